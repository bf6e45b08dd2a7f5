"""What an eviction policy is: it knows in which order objects are given up, and nothing else of them.

``eviction`` asks it which object goes and sees to it that there is room then. Policies are ``lru`` and ``twoq``; a new
one is a class that keeps this contract, and a name in ``eviction.POLICIES`` and in the engine's settings; "Eviction" in
``docs/design.md`` says in which tests and rules of the audit it is named as well.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

_TIME_STEP, _TIMES = 60_000_000_000, 1 << 15
"""A minute, for three weeks, is how well it is known when something was used last."""

T = TypeVar("T")
L = TypeVar("L")


class Clock:
    """Counts uses: a row's ``stamp`` is the count when it was used last. ``now`` is the time in nanoseconds."""

    def __init__(self) -> None:
        self.count = 0
        self.now = 0
        self._times: deque[tuple[int, int]] = deque(maxlen=_TIMES)  # (time, count then)

    def note_time(self, now: int) -> None:
        """Remember, now and then, which uses came before ``now``."""
        self.now = now
        if not self._times or now - self._times[-1][0] >= _TIME_STEP:
            self._times.append((now, self.count))

    def at(self, then: int) -> int:
        """Rows with a smaller or equal stamp were not used after ``then``; 0 if that is not known."""
        found = bisect_right(self._times, then, key=lambda noted: noted[0])
        return self._times[found - 1][1] if found else 0

    def times_of(self, stamps: Sequence[int]) -> list[int]:
        """By when rows with these stamps had been used, to the minute."""
        found = [bisect_left(self._times, stamp, key=lambda noted: noted[1]) for stamp in stamps]
        return [self._times[at][0] if at < len(self._times) else self.now for at in found]


class Recency(Protocol[T, L]):
    """A policy over the rows of a catalogue, in lists of objects of one size that belong to one owner.

    The catalogue owes: a row is in at most one list, and names that list whenever it is spoken of; it is in none while
    it has no object or is LOADING. A row that is LEASED stays where it is, so that leasing and releasing cost nothing
    here: the policy passes it over. What uses a chain says so once, with all of its rows.

    The policy owes: a row's ``stamp`` is the clock's count when it was used last, or its parent's, and of rows that it
    names for different lists or sizes that with the smallest goes first. Chains go from their ends, as far as their
    rows are of one standing. No call costs more than about as many steps as rows are named, or
    :data:`kvhold.core.lru.LOOK`, and nothing depends on anything but the calls and their order. It alone writes
    ``stamp``, ``older`` and ``newer``, and may keep columns of its own.
    """

    clock: Clock

    @property
    def passed(self) -> int:
        """Rows that were looked at in vain, ever, because somebody holds them."""
        ...

    @property
    def sizes(self) -> Sequence[int]:
        """Sizes of which compared lists have objects."""
        ...

    def open(self, size: int, owner: T, compared: bool = True) -> L:
        """A new list, empty. One that is not ``compared`` is never looked at by :meth:`oldest`."""
        ...

    def close(self, lst: L) -> None:
        """The list is empty and not used again."""
        ...

    def insert(self, row: int, lst: L, parent: int | None = None, again: bool = False) -> None:
        """Put in a row that is in no list, as used just now; with a ``parent`` in ``lst``, so that it goes before it.

        What is known already, and stored or read once more, is there ``again``.
        """
        ...

    def append(self, row: int, lst: L) -> None:
        """Put in a row that is in no list where it goes before those that were put in like it."""
        ...

    def remove(self, row: int, lst: L) -> None:
        """Take a row out of its list."""
        ...

    def touch(self, touched: Sequence[int], lst: L) -> None:
        """The rows of a chain, in its order and all of ``lst``, were used just now. Some may be named twice."""
        ...

    def pass_over(self, row: int, lst: L) -> None:
        """The row cannot go now: others are looked at before it is again."""
        ...

    def oldest(self, size: int, spared: Callable[[T], bool]) -> int | None:
        """The RESIDENT row of ``size`` that goes next, of owners that are not spared; None when none was found."""
        ...

    def victim(self, lst: L) -> int | None:
        """The RESIDENT row of a list that goes next; None when none was found."""
        ...

    def first(self, lst: L) -> int | None:
        """The row of a list that was used longest ago, whoever holds it."""
        ...

    def rows_of(self, lst: L) -> Iterator[int]:
        """All rows of a list. For audits: it takes as long as there are rows."""
        ...
