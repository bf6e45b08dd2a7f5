"""What the core knows of each object and slot, as integer rows in columns.

Only keys are Python objects: a million rows must not be a million things for the garbage collector to look at. A row
is in exactly one state:

               take               commit                   evict
        FREE --------> CREDIT --------------> RESIDENT ------------> FREE, or COLD if a log has it
                        | |  return, duplicate   |  ^                  ^
                        | +----> FREE       lease|  |last release      |purge, quarantine
                        | owner lost             v  |                  |
                        v                      LEASED -------------> DOOMED --last release--> FREE
                      LIMBO --owner gone--> FREE   ^   purge,          ^
                                                   |   quarantine      | purge, failed read
        recovered                promote           | read done         |
   FREE ---------> COLD ----------------------> LOADING ---------------+
                    |  ^------ nobody waits any more, not begun ---+ |
                    v                                               \\+ read done, nobody waits --> RESIDENT
                  FREE   (segment reclaimed, purged, quarantined, one object too many)

Leases count readers and I/O under way alike: LOADING has at least that of its read, and an object that is being
written to a log is LEASED by its write.
"""

from array import array
from typing import Final


class State:
    """Plain integers: an enum's members would double the cost of every loop over rows."""

    FREE: Final = 0
    CREDIT: Final = 1  # granted to a session that may be writing it
    RESIDENT: Final = 2  # can be read, can be evicted
    LEASED: Final = 3  # can be read, somebody does
    DOOMED: Final = 4  # cannot be found any more, but somebody still reads or fills it
    LIMBO: Final = 5  # a credit whose owner is lost and not proved dead
    LOADING: Final = 6  # being filled from a log
    COLD: Final = 7  # in a log alone: no slot
    HEAD: Final = 8  # a recency list's own row: no slot


NAMES: Final = ("free", "credit", "resident", "leased", "doomed", "limbo", "loading", "cold", "head")


class Rows:
    """The columns. ``bytes`` are slot bytes by state; rows of FREE, COLD and HEAD have no slot."""

    def __init__(self) -> None:
        self.bytes = [0] * (State.HEAD + 1)
        self.state = bytearray()
        self.logged = bytearray()  # whether the object was in a log since it was stored
        self.leases: list[int] = []  # small integers are shared: no objects of their own, and faster than an array
        self.epoch = array("Q")  # of the slot's present use; never given twice
        self.offset = array("Q")
        self.owner = array("Q")  # index id
        self.size = array("Q")
        self.stamp = array("Q")  # recency, comparable between lists
        self.place = array("Q")  # in a log; 0 is nowhere
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
        for column in (self.leases, self.epoch, self.offset, self.owner, self.size, self.stamp, self.place):
            column.append(0)
        for column in (self.older, self.newer, self.before, self.after):
            column.append(-1)
        self.key.append(b"")
        return row

    def drop(self, row: int) -> None:
        """The row is FREE: its slot is given back, it is in no list and in no index."""
        self.state[row] = State.FREE
        self.logged[row] = 0
        self.before[row] = self.after[row] = -1
        self.spare.append(row)

    def move(self, row: int, state: int) -> None:
        """Count the row's slot under another state."""
        size = self.size[row]
        self.bytes[self.state[row]] -= size
        self.bytes[state] += size
        self.state[row] = state
