"""What storage besides DRAM is to the core: one protocol, and every I/O that is under way in any backing.

An object's *place* is one number of 64 bits, never 0. Its top bits name the backing, which alone reads the rest. A
backing that finds objects by their name needs none: it has a *bit*, and a place that is the same for all. So an object
is in at most one backing of those that give places, and in any number of the others.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

from kvhold.core import events as ev
from kvhold.core.events import Effect, Reason

PLACE_BITS: Final = 52
"""Bits of a place that are its backing's own."""
READ_BATCH: Final = 8 << 20
"""Bytes of one read: enough for a device, little enough that what waits for it is not held up."""

BITS: Final = 8
"""Backings that find objects by their name."""

Name = tuple[bytes, int, bytes]
"""Namespace, group and key."""
Mark = tuple[int, int]
"""A point in what a backing was given to keep; only it knows what the numbers are."""


@dataclass(slots=True, eq=False)
class Io:
    """One I/O that is not answered. Its ``rows`` are held by it, and its ``bytes`` count in a budget, until it is."""

    number: int
    backing: "Backing"
    kind: str  # "read", "write", "forget", "ask", or the backing's own; ``<kind>_failed`` counts those that fail
    rows: list[int] = field(default_factory=list)
    bytes: int = 0
    cancelled: bool = False


class Backing(Protocol):
    """Storage besides DRAM.

    The core calls it within its own events alone. Whatever it does follows from those calls: it has no clock, and its
    I/O is what it returns as effects. It numbers each with :meth:`Backings.begin`, and hears of its end once. Rows that
    it is handed stay the same objects' until it has let go of them: :meth:`expect` ends with :meth:`dismiss`,
    :meth:`left` or :meth:`read`, and whatever it writes it leases from the effect to the answer.
    """

    kind: str
    """What people and metrics call its kind."""
    number: int
    objects: int
    """Objects that it has: those that :meth:`entered` and have not :meth:`left`."""
    bit: int
    """Which bit of a row says that it is here; 0 if this backing gives places."""

    # --- what is there

    def entered(self, row: int, place: int) -> None:
        """The object of ``row`` is at ``place`` from now on, which this backing has given."""
        ...

    def left(self, row: int, place: int) -> None:
        """What is at ``place`` does not count any more, and nobody reads it for ``row`` if that has not begun."""
        ...

    def moved(self, row: int, again: int) -> None:
        """The object of ``row`` has another row now, with the same place."""
        ...

    def where(self, place: int) -> str:
        """A place in words, also one that was left."""
        ...

    # --- reading

    def worth(self, row: int) -> Reason:
        """Why nobody should wait for a row that is COLD or LOADING to be read from here; NONE if it is to be had."""
        ...

    def expect(self, row: int) -> None:
        """A LOADING row is to be read when its turn comes: until then it stays readable."""
        ...

    def dismiss(self, row: int) -> None:
        """What is expected is not to be read after all; what is not expected does not matter."""
        ...

    def read(self, io: int, rows: Iterable[int]) -> ev.Read:
        """Read the first of these rows, all of them expected, and as many of the following as make one I/O.

        At least one, at most a batch and about :data:`READ_BATCH` bytes.
        """
        ...

    def read_ended(self, io: Io, good: bool | None) -> None:
        """A read is over; whether anything of it came, None if it was cancelled.

        What did not come is then read from another backing, or lost to :meth:`left`, or, where it could not be looked
        at, as it was.
        """
        ...

    # --- writing

    def stored(self, row: int, parent: bytes, depth: int) -> None:
        """An object in DRAM is worth keeping here: write it when its turn comes, if it is still there then."""
        ...

    def ended(self, io: Io, failed: set[int]) -> None:
        """An I/O of any kind but a read has ended; ``failed`` are positions of its rows, or 0 without rows."""
        ...

    def pump(self) -> list[Effect]:
        """What may be begun now."""
        ...

    @property
    def next_deadline(self) -> int | None:
        """When :meth:`pump` may be able to do more than now, for want of nothing but time."""
        ...

    @property
    def queued_writes(self) -> int: ...

    @property
    def busy(self) -> bool:
        """Whether anything is still to be written that can be."""
        ...

    def flush(self, flush: int) -> None:
        """Have what is queued now made durable, and then add this number to
        :attr:`Backings.flushed`, once."""
        ...

    def unflush(self, flush: int) -> None:
        """Nobody waits for that flush any more."""
        ...

    # --- forgetting

    def mark(self, then: int) -> Mark:
        """All that this backing began to keep by ``then``, and perhaps more, lies before this mark."""
        ...

    def recorded_before(self, row: int, mark: Mark | None) -> bool | None:
        """Whether what it has of ``row`` lies before a mark of its own; None if it has nothing, nor is writing it."""
        ...

    def forget(self, names: Sequence[Name]) -> list[Effect]:
        """Make the loss of some objects outlast the manager, in an I/O of kind "forget"."""
        ...

    def purge(self, namespace: bytes, mark: Mark) -> list[Effect]:
        """The same of all that a namespace (empty: every one) has before ``mark``."""
        ...

    # --- words

    def told(self, event: ev.FromBacking) -> None:
        """Word of its own kind."""
        ...

    def report(self, now: int) -> dict[str, object]:
        """Plain data for status and metrics, at ``now`` of the core's clock."""
        ...


@runtime_checkable
class Asked(Backing, Protocol):
    """A backing that others store into as well, and that gives up what it likes: it is asked what it has.

    It finds objects by their name. What is known to be there is not written again, and that is all that its bit says:
    an object that nobody has here is not known here. It hands on what it is told to forget before what it is asked.
    """

    @property
    def usable(self) -> bool:
        """Whether it is worth asking, and waiting for."""
        ...

    def ask(self, io: int, names: Sequence[Name]) -> ev.Ask:
        """Ask which of these are there."""
        ...

    def ask_ended(self, io: Io, failed: bool) -> None:
        """It has said so; or it could not be asked."""
        ...

    def too_late(self) -> Sequence[int]:
        """Rows of a read that takes too long, each once: from now on nobody waits for them, whenever it ends."""
        ...

    def touched(self, row: int, parent: bytes, depth: int) -> None:
        """An object in DRAM that follows ``parent`` was used: it may be time to see whether it is still here."""
        ...


class Backings:
    """All of them, by number, and every I/O that is not answered, by its number."""

    def __init__(self) -> None:
        self.all: dict[int, Backing] = {}
        self.asked: dict[int, Asked] = {}  # those of them that are asked
        self.keeping = (1 << BITS) - 1  # the bits of the others
        self.ios: dict[int, Io] = {}
        self.flushed: list[tuple[int, bool]] = []  # (flush, failed) since that was looked at last
        self._next_io = 1

    def add(self, backing: Backing) -> None:
        """There is one more."""
        self.all[backing.number] = backing
        if isinstance(backing, Asked):
            self.asked[backing.number] = backing
            self.keeping &= ~backing.bit

    def place_in(self, bit: int) -> int:
        """Where a backing with this bit has an object."""
        return next(number for number, one in self.all.items() if one.bit == bit) << PLACE_BITS | 1

    def of(self, place: int) -> Backing:
        """The backing of a place that is not 0."""
        return self.all[place >> PLACE_BITS]

    def begin(self, io: Io) -> int:
        """An I/O's number."""
        io.number, self._next_io = self._next_io, self._next_io + 1
        self.ios[io.number] = io
        return io.number
