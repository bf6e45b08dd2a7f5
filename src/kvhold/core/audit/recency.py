"""Rules about the order in which objects are evicted: of any policy, of queues of least recently used, and of 2Q."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from kvhold.core.audit.memory import ROWS, named, rows_in
from kvhold.core.audit.objects import INDEXES
from kvhold.core.audit.rules import Things, counted, each, together
from kvhold.core.lru import CLOSED, LRU, RecencyList
from kvhold.core.rows import State
from kvhold.core.twoq import TwoQ

if TYPE_CHECKING:
    from kvhold.core.state import Core

LISTED = frozenset((State.RESIDENT, State.LEASED, State.COLD))
"""What is on its way from a backing is in no list until it has come."""
_IS_LISTED = bytes(state in LISTED for state in range(256))


def lists_of(core: Core) -> list[Any]:
    """The lists of all indexes, then that of what has no slot."""
    return [*(index.recency for index in core.catalogue.indexes.values()), core.catalogue.cold_list]


class Queue(NamedTuple):
    """A list of least recently used, and the policy, or the part of it, that has it."""

    lru: LRU[Any]
    list: RecencyList[Any]
    compared: bool


def queues_of(core: Core) -> list[Queue]:
    policy, cold = core.catalogue.recency, core.catalogue.cold_list
    if isinstance(policy, LRU):
        return [Queue(policy, lst, lst is not cold) for lst in lists_of(core)]
    if isinstance(policy, TwoQ):
        pairs = [(lst, pair) for lst in lists_of(core) for pair in _both(policy, lst)]
        return [Queue(*pair, lst is not cold) for lst, pair in pairs]
    return []


def _both(policy: TwoQ[Any], lst: Any) -> list[tuple[LRU[Any], RecencyList[Any]]]:
    return [(policy._probation, lst.probation), (policy._main, lst.main)]


def queue_of(core: Core, row: int) -> RecencyList[Any] | None:
    """The queue in which a row belongs; None if it is in none."""
    cat, policy = core.catalogue, core.catalogue.recency
    if cat.state[row] not in LISTED:
        return None
    lst: Any = cat.cold_list if cat.state[row] == State.COLD else cat.indexes[cat.owner[row]].recency
    if isinstance(policy, TwoQ):
        lst = lst.main if policy._kept[row] else lst.probation
    return lst if isinstance(lst, RecencyList) else None


QUEUES: Things[Queue] = Things(queues_of, lambda core, queue: _name(core, queue.list), few=64)


def _name(core: Core, lst: RecencyList[Any]) -> str:
    for index in core.catalogue.indexes.values():
        its: Any = index.recency
        if lst in (its, getattr(its, "probation", None), getattr(its, "main", None)):
            return f"the list of {INDEXES.named(core, index)}"
    return "the list of what has no slot"


# --- any policy -------------------------------------------------------------------------------------------------


@together("all and only rows that are RESIDENT, LEASED or COLD are in a list, once")
def listed(core: Core) -> Iterator[str]:
    cat = core.catalogue
    seen = bytearray(len(cat.state))
    for lst in lists_of(core):
        for row in cat.recency.rows_of(lst):
            if seen[row]:
                yield f"{named(core, row)} a second time"
                break
            seen[row] = 1
    should = cat.state.translate(_IS_LISTED)
    if seen != should:
        yield from (named(core, row) for row in range(len(seen)) if seen[row] != should[row])


# --- least recently used ----------------------------------------------------------------------------------------


@each(ROWS, "a row in a list stands between two of the same list, and the newer one was used later")
def between(core: Core, row: int) -> bool:
    cat, lst = core.catalogue, queue_of(core, row)
    if lst is None:
        return True
    older, newer = cat.older[row], cat.newer[row]
    if not cat.newer[older] == cat.older[newer] == row:
        return False
    if any(one != lst.head and queue_of(core, one) is not lst for one in (older, newer)):
        return False
    return cat.stamp[row] <= (cat.recency.clock.count if newer == lst.head else cat.stamp[newer])


@together("all and only rows that are HEAD begin a list")
def heads(core: Core) -> Iterator[str]:
    begun = Counter(queue.list.head for queue in queues_of(core))
    begun.subtract(rows_in(core, State.HEAD))
    return (f"row {row}" for row, count in begun.items() if count)


@together("a list that has objects is looked at, by a stamp that is no newer than its oldest")
def queued(core: Core) -> Iterator[str]:
    cat, queues = core.catalogue, queues_of(core)
    heaps = {id(queue.lru): queue.lru._heaps.values() for queue in queues}
    entries = [entry for heap in heaps.values() for one in heap for entry in one]
    times, stamps = Counter(id(lst) for _, _, lst in entries), {id(lst): stamp for stamp, _, lst in entries}
    for queue in queues:
        lst, oldest = queue.list, cat.newer[queue.list.head]
        if not queue.compared:
            continue
        right = times[id(lst)] == lst.queued and (lst.queued or oldest == lst.head)
        if not right or (lst.queued and oldest != lst.head and stamps[id(lst)] > cat.stamp[oldest]):
            yield QUEUES.named(core, queue)


@together("lists that are closed are not looked at for long")
def closed(core: Core) -> Iterator[str]:
    queues = queues_of(core)
    compared = Counter(id(queue.lru) for queue in queues if queue.compared)
    for id_, lru in {id(queue.lru): queue.lru for queue in queues}.items():
        entries = [entry[2] for heap in lru._heaps.values() for entry in heap]
        dead = sum(lst.head == CLOSED for lst in entries)
        yield from counted(closed_lists=(dead, sum(lru._closed.values())))
        if dead > len(entries) / 2 + 1 or len(entries) - dead > compared[id_]:
            yield f"{dead} of {len(entries)}, with {compared[id_]} lists"


# --- 2Q ---------------------------------------------------------------------------------------------------------


@together("2Q counts what is on probation and what is not, of each list and each size")
def standing(core: Core) -> Iterator[str]:
    policy = core.catalogue.recency
    if not isinstance(policy, TwoQ):
        return
    sizes: dict[int, list[int]] = {}
    for lst in lists_of(core):
        counts = [sum(1 for _ in lru.rows_of(queue)) for lru, queue in _both(policy, lst)]
        if counts != lst.count:
            yield _name(core, lst.main)
        total = sizes.setdefault(lst.size, [0, 0])
        total[:] = [one + more for one, more in zip(total, counts, strict=True)]
    yield from counted(counts=({size: count for size, count in sizes.items() if any(count)}, policy._counts))
