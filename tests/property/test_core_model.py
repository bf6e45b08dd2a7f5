"""Any interleaving of engines, readers, disks, pressure, purges, changed limits and deaths, against a naive model."""

import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from core_model import (
    LIMITS,
    PAGE,
    PAGES,
    SEGMENT,
    SIZES,
    SLICE,
    UNIT,
    WORLDS,
    Asked,
    CoreModel,
    Engine,
    Fresh,
    Half,
    Space,
    said,
)
from core_world import Slot, pack
from fake_disks import Name
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvhold.core import Core
from kvhold.core import events as ev
from kvhold.core.events import Gone, Reason, Role
from kvhold.core.limits import Limits, Quota
from kvhold.core.rows import State

NAMESPACES = [b"\0\1n", b"\1\1n", b"\0\2n"]


def key(chain: int, position: int) -> bytes:
    return bytes([chain, position])


def geometry_of(geometry: int, world: int) -> tuple[bytes, int, tuple[int, ...]]:
    """Namespace, group and shards."""
    group = geometry % 3
    return bytes([group % 2, world]) + b"n", group, (SIZES[geometry] * UNIT,) + (UNIT,) * (world - 1)


small = st.integers(0, 11)
rarely = st.integers(0, 15).map(lambda number: number == 15)
lies = st.sampled_from(["", "", "", "", "", "spent", "foreign", "epoch", "unknown", "twice"])
records = st.lists(
    st.tuples(st.sampled_from([0, 0, 0, 1, 3]), st.integers(0, 1), st.integers(0, 2), st.integers(1, 5)), max_size=2
)
"""Pieces of chains: how far their geometry is from the engines', chain, first position, length."""


