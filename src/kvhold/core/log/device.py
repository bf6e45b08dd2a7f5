"""One log and how it does: what waits to be written, what is read, what fails or hangs."""

from collections import deque
from dataclasses import dataclass, field

from kvhold.core.backing import Io, Name
from kvhold.core.common import Timer
from kvhold.core.log.segments import Log, Segment

ERRORS = 3
"""Failures one after the other that take a log out of service for a while."""
WRITE_PATIENCE = 30_000_000_000
"""Nanoseconds that a write may take before it is said to hang. Nothing is done about it."""


@dataclass(slots=True)
class Dirty:
    """A row that is to be written, if its slot is still the same."""

    row: int
    epoch: int
    parent: bytes
    depth: int
    number: int  # in the order of queueing
    retried: bool = False
    again: bool = False  # it was in the log before


@dataclass(slots=True, eq=False)
class LogIo(Io):
    """One of a log's own, or a write: to a ``segment``, of what was ``dirty`` to these ``places``."""

    segment: Segment | None = None
    places: list[int] = field(default_factory=list)
    dirty: list[Dirty] = field(default_factory=list)
    flushes: list[int] = field(default_factory=list)  # that wait for a sync


@dataclass(slots=True)
class Device:
    """A log and how it does. After a segment could not be had, old ones are reused before new ones for a while."""

    log: Log
    ready: bool = False
    queue: deque[Dirty] = field(default_factory=deque)
    queued: int = 0  # ever
    writing: bool = False
    rows: set[int] = field(default_factory=set)  # being written
    reclaiming: bool = False
    full_until: int = 0
    rewrite: float = 0.0  # bytes that may be written again
    paused_until: int = 0  # not written before then
    wrote_at: int = 0  # when the last write was begun
    wrote: int = 0  # its bytes
    fresh: bool = False  # the segment that is being begun may never have been had
    read_errors: int = 0
    write_errors: int = 0
    read_errors_since: int = 0
    write_errors_since: int = 0
    reads_again: int = 0  # not read before then
    expected: dict[int, Segment] = field(default_factory=dict)  # by row that is to be read
    reading: dict[int, Segment] = field(default_factory=dict)  # by read that is not answered
    reads: Timer[int] = field(default_factory=Timer)  # their numbers
    flushes: dict[int, int] = field(default_factory=dict)  # up to which number of what was queued each waits
    lost: set[Name] = field(default_factory=set)  # as long as records are recovered
    purged: list[tuple[bytes, int]] = field(default_factory=list)  # (namespace, up to seq) while records are recovered

    def read_ended(self, good: bool, now: int) -> None:
        self.read_errors_since = self.read_errors_since if self.read_errors else now
        self.read_errors = 0 if good else self.read_errors + 1

    def write_ended(self, good: bool, now: int) -> None:
        self.write_errors_since = self.write_errors_since if self.write_errors else now
        self.write_errors = 0 if good else self.write_errors + 1

    def hangs_since(self, now: int, patience: int) -> int | None:
        """When the oldest read was begun, if that is longer ago than a read may take."""
        oldest = self.reads.oldest
        return oldest if oldest is not None and now - oldest > patience else None

    def out_of_use(self, now: int, patience: int) -> dict[str, tuple[str, int]]:
        """Why, and since when, the log is not read, or not written: until that succeeds, though it is tried."""
        out: dict[str, tuple[str, int]] = {}
        if (since := self.hangs_since(now, patience)) is not None:
            out["read"] = "hangs", since
        elif self.read_errors >= ERRORS:
            out["read"] = "errors", self.read_errors_since
        if self.write_errors >= ERRORS or now < self.paused_until:
            out["write"] = "errors", self.write_errors_since
        elif self.writing and now - self.wrote_at > WRITE_PATIENCE:
            out["write"] = "hangs", self.wrote_at
        return out
