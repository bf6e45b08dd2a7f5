"""Which records a log holds: from footers where there are any, else from headers. Payloads are never read.

Damage is skipped and counted, whatever it is; nothing here raises for what is on the disk.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from kvhold.core.log.segments import BLOCK, FOOTER_HEAD, HEADER
from kvhold.tiers.ssd.files import FileLayer, blocks, read_all
from kvhold.tiers.ssd.footer import BATCH, FooterHead, Record, decode_body, decode_head
from kvhold.tiers.ssd.format import Flaw, RecordHead, SegmentHead, decode_record
from kvhold.tiers.ssd.survey import Log

log = logging.getLogger(__name__)


class Found(NamedTuple):
    """A segment that has been gone through: its records end at byte ``end``. ``records`` counts the hidden ones too."""

    segment: int
    seq: int
    end: int
    sealed: bool
    records: int


class Recovery:
    """Goes through a log once. ``counts`` says what was met, by kind; it grows while it goes.

    ``segments``, ``unused``, ``bad_header``, ``wrong_version``, ``foreign`` are segments; ``sealed``, ``unsealed``,
    ``bad_footer`` are kinds of those that count; ``torn``, ``stale``, ``foreign_record``, ``wrong_version_record`` say
    why a scan ended where it did; ``truncated`` and ``unreadable`` are files; ``records`` and ``tombstoned`` are
    records, ``bad_tombstones`` blocks, ``lost_tombstones`` is 1 where their file is not what it was.
    """

    def __init__(self, opened: Log) -> None:
        self._log = opened
        self.counts: Counter[str] = Counter(foreign_files=opened.foreign_files, bad_log=int(opened.bad_log))
        self.counts["bad_tombstones"] = opened.tombstones.damaged
        self.counts["lost_tombstones"] = int(opened.tombstones.lost)
        self.lives: list[tuple[int, int]] = []
        """(segment, seq) of segments that count, the oldest life first."""
        names = {Flaw.EMPTY: "unused", Flaw.DAMAGED: "bad_header"}
        for segment, head in enumerate(opened.heads):
            if isinstance(head, SegmentHead):
                self.lives.append((segment, head.seq))
            elif head is not None:
                self.counts[names.get(head, head.value)] += 1
        self.lives.sort(key=lambda life: life[1])

    def __iter__(self) -> Iterator[list[Record] | Found]:
        """For each segment, the newest life first, its records in batches and then a :class:`Found`."""
        for segment, seq in reversed(self.lives):
            yield from self.segment(segment, seq)

    def segment(self, segment: int, seq: int) -> Iterator[list[Record] | Found]:
        self.counts["segments"] += 1
        try:
            handle = self._log.files.open_segment(self._log.segment_path(segment), write=False)
        except OSError as error:
            self._unreadable(segment, error)
            return
        try:
            for part in self._segment(handle, segment, seq):
                if not isinstance(part, Found):
                    part = self._visible(part)
                    self.counts["records"] += len(part)
                yield part
        except OSError as error:
            self._unreadable(segment, error)
        finally:
            self._log.files.close(handle)

    def _segment(self, handle: int, segment: int, seq: int) -> Iterator[list[Record] | Found]:
        files, size = self._log.files, self._log.segment_bytes
        number = self._log.numbers[segment]
        if files.size(handle) < size:
            self.counts["truncated"] += 1
        footer = self._footer(handle, number, seq)
        if isinstance(footer, tuple):
            head, body = footer
            batches = decode_body(head, body, segment)
            if not isinstance(batches, Flaw):
                self.counts["sealed"] += 1
                yield from batches
                yield Found(segment, seq, head.end, True, head.records)
                return
            footer = batches
        if footer not in (Flaw.EMPTY, Flaw.STALE):
            self.counts["bad_footer"] += 1
        self.counts["unsealed"] += 1
        batch: list[Record] = []
        records, end = 0, HEADER
        for found in scan(files, handle, self._log.id, number, seq, size, self.counts):
            batch.append(
                (
                    found.namespace,
                    found.group,
                    found.key,
                    found.shards,
                    found.depth,
                    segment,
                    seq,
                    found.at,
                    found.created,
                )
            )
            records, end = records + 1, found.at + found.length
            if len(batch) == BATCH:
                yield batch
                batch = []
        if batch:
            yield batch
        yield Found(segment, seq, end, False, records)

    def _footer(self, handle: int, number: int, seq: int) -> tuple[FooterHead, memoryview] | Flaw:
        files, size = self._log.files, self._log.segment_bytes
        block = blocks(BLOCK)
        try:
            if read_all(files, handle, [block], size - BLOCK) != BLOCK:
                return Flaw.EMPTY  # the file is cut short, which is counted
            head = decode_head(block, self._log.id, number, seq, size)
            if isinstance(head, Flaw):
                return head
            body = blocks(head.size)
            if head.size == BLOCK:
                body[:] = block
            elif read_all(files, handle, [body], size - head.size) != head.size:
                return Flaw.DAMAGED
        except OSError as error:
            log.warning("ssd: footer of %s/%d: %s", self._log.path, number, error)
            return Flaw.DAMAGED
        return head, body[:-FOOTER_HEAD]

    def _visible(self, records: list[Record]) -> list[Record]:
        stones = self._log.tombstones
        if not len(stones):
            return records
        kept = [record for record in records if not stones.hides(record)]
        self.counts["tombstoned"] += len(records) - len(kept)
        return kept

    def _unreadable(self, segment: int, error: OSError) -> None:
        self.counts["unreadable"] += 1
        log.warning("ssd: %s cannot be read: %s", self._log.segment_path(segment), error)


def scan(
    files: FileLayer, handle: int, log_id: bytes, number: int, seq: int, until: int, counts: Counter[str]
) -> Iterator[RecordHead]:
    """The records of a life by their headers alone, up to the first that does not count. Raises OSError."""
    limit = min(until, files.size(handle))
    block = blocks(BLOCK)
    at = HEADER
    why = {
        Flaw.DAMAGED: "torn",
        Flaw.STALE: "stale",
        Flaw.FOREIGN: "foreign_record",
        Flaw.VERSION: "wrong_version_record",
    }
    while at + HEADER <= limit and read_all(files, handle, [block], at) == HEADER:
        head = decode_record(block, log_id, number, seq, at)
        if isinstance(head, Flaw):
            if head in why:
                counts[why[head]] += 1
            return
        if at + head.length > limit:
            counts["torn"] += 1
            return
        yield head
        at += head.length
