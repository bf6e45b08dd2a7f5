"""Exhaustive search of small worlds of the model: which can come to a standstill, and which cannot.

A world is an engine and a few requests. The search goes through everything that can happen in it: requests arrive in
any order and at any time, transfers end in any order, well or not, clients give up. `-s` shows what was searched.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
from testbed.admission.model import (
    LOADING,
    Ask,
    Engine,
    Event,
    State,
    apply,
    awaited,
    events,
    fits,
    in_flight,
    is_deadlock,
    start,
    unfinished,
)

from kvhold.engines.vllm.admission import Waiting, may_ask, most_blocks, order_matters

STEP: Event = ("step", -1)
LIMIT = 100_000
"""States of one world; a test fails when it is reached."""


@dataclass
class Search:
    """All that can happen in a world. The first edge of a state is its step."""

    engine: Engine
    asks: Sequence[Ask]
    states: list[State]
    edges: list[list[tuple[Event, int]]]
    came: list[tuple[int, Event] | None]
    depth: int
    frontier: int

    def trace(self, at: int) -> list[Event]:
        """The shortest way to a state."""
        trace: list[Event] = []
        while (step := self.came[at]) is not None:
            at, event = step
            trace.append(event)
        return trace[::-1]

    def deadlock(self) -> list[Event] | None:
        """The way to the first state in which requests wait, nothing is under way, and steps change nothing."""
        found = (at for at, state in enumerate(self.states) if is_deadlock(self.engine, self.asks, state))
        return next((self.trace(at) for at in found), None)

    def standstill(self) -> list[Event] | None:
        """The way to requests that can go on for ever without finishing although every transfer and answer comes.

        Such a run ends in a set of states that it goes around in. It exists if and only if there is a strongly
        connected set with a step inside in which no transfer and no answer is awaited all the time. Deadlocks are the
        sets of one state. Arrivals and aborts, which end, are left out.
        """
        after = [[to for event, to in edges if event[0] not in ("arrive", "abort")] for edges in self.edges]
        for component in _components(after):
            inside = set(component)
            if not unfinished(self.states[component[0]]) or not any(self.edges[at][0][1] in inside for at in component):
                continue
            if all(any(not self._owed(at, index) for at in component) for index in range(len(self.asks))):
                return self.trace(min(component))
        return None

    def _owed(self, at: int, index: int) -> bool:
        request = self.states[at].requests[index]
        return in_flight(request) or awaited(self.asks[index], request)


def search(engine: Engine, asks: Sequence[Ask], first: State | None = None) -> Search:
    """Breadth first, from an idle engine or from ``first``."""
    states = [first or start(engine, asks)]
    number, came, edges = {states[0]: 0}, [None], []
    depths = [0]
    for at, state in enumerate(states):  # grows meanwhile
        if len(states) > LIMIT:
            break
        edges.append([])
        for event in events(asks, state):
            after = apply(engine, asks, state, event)
            to = number.setdefault(after, len(states))
            if to == len(states):
                states.append(after)
                came.append((at, event))
                depths.append(depths[at] + 1)
            edges[at].append((event, to))
    frontier = len(states) - len(edges)
    return Search(engine, asks, states, edges, came, depths[-1], frontier)


def _components(after: list[list[int]]) -> Iterator[list[int]]:
    """Strongly connected components, by Tarjan's algorithm without recursion."""
    order, low, stacked = [0] * len(after), [0] * len(after), [False] * len(after)
    stack: list[int] = []
    seen = 0
    for root in range(len(after)):
        if order[root]:
            continue
        work = [(root, 0)]
        while work:
            at, place = work.pop()
            if place == 0:
                seen += 1
                order[at] = low[at] = seen
                stack.append(at)
                stacked[at] = True
            else:
                low[at] = min(low[at], low[after[at][place - 1]])
            while place < len(after[at]):
                to = after[at][place]
                place += 1
                if not order[to]:
                    work += [(at, place), (to, 0)]
                    break
                if stacked[to]:
                    low[at] = min(low[at], order[to])
            else:
                if low[at] == order[at]:
                    component = stack[stack.index(at) :] if stack[-1] != at else [at]
                    del stack[-len(component) :]
                    for member in component:
                        stacked[member] = False
                    yield component


# Worlds that cannot come to a standstill

