"""Which object, and which page, gives way to make room. The policy says in what order objects go."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from kvhold.core import events as ev
from kvhold.core.arena import Run
from kvhold.core.catalogue import Catalogue
from kvhold.core.history import Kind
from kvhold.core.indexes import Index, Namespace
from kvhold.core.lru import LRU
from kvhold.core.recency import Recency
from kvhold.core.rows import Rows, State
from kvhold.core.turns import Work
from kvhold.core.twoq import TwoQ

Policy = Callable[[Rows], Recency[Namespace, Any]]

POLICIES: Final[Mapping[str, Policy]] = {"lru": LRU, "2q": TwoQ}
"""By what they are called in settings; the first one is the default."""

_TRIES = 4
"""Evictions for one slot: held neighbours must not make one slot cost the whole cache."""
_DRAIN_SHARE = 8
"""At most this part of the arena drains at once: what it held is lost before its pages are of use to anybody."""


class Eviction:
    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._arena = catalogue.arena
        self._recency = catalogue.recency

    @property
    def cost(self) -> int:
        """Rows evicted or passed over, ever: what an event's share of work is measured in."""
        return self._catalogue.evicted + self._recency.passed

    # --- slots --------------------------------------------------------------------------------------------------

    def take(self, index: Index) -> int | None:
        """A row in state CREDIT with a slot for an object of ``index``, at the cost of what goes first.

        None when all that could give way is held.
        """
        row = self._catalogue.new()
        if not self._place(row, index, State.CREDIT):
            self._catalogue.spare.append(row)
            return None
        self._catalogue.owner[row] = index.id
        return row

    def fetch(self, index: Index, key: bytes, parent: int | None) -> int | None:
        """A row in state LOADING, which its read holds, for an object of ``index`` that nobody has here.

        None when no slot can be had, or there are too many objects.
        """
        catalogue = self._catalogue
        if catalogue.objects >= catalogue.limits.max_objects and not self.forget_one():
            return None
        row = catalogue.new()
        if not self._place(row, index, State.LOADING):
            catalogue.spare.append(row)
            return None
        catalogue.expect(row, index, key, parent)
        return row

    def fill(self, row: int) -> bool:
        """Give a COLD row a slot to be read into, which its read holds; False when none can be had."""
        catalogue = self._catalogue
        if catalogue.state[row] != State.COLD:
            return catalogue.refuse(row, State.LOADING)
        self._recency.remove(row, catalogue.cold_list)  # making room must not give up the very object
        catalogue.cold -= 1
        if not self._place(row, catalogue.indexes[catalogue.owner[row]], State.LOADING):
            catalogue.cold += 1
            self._recency.insert(row, catalogue.cold_list)
            return False
        catalogue.leases[row] = 1
        return True

    def _place(self, row: int, index: Index, state: int) -> bool:
        """Give a row without a slot one, in a new ``state``."""
        size, owner = index.size, index.namespace
        for _ in range(_TRIES):
            if owner.used + size <= owner.quota.limit:
                break
            if not self.evict_own(owner):
                return False
        else:
            return False
        offset = self._arena.take(size, row)
        for _ in range(_TRIES):
            if offset is not None or not self._make_room(size, owner):
                break
            offset = self._arena.take(size, row)
        if offset is None:
            return False
        self._catalogue.occupy(row, index, offset, state)
        return True

    # --- one object ---------------------------------------------------------------------------------------------

    def evict_own(self, owner: Namespace) -> bool:
        """Evict the object of a namespace that goes first; False when all are held."""
        rows = [row for index in owner.indexes.values() if (row := self._recency.victim(index.recency)) is not None]
        if not rows:
            return False
        self._catalogue.evict(min(rows, key=self._catalogue.stamp.__getitem__))
        return True

    def forget_one(self) -> bool:
        """Give up the object that is least worth keeping altogether; False when all are held."""
        catalogue = self._catalogue
        row = self._recency.first(catalogue.cold_list)
        if row is None:
            found = [self._recency.oldest(size, lambda _: False) for size in self._recency.sizes]
            row = min((one for one in found if one is not None), key=catalogue.stamp.__getitem__, default=None)
        if row is None:
            return False
        catalogue.note(Kind.EVICTED, row)
        catalogue.evicted += 1
        catalogue.remove(row)
        return True

    def shrink(self) -> Work:
        """Keep to limits that were lowered, as far as nothing is held."""
        catalogue, going = self._catalogue, True
        while going:
            going = False
            for _ in range(ev.MAX_BATCH):
                if not (catalogue.objects > catalogue.limits.max_objects and self.forget_one()):
                    break
                going = True
            yield []
        cost = 0
        for name in list(catalogue.limits.quotas):
            more = True
            while more:
                owner = catalogue.namespaces.get(name)
                more = owner is not None and owner.used > owner.quota.limit and self.evict_own(owner)
                cost += 1
                if cost % ev.MAX_BATCH == 0:
                    yield []

    # --- pages --------------------------------------------------------------------------------------------------

    def _make_room(self, size: int, asking: Namespace) -> bool:
        """Free bytes so that a slot of ``size`` may fit now; False when what could go is held.

        The object that goes first does, whatever its size. One of another size takes along all that stands between
        it and a run of the new size, because only empty pages can change their size. Where something held stands
        there too, the first of the new size goes instead; without one, the run around is emptied as far as it can
        be, and drains; and when enough is draining already, that run's objects are passed over. Namespaces within
        their floor are spared, but for the one that asks.
        """

        def spared(owner: Namespace) -> bool:
            return owner is not asking and owner.used <= owner.quota.floor

        catalogue = self._catalogue
        found = {each: row for each in self._recency.sizes if (row := self._recency.oldest(each, spared)) is not None}
        if not found:
            return False
        first, own = min(found.values(), key=catalogue.stamp.__getitem__), found.get(size)
        if first == own:
            catalogue.evict(first)
            return True
        return self._empty_pages(size, first, own, spared)

    def _empty_pages(self, size: int, first: int, own: int | None, spared: Callable[[Namespace], bool]) -> bool:
        """The same where the object that goes ``first`` is of another size, and of this one ``own`` goes first."""
        arena, offset = self._arena, self._catalogue.offset[first]
        pages, span = len(arena.runs), arena.span_of(size)
        if span > pages:
            return False
        if window := self._window(offset // arena.page, span, spared):
            for run in window:
                self._empty(run)
        elif own is not None:
            self._catalogue.evict(own)
        elif arena.draining_pages < max(span, pages // _DRAIN_SHARE):
            self._empty(arena.run_at(offset))
        else:
            self._pass_over(arena.run_at(offset))
        return True

    def _pass_over(self, run: Run) -> None:
        """None of a run's objects can make room, so not each is to be found first in its turn."""
        catalogue = self._catalogue
        # A chain fills slots from its start on, and its end stays older.
        for row in sorted(run.used_rows(), key=lambda row: (catalogue.stamp[row], -catalogue.offset[row])):
            if catalogue.state[row] == State.RESIDENT:
                self._recency.pass_over(row, catalogue.indexes[catalogue.owner[row]].recency)

    def _window(self, page: int, span: int, spared: Callable[[Namespace], bool]) -> list[Run]:
        """The runs to empty for ``span`` free pages around ``page``, fewest objects first; [] if all hold something."""
        best: list[Run] = []
        fewest, pages = -1, self._arena.runs
        for start in range(max(0, page - span + 1), min(page, len(pages) - span) + 1):
            runs = list({run.base: run for run in pages[start : start + span] if run is not None}.values())
            count = sum(run.used for run in runs)
            if (fewest < 0 or count < fewest) and not any(self._holds(run, spared) for run in runs):
                best, fewest = runs, count
        return best

    def _holds(self, run: Run, spared: Callable[[Namespace], bool]) -> bool:
        """Whether anything in ``run`` cannot be evicted, or should not."""
        catalogue, used = self._catalogue, run.used_rows()
        if any(catalogue.state[row] != State.RESIDENT for row in used):
            return True
        owners = (catalogue.indexes[catalogue.owner[row]].namespace for row in used)
        return bool(catalogue.limits.quotas) and any(map(spared, owners))

    def _empty(self, run: Run) -> None:
        """Evict what can be evicted from ``run``; what is held there goes with its last owner, nothing new comes."""
        self._arena.drain(run)
        self._catalogue.vacate(run.used_rows())
