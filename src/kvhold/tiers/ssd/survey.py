"""What is in a log's directory: whose log it is, its segments, and what their headers say.

Nothing changes there but by :func:`write_log`.
"""

import logging
import re
from dataclasses import dataclass, field
from errno import EIO
from pathlib import Path
from typing import Final

from kvhold.core.log.segments import BLOCK
from kvhold.tiers.ssd.files import MEDIA_ERRORS, FileLayer, blocks, read_all, write_all
from kvhold.tiers.ssd.format import Flaw, LogHead, SegmentHead, decode_log, decode_segment, encode_log
from kvhold.tiers.ssd.tombstones import Tombstones

log = logging.getLogger(__name__)

_SEGMENT_NAME: Final = re.compile(r"kvhold-(\d{8})\.segment")
LOG_FILE, LOCK_FILE, TOMBSTONES_FILE = "kvhold.log", "kvhold.lock", "kvhold.tombstones"
_OURS: Final = {LOG_FILE, LOCK_FILE, TOMBSTONES_FILE, LOG_FILE + ".new", TOMBSTONES_FILE + ".new"}
_UNKNOWN_SEQS: Final = 1 << 20
"""How far the numbering of lives jumps when a segment's own number could not be read: it must not be used again."""


class DirectoryError(Exception):
    """This directory cannot be used as it is; the text says why and what to do."""


@dataclass
class Log:
    """An open log. ``numbers[i]`` is the file of core's segment ``i``; ``heads[i]`` what its header said at start.

    A head is ``None`` for a segment without a file, and for one that was begun anew since. ``newest_seq`` is the
    greatest number that a life may have had: new ones are greater. ``bytes_on_disk`` is what was there when it was
    opened, after removals. ``forgotten_seq`` is the greatest number in tombstones that the log's other files know of.
    Sizes are bytes.
    """

    path: Path
    files: FileLayer
    id: bytes
    segment_bytes: int
    numbers: list[int]
    heads: list[SegmentHead | Flaw | None]
    tombstones: Tombstones
    newest_seq: int
    created: int
    forgotten_seq: int
    budget: int = 0
    min_free: int = 0
    foreign_files: int = 0
    removed_segments: int = 0
    bad_log: bool = False
    bytes_on_disk: int = 0
    sizes: list[int] = field(default_factory=list)
    _lock: int | None = None

    def segment_path(self, segment: int) -> Path:
        return self.path / segment_name(self.numbers[segment])

    def note_forgotten(self) -> None:
        """Have the loss of the tombstones noticed from now on: write down, elsewhere, how far they go. OSError."""
        seq = self.tombstones.newest_seq
        if seq > self.forgotten_seq:
            write_log(self.path, self.files, LogHead(self.id, self.segment_bytes, self.created, seq))
            self.forgotten_seq = seq

    def close(self) -> None:
        """Let the directory go. Not while an I/O may still be under way."""
        if self._lock is not None:
            self.files.close(self._lock)
            self._lock = None


def segment_name(number: int) -> str:
    return f"kvhold-{number:08}.segment"


def identify(path: Path, files: FileLayer) -> tuple[LogHead | None, dict[str, int], bool]:
    """Whose log this is (None: nobody's), what is in the directory, and whether its own file had to be replaced."""
    names = files.names(path)
    head: LogHead | Flaw = Flaw.EMPTY
    if LOG_FILE in names:
        block = blocks(BLOCK)
        got = _read(files, path / LOG_FILE, [block], 0)
        head = decode_log(block[: max(got, 0)])
    if isinstance(head, LogHead):
        return head, names, False
    if head is Flaw.VERSION:
        raise DirectoryError(
            f"ssd: {path} holds a log in another version of the format, which this kvhold does not read; use another "
            "directory, or remove the log's files (kvhold*) to begin anew"
        )
    # The segments still say whose they are.
    claims: dict[bytes, LogHead] = {}
    for number in segment_numbers(names):
        segment = segment_head(files, path / segment_name(number), None)
        if isinstance(segment, SegmentHead):
            claims[segment.log] = LogHead(segment.log, segment.segment_bytes, segment.created, 0)
    if len(claims) > 1:
        raise DirectoryError(
            f"ssd: {path} has segments of {len(claims)} logs and no readable {LOG_FILE}; remove the segments that do "
            "not belong there, or all of them"
        )
    return next(iter(claims.values()), None), names, True