RESTORED = (Ask(3, 1, outside=2), Ask(4, 1, outside=1), Ask(4, 2, outside=3), Ask(2, 2, outside=1))
WORLDS = {
    "restores and a cold prompt": (Engine(5, 9), (*RESTORED, Ask(5))),
    "chunks": (Engine(5, 2), (*RESTORED, Ask(5))),
    "restores longer than the budget": (Engine(7, 1), (Ask(7, 1, 5), Ask(6, 2, 5), Ask(6, 1, 4), Ask(3, 3))),
    "preemption": (Engine(5, 9), (Ask(2, 4), Ask(2, 4), Ask(4, 2, 3), Ask(3, 1, 2), Ask(4, 1, 3))),
    "failures": (Engine(5, 3), tuple(replace(ask, fails=True) for ask in RESTORED)),
    "clients give up": (Engine(5, 3), tuple(replace(ask, aborts=True) for ask in RESTORED)),
    "both": (Engine(5, 3), tuple(replace(ask, aborts=True, fails=True) for ask in RESTORED)),
    "a prefix in common": (
        Engine(6, 3),
        tuple(Ask(p, 2, o, family=0, shared=2, fails=p == 4) for p, o in ((3, 2), (4, 3), (5, 2), (5, 4))),
    ),
    "answers that are late": (Engine(5, 3), tuple(replace(ask, late=True) for ask in RESTORED)),
    "few seats and a watermark": (Engine(6, 3, seats=2, watermark=1), (*RESTORED, Ask(5))),
    "blocks of two tokens": (
        Engine(5, 3, block_tokens=2),
        (Ask(8, 3, 6, fails=True), Ask(7, 2, 2), Ask(5, 5, 4), Ask(4, 3, 2)),
    ),
    "without full ISL": (Engine(5, 2, whole_prompt=False), tuple(replace(ask, fails=True) for ask in RESTORED)),
    "drafts of a block": (
        Engine(4, 3, block_tokens=2, drafts=1, max_len=8),
        (Ask(7, 1, 6, fails=True), Ask(6, 2, 4), Ask(5, 2, 4), Ask(3, 3)),
    ),
    "priorities": (
        Engine(5, 3, policy="priority"),
        tuple(replace(ask, priority=-index, fails=index > 1) for index, ask in enumerate((*RESTORED, Ask(5)))),
    ),
    "priorities the other way": (
        Engine(5, 2, policy="priority"),
        tuple(replace(ask, priority=index, aborts=index == 1) for index, ask in enumerate((*RESTORED, Ask(5)))),
    ),
    "priorities without full ISL, gated": (
        Engine(6, 2, policy="priority", whole_prompt=False, gate="later"),
        tuple(replace(ask, priority=-index, fails=index > 1) for index, ask in enumerate(RESTORED)),
    ),
    "drafts beyond a block, gated": (
        Engine(4, 4, block_tokens=2, drafts=3, max_len=8, gate="later"),
        (Ask(7, 1, 6, fails=True), Ask(6, 2, 4), Ask(5, 2, 4), Ask(3, 3)),
    ),
}


@pytest.mark.parametrize("name", WORLDS)
def test_every_run_of_a_world_ends(name: str) -> None:
    searched = search(*WORLDS[name])
    print(f"{name}: depth {searched.depth}, {len(searched.states)} states, frontier {searched.frontier}")
    assert searched.frontier == 0
    assert searched.deadlock() is None
    assert searched.standstill() is None


# Worlds that do come to a standstill, and what prevents it

NAMED = Ask(5, 2, outside=4), Ask(4, 1, priority=-1)
"""A finished restore holds 4 of 7 blocks, a cold request that is served before it needs 4 of the 3 that are free."""
PREEMPTED = Ask(3, 2), Ask(5, 1, outside=4)
"""The same without priorities: the cold request comes first, outgrows what is free, and waits at the front again."""
TWO = Ask(4, 1, outside=1), Ask(4, 1, outside=3)
"""The first needs what the second holds."""
BACKWARDS = Ask(3, 1, outside=2, priority=1), Ask(4, 1, outside=2)
"""The second is given blocks last and is served first."""
FULL = (Ask(7, 1, outside=6),)
"""A restore of all but the last block of the pool."""
FAILS = (Ask(3, 1, outside=2, fails=True),)

