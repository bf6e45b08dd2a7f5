"""What one thread does to a directory's files, in the order it was asked: begin lives, append, seal, forget.

A life's records lie one behind the other without a gap, or a scan by headers would end at the gap. So a write that does
not begin where the last good one ended fails, as does one to a life that another process began: after a crash nobody
knows what lies behind its last good record.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from errno import EIO
from typing import Final

from kvhold.core.log.events import Forget, Reuse, Seal, Stored, Write
from kvhold.core.log.segments import BLOCK, HEADER, footer_bytes, table_bytes
from kvhold.tiers.checksums import checksums
from kvhold.tiers.ssd.counters import Counters
from kvhold.tiers.ssd.files import IOV_MAX, blocks, write_all
from kvhold.tiers.ssd.footer import Entry, encode_footer
from kvhold.tiers.ssd.format import (
    FROM_MANAGER,
    MAX_KEY,
    NAMESPACE,
    RecordHead,
    SegmentHead,
    encode_record,
    encode_segment,
    proper_shards,
)
from kvhold.tiers.ssd.handles import Handles
from kvhold.tiers.ssd.recover import scan
from kvhold.tiers.ssd.survey import Log

_AT_ONCE: Final = IOV_MAX // 2
"""Records in one call: a header and a payload each."""


class Refused(ValueError):
    """What was asked would break the log: a mistake in the asking, not of the disk."""


@dataclass(slots=True)
class _Life:
    seq: int
    end: int = HEADER
    entries: list[Entry] = field(default_factory=list)
    ended: bool = False


class Writer:
    """For one thread. Everything raises OSError or Refused."""

    def __init__(self, opened: Log, handles: Handles, arena: memoryview, counters: Counters) -> None:
        self._log = opened
        self._handles = handles
        self._arena = arena
        self._counters = counters
        self._lives: dict[int, _Life] = {}
        self._heads = blocks(_AT_ONCE * HEADER)
        self._tail = (0, 0, 0)  # of the life written last: seq, end of what counts, end of what was tried

    def reuse(self, effect: Reuse) -> None:
        """Begin a new life: from here on, and durably, nothing of the segment's old one counts."""
        if effect.seq <= self._log.newest_seq:
            raise Refused(f"seq {effect.seq} is not greater than {self._log.newest_seq}, which was used already")
        self._lives.pop(effect.segment, None)
        self._log.heads[effect.segment] = None  # what it said at start holds no more, whatever comes of this
        self._handles.create(effect.segment)
        block = self._heads[:HEADER]
        number = self._log.numbers[effect.segment]
        size, forgotten = self._log.segment_bytes, self._log.forgotten_seq
        encode_segment(block, SegmentHead(self._log.id, effect.seq, number, size, time.time_ns(), forgotten))
        # Even a header that reaches the disk although this call fails has used its number up.
        self._log.newest_seq = effect.seq
        with self._handles.use(effect.segment, write=True) as handle:
            if self._write(handle, [block], 0) != HEADER:
                raise OSError(EIO, "the disk took a part of a segment's header only")
            self._log.files.fdatasync(handle)
        self._lives[effect.segment] = _Life(effect.seq)

    def write(self, effect: Write) -> tuple[int, OSError | Refused | None]:
        """Append; how many objects, from the first on, are written, and what kept the others from it."""
        life = self._lives.get(effect.segment)
        objects = effect.objects
        if life is None or life.seq != effect.seq or life.ended:
            raise Refused(f"segment {effect.segment} has no life {effect.seq} that this process began")
        error: OSError | Refused | None = None
        proper = next((index for index, stored in enumerate(objects) if not _can_be_stored(stored)), len(objects))
        if proper < len(objects):  # what follows it fails with it: it would not follow the last good one
            error = Refused(f"no record can hold {_shape(objects[proper])}")
            objects = objects[:proper]
            if not objects:
                return 0, error
        self._check(life, objects)
        written = 0
        with self._handles.use(effect.segment, write=True) as handle:
            while written < len(objects):
                chunk = objects[written : written + _AT_ONCE]
                try:
                    good = self._append(handle, life, effect.segment, chunk)
                    written += good
                    if good < len(chunk):
                        error = OSError(EIO, "the disk took a part of a write only")
                        break
                except OSError as refused:  # what of it is there does not count: the next write takes its place
                    error = refused
                    break
        tried = objects[-1].at + HEADER + sum(objects[-1].shards) if objects else 0
        self._tail = (life.seq, life.end, max(tried, self._tail[2]) if self._tail[0] == life.seq else tried)
        return written, error

    def seal(self, effect: Seal) -> None:
        """Write the footer. It, and all before it, is durable after the next fdatasync."""
        life = self._lives.get(effect.segment)
        number = self._log.numbers[effect.segment]
        with self._handles.use(effect.segment, write=True) as handle:
            if life is None or life.seq != effect.seq:  # begun by an earlier process: its headers are the index
                head = self._log.heads[effect.segment]
                if not isinstance(head, SegmentHead) or head.seq != effect.seq:
                    raise Refused(f"segment {effect.segment} has no life {effect.seq}")
                # A footer that outlived its header in a loss of power would be taken for that of another life.
                self._log.files.fdatasync(handle)
                entries, end = self._scan(handle, number, effect)
            else:
                entries, end = life.entries, life.end
                life.ended = True  # a footer that is there although this fails would hide what is appended later
            tables = sum(table_bytes(len(shards)) for _, _, _, shards in {entry.geometry for entry in entries})
            buffer = blocks(footer_bytes(len(entries), tables))
            if end > effect.end or effect.end > self._log.segment_bytes - len(buffer):
                raise Refused(f"a footer of {len(buffer)} bytes has no room after {effect.end} (records end at {end})")
            encode_footer(buffer, self._log.id, number, effect.seq, end, entries)
            at = self._log.segment_bytes - len(buffer)
            if self._write(handle, [buffer], at) != len(buffer):
                raise OSError(EIO, "the disk took a part of a footer only")
        self._lives.pop(effect.segment, None)

    def forget(self, effect: Forget) -> None:
        """Add tombstones; durable on return.

        A write that failed may have left records behind the end of what counts, and a scan would find them. They must
        not outlive a purge that came later.
        """
        seq, end, tried = self._tail
        at = max(effect.at, tried) if effect.seq == seq and tried > end else effect.at
        self._log.tombstones.append(effect.names, effect.namespace, (effect.seq, at))
        self._log.note_forgotten()

    def _append(self, handle: int, life: _Life, segment: int, objects: Sequence[Stored]) -> int:
        number, now = self._log.numbers[segment], time.time_ns()
        buffers: list[memoryview] = []
        began = time.perf_counter()
        for index, stored in enumerate(objects):
            head = self._heads[index * HEADER : (index + 1) * HEADER]
            length = sum(stored.shards)
            payload = self._arena[stored.offset : stored.offset + length]
            encode_record(
                head,
                RecordHead(
                    self._log.id, life.seq, number, stored.group, stored.at, HEADER + length, now - stored.age,
                    stored.namespace, stored.depth, FROM_MANAGER, stored.key, stored.parent, stored.shards,
                    checksums(payload, stored.shards),
                ),
            )  # fmt: skip
            buffers += (head, payload) if length else (head,)
        self._counters.checksum_seconds += time.perf_counter() - began
        done = life.end + self._write(handle, buffers, life.end)
        for index, stored in enumerate(objects):
            end = stored.at + HEADER + sum(stored.shards)
            if end > done:
                return index
            geometry = (stored.namespace, stored.group, len(stored.key), stored.shards)
            life.entries.append(Entry(geometry, stored.key, stored.at, stored.depth, now - stored.age))
            life.end = end
        return len(objects)

    def _write(self, handle: int, buffers: Sequence[memoryview], at: int) -> int:
        began = time.perf_counter()
        try:
            done = write_all(self._log.files, handle, buffers, at)
        finally:
            self._counters.write_seconds += time.perf_counter() - began
        self._counters.writes += 1
        self._counters.written_bytes += done
        return done

    def _check(self, life: _Life, objects: Sequence[Stored]) -> None:
        at = life.end
        for stored in objects:
            length = sum(stored.shards)
            if stored.at != at:
                raise Refused(f"a record at {stored.at} would not follow the last good one, which ends at {at}")
            if stored.offset < 0 or stored.offset + length > len(self._arena):
                raise Refused(f"{length} bytes at {stored.offset} are not in the arena of {len(self._arena)}")
            at += HEADER + length
        if at > self._log.segment_bytes - BLOCK:
            raise Refused(f"a record that ends at {at} leaves no room for a footer")

    def _scan(self, handle: int, number: int, effect: Seal) -> tuple[list[Entry], int]:
        entries: list[Entry] = []
        end = HEADER
        for head in scan(self._log.files, handle, self._log.id, number, effect.seq, effect.end, Counter()):
            geometry = (head.namespace, head.group, len(head.key), head.shards)
            entries.append(Entry(geometry, head.key, head.at, head.depth, head.created))
            end = head.at + head.length
        return entries, end


def _can_be_stored(stored: Stored) -> bool:
    """Whether a record's header has room for what is said of it."""
    return (
        len(stored.namespace) == NAMESPACE
        and 0 <= stored.group < 1 << 32
        and 0 <= stored.depth < 1 << 32
        and 0 < len(stored.key) <= MAX_KEY
        and len(stored.parent) <= MAX_KEY
        and proper_shards(stored.shards)
    )


def _shape(stored: Stored) -> str:
    return (
        f"a key of {len(stored.key)} bytes after one of {len(stored.parent)} at depth {stored.depth}, in group "
        f"{stored.group} of a namespace of {len(stored.namespace)} bytes, in shards {str(stored.shards)[:80]}"
    )
