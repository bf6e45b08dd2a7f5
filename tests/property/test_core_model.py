"""Any interleaving of engines, readers, disks, pressure, purges, changed limits and deaths, against a naive model."""

import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from testbed.core.fake_disks import Name
from testbed.property.core_model import (
    LIMITS,
    PAGE,
    PAGES,
    SLICE,
    UNIT,
    said,
)
from testbed.property.core_questions import Questions
from testbed.property.core_rules import NAMESPACES, small

from kvhold.core import Core, indexes
from kvhold.core import events as ev
from kvhold.core.events import Gone
from kvhold.core.eviction import POLICIES
from kvhold.core.limits import Limits, Quota
from kvhold.core.rows import State


class Machine(Questions, RuleBasedStateMachine):
    """All rules together."""

    # --- limits and time ----------------------------------------------------------------------------------------

    @rule(
        change=st.sampled_from(
            [
                {},
                {},
                {"prepared_share": 0.1},
                {"prepared_share": 0.9, "engine_share": 0.9},
                {"engine_share": 0.1},
                {"credit_share": 0.08},
                {"max_objects": 4},
                {"max_objects": 9},
                {"queries": 1},
                {"operations": 1},
                {"read_bytes": 1},
                {"write_batch": 1},
                {"write_queue": 1},
                {"write_rate": 10**12},
                {"second_touch": True},
                {"quotas": {NAMESPACES[0]: Quota(floor=3 * UNIT), NAMESPACES[1]: Quota(limit=4 * UNIT)}},
                {"quotas": {NAMESPACES[0]: Quota(limit=5 * UNIT), NAMESPACES[1]: Quota(floor=4 * UNIT)}},
                {"quotas": {NAMESPACES[0]: Quota(limit=2 * UNIT), NAMESPACES[1]: Quota(limit=2 * UNIT)}},
            ]
        ),
        at_once=st.booleans(),
    )
    def configure(self, change: dict[str, Any], at_once: bool) -> None:
        self.limits = Limits(**(LIMITS | change))
        calm = not self.core.has_work
        self.do(ev.Configure(self.limits))
        if not at_once or not calm:
            return  # what is let go of later goes when its namespace needs room
        self.drain()
        catalogue = self.core.catalogue
        here = Counter(name[0] for name, offset in self.seen.items() if offset is not None)
        free = [name for name, offset in self.seen.items() if offset is not None and not self.holds(offset)]
        cold = [name for name, offset in self.seen.items() if offset is None and not self.disk.reads(name)]
        if self.core.objects > self.limits.max_objects:
            assert not free
            assert not [name for name in cold if not self.awaited(name)]
        for name, owner in catalogue.namespaces.items():
            if owner.used > self.limits.quotas.get(name, Quota()).limit and here[name]:
                assert not [one for one in free if one[0] == name], "more than its quota, and not held"

    def holds(self, offset: int) -> bool:
        """Whether any engine or I/O holds the object at ``offset``, or may."""
        pieces = {piece[:1] for engine in self.engines for piece in engine.held()}
        io = {at for at, _ in self.disk.extents}
        unsure = any(one.answered is None for engine in self.engines for one in engine.asked.values())
        return (offset,) in pieces or offset in io or unsure

    def awaited(self, name: Name) -> bool:
        return any(name in one.chosen for engine in self.engines for one in engine.asked.values())

    @rule(by=st.sampled_from([1, 10, 40, 60, 100, 130]), ticks=st.integers(1, 3), behind=small)
    def wait(self, by: int, ticks: int, behind: int) -> None:
        """Time goes by, and the shell says so a little late, or at once when it is due; perhaps it is behind."""
        self.now += by
        speakers = [engine.scheduler.id for engine in self.speakers() if engine.scheduler is not None]
        self.behind = frozenset(speakers[:behind] if behind < 3 else ())
        for _ in range(ticks):
            due = self.core.next_deadline
            effects = self.do(ev.Tick(self.behind))
            assert due is None or due > self.now or effects or self.behind or self.core.next_deadline != due
        self.unheard |= dict.fromkeys(self.behind, self.now + self.limits.hear_ns)
        self.behind = frozenset()

    @rule()
    def tick(self) -> None:
        """All that is due is done."""
        for _ in range(100):
            self.do(ev.Tick())
            if (due := self.core.next_deadline) is None or due > self.now:
                break
        else:
            raise AssertionError("a deadline that never ends")
        for engine in self.engines:
            heard = max((self.unheard.get(session, 0) for session in engine.halves), default=0)
            for one in engine.asked.values():
                if one.answered is not None and not engine.broken:
                    in_time = one.answered > self.now - self.limits.lease_ns or self.now < heard
                    assert one.started is not None or in_time
                    assert one.started is None or one.stalled or one.started > self.now - self.limits.stall_ns

    @rule(back=st.integers(2, 50))
    def clock_goes_back(self, back: int) -> None:
        self.do(ev.Tick(), back=back)

    # --- the disk -----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.disk.flying)
    @rule(
        number=small,
        count=st.integers(1, 3),
        fate=st.sampled_from(["good", "good", "good", "good", "some", "all", "kept"]),
        position=small,
    )
    def complete(self, number: int, count: int, fate: str, position: int) -> None:
        for _ in range(min(count, len(self.disk.flying))):
            io = sorted(self.disk.flying)[number % len(self.disk.flying)]
            failing = {"good": (), "some": (position,), "all": range(99), "kept": (position, position + 1)}[fate]
            flying, lost = self.disk.flying[io], io not in self.disk.cancelled
            done = self.disk.finish(io, failing)
            if isinstance(done, ev.Found):
                self.do(replace(done, failed=fate == "all"))
                continue
            kept = isinstance(flying, ev.Read) and fate == "kept"  # that could not be looked at
            done = replace(done, kept=kept)
            gone = set[Name]()
            if isinstance(flying, ev.Read):
                gone = {(o.namespace, o.group, o.key) for i, o in enumerate(flying.objects) if i in done.failed}
                gone = {name for name in gone if name in self.seen and self.seen[name] is None}
            self.do(done)
            if kept:
                assert gone <= self.seen.keys(), "it says nothing about them"
            else:
                assert not isinstance(flying, ev.Read) or not lost or gone.isdisjoint(self.seen) or self.restored(gone)

    @rule(number=small, which=small, chain=st.integers(0, 1), quick=st.integers(1, 12))
    def settle_down(self, number: int, which: int, chain: int, quick: int) -> None:
        """Disks work well for a while, engines store more, and so what was stored before is in a log alone."""
        for _ in range(quick):
            if self.disk.flying:
                self.do(self.disk.finish(min(self.disk.flying)))
            if self.core.has_work:
                self.do(None)
        if self.speakers():
            self.store(number, which, chain, 12)

    def restored(self, names: set[Name]) -> bool:
        """Known again after a purge: another copy than the one whose read failed."""
        return all(self.disk.reads(name) or self.seen.get(name) is None for name in names & self.seen.keys())

    @rule(number=small)
    def complete_twice(self, number: int) -> None:
        """An answer that nobody waits for changes nothing."""
        answered = self.disk.answered
        io = answered[number % len(answered)] if answered and number else 10**6
        counted, accounts = self.core.counters["stale_io"], self.core.accounts()
        effects = self.do(ev.Done(io, (0,) if number % 2 else ()))
        assert self.core.counters["stale_io"] == counted + 1
        assert said(effects) == []
        assert effects or self.core.accounts() == accounts or self.core.has_work

    # --- always, and at the end ---------------------------------------------------------------------------------

    @invariant()
    def always(self) -> None:
        self.check_owners()
        self.check_operations()
        self.check_rest()
        self.check_room()

    def calm(self) -> None:
        """With nothing leased, who lacks credits lacks them only because others' credits are in the way."""
        for engine in self.speakers():
            self.let_go(engine, sorted(engine.asked))
        self.limits = Limits(**LIMITS)  # type: ignore[arg-type]
        self.do(ev.Configure(self.limits))
        self.finish()
        if self.core.accounts()["leased"]:
            return  # by an engine that was lost
        quiet = 0
        while quiet < 2 * PAGES // 4 + 2:
            granted = [effect for effect in self.do(ev.Populated(0)) if isinstance(effect, ev.Grant)]
            self.finish()
            quiet = 0 if granted else quiet + 1
        states, runs = self.core.catalogue.state, self.core.arena.runs
        pinned = [run and any(row >= 0 and states[row] != State.RESIDENT for row in run.rows) for run in runs]
        for space in (space for engine in self.speakers() if not engine.broken for space in engine.spaces.values()):
            if len(space.credits) < self.target(space):
                here = [
                    name
                    for name, at in self.seen.items()
                    if name[:2] == (space.namespace, space.group) and at is not None
                ]
                assert here == []
                assert space.size > PAGE or all(pinned)

    def teardown(self) -> None:
        if sys.exc_info()[0] is not None:
            return  # a rule has failed: this would hide it
        while self.recovering or self.unready:
            self.recover()
        self.finish()
        for engine in self.engines:
            assert engine.broken or not engine.pending, "a question was never answered"
            engine.looks.clear()
        self.calm()
        for half in list(self.halves.values()):
            self.leave(half, Gone.DEAD)
        self.finish()
        states = self.core.accounts()
        assert not any(states[name] for name in ("credit", "leased", "doomed", "orphaned", "loading"))
        assert not self.core.sessions
        assert not self.core.attachments
        self.purge(b"")
        self.finish()
        assert self.core.storage.pending == self.core.storage.queued_writes == self.core.storage.reading.bytes == 0
        assert not self.core.storage.reading.queued
        assert not self.core.operations._waiters
        assert self.core.accounts()["free_pages"] == self.core.arena.total
        assert not self.core.catalogue.indexes
        again = Core(PAGE, PAGES * PAGE, Limits(**LIMITS), POLICIES[self.policy])  # type: ignore[arg-type]
        assert self.told == [again.step() if event is None else again.handle(event, now) for event, now in self.log]