DEADLOCKS = {
    "named, one queue": (Engine(7, 9, policy="priority", holders_first=False), {"holders_first": True}, NAMED),
    "named, fcfs, one queue": (Engine(7, 9, holders_first=False), {"holders_first": True}, PREEMPTED),
    "two restores, nothing reserved": (Engine(5, 9, reserve=False), {"reserve": True}, TWO),
    "priorities without full ISL": (
        Engine(5, 9, policy="priority", whole_prompt=False),
        {"whole_prompt": True},
        BACKWARDS,
    ),
    "the same, gated": (Engine(5, 9, policy="priority", whole_prompt=False), {"gate": "later"}, BACKWARDS),
    "the same, gated by misses": (Engine(5, 9, policy="priority", whole_prompt=False), {"gate": "miss"}, BACKWARDS),
    "drafts beyond a block": (Engine(4, 9, block_tokens=2, drafts=3, max_len=8), {"gate": "later"}, FULL),
    "asking again after a failure": (Engine(4, 9, insists=True), {"insists": False}, FAILS),
}


@pytest.mark.parametrize("name", DEADLOCKS)
def test_a_deadlock_and_what_prevents_it(name: str) -> None:
    engine, remedy, asks = DEADLOCKS[name]
    found = search(engine, asks)
    print(f"{name}: {found.deadlock()}")
    assert found.deadlock() is not None
    assert found.standstill() is not None
    assert search(replace(engine, **remedy), asks).standstill() is None


@pytest.mark.parametrize("asks", [NAMED, PREEMPTED])
def test_the_named_counterexample_needs_no_reservation(asks: tuple[Ask, ...]) -> None:
    """What prevents it is the order: requests that hold blocks are visited before all that do not."""
    policy = "priority" if asks is NAMED else "fcfs"
    assert search(Engine(7, 9, policy=policy, reserve=False), asks).standstill() is None
    assert search(Engine(7, 9, policy=policy, holders_first=False), asks).deadlock() is not None  # reserving or not


def test_asking_again_goes_round_for_ever_where_it_does_not_deadlock() -> None:
    searched = search(Engine(8, 9, insists=True), FAILS)
    assert searched.deadlock() is None
    assert searched.standstill() is not None


# All worlds of a size


def asks_of(engine: Engine, outputs: Sequence[int]) -> list[Ask]:
    """Every request that fits into the engine, with whole blocks outside and at least one token to compute."""
    tokens = engine.blocks * engine.block_tokens
    sizes = itertools.product(outputs, range(1, tokens + 1), range(0, tokens, engine.block_tokens))
    asks = [Ask(prompt, output, outside) for output, prompt, outside in sizes if outside < prompt]
    return [ask for ask in asks if fits(engine, ask)]


def worlds_of(engine: Engine, kinds: Sequence[Ask], count: int, **traits: bool) -> Iterator[tuple[Ask, ...]]:
    """Every ``count`` of ``kinds``. With priorities, no two have the same one, and it matters who has which."""
    if engine.policy == "fcfs":
        for asks in itertools.combinations_with_replacement(kinds, count):
            yield tuple(replace(ask, **traits) for ask in asks)
    else:
        for asks in itertools.product(kinds, repeat=count):
            yield tuple(replace(ask, priority=at, **traits) for at, ask in enumerate(asks))


