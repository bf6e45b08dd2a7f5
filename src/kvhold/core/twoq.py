"""2Q: what was used once is on probation and goes first, as long as that is half of what there is.

Johnson and Shasha, "2Q: A Low Overhead High Performance Buffer Management Replacement Algorithm", VLDB 1994, in their
simplified version: without names of what is gone already. So prompts that come once cannot push out what many share.
Each of the two queues is least recently used first. Of a chain that is used again, the new end is on probation and goes
before what it follows, unless less than half is.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Generic, TypeVar

from kvhold.core.lru import LRU, RecencyList
from kvhold.core.recency import Clock
from kvhold.core.rows import Rows

T = TypeVar("T")


class TwoQList(Generic[T]):
    """The two queues of a list. ``count`` is how many rows each has."""

    __slots__ = ("count", "main", "probation", "size")

    def __init__(self, probation: RecencyList[T], main: RecencyList[T]) -> None:
        self.size = probation.size
        self.probation = probation
        self.main = main
        self.count = [0, 0]


class TwoQ(Generic[T]):
    """All lists over ``rows``: see :class:`kvhold.core.recency.Recency`."""

    def __init__(self, rows: Rows) -> None:
        self.clock = Clock()
        self._rows = rows
        self._probation: LRU[T] = LRU(rows, self.clock)
        self._main: LRU[T] = LRU(rows, self.clock)
        self._kept = bytearray()  # by row: whether it is in the main queue of its list
        self._counts: dict[int, list[int]] = {}  # by size: rows on probation and in main queues

    @property
    def passed(self) -> int:
        return self._probation.passed + self._main.passed

    @property
    def sizes(self) -> list[int]:
        return list(dict.fromkeys(chain(self._probation.sizes, self._main.sizes)))

    def open(self, size: int, owner: T, compared: bool = True) -> TwoQList[T]:
        """A new list; one that is not ``compared`` is never looked at by :meth:`oldest`."""
        return TwoQList(self._probation.open(size, owner, compared), self._main.open(size, owner, compared))

    def close(self, lst: TwoQList[T]) -> None:
        """The list is empty and not used again."""
        self._probation.close(lst.probation)
        self._main.close(lst.main)

    def insert(self, row: int, lst: TwoQList[T], parent: int | None = None, again: bool = False) -> None:
        """What is new is on probation; what was known before is not."""
        near = parent if parent is not None and self._kept[parent] == again else None
        if again:
            self._main.insert(row, lst.main, near)
        else:
            self._probation.insert(row, lst.probation, near)
        self._count(row, lst, again)

    def append(self, row: int, lst: TwoQList[T]) -> None:
        """Put a row that is in no list where it is the next to go of those on probation."""
        self._probation.append(row, lst.probation)
        self._count(row, lst, False)

    def remove(self, row: int, lst: TwoQList[T]) -> None:
        kept, count = self._kept[row], self._counts[lst.size]
        self._main.remove(row, lst.main)  # a row is unlinked alike from whichever it is in
        lst.count[kept] -= 1
        count[kept] -= 1
        if not any(count):
            del self._counts[lst.size]

    def touch(self, touched: Sequence[int], lst: TwoQList[T]) -> None:
        """The rows of a chain are the most recent of the main queue, the first before the last."""
        self._main.touch(touched, lst.main)
        kept, first = self._kept, 0
        for row in touched:
            if not kept[row]:
                kept[row] = 1
                first += 1
        if first:
            self._main.queue(lst.main)
            for count in (lst.count, self._counts[lst.size]):
                count[0] -= first
                count[1] += first

    def pass_over(self, row: int, lst: TwoQList[T]) -> None:
        """Count ``row`` as used just now, where it is."""
        if self._kept[row]:
            self._main.pass_over(row, lst.main)
        else:
            self._probation.pass_over(row, lst.probation)

    def oldest(self, size: int, spared: Callable[[T], bool]) -> int | None:
        """Of the queue that goes first, the evictable row of ``size`` used longest ago whose owner is not spared."""
        queues = self._probation, self._main
        found = (queue.oldest(size, spared) for queue in _in_order(queues, self._counts.get(size, (0, 0))))
        return next((row for row in found if row is not None), None)

    def victim(self, lst: TwoQList[T]) -> int | None:
        """The object of a list to evict next."""
        queues = (self._probation, lst.probation), (self._main, lst.main)
        found = (queue.victim(part) for queue, part in _in_order(queues, lst.count))
        return next((row for row in found if row is not None), None)

    def first(self, lst: TwoQList[T]) -> int | None:
        """The row of a list that was used longest ago."""
        found = self._probation.first(lst.probation), self._main.first(lst.main)
        return min((row for row in found if row is not None), key=self._rows.stamp.__getitem__, default=None)

    def rows_of(self, lst: TwoQList[T]) -> Iterator[int]:
        """All rows of a list: those on probation, then the others, each used longest ago first."""
        yield from self._probation.rows_of(lst.probation)
        yield from self._main.rows_of(lst.main)

    def _count(self, row: int, lst: TwoQList[T], kept: bool) -> None:
        if row >= len(self._kept):
            self._kept.extend(bytes(row + 1 - len(self._kept)))
        self._kept[row] = kept
        lst.count[kept] += 1
        self._counts.setdefault(lst.size, [0, 0])[kept] += 1


Q = TypeVar("Q")


def _in_order(queues: tuple[Q, Q], count: Sequence[int]) -> tuple[Q, Q]:
    """Probation first as long as it is half of the rows or more."""
    return queues if count[0] >= count[1] else (queues[1], queues[0])
