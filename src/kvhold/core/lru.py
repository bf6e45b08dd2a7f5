"""Least recently used first, and of a chain its end before its start.

There is a list per index, so that a namespace's share can be kept apart; stamps compare across them, and a heap of each
size's list heads finds the oldest.
"""

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

from kvhold.core.recency import Clock
from kvhold.core.rows import Rows, State

LOOK = 512
"""Rows that one search for a victim looks at before it gives up."""

CLOSED = -1
"""In place of the head of a list that is not used any more."""

T = TypeVar("T")


class RecencyList(Generic[T]):
    """Objects of one size that belong to ``owner``; ``head`` is its own row, older than all and newer than all."""

    __slots__ = ("head", "number", "owner", "queued", "size")

    def __init__(self, head: int, size: int, owner: T, number: int) -> None:
        self.head = head
        self.size = size
        self.owner = owner
        self.number = number
        self.queued = False


class LRU(Generic[T]):
    """All lists over ``rows``: see :class:`kvhold.core.recency.Recency`."""

    def __init__(self, rows: Rows, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.passed = 0
        self._rows = rows
        self._number = 0
        # By size, of every list that is not empty: its oldest row's stamp when last looked at. Never newer than it is.
        self._heaps: dict[int, list[tuple[int, int, RecencyList[T]]]] = {}
        self._closed: dict[int, int] = {}  # by size, how many of them are closed

    @property
    def sizes(self) -> list[int]:
        return [size for size, heap in self._heaps.items() if heap]

    def open(self, size: int, owner: T, compared: bool = True) -> RecencyList[T]:
        """A new list; one that is not ``compared`` is never looked at by :meth:`oldest`."""
        rows = self._rows
        head = rows.new()
        rows.move(head, State.HEAD)
        rows.older[head] = rows.newer[head] = head
        self._number += 1
        lst = RecencyList(head, size, owner, self._number)
        lst.queued = not compared
        return lst

    def close(self, lst: RecencyList[T]) -> None:
        """The list is empty and not used again."""
        self._rows.drop(lst.head)
        lst.head = CLOSED
        if not lst.queued:
            return
        # To look for it in the heap would cost as much as there are lists, each time; so that is done now and then.
        heap, closed = self._heaps[lst.size], self._closed.get(lst.size, 0) + 1
        if closed * 2 > len(heap):
            heap[:] = [entry for entry in heap if entry[2].head != CLOSED]
            heapify(heap)
            closed = 0
        self._closed[lst.size] = closed
        self._drop_empty(lst.size)

    def _drop_empty(self, size: int) -> None:
        if not self._heaps[size]:
            del self._heaps[size]
            self._closed.pop(size, None)

    def insert(self, row: int, lst: RecencyList[T], parent: int | None = None, again: bool = False) -> None:
        """Put a row that is in no list just behind ``parent``, which is in ``lst``; without one, as used just now."""
        if parent is None:
            self.clock.count += 1
            self._rows.stamp[row] = self.clock.count
            self._link(row, lst.head)
        else:
            self._rows.stamp[row] = self._rows.stamp[parent]
            self._link(row, parent)
        if not lst.queued:
            self.queue(lst)

    def queue(self, lst: RecencyList[T]) -> None:
        """Have a list that has rows looked at by :meth:`oldest`, if it is not."""
        if not lst.queued:
            lst.queued = True
            oldest = self._rows.newer[lst.head]
            heappush(self._heaps.setdefault(lst.size, []), (self._rows.stamp[oldest], lst.number, lst))

    def append(self, row: int, lst: RecencyList[T]) -> None:
        """Put a row that is in no list where the one used longest ago is."""
        oldest = self._rows.newer[lst.head]
        if oldest == lst.head:
            self.insert(row, lst)
        else:
            self.insert(row, lst, oldest)

    def remove(self, row: int, lst: RecencyList[T]) -> None:
        older, newer = self._rows.older, self._rows.newer
        before, after = newer[row], older[row]
        older[before], newer[after] = after, before

    def touch(self, touched: Sequence[int], lst: RecencyList[T]) -> None:
        """Make the rows of a chain, all of ``lst``, the most recent, the first before the last.

        Rows that already follow each other are moved as one piece. A row that the chain names a second time stays.
        """
        self.clock.count += 1
        rows, clock = self._rows, self.clock.count
        older, newer, stamp = rows.older, rows.newer, rows.stamp
        pieces: list[tuple[int, int]] = []
        first = last = -1
        for row in touched:
            if stamp[row] == clock:
                continue
            stamp[row] = clock
            if last < 0 or older[last] != row:
                if last >= 0:
                    pieces.append((first, last))
                first = row
            last = row
        if last >= 0:
            pieces.append((first, last))
        head = lst.head
        for first, last in reversed(pieces):
            before, after = newer[first], older[last]
            older[before], newer[after] = after, before
            front = older[head]
            older[head], newer[first] = first, head
            older[last], newer[front] = front, last

    def oldest(self, size: int, spared: Callable[[T], bool]) -> int | None:
        """The evictable row of ``size`` used longest ago whose owner is not spared; None when none was found."""
        heap = self._heaps.get(size)
        if heap is None:
            return None
        aside: list[tuple[int, int, RecencyList[T]]] = []
        found = None
        while heap:
            stamp, number, lst = heap[0]
            if lst.head == CLOSED:
                heappop(heap)
                self._closed[size] -= 1
                continue
            last = self._rows.newer[lst.head]
            if last == lst.head:
                heappop(heap)
                lst.queued = False
            elif (now := self._rows.stamp[last]) != stamp:
                heapreplace(heap, (now, number, lst))
            elif spared(lst.owner) or (row := self.victim(lst)) is None:
                aside.append(heappop(heap))
            elif self._rows.stamp[row] != stamp:
                heapreplace(heap, (self._rows.stamp[row], number, lst))  # held ones were passed over
            else:
                found = row
                break
        for entry in aside:
            heappush(heap, entry)
        self._drop_empty(size)
        return found

    def first(self, lst: RecencyList[T]) -> int | None:
        """The row of a list that was used longest ago."""
        row = self._rows.newer[lst.head]
        return None if row == lst.head else row

    def victim(self, lst: RecencyList[T]) -> int | None:
        """The object of a list to evict next; held ones on the way to it are passed over."""
        newer, state = self._rows.newer, self._rows.state
        first = newer[lst.head]
        for look in range(LOOK):
            row = newer[lst.head]
            if row == lst.head or (look and row == first):
                return None
            if state[row] == State.RESIDENT:
                return row
            self.pass_over(row, lst)
        return None

    def pass_over(self, row: int, lst: RecencyList[T]) -> None:
        """Count ``row`` as used just now."""
        self.passed += 1
        self.remove(row, lst)
        self.insert(row, lst)

    def rows_of(self, lst: RecencyList[T]) -> Iterator[int]:
        """All rows of a list, the one used longest ago first."""
        row = self._rows.newer[lst.head]
        while row != lst.head:
            yield row
            row = self._rows.newer[row]

    def _link(self, row: int, after: int) -> None:
        """Put ``row`` on the older side of ``after``."""
        older, newer = self._rows.older, self._rows.newer
        following = older[after]
        older[after], newer[row] = row, after
        older[row], newer[following] = following, row
