"""Rules about rows, the arena's slots, and its bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvhold.core.arena import Run
from kvhold.core.audit.rules import Things, counted, each, together
from kvhold.core.rows import NAMES, STATES, State

if TYPE_CHECKING:
    from kvhold.core.state import Core

SLOT = frozenset(state for state, facts in STATES.items() if facts.slot)
EVICTED = frozenset(state for state, facts in STATES.items() if facts.evicted)


def named(core: Core, row: int) -> str:
    return f"row {row} ({NAMES[core.catalogue.state[row]]})"


def runs_of(core: Core) -> list[Run]:
    return list({id(run): run for run in core.arena.runs if run is not None}.values())


def rows_in(core: Core, *states: int) -> Iterator[int]:
    """Rows in one of few states, found without looking at each of the others."""
    for state in states:
        row = core.catalogue.state.find(state)
        while row >= 0:
            yield row
            row = core.catalogue.state.find(state, row + 1)


ROWS: Things[int] = Things(lambda core: range(len(core.catalogue.state)), named, few=128)
RUNS: Things[Run] = Things(runs_of, lambda _, run: f"the run at {run.base}, of slots of {run.size} bytes")


@together("all and only rows that are FREE are spare")
def spare(core: Core) -> Iterator[str]:
    rows = Counter(core.catalogue.spare)
    rows.subtract(rows_in(core, State.FREE))
    return (named(core, row) for row, count in rows.items() if count)


@each(ROWS, "a row whose state has a slot owns one of its size in the arena")
def slot(core: Core, row: int) -> bool:
    cat, arena = core.catalogue, core.arena
    if cat.state[row] not in SLOT:
        return True
    offset = cat.offset[row]
    run = arena.runs[offset // arena.page] if offset < arena.total else None
    if run is None or run.size != cat.size[row]:
        return False
    at, between = divmod(offset - run.base, run.size)
    return not between and at < run.count and run.rows[at] == row


@together("all and only rows whose state has a slot own one")
def slots(core: Core) -> Iterator[str]:
    owners = sum(core.catalogue.state.count(state) for state in SLOT)
    return counted(number_of_used_slots=(sum(run.used for run in runs_of(core)), owners))


@together("the bytes of each state are those of its rows' slots")
def bytes_by_state(core: Core) -> Iterator[str]:
    cat = core.catalogue
    sizes = dict.fromkeys(STATES, 0)
    for state, size in zip(cat.state, cat.size, strict=True):
        sizes[state] += size
    pairs = {NAMES[state]: (sizes[state] if state in SLOT else 0, cat.bytes[state]) for state in STATES}
    return counted(**pairs)


@together("what the accounts name makes up the arena to the byte, and none of it is negative")
def accounts(core: Core) -> Iterator[str]:
    named = core.accounts()
    yield from counted(all_bytes=(core.arena.total, sum(named.values())))
    yield from (f"{name} has {size} bytes" for name, size in named.items() if size < 0)


@each(RUNS, "a run has whole pages, one after the other, and all slots that fit")
def pages(core: Core, run: Run) -> bool:
    arena, first = core.arena, run.base // core.arena.page
    mine = arena.runs[first : first + run.span]
    whole = len(mine) == run.span and all(one is run for one in mine)
    return whole and len(run.rows) == run.count == run.span * arena.page // run.size > 0


@each(RUNS, "a run's free slots are those that no row owns")
def free_slots(_: Core, run: Run) -> bool:
    return sorted(run.free) == [at for at, row in enumerate(run.rows) if row < 0]


@each(RUNS, "a run that no row needs has given its pages back")
def empty(_: Core, run: Run) -> bool:
    return len(run.free) < run.count


@each(RUNS, "a run that drains holds nothing that may be evicted")
def draining(core: Core, run: Run) -> bool:
    state = core.catalogue.state
    return not run.draining or not any(state[row] in EVICTED for row in run.used_rows())


@each(RUNS, "all and only runs that have a free slot and do not drain take more")
def open_runs(core: Core, run: Run) -> bool:
    return (core.arena._open.get(run.size, {}).get(run.base) is run) == (bool(run.free) and not run.draining)


@together("free pages, free slots, what drains and the slack are counted")
def arena(core: Core) -> Iterator[str]:
    arena, runs = core.arena, runs_of(core)
    return counted(
        free_pages=(arena.runs.count(None), arena.free_pages),
        pages=(sum(run.span for run in runs) + arena.free_pages, len(arena.runs)),
        free_slot_bytes=(sum(len(run.free) * run.size for run in runs), arena.free_slot_bytes),
        draining_pages=(sum(run.span for run in runs if run.draining), arena.draining_pages),
        slack_bytes=(sum(run.span * arena.page - run.count * run.size for run in runs), arena.slack_bytes),
        open_runs=(sum(map(len, arena._open.values())), sum(bool(run.free) and not run.draining for run in runs)),
    )
