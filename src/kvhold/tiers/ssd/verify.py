"""A log seen from outside: what is in it, and whether all of it is as it was written. Read-only, and without a lock."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvhold.core.log.segments import HEADER
from kvhold.tiers.ssd.check import Identity, Place, check_head, check_payload
from kvhold.tiers.ssd.directory import open_for_reading
from kvhold.tiers.ssd.files import FileLayer, blocks, read_all
from kvhold.tiers.ssd.footer import Record
from kvhold.tiers.ssd.format import SegmentHead, decode_segment
from kvhold.tiers.ssd.recover import Found, Recovery
from kvhold.tiers.ssd.survey import Log


class Damage(NamedTuple):
    """A record that would not be served, and why: it would be a miss."""

    file: str
    at: int
    reason: str
    namespace: bytes
    group: int
    key: bytes


@dataclass(slots=True)
class Scrub:
    """Goes through the records of a log and checks their bytes, at most ``bytes_per_second`` if that is not 0.

    Iterate over it for the damage. ``sample`` is the share of records that is read. It may run beside a manager:
    segments that are being filled are passed over (``live`` tells it that there is one), and a segment that was begun
    anew meanwhile is not damaged.
    """

    path: Path
    sample: float = 1.0
    bytes_per_second: int = 0
    live: bool = False
    files: FileLayer | None = None
    seed: int = 0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    progress: Callable[[], None] = lambda: None
    """Called after every record."""
    checked: int = 0
    checked_bytes: int = 0
    segments: int = 0
    """Segments with records, and how many of them are done."""
    done_segments: int = 0
    skipped_segments: int = 0
    damaged: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """What recovery counted, see :class:`Recovery`."""

    def __iter__(self) -> Iterator[Damage]:
        """Raises DirectoryError if there is no log."""
        opened = open_for_reading(self.path, self.files)
        recovery = Recovery(opened)
        self.counts = recovery.counts
        pick = random.Random(self.seed)
        began = self.clock()
        self.segments = len(recovery.lives)
        for done, (segment, seq) in enumerate(recovery.lives):
            self.done_segments = done
            self.progress()
            records: list[Record] = []
            sealed = False
            for part in recovery.segment(segment, seq):
                if isinstance(part, Found):
                    sealed = part.sealed
                else:
                    records += [record for record in part if self.sample >= 1 or pick.random() < self.sample]
            if self.live and not sealed:
                self.skipped_segments += 1
                continue
            yield from self._segment(opened, segment, seq, records, began)
        self.done_segments = self.segments
        self.progress()

    def _segment(self, opened: Log, segment: int, seq: int, records: list[Record], began: float) -> Iterator[Damage]:
        name = opened.segment_path(segment).name
        try:
            handle = opened.files.open_segment(opened.segment_path(segment), write=False)
        except OSError:
            self.skipped_segments += 1  # it went while we looked, or recovery has counted it
            return
        buffer = blocks(HEADER)
        try:
            for record in records:
                namespace, group, key, shards, _, _, _, at, _ = record
                size = HEADER + sum(shards)
                if size > len(buffer):
                    buffer = blocks(size)
                reason = self._check(opened, handle, record, buffer[:size])
                if reason is not None:
                    if not self._still(opened, handle, seq):
                        self.skipped_segments += 1
                        return
                    self.damaged += 1
                    yield Damage(name, at, reason, namespace, group, key)
                self.checked += 1
                self.checked_bytes += size
                self.progress()
                if self.bytes_per_second:
                    ahead = self.checked_bytes / self.bytes_per_second - (self.clock() - began)
                    if ahead > 0:
                        self.sleep(ahead)
        finally:
            opened.files.close(handle)

    def _check(self, opened: Log, handle: int, record: Record, buffer: memoryview) -> str | None:
        namespace, group, key, shards, _, segment, seq, at, _ = record
        try:
            if read_all(opened.files, handle, [buffer], at) != len(buffer):
                return "truncated"
        except OSError as error:
            return f"unreadable ({error.strerror or error})"
        place = Place(opened.id, opened.numbers[segment], seq, at)
        head = check_head(buffer[:HEADER], place, Identity(namespace, group, key, shards))
        return head if isinstance(head, str) else check_payload(head, buffer[HEADER:])

    def _still(self, opened: Log, handle: int, seq: int) -> bool:
        block = blocks(HEADER)
        try:
            got = read_all(opened.files, handle, [block], 0)
        except OSError:
            return True
        head = decode_segment(block, opened.id) if got == HEADER else None
        return not isinstance(head, SegmentHead) or head.seq == seq


@dataclass(slots=True)
class Summary:
    """What a log holds. ``disk_bytes`` are the files', all other bytes are payloads.

    ``useful`` are records that are the latest of their name and not forgotten.
    """

    path: Path
    log: str
    segment_bytes: int
    disk_bytes: int
    newest_seq: int
    segments: list[Found] = field(default_factory=list)
    records: int = 0
    payload_bytes: int = 0
    useful_records: int = 0
    useful_bytes: int = 0
    namespaces: dict[tuple[bytes, int], tuple[int, int]] = field(default_factory=dict)
    """(namespace, group) -> (useful records, useful bytes)."""
    oldest: int = 0
    newest: int = 0
    """Creation times, ns."""
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def useful_ratio(self) -> float:
        return self.useful_bytes / self.disk_bytes if self.disk_bytes else 0.0


def inspect(path: Path, files: FileLayer | None = None) -> Summary:
    """A log's summary, from its index. Raises DirectoryError. Takes some 100 bytes of memory per record."""
    opened = open_for_reading(path, files)
    summary = Summary(path, opened.id.hex(), opened.segment_bytes, opened.bytes_on_disk, opened.newest_seq)
    recovery = Recovery(opened)
    seen: set[int] = set()  # fingerprints: an error in 2^64 is nothing in a summary
    for part in recovery:  # the newest life first; within one, a name is rarely stored twice
        if isinstance(part, Found):
            summary.segments.append(part)
            continue
        for namespace, group, key, shards, _, _, _, _, created in part:
            size = sum(shards)
            summary.records += 1
            summary.payload_bytes += size
            summary.oldest = min(summary.oldest or created, created)
            summary.newest = max(summary.newest, created)
            name = hash((namespace, group, key))
            if name not in seen:
                seen.add(name)
                records, total = summary.namespaces.get((namespace, group), (0, 0))
                summary.namespaces[namespace, group] = (records + 1, total + size)
                summary.useful_records += 1
                summary.useful_bytes += size
    summary.counts = recovery.counts
    return summary
