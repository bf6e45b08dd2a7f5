"""What the core knows of each object and slot, as integer rows in columns, and the states that a row may be in.

Only keys are Python objects: a million rows must not be a million things for the garbage collector to look at. A row
is in exactly one state. :data:`STATES` is the only place that knows what holds in each state and which may follow it:
:meth:`Rows.move` goes by it, and a test holds the table in docs/design.md against it.

Leases count readers and I/O under way alike: LOADING has at least that of its read, and an object that is being
written to a backing is LEASED by its write. So nothing is freed under an I/O, and whoever ends last frees.
"""

from array import array
from collections import Counter
from typing import Final, NamedTuple

from kvhold.core.events import Tier


class State:
    """Plain integers: an enum's members would double the cost of every loop over rows."""

    FREE: Final = 0
    CREDIT: Final = 1  # granted to a session that may be writing it
    RESIDENT: Final = 2  # can be read, can be evicted
    LEASED: Final = 3  # can be read, somebody does
    DOOMED: Final = 4  # cannot be found any more, but somebody still reads or fills it
    ORPHANED: Final = 5  # a credit whose owner is lost and not proved dead
    LOADING: Final = 6  # being filled from a backing
    COLD: Final = 7  # in a backing alone: no slot
    HEAD: Final = 8  # a recency list's own row: no slot


class Facts(NamedTuple):
    """What holds of every row in one state. ``becomes`` says by what it goes to which other state."""

    name: str
    slot: bool
    """It has a slot of the arena."""
    found: bool
    """It is an object that can be found by its key."""
    evicted: bool
    """Its slot may be taken away to make room."""
    becomes: dict[int, str]


STATES: Final[dict[int, Facts]] = {
    State.FREE: Facts(
        "free",
        slot=False,
        found=False,
        evicted=False,
        becomes={
            State.CREDIT: "granted",
            State.COLD: "recovered",
            State.LOADING: "fetched from elsewhere",
            State.HEAD: "list opened",
        },
    ),
    State.CREDIT: Facts(
        "credit",
        slot=True,
        found=False,
        evicted=False,
        becomes={
            State.RESIDENT: "commit",
            State.FREE: "return, duplicate, commit of what is COLD",
            State.ORPHANED: "owner lost",
        },
    ),
    State.ORPHANED: Facts("orphaned", slot=True, found=False, evicted=False, becomes={State.FREE: "owner proved gone"}),
    State.RESIDENT: Facts(
        "resident",
        slot=True,
        found=True,
        evicted=True,
        becomes={
            State.LEASED: "lease, write to a backing",
            State.COLD: "evicted, a backing has it",
            State.FREE: "evicted, purged, quarantined",
        },
    ),
    State.LEASED: Facts(
        "leased",
        slot=True,
        found=True,
        evicted=False,
        becomes={State.RESIDENT: "last lease ends", State.DOOMED: "purged, quarantined"},
    ),
    State.COLD: Facts(
        "cold",
        slot=False,
        found=True,
        evicted=False,
        becomes={
            State.LOADING: "promoted",
            State.RESIDENT: "stored anew",
            State.FREE: "its backing gives it up, purged, quarantined, one object too many",
        },
    ),
    State.LOADING: Facts(
        "loading",
        slot=True,
        found=True,
        evicted=False,
        becomes={
            State.LEASED: "read and verified",
            State.COLD: "nobody waits, not begun",
            State.DOOMED: "failed, purged, quarantined",
            State.FREE: "it did not come from elsewhere, nobody waits",
        },
    ),
    State.DOOMED: Facts(
        "doomed", slot=True, found=False, evicted=False, becomes={State.FREE: "last lease or I/O ends"}
    ),
    State.HEAD: Facts("head", slot=False, found=False, evicted=False, becomes={State.FREE: "list closed"}),
}
"""In the order of an object's life; a list's own row comes last."""

NAMES: Final = tuple(facts.name for _, facts in sorted(STATES.items()))
_READABLE: Final = (State.RESIDENT, State.LEASED)
TIERS: Final = bytes(
    Tier.DRAM if state in _READABLE else Tier.BACKING if facts.found else Tier.NOWHERE
    for state, facts in sorted(STATES.items())
)
"""Where an object is, by its state."""
_SLOT: Final = tuple(facts.slot for _, facts in sorted(STATES.items()))
_BECOMES: Final = tuple(frozenset(facts.becomes) for _, facts in sorted(STATES.items()))


class ForbiddenMove(Exception):
    """A row was to go to a state that may not follow the one it is in."""


class Rows:
    """The columns. ``bytes`` are slot bytes by state; rows without a slot have none."""

    strict = False
    """Whether a move that is not in the table raises :class:`ForbiddenMove`, as in all tests. Else it is refused."""

    def __init__(self) -> None:
        self.bytes = [0] * len(STATES)
        self.counters: Counter[str] = Counter()
        self.state = bytearray()
        self.logged = bytearray()  # whether the object was in a backing since it was stored
        self.there = bytearray()  # a bit for each backing that has it under its name
        self.leases: list[int] = []  # small integers are shared: no objects of their own, and faster than an array
        self.epoch = array("Q")  # of the slot's present use; never given twice
        self.offset = array("Q")
        self.owner = array("Q")  # index id
        self.size = array("Q")
        self.stamp = array("Q")  # recency, comparable between lists
        self.born = array("q")  # when the object was computed, in nanoseconds of the core's clock, as far as is known
        self.place = array("Q")  # in a backing that gives places; 0 is nowhere
        self.older = array("i")
        self.newer = array("i")
        self.before = array("i")  # in a chain: the row of what comes before; it counts where that one says so, too
        self.after = array("i")  # and of what came last to follow it; -1 is nothing
        self.key: list[bytes] = []
        self.spare: list[int] = []

    def new(self) -> int:
        """A row in state FREE, in no list."""
        if self.spare:
            return self.spare.pop()
        row = len(self.state)
        self.state.append(State.FREE)
        self.logged.append(0)
        self.there.append(0)
        for column in (self.leases, self.epoch, self.offset, self.owner, self.size, self.stamp, self.born, self.place):
            column.append(0)
        for column in (self.older, self.newer, self.before, self.after):
            column.append(-1)
        self.key.append(b"")
        return row

    def drop(self, row: int) -> bool:
        """The row is FREE: it is in no list and in no index, and its slot is given back next. False if it may not be.

        So a row is free once: who gives it back twice does not give away what somebody else was granted meanwhile.
        """
        if not self.move(row, State.FREE):
            return False
        self.logged[row] = 0
        self.before[row] = self.after[row] = -1
        self.spare.append(row)
        return True

    def move(self, row: int, state: int) -> bool:
        """Put a row in another state, and the bytes of its slot, if it has one, under that.

        False if no such move is in :data:`STATES`; then nothing has changed, and the caller leaves the row as it is.
        At worst a slot is not used again: nothing is freed under a reader, and nothing is found that was not stored.
        """
        former = self.state[row]
        if state not in _BECOMES[former]:
            return self.refuse(row, state)
        size = self.size[row]
        if _SLOT[former]:
            self.bytes[former] -= size
        if _SLOT[state]:
            self.bytes[state] += size
        self.state[row] = state
        return True

    def refuse(self, row: int, state: int) -> bool:
        """A row cannot go to ``state``: something that the core believes of it is wrong."""
        if self.strict:
            raise ForbiddenMove(f"row {row} is {NAMES[self.state[row]]} and was to become {NAMES[state]}")
        self.counters["forbidden_moves"] += 1
        return False
