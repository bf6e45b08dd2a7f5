"""What only a packed log tells the core (events) and asks of its shell (effects).

Its reads, writes and tombstones are those of every backing, and say which life of which segment they concern.
"""

from dataclasses import dataclass

from kvhold.core import events as ev

# --- events -----------------------------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class LogOpened(ev.BackingOpened):
    """A log of so many segments can be used once its records are recovered.

    ``newest_seq`` is at least that of any life that one of its segments had.
    """

    segments: int
    segment_bytes: int
    newest_seq: int = 0


@dataclass(slots=True, frozen=True)
class Segments(ev.FromBacking):
    """Which segments of a log may have records: (number, seq, age), the oldest life first. Comes before their records.

    Ages are nanoseconds since a life was begun.
    """

    lives: tuple[tuple[int, int, int], ...]


@dataclass(slots=True, frozen=True)
class Recovered(ev.Inventory):
    """Records that were found in a segment: (namespace, group, key, shards, byte offset). At most a batch of them."""

    segment: int
    records: tuple[tuple[bytes, int, bytes, tuple[int, ...], int], ...]


@dataclass(slots=True, frozen=True)
class LogReady(ev.FromBacking):
    """All records of a log were recovered: it may be written."""


# --- effects ----------------------------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class Stored(ev.Stored):
    """One object with its record, which is ``at`` that byte of its segment: the payload follows its header there."""

    at: int


@dataclass(slots=True, frozen=True)
class Read(ev.Read):
    """Fill arena slots from records of one segment, and check them, each for itself."""

    objects: tuple[Stored, ...]
    segment: int
    seq: int


@dataclass(slots=True, frozen=True)
class Write(ev.Write):
    """Append records, one directly after the other."""

    objects: tuple[Stored, ...]
    segment: int
    seq: int


@dataclass(slots=True, frozen=True)
class Forget(ev.Forget):
    """Those that were appended before byte ``at`` of the segment with ``seq`` are gone."""

    seq: int
    at: int


@dataclass(slots=True, frozen=True)
class Reuse(ev.ToBacking):
    """Give a segment that nothing reads a new header, durably, before anything is appended."""

    segment: int
    seq: int


@dataclass(slots=True, frozen=True)
class Seal(ev.ToBacking):
    """The segment takes no more records: write its footer after ``end``."""

    segment: int
    seq: int
    end: int


@dataclass(slots=True, frozen=True)
class Sync(ev.ToBacking):
    """Make all writes that were answered durable."""


ToLog = Read | Write | Forget | Reuse | Seal | Sync | ev.Cancel
