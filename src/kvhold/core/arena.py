"""The arena, cut into slots. A run of pages holds slots of one size; an empty run gives its pages back.

    arena = free pages + free slots + tail slack + slots in use          (to the byte, at all times)

Sizes are bytes, offsets are bytes from the arena's start. Nothing here knows what a slot holds, except that the
owner of each used slot is a catalogue row, so that a run can be emptied.
"""

from array import array
from collections.abc import Iterable

ALIGN = 4096
"""Slots, shards and pages start at multiples of this: what O_DIRECT and huge pages want."""


def align(size: int) -> int:
    """``size`` rounded up to the arena's alignment."""
    return -(-size // ALIGN) * ALIGN


def slot_bytes(shards: Iterable[int]) -> int:
    """Bytes of the slot of an object whose shards have so many bytes: each begins aligned."""
    return align(sum(map(align, shards)))


class Run:
    """``span`` adjacent pages cut into ``count`` slots of ``size`` bytes."""

    __slots__ = ("base", "count", "draining", "free", "rows", "size", "span")

    def __init__(self, base: int, size: int, span: int, page: int) -> None:
        self.base = base
        self.size = size
        self.span = span
        self.count = span * page // size
        self.free = list(range(self.count - 1, -1, -1))
        self.rows = array("i", [-1]) * self.count
        self.draining = False

    @property
    def used(self) -> int:
        return self.count - len(self.free)

    def used_rows(self) -> list[int]:
        return [row for row in self.rows if row >= 0]


class Arena:
    """Slab allocation over pages of ``page`` bytes each, of which :meth:`grow` adds more."""

    def __init__(self, page: int) -> None:
        if page % ALIGN:
            raise ValueError(f"page size {page} is not a multiple of {ALIGN}")
        self.page = page
        self.runs: list[Run | None] = []  # by page; every page of a run names it
        self.free_pages = 0
        self.free_slot_bytes = 0
        self.slack_bytes = 0
        self.draining_pages = 0
        self._open: dict[int, dict[int, Run]] = {}  # size -> runs with a free slot that are not draining, by base
        self._lowest_free = 0

    @property
    def total(self) -> int:
        """Bytes of all pages."""
        return len(self.runs) * self.page

    def grow(self, pages: int) -> None:
        self.runs.extend([None] * pages)
        self.free_pages += pages

    def span_of(self, size: int) -> int:
        """Pages in a run of ``size`` slots: the fewest that waste at most an eighth, if there are enough pages."""
        least = -(-size // self.page)
        for span in range(least, min(least + 8, len(self.runs) // 4)):
            if span * self.page % size * 8 <= span * self.page:
                return span
        return least

    def take(self, size: int, row: int) -> int | None:
        """The offset of a free slot of ``size`` bytes, now used by ``row``; None when a slot must be freed first."""
        runs = self._open.get(size)
        run = next(reversed(runs.values())) if runs else self._cut(size)
        if run is None:
            return None
        index = run.free.pop()
        run.rows[index] = row
        if not run.free:
            del self._open[size][run.base]
        self.free_slot_bytes -= size
        return run.base + index * size

    def give(self, offset: int) -> None:
        """Free the slot at ``offset``; the last one of a run gives the run's pages back."""
        run = self.run_at(offset)
        index = (offset - run.base) // run.size
        if run.rows[index] < 0:
            raise ValueError(f"slot at {offset} is free already")
        run.rows[index] = -1
        run.free.append(index)
        self.free_slot_bytes += run.size
        free = len(run.free)
        if free == run.count:
            self._dissolve(run)
        elif free == 1 and not run.draining:
            self._open.setdefault(run.size, {})[run.base] = run

    def rename(self, offset: int, row: int) -> None:
        """The used slot at ``offset`` is ``row``'s from now on."""
        run = self.run_at(offset)
        run.rows[(offset - run.base) // run.size] = row

    def drain(self, run: Run) -> None:
        """Give out no more slots of ``run``."""
        if not run.draining:
            run.draining = True
            self.draining_pages += run.span
        self._open.get(run.size, {}).pop(run.base, None)

    def run_at(self, offset: int) -> Run:
        run = self.runs[offset // self.page]
        if run is None:
            raise ValueError(f"no slot at {offset}")
        return run

    def _cut(self, size: int) -> Run | None:
        if not self.free_pages:
            return None
        span = self.span_of(size)
        first = self._find(span)
        if first is None:
            return None
        run = Run(first * self.page, size, span, self.page)
        self.runs[first : first + span] = [run] * span
        self.free_pages -= span
        self.free_slot_bytes += run.count * size
        self.slack_bytes += span * self.page - run.count * size
        self._open.setdefault(size, {})[run.base] = run
        return run

    def _find(self, span: int) -> int | None:
        if self.free_pages < span:
            return None
        length = 0
        for page in range(self._lowest_free, len(self.runs)):
            length = length + 1 if self.runs[page] is None else 0
            if length == 1 and span == 1:
                self._lowest_free = page
            if length == span:
                return page - span + 1
        return None

    def _dissolve(self, run: Run) -> None:
        first = run.base // self.page
        self.runs[first : first + run.span] = [None] * run.span
        self._lowest_free = min(self._lowest_free, first)
        self.free_pages += run.span
        self.free_slot_bytes -= run.count * run.size
        self.slack_bytes -= run.span * self.page - run.count * run.size
        if run.draining:
            self.draining_pages -= run.span
        open_runs = self._open.get(run.size)
        if open_runs is not None:
            open_runs.pop(run.base, None)
            if not open_runs:
                del self._open[run.size]