class UsedOnceGoesFirst(Machine):
    """The same rules, whatever decides which objects go."""

    policy = "2q"


def explore(
    monkeypatch: pytest.MonkeyPatch, examples: int, steps: int, machine: type[RuleBasedStateMachine] = Machine
) -> None:
    monkeypatch.setattr(ev, "MAX_BATCH", SLICE)
    monkeypatch.setattr(ev, "MAX_LISTED", 2 * SLICE + 1)
    monkeypatch.setattr(indexes, "_SMALL", SLICE)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_credits_that_were_put_off_are_not_given_up(monkeypatch: pytest.MonkeyPatch):
    """Found by the search: two spaces look at all that is held, and the one that is to go on is not tried in vain."""
    monkeypatch.setattr(ev, "MAX_BATCH", SLICE)
    world = Machine()
    world.begin(slots=2, pages=12, geometry=0, logs=1, segments=8, found=[], recovered=True, diligence=4)
    world.tick()
    world.request(chain=2, length=1, number=0, skip=0, which=0)
    world.tick()
    world.request(chain=0, length=14, number=2, skip=0, which=0)
    world.do(ev.Explain(10**6, b"nobody asked for this"))
    world.drain()
    for _ in range(2):
        world.tick()
        world.clock_goes_back(back=2)
    world.arrive(geometry=1, instance="tri", slots=1, watch=False)
    world.give_back(count=2, lie="", number=0, recalled=False, which=0)
    world.arrive(geometry=0, instance="one", slots=2, watch=False)
    for number in (2, 0):
        world.settle_down(chain=0, number=number, quick=1 + (number == 0), which=0)
        world.always()


def test_any_interleaving_keeps_the_rules(monkeypatch: pytest.MonkeyPatch, quick: bool):
    explore(monkeypatch, examples=40 if quick else 200, steps=50)


def test_any_interleaving_keeps_the_rules_with_another_policy(monkeypatch: pytest.MonkeyPatch):
    explore(monkeypatch, examples=60, steps=50, machine=UsedOnceGoesFirst)


@pytest.mark.long
def test_many_more_interleavings_keep_the_rules(monkeypatch: pytest.MonkeyPatch):
    explore(monkeypatch, examples=2000, steps=80)


@pytest.mark.long
def test_many_more_interleavings_keep_the_rules_with_another_policy(monkeypatch: pytest.MonkeyPatch):
    explore(monkeypatch, examples=2000, steps=80, machine=UsedOnceGoesFirst)