def survey(path: Path, files: FileLayer, found: LogHead, numbers: list[int], names: dict[str, int], bad: bool) -> Log:
    heads: list[SegmentHead | Flaw | None] = []
    for number in numbers:
        heads.append(head := segment_head(files, path / segment_name(number), found.log))
        if isinstance(head, SegmentHead) and (head.log, head.number) != (found.log, number):
            heads[-1] = Flaw.FOREIGN
    sizes = [names[segment_name(number)] for number in numbers]
    good = [head for head in heads if isinstance(head, SegmentHead)]
    forgotten = max(found.forgotten_seq, *(head.forgotten_seq for head in good), 0)
    stones = Tombstones(files, path / TOMBSTONES_FILE, found.log, 0)
    stones.load()
    if forgotten > stones.newest_seq and any(head.seq <= forgotten for head in good):
        log.warning(
            "ssd: %s is missing or out of date, so it is unknown what it hid: all that was stored until the last purge "
            "is ignored",
            path / TOMBSTONES_FILE,
        )
        stones.hide_all(forgotten)
    newest = max(stones.newest_seq, *(head.seq for head in good), 0)
    if any(isinstance(head, Flaw) for head in heads):
        newest += _UNKNOWN_SEQS
    foreign = sum(1 for name in names if name not in _OURS and not _is_segment(name, names))
    return Log(
        path, files, found.log, found.segment_bytes, list(numbers), heads, stones, newest, found.created, forgotten,
        foreign_files=foreign, bad_log=bad, bytes_on_disk=sum(sizes), sizes=sizes,
    )  # fmt: skip


def write_log(path: Path, files: FileLayer, head: LogHead) -> None:
    """Say, durably, whose directory this is. OSError."""
    block = blocks(BLOCK)
    encode_log(block, head)
    fresh = path / (LOG_FILE + ".new")
    files.remove(fresh)
    handle = files.open_segment(fresh, create=True)
    try:
        if write_all(files, handle, [block], 0) != BLOCK:
            raise OSError(EIO, "the disk took a part of a block only")
        files.fdatasync(handle)
    finally:
        files.close(handle)
    files.replace(fresh, path / LOG_FILE)
    files.sync_names(path)


def is_ours(name: str) -> bool:
    """Whether a log may have a file of this name."""
    return name in _OURS or _SEGMENT_NAME.fullmatch(name) is not None


def segment_numbers(names: dict[str, int]) -> list[int]:
    return sorted(int(name[7:15]) for name in names if _is_segment(name, names))


def _is_segment(name: str, names: dict[str, int]) -> bool:
    return _SEGMENT_NAME.fullmatch(name) is not None and names[name] >= 0


def segment_head(files: FileLayer, path: Path, log_id: bytes | None) -> SegmentHead | Flaw:
    """What the header of a segment's file says, wherever it belongs. Raises nothing for what is on the disk."""
    block = blocks(BLOCK)
    got = _read(files, path, [block], 0)
    if got == 0:
        return Flaw.EMPTY
    return decode_segment(block, log_id) if got == BLOCK else Flaw.DAMAGED


def _read(files: FileLayer, path: Path, buffers: list[memoryview], at: int) -> int:
    """Bytes read; -1 where the disk fails: to whoever starts, that is damage like any other.

    Raises OSError for what says nothing about the disk: a log must not be begun anew because files could not be opened.
    """
    try:
        handle = files.open_segment(path, write=False)
        try:
            return read_all(files, handle, buffers, at)
        finally:
            files.close(handle)
    except OSError as error:
        if error.errno not in MEDIA_ERRORS:
            raise
        log.warning("ssd: %s cannot be read: %s", path, error)
        return -1
