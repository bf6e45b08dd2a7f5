"""A log in a directory: opened under a lock and a byte budget, or created.

    kvhold.log          names the log (uuid, segment size)            kvhold.lock         locked while a manager runs
    kvhold.tombstones   what was forgotten                            kvhold-NNNNNNNN.segment the records

Whatever else lies there is left alone. Core numbers a log's segments from 0 without gaps; the files' numbers may have
gaps once a smaller budget took some away, and are what is written in headers. :class:`Log` knows both.
"""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvhold.core.log.segments import BLOCK
from kvhold.tiers.ssd.files import FileLayer, NotAFile, RealFiles, Shared
from kvhold.tiers.ssd.format import Flaw, LogHead, SegmentHead
from kvhold.tiers.ssd.survey import (
    LOCK_FILE,
    TOMBSTONES_FILE,
    DirectoryError,
    Log,
    identify,
    is_ours,
    segment_name,
    segment_numbers,
    survey,
    write_log,
)
from kvhold.units import format_size

log = logging.getLogger(__name__)

MIN_SEGMENTS: Final = 4
MAX_SEGMENTS: Final = 1 << 20
"""Core has 24 bits for a segment, and a start looks at every one."""
SEGMENT: Final = 256 << 20
MIN_FREE: Final = 1 << 30
_LEAST_SEGMENT: Final = 64 << 10