class Machine(CoreModel, RuleBasedStateMachine):
    def speakers(self) -> list[Engine]:
        """Engines whose scheduler half can still say something."""
        return [engine for engine in self.engines if engine.scheduler is not None]

    def speaker(self, number: int) -> Engine:
        return self.speakers()[number % len(self.speakers())]

    def some_space(self, engine: Engine, number: int) -> tuple[int, Space | None]:
        if not engine.spaces:
            return -1, None
        at = sorted(engine.spaces)[number % len(engine.spaces)]
        return at, engine.spaces[at]

    # --- the start ----------------------------------------------------------------------------------------------

    @initialize(
        pages=st.sampled_from([5, 6, 8, PAGES]),
        geometry=st.integers(0, 2),
        slots=st.integers(1, 3),
        logs=st.sampled_from([0, 1, 1, 1, 2]),
        segments=st.sampled_from([8, 4, 3, 2]),
        found=st.lists(records, max_size=2),
        recovered=st.booleans(),
        diligence=st.sampled_from([3, 3, 1, 0]),
    )
    def begin(
        self,
        pages: int,
        geometry: int,
        slots: int,
        logs: int,
        segments: int,
        found: list[list[tuple[int, int, int, int]]],
        recovered: bool,
        diligence: int,
    ) -> None:
        """Two engines that share a namespace, and something stored; rules take it apart again."""
        self.diligence = diligence  # writes that end with each commit
        self.recovering: list[ev.Recovered] = []
        self.unready = list(range(logs))
        self.do(ev.Populated(pages))
        for log in range(logs):
            self.adopt(log, segments, found if log == 0 else [], geometry)
        if recovered:
            while self.recovering or self.unready:
                self.recover()
        self.arrive("one", geometry, slots)
        self.arrive("two", geometry, slots)
        for chain, length in ((0, 6), (1, 3)):
            if self.speakers():  # what a log brought of another geometry may have turned them away
                self.store(chain, 0, chain, length)

    def adopt(self, log: int, segments: int, found: list[list[tuple[int, int, int, int]]], near: int) -> None:
        """A log is opened; what its segments hold is told of later."""
        lives: list[tuple[int, int, int]] = []
        for number, there in enumerate(found):
            sized = []
            for away, chain, first, length in there:
                namespace, group, shards = geometry_of(3 if away == 3 else (near + away) % 3, 1)
                names = [(namespace, group, key(chain, first + i)) for i in range(length)]
                sized += [(name, sum(shards)) for name in names]
            life = self.disk.adopt(log, number, number + 1, sized, SEGMENT - UNIT)
            lives.append((number, number + 1, 0))
            batch = tuple((*name, (life.sizes[at],), at) for at, name in life.records.items())
            if batch:
                self.recovering.append(ev.Recovered(log, number, batch))
        self.do(ev.LogOpened(log, segments, SEGMENT, len(found)))
        self.do(ev.Segments(log, tuple(lives)))

    @precondition(lambda self: self.recovering or self.unready)
    @rule()
    def recover(self) -> None:
        """The next records of a log come; after the last ones it may be written."""
        if not self.recovering:
            self.do(ev.LogReady(self.unready.pop()))
            return
        event = self.recovering.pop(0)
        fresh: Fresh = {}
        for namespace, group, one, shards, _ in event.records:
            index = self.core.catalogue.find(namespace, group)
            name = namespace, group, one
            if (index is None or index.shards == shards) and name not in self.seen and name not in self.unrecovered:
                fresh[name] = {None}
        self.do(event, fresh)

    # --- sessions -----------------------------------------------------------------------------------------------

    @rule(instance=st.sampled_from(sorted(WORLDS)), geometry=st.integers(0, 2), slots=st.integers(1, 3))
    def arrive(self, instance: str, geometry: int, slots: int) -> None:
        """All that an instance lacks comes."""
        engine = self.engine(instance)
        for part in range(WORLDS[instance] + 1):
            if engine is None or part not in engine.parts:
                self.join(instance, part)
                engine = self.engine(instance)
        for half in list(self.halves.values()):
            if half.engine is engine and half.role is Role.WORKER and not half.mapped:
                self.map_arena(half)
        if engine is not None and engine.scheduler is not None and len(engine.spaces) < 3:
            space = next(number for number in range(3) if number not in engine.spaces)
            self.open_space(engine, space, geometry, slots)

    def engine(self, instance: str) -> Engine | None:
        return next((engine for engine in self.engines if engine.instance == instance and not engine.broken), None)

    @rule(instance=st.sampled_from(sorted(WORLDS)), part=st.integers(0, 2), other_world=st.sampled_from([0, 0, 0, 1]))
    def join(self, instance: str, part: int, other_world: int = 0) -> None:
        world = WORLDS[instance] + other_world
        role = Role.WORKER if part else Role.SCHEDULER
        rank = max(0, part - 1) % world
        engine = self.engine(instance)
        crowded = self.core.lost_bytes(besides=instance) > self.limits.lost_share * self.core.arena.total
        session, self.next_session = self.next_session, self.next_session + 1
        event = ev.Joined(session, role, instance, rank, world)
        if crowded or (engine is not None and (other_world or (part and rank + 1) in engine.parts)):
            assert [type(effect) for effect in said(self.do(event))] == [ev.Refuse]
            assert not crowded or any(half.closed for half in self.halves.values())
            return
        if other_world:
            return
        if engine is None:
            engine = Engine(instance)
            self.engines.append(engine)
        self.halves[session] = engine.halves[session] = Half(session, role, rank, engine)
        effects = self.do(event)
        assert effects[0] == ev.Accept(session)
        self.check_ready(engine, effects)

    @rule(number=small)
    def map_one(self, number: int) -> None:
        half = self.pick_half(number, closed=False)
        if half is not None and half.role is Role.WORKER:
            self.map_arena(half)

    def map_arena(self, half: Half) -> None:
        half.mapped = True
        self.check_ready(half.engine, self.do(ev.Mapped(half.id)))

    def check_ready(self, engine: Engine, effects: list[ev.Effect]) -> None:
        workers = [half.id for half in engine.halves.values() if half.mapped]
        scheduler = engine.scheduler
        told = [(effect.session, sorted(effect.workers)) for effect in effects if isinstance(effect, ev.Ready)]
        complete = scheduler is not None and len(workers) == WORLDS[engine.instance]
        if complete and not engine.broken and not engine.ready:
            assert told == [(scheduler.id, sorted(workers))]
            engine.ready = True
        else:
            assert told == []

    def pick_half(self, number: int, closed: bool) -> Half | None:
        halves = [half for half in self.halves.values() if half.closed is closed]
        return halves[number % len(halves)] if halves else None

    @precondition(lambda self: any(half.closed for half in self.halves.values()))
    @rule(number=small, how=st.sampled_from([Gone.DEAD, Gone.DEAD, Gone.SAID, Gone.UNKNOWN]))
    def prove(self, number: int, how: Gone) -> None:
        """More becomes known of a session that was lost."""
        half = self.pick_half(number, closed=True)
        assert half is not None
        self.leave(half, how)

    @rule(
        kind=st.sampled_from(["lose", "lose", "lose", "die", "purge", "close", "populate", "populate"]),
        number=small,
        which=small,
        how=st.sampled_from(list(Gone)),
        namespace=st.sampled_from([b"", *NAMESPACES]),
    )
    def trouble(self, kind: str, number: int, which: int, how: Gone, namespace: bytes) -> None:
        half = self.pick_half(number, closed=False)
        if kind == "lose" and half is not None:
            self.leave(half, how)
        elif kind == "die":
            for engine in [engine for engine in self.engines if engine.instance == "one"]:
                for member in list(engine.halves.values()):
                    self.leave(member, Gone.DEAD)
        elif kind == "purge":
            self.purge(namespace)
        elif kind == "close" and self.speakers():
            self.close(self.speaker(number), which)
        elif kind == "populate" and self.core.arena.total < PAGES * PAGE:
            self.do(ev.Populated(1))

    def purge(self, namespace: bytes) -> None:
        """What is stored now goes, and what a log has yet to tell of."""
        names = {name for name in self.seen if namespace in (b"", name[0])}
        self.condemned |= names
        self.doomed |= names
        self.purging.add(namespace)
        waiting = {record[:3] for event in self.recovering for record in event.records}
        self.unrecovered |= {name for name in waiting if namespace in (b"", name[0])}
        told = [effect.namespace for effect in self.do(ev.Purge(namespace)) if isinstance(effect, ev.Forget)]
        assert [one for one in told if one is not None] == [namespace] * len(self.core.storage.devices)

    @rule(namespace=st.sampled_from([b"", *NAMESPACES]), older=st.sampled_from([1, 30, 1000]))
    def purge_old(self, namespace: bytes, older: int) -> None:
        """Some of what is stored now may go, and nothing that somebody holds is touched."""
        if self.recovering:
            return  # whether a record is that old is told by its segment
        self.condemned |= {name for name in self.seen if namespace in (b"", name[0])}
        self.purging.add(namespace)
        self.disk.partial = True
        self.do(ev.Purge(namespace, older))
        self.disk.partial = False

    # --- limits and time ----------------------------------------------------------------------------------------

    @rule(
        change=st.sampled_from(
            [
                {},
                {},
                {"prepared_share": 0.1},
                {"prepared_share": 0.9, "engine_share": 0.9},
                {"engine_share": 0.1},
                {"speculative_share": 0.1},
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
        self.do(ev.Configure(self.limits))
        if not at_once:
            return
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

    @rule(by=st.sampled_from([1, 10, 40, 70, 100, 160]), ticks=st.integers(1, 3))
    def wait(self, by: int, ticks: int) -> None:
        """Time goes by, and the shell says so a little late, or at once when it is due."""
        self.now += by
        for _ in range(ticks):
            due = self.core.next_deadline
            effects = self.do(ev.Tick())
            assert due is None or due > self.now or effects or self.core.next_deadline != due

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
            for one in engine.asked.values():
                if one.answered is not None and not engine.broken:
                    assert one.started is not None or one.answered > self.now - self.limits.lease_ns
                    assert one.started is None or one.stalled or one.started > self.now - self.limits.stall_ns

    @rule(back=st.integers(2, 50))
    def clock_goes_back(self, back: int) -> None:
        self.do(ev.Tick(), back=back)

    # --- the disk -----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.disk.flying)
    @rule(
        number=small,
        count=st.integers(1, 3),
        fate=st.sampled_from(["good", "good", "good", "good", "some", "all"]),
        position=small,
    )
    def complete(self, number: int, count: int, fate: str, position: int) -> None:
        for _ in range(min(count, len(self.disk.flying))):
            io = sorted(self.disk.flying)[number % len(self.disk.flying)]
            failing = {"good": (), "some": (position,), "all": range(99)}[fate]
            flying, lost = self.disk.flying[io], io not in self.disk.cancelled
            done = self.disk.finish(io, failing)
            gone = set[Name]()
            if isinstance(flying, ev.Read):
                gone = {(o.namespace, o.group, o.key) for i, o in enumerate(flying.objects) if i in done.failed}
                gone = {name for name in gone if name in self.seen and self.seen[name] is None}
            self.do(done)
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

    # --- spaces and credits -------------------------------------------------------------------------------------

    @precondition(lambda self: self.speakers())
    @rule(number=small, space=st.integers(0, 2), geometry=st.integers(0, 3), slots=st.integers(0, 8), clash=rarely)
    def open(self, number: int, space: int, geometry: int, slots: int, clash: bool) -> None:
        engine = self.speaker(number)
        if clash or (space not in engine.spaces and geometry < 3):
            self.open_space(engine, space, geometry, slots)

    def open_space(self, engine: Engine, space: int, geometry: int, slots: int) -> None:
        scheduler = engine.scheduler
        assert scheduler is not None
        namespace, group, shards = geometry_of(geometry, WORLDS[engine.instance])
        event = ev.Open(scheduler.id, space, namespace, group, 2, shards, slots)
        if engine.broken:
            assert said(self.do(event)) == []
            return
        known = self.core.catalogue.find(namespace, group)
        if space in engine.spaces or (known is not None and known.shards != shards):
            self.refused(self.do(event), scheduler.id)
            return
        opened = engine.spaces[space] = Space(namespace, group, shards, slots)
        self.sizes[namespace, group] = opened.size
        assert self.do(event)[0] == ev.Opened(scheduler.id, space, self.target(opened), "")

    def close(self, engine: Engine, which: int) -> None:
        at, space = self.some_space(engine, which)
        if space is None or engine.broken:
            return
        space.want = 0
        if not space.credits:
            del engine.spaces[at]
        self.do(ev.Close(engine.scheduler.id, at))

    def pick_slots(self, engine: Engine, space: Space, count: int, lie: str) -> list[Slot]:
        mine = list(space.credits.values())
        foreign = [slot for other in self.engines for s in other.spaces.values() for slot in s.credits.values()]
        pool = {
            "spent": engine.spent[-3:] + mine,
            "foreign": foreign,
            "epoch": [Slot(slot.row, slot.offset, slot.epoch - 1) for slot in mine[:1]] + mine[1:],
            "unknown": [Slot(len(self.core.catalogue.state) + 3, 0, 1), *mine],
            "twice": mine[:1] + mine,
        }.get(lie, mine)
        return pool[:count]

    @precondition(lambda self: self.speakers())
    @rule(number=small, which=small, chain=st.integers(0, 1), length=st.integers(1, 12))
    def store(self, number: int, which: int, chain: int, length: int) -> None:
        """What an engine does all day: commit what is not there yet of a chain, batch by batch."""
        engine = self.speaker(number)
        at, space = self.some_space(engine, which)
        for _ in range(length):
            if space is None or not space.credits or engine.broken:
                return
            names = [(space.namespace, space.group, key(chain, position)) for position in range(length)]
            start = next((i for i, name in enumerate(names) if self.seen.get(name) is None), length)
            count = min(length - start, len(space.credits), SLICE)
            if not count:
                return
            self.commit_keys(engine, at, chain, start, list(space.credits.values())[:count], "", "")

    @precondition(lambda self: self.speakers())
    @rule(
        number=small,
        which=small,
        count=st.integers(1, 4),
        chain=st.integers(0, 1),
        start=st.integers(0, 8),
        lie=lies,
        torn=st.sampled_from([""] * 15 + ["shards", "keys"]),
    )
    def commit(self, number: int, which: int, count: int, chain: int, start: int, lie: str, torn: str) -> None:
        engine = self.speaker(number)
        at, space = self.some_space(engine, which)
        if space is not None and (slots := self.pick_slots(engine, space, count, lie)):
            self.commit_keys(engine, at, chain, start, slots, lie, torn)

    def commit_keys(
        self, engine: Engine, at: int, chain: int, start: int, slots: list[Slot], lie: str, torn: str
    ) -> None:
        scheduler, space = engine.scheduler, engine.spaces[at]
        assert scheduler is not None
        keys = [key(chain, start + i) for i in range(len(slots))]
        if lie == "twice":
            keys[-1] = keys[0]
        parent = key(chain, start - 1) if start else b""
        shards = (*space.shards[:-1], space.shards[-1] + 1) if torn == "shards" else space.shards
        packed = b"".join(keys)[: -1 if torn == "keys" else None]
        event = ev.Commit(scheduler.id, at, parent, start, packed, *pack(slots), shards)
        counters = Counter(self.core.counters)
        if engine.broken:
            assert said(self.do(event)) == []
            assert self.core.counters["stale"] - counters["stale"] == len(slots)
            return
        if torn:
            self.refused(self.do(event), scheduler.id)
            return
        fresh, expected = Fresh(), Counter[str]()
        full = self.core.objects + len(slots) > self.limits.max_objects
        for name, slot in zip(space.names(keys), slots, strict=True):
            if space.credits.get(slot.row) != slot:
                expected["stale"] += 1
                continue
            engine.spent.append(space.credits.pop(slot.row))
            known = name in fresh or self.seen.get(name) is not None or self.disk.reads(name) or self.loading(name)
            if known:
                expected["duplicates"] += 1
            else:
                expected["commits"] += 1
            if not known or full:
                fresh.setdefault(name, set()).add(slot.offset)
                self.content[slot.offset] = name
        if not space.want and not space.credits:
            del engine.spaces[at]
        self.do(event, fresh)
        counted = {what: self.core.counters[what] - counters[what] for what in ("stale", "duplicates", "commits")}
        if full:  # what gives way for one may be the next
            over = self.core.counters["over_max_objects"] - counters["over_max_objects"]
            assert sum(counted.values()) + over == len(slots)
        else:
            assert counted == {what: expected[what] for what in counted}
        for _ in range(self.diligence):
            if other := [number for number, io in self.disk.flying.items() if not isinstance(io, ev.Read)]:
                self.do(self.disk.finish(min(other)))

    def loading(self, name: Name) -> bool:
        index = self.core.catalogue.find(*name[:2])
        row = index.get(name[2]) if index is not None else None
        return row in self.core.storage._queued

    @precondition(lambda self: self.speakers())
    @rule(number=small, which=small, count=st.integers(1, 4), lie=lies, recalled=st.booleans())
    def give_back(self, number: int, which: int, count: int, lie: str, recalled: bool) -> None:
        engine = self.speaker(number)
        at, space = self.some_space(engine, which)
        if space is not None and recalled and at in engine.recalled:
            count, lie = max(0, len(space.credits) - engine.recalled.pop(at)), ""
        slots = self.pick_slots(engine, space, count, lie) if space is not None else []
        if not slots or engine.broken:
            return
        stale, counted = 0, self.core.counters["stale"]
        for slot in slots:
            owner = next((n for n, s in engine.spaces.items() if s.credits.get(slot.row) == slot), None)
            if owner is None:
                stale += 1
                continue
            engine.spent.append(engine.spaces[owner].credits.pop(slot.row))
            if not engine.spaces[owner].want and not engine.spaces[owner].credits:
                del engine.spaces[owner]
        self.do(ev.Return(engine.scheduler.id, *pack(slots)))
        assert self.core.counters["stale"] - counted == stale

    # --- questions ----------------------------------------------------------------------------------------------

    def some_keys(self, space: Space | None, which: int, chain: int, length: int, twist: str) -> list[bytes]:
        known = sorted(name for name in self.seen if space and name[:2] == (space.namespace, space.group))
        cold = [name for name in known if self.seen[name] is None]
        if known and twist != "far":
            known = cold if cold and which % 2 else known
            chain = known[which * chain % len(known)][2][0]
        keys = [key(chain, position) for position in range(length)]
        if twist == "gap" and keys:
            keys[length // 2] = key(9, 9)
        if twist == "twice":
            keys = keys[: length // 2] + keys[: length // 2 + 1][::-1] + keys[:2]
        return keys

    @precondition(lambda self: self.speakers())
    @rule(
        number=small,
        which=small,
        chain=st.integers(0, 1),
        length=st.integers(0, 12),
        skip=st.one_of(st.just(0), small),
        twist=st.sampled_from([""] * 8 + ["gap", "twice", "twice"]),
        op=st.integers(0, 5),
        revision=st.integers(1, 4),
        ahead=st.sampled_from([False, False, True]),
        torn=rarely,
    )
    def query(
        self,
        number: int,
        which: int,
        chain: int,
        length: int,
        skip: int,
        twist: str,
        op: int,
        revision: int,
        ahead: bool = False,
        torn: bool = False,
    ) -> None:
        engine = self.speaker(number)
        at, space = self.some_space(engine, which)
        keys = self.some_keys(space, which, chain, length, twist)
        one = Asked(revision, False, ahead, space, space.names(keys) if space else [], skip)
        one.chosen = one.names[skip:]
        event = ev.Query(engine.scheduler.id, op, revision, 7 if space is None else at, skip, b"".join(keys))
        self.ask(engine, replace(event, ahead=ahead, keys=event.keys + b"!" * torn), one, torn)

    @precondition(lambda self: any(engine.asked for engine in self.speakers()))
    @rule(number=small, which=small, length=st.integers(0, 6), more=st.integers(-1, 2), ahead=st.booleans())
    def extend(self, number: int, which: int, length: int, more: int, ahead: bool) -> None:
        """The chain of an operation grows while it is matched, waits, was answered, or is over."""
        engine = next(e for e in (self.speakers() * 2)[number % len(self.speakers()) :] if e.asked)
        op = sorted(engine.asked)[which % len(engine.asked)]
        former = engine.asked[op]
        at = next((at for at, space in engine.spaces.items() if space is former.space), None)
        if at is None:
            at, space = self.some_space(engine, which)
        else:
            space = engine.spaces[at]
        start = len(former.names)
        chain = former.names[-1][2][0] if former.names else 0
        keys = [key(chain, start + i) for i in range(length)]
        skip = max(0, former.skip + more)
        one = Asked(former.revision + max(0, more), False, ahead, space, [], skip, extends=True)
        if space is not None and former.space is space and not former.exact:
            one.names = former.names + space.names(keys)
            one.skip = max(skip, former.skip)
            one.pieces = former.pieces[one.skip - former.skip :]
            one.chosen = one.names[one.skip :]
        event = ev.Query(engine.scheduler.id, op, one.revision, 7 if space is None else at, skip, b"".join(keys), True)
        self.ask(engine, replace(event, ahead=ahead), one)

    @precondition(lambda self: self.speakers())
    @rule(
        number=small,
        parts=st.lists(st.tuples(small, st.integers(0, 1), st.integers(0, 6)), min_size=1, max_size=3),
        twist=st.sampled_from(["", "", "", "gap", "twice"]),
        op=st.integers(0, 5),
        revision=st.integers(1, 4),
        ahead=st.sampled_from([False, False, True]),
    )
    def prepare(
        self, number: int, parts: list[tuple[int, int, int]], twist: str, op: int, revision: int, ahead: bool
    ) -> None:
        """Exactly these, of one to three spaces."""
        engine = self.speaker(number)
        named: list[tuple[int, bytes]] = []
        names: list[Name] = []
        demand = 0
        for which, chain, length in parts:
            at, space = self.some_space(engine, which)
            keys = self.some_keys(space, which, chain, length, twist if length else "")
            named.append((7 if space is None else at, b"".join(keys)))
            if space is not None:
                names += space.names(keys)
                demand += len(keys) * space.size
        one = Asked(revision, True, ahead, engine.spaces.get(named[0][0]), names, chosen=names)
        self.ask(engine, ev.Prepare(engine.scheduler.id, op, revision, tuple(named), ahead), one, demand=demand)

    def ask(
        self, engine: Engine, event: ev.Query | ev.Prepare, one: Asked, torn: bool = False, demand: int = 0
    ) -> None:
        """Put a question, of which the model knows whether it is taken, refused, ignored or over budget at once."""
        op, former = event.op, engine.asked.get(event.op)
        if engine.broken or not engine.ready or one.space is None:
            expected = [ev.Answer(event.session, op, event.revision, 0, b"", Reason.DETACHED)]
            assert said(self.do(event)) == expected
        elif torn or (former is not None and former.revision < event.revision and former.started is not None):
            self.refused(self.do(event), event.session)
        elif former is not None and former.revision >= event.revision:
            counted = self.core.counters["stale"]
            assert said(self.do(event)) == []
            assert self.core.counters["stale"] == counted + 1
        else:
            pending = engine.pending - (former is not None and former.answered is None)
            crowded = pending >= self.limits.queries
            crowded |= len(engine.asked) - (former is not None) >= self.limits.operations
            self.over(engine, op)
            share = self.limits.speculative_share if one.ahead else 1.0
            share *= min(self.limits.engine_share, self.limits.prepared_share)
            large = demand > share * self.core.arena.total
            engine.asked[op] = one
            if crowded:
                one.pieces, one.crowded = [], True
            answers = [effect for effect in self.do(event) if isinstance(effect, ev.Answer) and effect.op == op]
            if crowded:
                assert [(a.resident, a.reason) for a in answers] == [(0, Reason.BUDGET)]
            elif former is None:
                assert not large or [a.reason for a in answers] == [Reason.TOO_LARGE]
                assert large or all(answer.reason is not Reason.TOO_LARGE for answer in answers)

    @precondition(lambda self: self.speakers())
    @rule(number=small, which=small, chain=st.integers(0, 2), length=st.integers(1, 14), skip=st.integers(0, 2))
    def request(self, number: int, which: int, chain: int, length: int, skip: int) -> None:
        """A prompt comes, is stored, and comes again to another engine."""
        self.store(number, which, chain, length)
        for other in (number, number + 1):
            if self.speakers():
                self.query(other, which, chain, length, skip, "far", number % 6, 4)

    @precondition(lambda self: self.speakers())
    @rule(number=small, parts=st.lists(st.tuples(small, st.integers(0, 1), st.integers(0, 6)), max_size=3), torn=rarely)
    def lookup(self, number: int, parts: list[tuple[int, int, int]], torn: bool) -> None:
        """It says where everything is and changes nothing."""
        engine = self.speaker(number)
        named: list[tuple[int, bytes]] = []
        names: list[list[Name]] = []
        for which, chain, length in parts:
            at, space = self.some_space(engine, which)
            keys = self.some_keys(space, which, chain, length, "")
            named.append((7 if space is None else at, b"".join(keys) + b"!" * torn))
            names.append(space.names(keys) if space is not None else [])
        self.drain()
        known = [engine.ready and not engine.broken and at in engine.spaces for at, _ in named]
        catalogue, counters = self.core.catalogue, Counter(self.core.counters)
        event = ev.Lookup(engine.scheduler.id, 99, tuple(named))
        if torn and any(known):
            self.refused(self.do(event), engine.scheduler.id)
            return
        hungry = bool(self.core.credits._hungry)  # who wants credits looks for them at every event
        before = [*map(list, (catalogue.stamp, catalogue.older, catalogue.leases, catalogue.state, catalogue.bytes))]
        seen = self.seen
        effects = self.do(event)
        while not any(isinstance(effect, ev.Residency) for effect in effects):
            effects = effects + self.do(None)
        here = [*map(list, (catalogue.stamp, catalogue.older, catalogue.leases, catalogue.state, catalogue.bytes))]
        assert hungry or here == before or said(effects) != effects
        (residency,) = [effect for effect in effects if isinstance(effect, ev.Residency)]
        tiers = [[0 if n not in seen else 1 if seen[n] is not None else 2 for n in part] for part in names]
        expected = tuple(bytes(part) if ok else b"" for part, ok in zip(tiers, known, strict=True))
        assert residency == ev.Residency(engine.scheduler.id, 99, expected) or seen != self.seen
        assert self.core.counters["keys_asked"] == counters["keys_asked"]

    # --- what follows an answer ---------------------------------------------------------------------------------

    @precondition(lambda self: any(engine.asked for engine in self.speakers()))
    @rule(number=small, ops=st.sets(st.integers(0, 5), min_size=1), older=st.sampled_from([0, 0, 0, 1]))
    def release(self, number: int, ops: set[int], older: int) -> None:
        holders = [engine for engine in self.speakers() if engine.asked]
        engine = holders[number % len(holders)]
        named = [(op, engine.asked[op].revision - older) for op in sorted(engine.asked.keys() & ops)]
        if not older:
            self.let_go(engine, [op for op, _ in named])
            return
        counted = self.core.counters["stale"]
        self.do(ev.Release(engine.scheduler.id, tuple(named)))
        self.drain()
        assert self.core.counters["stale"] == counted + len(named)

    def let_go(self, engine: Engine, ops: list[int]) -> None:
        """Ends them all: with the event one by one, each of which may take a slice."""
        named = tuple((op, engine.asked[op].revision) for op in ops)
        for op in ops:
            one = engine.asked[op]
            self.ending.update(one.chosen)
        for op, revision in named:
            self.over(engine, op)
            self.do(ev.Release(engine.scheduler.id, ((op, revision),)))

    @precondition(lambda self: any(engine.asked for engine in self.speakers()))
    @rule(number=small, ops=st.sets(st.integers(0, 5), min_size=1), spoiled=st.sampled_from(["", "", "", "one", "end"]))
    def start(self, number: int, ops: set[int], spoiled: str) -> None:
        """Restores begin; some fail, and some of those are told of with the release."""
        holders = [engine for engine in self.speakers() if engine.asked]
        engine = holders[number % len(holders)]
        counted, stale = self.core.counters["stale"], 0
        for op in sorted(ops):
            one = engine.asked.get(op)
            if engine.broken or one is None or one.answered is None or one.started is not None:
                stale += not engine.broken
            else:
                one.started = self.now + 1
        self.do(ev.Started(engine.scheduler.id, tuple(sorted(ops))))
        assert self.core.counters["stale"] == counted + stale
        going = [op for op, one in engine.asked.items() if one.started is not None]
        if spoiled and going:
            self.spoil(engine, going[0])
            if spoiled == "end" and going[0] in engine.asked:
                self.let_go(engine, [going[0]])

    def spoil(self, engine: Engine, op: int) -> None:
        if not engine.broken:
            names = {name for name, offset, _ in engine.asked[op].pieces if self.seen.get(name) == offset}
            self.condemned |= names
            self.doomed |= names
        self.do(ev.Spoiled(engine.scheduler.id, op))

    @precondition(lambda self: self.speakers() and not self.core.has_work)
    @rule(number=small, op=st.one_of(st.none(), st.integers(0, 5)))
    def explained(self, number: int, op: int | None) -> None:
        """Who holds an object is told, and what an operation does."""
        scheduler = self.speaker(number).scheduler
        names = sorted(self.seen)
        assert scheduler is not None
        if op is None and not names:
            return
        event = (
            ev.Explain(scheduler.id, op=op)
            if op is not None
            else ev.Explain(scheduler.id, names[number % len(names)][2])
        )
        effects = self.do(event)
        while not any(isinstance(effect, ev.Explained) for effect in effects):
            effects = effects + self.do(None)
        (told,) = [effect for effect in effects if isinstance(effect, ev.Explained)]
        text = "\n".join(told.lines)
        for engine in self.engines:
            for number, one in engine.asked.items():
                if number == op:
                    assert f"in instance {engine.instance}, revision {one.revision}" in text
                if op is None and any(name[2] == event.key and self.seen.get(name) == at for name, at, _ in one.pieces):
                    assert f"held by operation {number} of instance {engine.instance}" in text

    @precondition(lambda self: self.core.has_work)
    @rule(slices=st.integers(1, 4))
    def step(self, slices: int) -> None:
        for _ in range(slices):
            self.do(None)

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
        self.calm()
        for half in list(self.halves.values()):
            self.leave(half, Gone.DEAD)
        self.finish()
        states = self.core.accounts()
        assert not any(states[name] for name in ("credit", "leased", "doomed", "limbo", "loading"))
        assert not self.core.sessions
        assert not self.core.attachments
        self.purge(b"")
        self.finish()
        assert self.core.storage.pending == self.core.storage.queued_writes == self.core.storage.read_bytes == 0
        assert not self.core.storage._queued
        assert not self.core.queries._waiters
        assert self.core.accounts()["free_pages"] == self.core.arena.total
        assert not self.core.catalogue.indexes
        again = Core(PAGE, PAGES * PAGE, Limits(**LIMITS))  # type: ignore[arg-type]
        assert self.told == [again.step() if event is None else again.handle(event, now) for event, now in self.log]


def explore(monkeypatch: pytest.MonkeyPatch, examples: int, steps: int) -> None:
    monkeypatch.setattr(ev, "MAX_BATCH", SLICE)
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_any_interleaving_keeps_the_rules(monkeypatch: pytest.MonkeyPatch):
    explore(monkeypatch, examples=200, steps=50)


@pytest.mark.long
def test_many_more_interleavings_keep_the_rules(monkeypatch: pytest.MonkeyPatch):
    explore(monkeypatch, examples=2000, steps=80)
