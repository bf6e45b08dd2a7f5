"""Any interleaving of engines, readers, pressure, purges and deaths, against a model of plain sets and dictionaries.

The model knows what each engine was told and what it did, never what the core remembers. Which objects are evicted is
the core's choice: of it the model only knows what must not go.
"""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from core_world import Slot, audit, offsets_of, pack, slots_of
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

from kvhold.core import Core, state
from kvhold.core import events as ev
from kvhold.core.catalogue import State
from kvhold.core.events import Effect, Event, Gone, Reason, Role
from kvhold.core.state import LIMBO_SHARE

UNIT = 4096
PAGE = 2 * UNIT
PAGES = 16
SLICE = 4
LEASE_SHARE = 0.4
"""Little, so that budgets are met often."""
WORLDS = {"one": 1, "two": 1, "tri": 2}
SIZES = [1, 2, 3, 2]
"""Units of an object by geometry. The third spans pages; the fourth has the first's name."""

Name = tuple[bytes, int, bytes]


@dataclass
class Half:
    """One session."""

    id: int
    role: Role
    rank: int
    engine: "Engine"
    closed: bool = False  # lost, not proved dead
    mapped: bool = False


@dataclass
class Space:
    namespace: bytes
    group: int
    shards: tuple[int, ...]
    want: int
    credits: dict[int, Slot] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(self.shards)

    @property
    def target(self) -> int:
        return min(self.want, max(1, PAGES * PAGE // 8 // self.size))


@dataclass
class Asked:
    space: Space
    skip: int
    keys: list[bytes]


@dataclass
class Engine:
    """One attachment: what its halves were told they hold."""

    instance: str
    halves: dict[int, Half] = field(default_factory=dict)  # those not proved gone
    broken: bool = False
    ready: bool = False
    spaces: dict[int, Space] = field(default_factory=dict)
    spent: list[Slot] = field(default_factory=list)
    pending: dict[int, Asked] = field(default_factory=dict)
    leases: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # operation -> (offset, size)...

    @property
    def scheduler(self) -> Half | None:
        return next((half for half in self.halves.values() if half.role is Role.SCHEDULER and not half.closed), None)

    @property
    def parts(self) -> set[int]:
        """Who is here: 0 is the scheduler half, 1 the worker of rank 0, and so on."""
        return {half.rank + 1 if half.role is Role.WORKER else 0 for half in self.halves.values()}

    def held(self) -> list[tuple[int, int]]:
        credits = [(slot.offset, space.size) for space in self.spaces.values() for slot in space.credits.values()]
        return credits + [piece for pieces in self.leases.values() for piece in pieces]


def key(chain: int, position: int) -> bytes:
    return bytes([chain, position])


def said(effects: list[Effect]) -> list[Effect]:
    """All but grants, which any event may bring to anybody."""
    return [effect for effect in effects if not isinstance(effect, ev.Grant)]


small = st.integers(0, 11)
rarely = st.integers(0, 15).map(lambda number: number == 15)
lies = st.sampled_from(["", "", "", "", "", "spent", "foreign", "epoch", "unknown", "twice"])


class CoreModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.core = Core(PAGE, PAGES * PAGE)
        self.log: list[Event | None] = []
        self.told: list[list[Effect]] = []
        self.engines: list[Engine] = []
        self.halves: dict[int, Half] = {}
        self.content: dict[int, Name] = {}  # offset -> what was last written there in full
        self.epochs: set[int] = set()
        self.purging = False
        self.next_session = 1

    # --- doing and checking -------------------------------------------------------------------------------------

    def view(self) -> dict[Name, int]:
        """What is stored now, and where."""
        catalogue = self.core.catalogue
        return {
            (index.namespace, index.group, key): catalogue.offset[row]
            for index in catalogue.indexes.values()
            for part in index.maps
            for key, row in part.items()
        }

    def do(self, event: Event | None, fresh: dict[Name, int] | None = None) -> list[Effect]:
        """Tell the core (None: one step); ``fresh`` is what the event stores. All but the answers is checked here."""
        fresh = fresh or {}
        before = self.view()
        gone = self.gone
        self.log.append(event)
        effects = self.core.step() if event is None else self.core.handle(event)
        self.told.append(effects)
        audit(self.core)
        after = self.view()
        leased = {offset for engine in self.engines for pieces in engine.leases.values() for offset, _ in pieces}
        for name, offset in before.items():
            if name not in after:
                assert offset not in leased or self.purging
            elif name not in fresh:
                assert after[name] == offset
        assert {name: offset for name, offset in after.items() if name not in before}.items() <= fresh.items()
        assert len(before) + len(fresh) - len(after) == self.gone - gone
        for effect in effects:
            if isinstance(effect, ev.Grant):
                self.granted(effect)
            elif isinstance(effect, ev.Answer):
                self.answered(effect, before)
        self.purging = self.purging and self.core.has_work
        return effects

    @property
    def gone(self) -> int:
        return self.core.catalogue.evicted + self.core.counters["purged"]

    def granted(self, grant: ev.Grant) -> None:
        engine = self.halves[grant.session].engine
        assert not engine.broken
        assert engine.scheduler is self.halves[grant.session]
        space = engine.spaces[grant.space]
        for slot in slots_of(grant):
            assert slot.epoch not in self.epochs
            assert 0 <= slot.offset <= self.core.arena.total - space.size
            for other in self.engines:
                for offset, size in other.held():
                    assert slot.offset + space.size <= offset or offset + size <= slot.offset
            self.epochs.add(slot.epoch)
            self.content.pop(slot.offset, None)
            space.credits[slot.row] = slot
        assert len(space.credits) <= space.target

    def answered(self, answer: ev.Answer, stored: dict[Name, int]) -> None:
        if answer.reason is Reason.DETACHED:
            return  # the query's rule knows when
        engine = self.halves[answer.session].engine
        asked = engine.pending.pop(answer.op)
        assert answer.resident <= len(asked.keys)
        space, offsets = asked.space, offsets_of(answer)
        names = [(space.namespace, space.group, key) for key in asked.keys]
        assert len(offsets) == max(0, answer.resident - asked.skip)
        for name, offset in zip(names[asked.skip : answer.resident], offsets, strict=True):
            assert self.content[offset] == name
        match answer.reason:
            case Reason.NONE:
                assert answer.resident == len(names)
            case Reason.NOT_STORED:
                assert names[answer.resident] not in stored
            case Reason.BUDGET:
                assert names[answer.resident] in stored
                states = self.core.accounts()
                used = states["leased"] + states["doomed"] + space.size
                twice = len(set(names)) < len(names)  # such a chain may be cut short of what could be had
                assert used > LEASE_SHARE * self.core.arena.total or twice
        if len(names) <= SLICE:
            assert all(name in stored for name in names[: answer.resident])
        if offsets:
            assert answer.op not in engine.leases
            engine.leases[answer.op] = [(offset, space.size) for offset in offsets]

    def refused(self, effects: list[Effect], session: int) -> None:
        """A refused session is closed by the shell; its process may live."""
        assert [type(effect) for effect in said(effects)] == [ev.Refuse]
        self.leave(self.halves[session], Gone.UNKNOWN)

    def leave(self, half: Half, how: Gone) -> None:
        engine = half.engine
        others = [other for other in engine.halves if other != half.id]
        parted = [] if engine.broken or how is Gone.SAID else others
        engine.broken = True
        engine.pending.clear()
        half.closed = True
        if how is not Gone.UNKNOWN:
            del engine.halves[half.id], self.halves[half.id]
            if not engine.halves:
                self.engines.remove(engine)
        effects = self.do(ev.Left(half.id, how))
        assert [effect.session for effect in effects if isinstance(effect, ev.Part)] == parted

    def drain(self) -> None:
        for _ in range(1000):
            if not self.core.has_work:
                return
            self.do(None)
        raise AssertionError("work without an end")

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

    # --- sessions -----------------------------------------------------------------------------------------------

    @initialize(pages=st.integers(6, PAGES), geometry=st.integers(0, 2), slots=st.integers(1, 3))
    def begin(self, pages: int, geometry: int, slots: int) -> None:
        """Two engines that share a namespace, and something stored; rules take it apart again."""
        self.do(ev.Populated(pages))
        self.arrive("one", geometry, slots)
        self.arrive("two", geometry, slots)
        self.store(0, 0, 0, 6)
        self.store(1, 0, 1, 3)

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
        crowded = self.core.lost_bytes(besides=instance) > LIMBO_SHARE * self.core.arena.total
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

    def check_ready(self, engine: Engine, effects: list[Effect]) -> None:
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
        namespace=st.sampled_from([b"", b"\0\1n", b"\1\1n", b"\0\2n"]),
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
            self.purging = True
            self.do(ev.Purge(namespace))
        elif kind == "close" and self.speakers():
            self.close(self.speaker(number), which)
        elif kind == "populate" and self.core.arena.total < PAGES * PAGE:
            self.do(ev.Populated(1))

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
        world = WORLDS[engine.instance]
        shards = (SIZES[geometry] * UNIT,) + (UNIT,) * (world - 1)
        group = geometry % 3
        namespace = bytes([group % 2, world]) + b"n"
        event = ev.Open(scheduler.id, space, namespace, group, 2, shards, slots)
        if engine.broken:
            assert said(self.do(event)) == []
            return
        indexes = self.core.catalogue.indexes.values()
        known = {index.shards for index in indexes if (index.namespace, index.group) == (namespace, group)}
        if space in engine.spaces or known - {shards}:
            self.refused(self.do(event), scheduler.id)
            return
        opened = engine.spaces[space] = Space(namespace, group, shards, slots)
        assert self.do(event)[0] == ev.Opened(scheduler.id, space, opened.target, "")

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
            stored = self.view()
            names = [(space.namespace, space.group, key(chain, position)) for position in range(length)]
            start = next((i for i, name in enumerate(names) if name not in stored), length)
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
        event = ev.Commit(scheduler.id, at, parent, packed, *pack(slots), shards)
        counters = Counter(self.core.counters)
        if engine.broken:
            assert said(self.do(event)) == []
            assert self.core.counters["stale"] - counters["stale"] == len(slots)
            return
        if torn:
            self.refused(self.do(event), scheduler.id)
            return
        stored, fresh, expected = self.view(), dict[Name, int](), Counter[str]()
        for name, slot in zip([(space.namespace, space.group, k) for k in keys], slots, strict=True):
            if space.credits.get(slot.row) != slot:
                expected["stale"] += 1
                continue
            engine.spent.append(space.credits.pop(slot.row))
            if name in stored or name in fresh:
                expected["duplicates"] += 1
            else:
                expected["commits"] += 1
                fresh[name] = slot.offset
                self.content[slot.offset] = name
        if not space.want and not space.credits:
            del engine.spaces[at]
        self.do(event, fresh)
        for what in ("stale", "duplicates", "commits"):
            assert self.core.counters[what] - counters[what] == expected[what]

    @precondition(lambda self: self.speakers())
    @rule(number=small, which=small, count=st.integers(1, 4), lie=lies)
    def give_back(self, number: int, which: int, count: int, lie: str) -> None:
        engine = self.speaker(number)
        _, space = self.some_space(engine, which)
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

    # --- queries ------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.speakers())
    @rule(
        number=small,
        which=small,
        chain=st.integers(0, 1),
        length=st.integers(1, 12),
        skip=st.one_of(st.just(0), small),
        twist=st.sampled_from([""] * 8 + ["gap", "twice", "twice"]),
        clash=rarely,
    )
    def query(self, number: int, which: int, chain: int, length: int, skip: int, twist: str, clash: bool) -> None:
        engine = self.speaker(number)
        at, space = self.some_space(engine, which)
        scheduler = engine.scheduler
        assert scheduler is not None
        stored = sorted(name for name in self.view() if space and name[:2] == (space.namespace, space.group))
        if stored and twist != "far":
            chain = stored[which * chain % len(stored)][2][0]
        keys = [key(chain, position) for position in range(length)]
        if twist == "gap":
            keys[length // 2] = key(9, 9)
        if twist == "twice":
            keys = keys[: length // 2] + keys[: length // 2 + 1][::-1] + keys[:2]
        used = {*engine.leases, *engine.pending}
        op = min(used) if clash and used else next(op for op in range(100) if op not in used)
        torn = clash and not used
        event = ev.Query(scheduler.id, op, 7 if space is None else at, skip, b"".join(keys) + b"!" * torn)
        if engine.broken or not engine.ready or space is None:
            assert self.do(event) == [ev.Answer(scheduler.id, op, 0, b"", Reason.DETACHED)]
        elif clash:
            self.refused(self.do(event), scheduler.id)
        else:
            engine.pending[op] = Asked(space, skip, keys)
            self.do(event)
            assert op not in engine.pending or len(keys) > SLICE

    @precondition(lambda self: self.speakers())
    @rule(number=small, which=small, chain=st.integers(0, 2), length=st.integers(1, 14), skip=st.integers(0, 2))
    def request(self, number: int, which: int, chain: int, length: int, skip: int) -> None:
        """A prompt comes, is stored, and comes again to another engine."""
        self.store(number, which, chain, length)
        for other in (number, number + 1):
            if self.speakers():
                self.query(other, which, chain, length, skip, "far", False)

    @precondition(lambda self: any(engine.leases or engine.pending for engine in self.speakers()))
    @rule(number=small, ops=st.sets(st.integers(0, 3), min_size=1))
    def release(self, number: int, ops: set[int]) -> None:
        holders = [engine for engine in self.speakers() if engine.leases or engine.pending]
        engine = holders[number % len(holders)]
        self.let_go(engine, sorted({*engine.leases, *engine.pending} & ops))

    def let_go(self, engine: Engine, ops: list[int]) -> None:
        for op in ops:
            engine.leases.pop(op, None)
            engine.pending.pop(op, None)
        self.do(ev.Release(engine.scheduler.id, tuple(ops)))

    @precondition(lambda self: self.core.has_work)
    @rule(slices=st.integers(1, 4))
    def step(self, slices: int) -> None:
        for _ in range(slices):
            self.do(None)

    # --- always -------------------------------------------------------------------------------------------------

    @invariant()
    def what_owners_hold_is_theirs(self) -> None:
        catalogue, arena = self.core.catalogue, self.core.arena

        def state_of(offset: int, size: int) -> int:
            run = arena.run_at(offset)
            assert run.size == size
            row = run.rows[(offset - run.base) // size]
            assert row >= 0
            return catalogue.state[row]

        for engine in self.engines:
            for space in engine.spaces.values():
                for slot in space.credits.values():
                    assert catalogue.epoch[slot.row] == slot.epoch
                    assert catalogue.offset[slot.row] == slot.offset
                    assert state_of(slot.offset, space.size) == (State.LIMBO if engine.broken else State.CREDIT)
            for pieces in engine.leases.values():
                for offset, size in pieces:
                    assert state_of(offset, size) in (State.LEASED, State.DOOMED)
                    assert offset in self.content
        states = self.core.accounts()
        assert states["leased"] + states["doomed"] <= LEASE_SHARE * arena.total

    @invariant()
    def at_rest_nothing_more_is_held(self) -> None:
        if self.core.has_work:
            return
        states, held = self.core.accounts(), Counter[str]()
        leased: set[tuple[int, int]] = set()
        for engine in self.engines:
            for space in engine.spaces.values():
                held["limbo" if engine.broken else "credit"] += len(space.credits) * space.size
            for pieces in engine.leases.values():
                leased |= set(pieces)
            if not engine.broken:
                assert not engine.pending, "a query was never answered"
        assert (states["credit"], states["limbo"]) == (held["credit"], held["limbo"])
        rest = states["leased"] + states["doomed"] - sum(size for _, size in leased)
        assert rest == 0 or any(engine.broken for engine in self.engines)

    @invariant()
    def nobody_waits_beside_free_room(self) -> None:
        arena = self.core.arena
        if self.core.has_work:
            return
        for engine in self.speakers():
            for space in engine.spaces.values():
                if not engine.broken and len(space.credits) < space.target:
                    assert not arena._open.get(space.size)
                    assert arena._find(arena.span_of(space.size)) is None

    def calm(self) -> None:
        """With nothing leased, who lacks credits lacks them only because others' credits are in the way."""
        for engine in self.speakers():
            self.let_go(engine, sorted({*engine.leases, *engine.pending}))
        self.drain()
        if self.core.accounts()["leased"]:
            return  # by an engine that was lost
        quiet = 0
        while quiet < 2 * PAGES // 4 + 2:
            granted = [effect for effect in self.do(ev.Populated(0)) if isinstance(effect, ev.Grant)]
            self.drain()
            quiet = 0 if granted else quiet + 1
        states, runs = self.core.catalogue.state, self.core.arena.runs
        pinned = [run and any(row >= 0 and states[row] != State.RESIDENT for row in run.rows) for run in runs]
        for space in (space for engine in self.speakers() if not engine.broken for space in engine.spaces.values()):
            if len(space.credits) < space.target:
                assert len(self.core.catalogue._by_name[space.namespace, space.group]) == 0
                assert space.size > PAGE or all(pinned)

    def teardown(self) -> None:
        self.calm()
        for half in list(self.halves.values()):
            self.leave(half, Gone.DEAD)
        self.drain()
        states = self.core.accounts()
        assert not any(states[name] for name in ("credit", "leased", "doomed", "limbo"))
        assert not self.core.sessions
        assert not self.core.attachments
        self.purging = True
        self.do(ev.Purge())
        self.drain()
        assert self.core.accounts()["free_pages"] == self.core.arena.total
        assert not self.core.catalogue.indexes
        again = Core(PAGE, PAGES * PAGE)
        assert self.told == [again.step() if event is None else again.handle(event) for event in self.log]


def explore(monkeypatch: pytest.MonkeyPatch, examples: int, steps: int) -> None:
    monkeypatch.setattr(ev, "MAX_BATCH", SLICE)
    monkeypatch.setattr(state, "LEASE_SHARE", LEASE_SHARE)
    run_state_machine_as_test(
        CoreModel,
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