def reserve_bytes(budget: int) -> int:
    """What of a budget is kept for everything but segments: most of it for tombstones."""
    return min(16 << 20, max(64 << 10, budget // 64)) // BLOCK * BLOCK


def segment_size(budget: int) -> int:
    """Bytes of a segment in a new log: 256 MiB; under 16 GiB a 64th, under 4 GiB 64 MiB, under 256 MiB a quarter."""
    usable = max(0, budget - reserve_bytes(budget))
    size = min(SEGMENT, max(usable // 64, SEGMENT // 4), usable // MIN_SEGMENTS)
    unit = 1 << 20 if size >= 1 << 20 else BLOCK
    return max(size // unit * unit, _LEAST_SEGMENT)


def least_budget(segment_bytes: int) -> int:
    """The smallest budget that is enough for segments of this size."""
    segments = MIN_SEGMENTS * max(segment_bytes, _LEAST_SEGMENT)
    return segments + min(16 << 20, max(64 << 10, -(-segments // (63 * BLOCK)) * BLOCK))


def claim_log(
    path: Path,
    budget: int,
    *,
    min_free: int = MIN_FREE,
    segment_bytes: int | None = None,
    files: FileLayer | None = None,
) -> Log:
    """Open the log in ``path``, or create one, for this process alone, in at most ``budget`` bytes of disk.

    Nothing of a log that is there has changed; :func:`trim_log` comes before anything else. So a start that fails for
    another reason has taken nothing away. ``segment_bytes`` is for new logs; an existing one keeps its own. Raises
    DirectoryError.
    """
    files = files or RealFiles()
    lock = None
    with _explained(path):
        try:
            files.make_directory(path)
        except FileNotFoundError:
            raise DirectoryError(
                f"ssd: {path} cannot be made, {path.parent} is not there: make that, or mount the disk that has it"
            ) from None
        files.check_private(path, filter(is_ours, files.names(path)))
        try:
            lock = files.lock(path / LOCK_FILE)
        except BlockingIOError:
            raise DirectoryError(
                f"ssd: {path} is in use by another kvhold manager; stop that one, or give this one another directory"
            ) from None
        try:
            opened = _open(path, budget, segment_bytes or segment_size(budget), files)
            opened.min_free = min_free
            opened._lock, lock = lock, None
            return opened
        finally:
            if lock is not None:
                files.close(lock)


def trim_log(opened: Log) -> None:
    """Take away what the budget has no room for. Nothing is allocated yet. Raises DirectoryError."""
    with _explained(opened.path):
        usable = opened.budget - reserve_bytes(opened.budget)
        segments = usable // opened.segment_bytes
        if segments > MAX_SEGMENTS:
            log.warning(
                "ssd: %s: %s are more than %d segments of %s, the most that a log has: the rest is not used; a new "
                "log, in an empty directory, would have larger ones",
                opened.path,
                format_size(opened.budget),
                MAX_SEGMENTS,
                format_size(opened.segment_bytes),
            )
        _shrink(opened, min(segments, MAX_SEGMENTS))
        opened.tombstones.limit = reserve_bytes(opened.budget) // 2 - 2 * BLOCK  # twice that, while it is rewritten
        try:
            opened.tombstones.compact(_oldest_seq(opened))
            opened.note_forgotten()
        except OSError as error:
            log.warning("ssd: %s: tombstones not compacted: %s", opened.path, error)
        _warn_of_room(opened)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except Shared as error:
        raise DirectoryError(f"ssd: {path} cannot be used: {_said(path, error)}") from None
    except NotAFile as error:
        raise DirectoryError(
            f"ssd: {path} cannot be used: {_said(path, error)}; remove it, or name another directory"
        ) from None
    except OSError as error:
        raise DirectoryError(
            f"ssd: {path} cannot be used: {_said(path, error)}; check that it is there, that this user may write "
            "to it and that its filesystem is healthy and not full"
        ) from None


def _said(path: Path, error: OSError) -> str:
    """What the system said, and of which file unless that is ``path`` itself."""
    where = f"{error.filename}: " if error.filename not in (None, str(path), path) else ""
    return f"{where}{error.strerror or error}"


def open_for_reading(path: Path, files: FileLayer | None = None) -> Log:
    """The log in ``path`` as it is, without a lock and without changing anything. Raises DirectoryError."""
    files = files or RealFiles()
    try:
        found, names, bad = identify(path, files)
        if found is None:
            raise DirectoryError(f"ssd: {path} holds no log of kvhold; name the directory that was given with --ssd")
        return survey(path, files, found, segment_numbers(names), names, bad)
    except OSError as error:
        raise DirectoryError(f"ssd: {path} cannot be read: {_said(path, error)}") from None


def in_use(path: Path, files: FileLayer | None = None) -> bool:
    """Whether a manager has the directory now. Changes nothing there."""
    files = files or RealFiles()
    try:
        if LOCK_FILE not in files.names(path):
            return False
        files.close(files.lock(path / LOCK_FILE))
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _open(path: Path, budget: int, segment_bytes: int, files: FileLayer) -> Log:
    found, names, bad = identify(path, files)
    present = segment_numbers(names)
    usable, removed = budget - reserve_bytes(budget), 0
    if found is not None and usable // found.segment_bytes < MIN_SEGMENTS:
        if present:  # too few segments would be next to nothing
            size = found.segment_bytes
            raise DirectoryError(
                f"ssd: {format_size(budget)} for {path} is too small for the log that is there, which has "
                f"{len(present)} segments of {format_size(size)}; give at least {format_size(least_budget(size))}, or "
                f"remove {path}/kvhold* to begin anew with smaller ones"
            )
        found = None
    if found is None:
        if segment_bytes % BLOCK or segment_bytes < _LEAST_SEGMENT or usable // segment_bytes < MIN_SEGMENTS:
            raise DirectoryError(
                f"ssd: {format_size(budget)} for {path} is too small for segments of {format_size(segment_bytes)}; "
                f"give at least {format_size(least_budget(segment_bytes))}"
            )
        removed = _remove(path, files, present)  # they are nobody's
        files.remove(path / TOMBSTONES_FILE)
        found, present, bad = _create(path, files, segment_bytes), [], False
    elif bad:
        write_log(path, files, found)
    opened = survey(path, files, found, present, names, bad)
    opened.budget, opened.removed_segments = budget, removed
    return opened


def _oldest_seq(opened: Log) -> int:
    """That of the oldest life; 0 where a segment does not say: its records may be of any, and come back next time."""
    oldest = opened.newest_seq + 1
    for head in opened.heads:
        if isinstance(head, Flaw):
            return 0
        if head is not None:
            oldest = min(oldest, head.seq)
    return oldest


def _shrink(opened: Log, segments: int) -> None:
    """Down, or up, to so many segments. What holds no records goes first, then the oldest."""

    def worth(index: int) -> int:
        head = opened.heads[index]
        return head.seq if isinstance(head, SegmentHead) else -1

    order = sorted(range(len(opened.numbers)), key=worth)
    surplus = order[: max(0, len(order) - segments)]
    opened.removed_segments += _remove(opened.path, opened.files, [opened.numbers[index] for index in surplus])
    for index in sorted(surplus, reverse=True):
        opened.bytes_on_disk -= opened.sizes.pop(index)
        del opened.numbers[index], opened.heads[index]
    taken = set(opened.numbers)
    number = 0
    while len(opened.numbers) < segments:
        if number not in taken:
            opened.numbers.append(number)
            opened.heads.append(None)
            opened.sizes.append(0)
        number += 1


def _create(path: Path, files: FileLayer, segment_bytes: int) -> LogHead:
    head = LogHead(os.urandom(16), segment_bytes, time.time_ns(), 0)
    write_log(path, files, head)
    return head


def _remove(path: Path, files: FileLayer, numbers: list[int]) -> int:
    for number in numbers:
        files.remove(path / segment_name(number))
    if numbers:
        files.sync_names(path)
    return len(numbers)


def _warn_of_room(opened: Log) -> None:
    want = len(opened.numbers) * opened.segment_bytes - opened.bytes_on_disk
    have = opened.files.free_bytes(opened.path) - opened.min_free
    if have < opened.segment_bytes and not opened.bytes_on_disk:
        log.warning(
            "ssd: %s: nothing can be kept there, because %s are free and min_free keeps %s; lower it, or make room",
            opened.path,
            format_size(max(have + opened.min_free, 0)),
            format_size(opened.min_free),
        )
    elif want > have:
        log.warning(
            "ssd: %s may grow by %s, but only %s are free there beyond the %s of min_free; it will hold less",
            opened.path,
            format_size(want),
            format_size(max(have, 0)),
            format_size(opened.min_free),
        )
