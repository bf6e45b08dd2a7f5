"""Where records lie in a log: segments of one size, filled one after the other, given up whole, the oldest first.

    segment = header, records..., [footer]        record = header, payload; all in blocks of 4 KiB

A log is a ring in effect, but of segments in any order: each life of one has a number (``seq``) that only grows. All is
integers here; who reads and writes the bytes is the shell.
"""

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from kvhold.core.backing import PLACE_BITS

BLOCK: Final = 4096
HEADER: Final = BLOCK
"""Bytes of a segment's and of a record's header."""
SPARSE: Final = 16
"""A segment with less than this part of records that count is given up before older ones."""
FOOTER_HEAD: Final = 128
FOOTER_ENTRY: Final = 96
"""Bytes of a footer's head and of its entry for a record."""


def footer_bytes(records: int, tables: int) -> int:
    """Bytes of a footer of so many records, whose table of geometries takes ``tables``."""
    return -(-(FOOTER_HEAD + tables + records * FOOTER_ENTRY) // BLOCK) * BLOCK


def table_bytes(shards: int) -> int:
    """Bytes that one geometry of so many shards takes in a footer's table."""
    return 56 + 8 * shards


def pack(log: int, segment: int, at: int) -> int:
    """A place as one number, never 0: ``at`` is a byte offset in the segment, which is shorter than 1 TiB."""
    return log << PLACE_BITS | segment << 28 | at // BLOCK


def unpack(place: int) -> tuple[int, int, int]:
    """(log, segment, byte offset) of :func:`pack`."""
    return place >> PLACE_BITS, place >> 28 & 0xFFFFFF, (place & 0xFFFFFFF) * BLOCK


@dataclass(slots=True)
class Segment:
    """One life of a segment. ``rows`` are those of its records in order, some of them gone since."""

    number: int
    seq: int
    born: int  # by the core's clock; before its zero for those of earlier processes
    end: int = HEADER  # where the next record goes
    rows: "array[int]" = field(default_factory=lambda: array("I"))
    tables: dict[int, int] = field(default_factory=dict)  # bytes by index
    readers: int = 0  # objects being read from it or waiting for that, and its seal if that is being written
    closing: bool = False  # being given up: nothing new is read from it
    live: int = 0  # bytes of records that can still be found


class Log:
    """The segments of one directory. ``open`` takes records, ``next`` is the one after, if it is ready."""

    def __init__(self, number: int, segments: int, segment_bytes: int) -> None:
        self.number = number
        self.segment_bytes = segment_bytes
        self.seq = 0
        self.free: deque[int] = deque()  # have been used before
        self.fresh = deque(range(segments))  # may not be had: never used so far, or failed to be begun
        self.sealed: deque[Segment] = deque()  # oldest first
        self.open: Segment | None = None
        self.next: Segment | None = None
        self.erasing: Segment | None = None
        self.segments: dict[int, Segment] = {}

    @property
    def live(self) -> int:
        """Bytes of records that can be found, headers included."""
        return sum(segment.live for segment in self.segments.values())

    def room(self, segment: Segment, length: int, index: int, tables: int) -> bool:
        """Whether a record of ``length`` bytes, header included, and the footer that it makes longer still fit."""
        table = sum(segment.tables.values()) + (0 if index in segment.tables else tables)
        return segment.end + length + footer_bytes(len(segment.rows) + 1, table) <= self.segment_bytes

    def fits(self, length: int, tables: int) -> bool:
        """Whether such a record fits into an empty segment at all."""
        return HEADER + length + footer_bytes(1, tables) <= self.segment_bytes

    def append(self, row: int, length: int, index: int, tables: int) -> int:
        """The byte offset of a new record at the end of the open segment, which has room."""
        segment = self.open
        assert segment is not None
        at = segment.end
        segment.end += length
        segment.rows.append(row)
        segment.tables.setdefault(index, tables)
        return at

    def rewind(self, segment: Segment, at: int, records: int) -> None:
        """The last ``records`` records were not written: the next one goes to ``at``."""
        segment.end = at
        del segment.rows[len(segment.rows) - records :]

    def begin(self, number: int, now: int) -> Segment:
        """A new life of a free segment."""
        self.seq += 1
        segment = self.segments[number] = Segment(number, self.seq, now)
        return segment

    def retire(self, segment: Segment, failed: bool = False) -> None:
        """Nothing of it can be found and nobody reads it: it is free."""
        del self.segments[segment.number]
        (self.fresh if failed else self.free).append(segment.number)

    def adopt(self, number: int, seq: int, born: int) -> None:
        """A segment that was there when the log was opened, the oldest first. It takes no more records.

        Nobody knows what a crash left behind its last good record: what is appended there could make that count again.
        """
        self.fresh.remove(number)
        segment = self.segments[number] = Segment(number, seq, born, self.segment_bytes)
        self.seq = max(self.seq, seq)
        self.sealed.append(segment)

    def to_reclaim(self) -> Segment | None:
        """The segment to give up next: one that keeps little, as a crash may leave it, or else the oldest."""
        idle = [segment for segment in self.sealed if not segment.readers]
        least = min(idle, key=lambda segment: segment.live, default=None)
        if least is not None and least.live * SPARSE <= self.segment_bytes:
            return least
        return idle[0] if idle else None

    def position_at(self, then: int) -> tuple[int, int]:
        """(seq, byte offset) that the records of all segments begun by ``then`` lie before."""
        seq = max((segment.seq for segment in self.segments.values() if segment.born <= then), default=0)
        return min((seq, self.segment_bytes), self.position)

    @property
    def position(self) -> tuple[int, int]:
        """(seq, byte offset) that all records so far lie before."""
        for segment in (self.open, self.next, self.erasing):
            if segment is not None:
                return segment.seq, segment.end
        return self.seq, self.segment_bytes