PRIORITY = Engine(4, 9, policy="priority")
LATER = replace(PRIORITY, whole_prompt=False, gate="later")
MISS = replace(LATER, gate="miss")
DRAFTS = Engine(3, 9, block_tokens=2, drafts=1, max_len=6)
SWEEPS = {
    "fcfs": (Engine(4, 9), 3, (1, 2), {}),
    "fcfs, chunks, failures": (Engine(4, 2), 3, (1,), {"fails": True}),
    "fcfs, chunks, without full ISL": (Engine(4, 2, whole_prompt=False), 3, (1, 2), {}),
    "fcfs, drafts": (DRAFTS, 3, (1, 2), {}),
    "priorities": (PRIORITY, 3, (1,), {}),
    "priorities, gated": (LATER, 3, (1,), {}),
    "priorities, gated by misses": (MISS, 3, (1,), {}),
}
LONG_SWEEPS = {
    "fcfs, failures, aborts": (Engine(4, 9), 3, (1, 2), {"fails": True, "aborts": True}),
    "fcfs, four requests": (Engine(4, 2), 4, (1,), {}),
    "fcfs, five blocks, failures": (Engine(5, 3), 3, (1, 2), {"fails": True}),
    "fcfs, without full ISL, failures": (Engine(4, 2, whole_prompt=False), 3, (1, 2), {"fails": True}),
    "fcfs, drafts beyond a block, gated": (replace(DRAFTS, drafts=2, gate="later"), 3, (1, 2), {"fails": True}),
    "priorities, chunks, failures": (replace(PRIORITY, budget=2), 3, (1,), {"fails": True}),
    "priorities, decoding": (PRIORITY, 3, (1, 2), {}),
    "priorities, drafts": (replace(DRAFTS, policy="priority"), 3, (1, 2), {}),
    "priorities, drafts beyond a block, gated": (
        replace(DRAFTS, policy="priority", drafts=2, gate="miss"),
        3,
        (1,),
        {},
    ),
    "priorities, gated, chunks, failures": (replace(LATER, budget=2), 3, (1,), {"fails": True}),
    "priorities, gated by misses, chunks, failures": (replace(MISS, budget=2), 3, (1,), {"fails": True}),
    "priorities, gated, decoding": (LATER, 3, (1, 2), {}),
    "priorities, decoding, passing over": (replace(PRIORITY, passes_over=True), 3, (1, 2), {}),
    "priorities, gated, decoding, passing over": (replace(LATER, passes_over=True), 3, (1, 2), {}),
    "priorities, gated, five blocks": (replace(LATER, blocks=5), 3, (1,), {}),
}


@pytest.mark.parametrize("name", [*SWEEPS, *(pytest.param(name, marks=pytest.mark.long) for name in LONG_SWEEPS)])
def test_every_run_of_every_world_of_a_size_ends(name: str) -> None:
    engine, count, outputs, traits = (SWEEPS | LONG_SWEEPS)[name]
    worlds, states, depth = 0, 0, 0
    for asks in worlds_of(engine, asks_of(engine, outputs), count, **traits):
        searched = search(engine, asks)
        worlds, states, depth = worlds + 1, states + len(searched.states), max(depth, searched.depth)
        assert searched.frontier == 0, asks
        assert searched.standstill() is None, (asks, searched.standstill())
    print(f"{name}: {worlds} worlds, depth {depth}, {states} states, frontier 0")
    assert worlds > 200


@pytest.mark.parametrize("budget", [9, 2])
def test_what_the_gate_refuses_could_deadlock(budget: int) -> None:
    """Allowed nevertheless, once, each refused restore leads to a deadlock in one of the ways that things may go."""
    engine = replace(LATER, budget=budget)
    refused = 0
    for asks in worlds_of(engine, [ask for ask in asks_of(engine, (1,)) if ask.outside], 3):
        searched = search(engine, asks)
        for at, state in enumerate(searched.states):
            forced = apply(replace(engine, gate=""), asks, state, STEP)
            usual = searched.states[searched.edges[at][0][1]]
            if _loading(forced) - _loading(usual):
                refused += 1
                assert search(engine, asks, forced).deadlock() is not None, (asks, searched.trace(at))
    print(f"budget {budget}: {refused} refusals")
    assert refused > 100


def _loading(state: State) -> set[int]:
    return {index for index, request in enumerate(state.requests) if request.status == LOADING}


# The gate itself


def test_the_gate_counts_only_blocks_of_requests_that_are_served_later() -> None:
    urgent, usual, patient = (-1, 5.0, "c"), (0, 1.0, "a"), (0, 2.0, "b")
    waiting = [Waiting(urgent, 3), Waiting(patient, 2)]
    assert may_ask(usual, start=3, waiting=waiting, pool=5)
    assert not may_ask(usual, start=4, waiting=waiting, pool=5)
    assert may_ask(usual, start=9, waiting=[Waiting(urgent, 3)], pool=5), "alone it is the engine's to judge"


def test_the_gate_is_for_priorities_without_full_isl() -> None:
    assert [order_matters(policy, whole) for policy in ("fcfs", "priority") for whole in (True, False)] == [
        False,
        False,
        False,
        True,
    ]


def test_drafts_shorten_what_may_be_restored_by_the_blocks_of_a_step() -> None:
    assert most_blocks(pool=10, block_tokens=[16], speculative_tokens=0) == 10
    assert most_blocks(pool=10, block_tokens=[16], speculative_tokens=15) == 9
    assert most_blocks(pool=10, block_tokens=[16], speculative_tokens=16) == 8
    assert most_blocks(pool=1, block_tokens=[2], speculative_tokens=5) == 0
