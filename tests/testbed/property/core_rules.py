"""What engines do: come, open, store, return, leave, die; and what else happens to all of them."""

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    precondition,
    rule,
)
from testbed.core.core_world import Slot, pack
from testbed.core.fake_disks import Name
from testbed.core.second_backing import StoreOpened
from testbed.core.shared_store import opened
from testbed.property.core_model import (
    PAGE,
    PAGES,
    SEGMENT,
    SIZES,
    SLICE,
    UNIT,
    WORLDS,
    CoreModel,
    Engine,
    Fresh,
    Half,
    Space,
    said,
)

from kvhold.core import events as ev
from kvhold.core.events import Gone, Role
from kvhold.core.log import events as lev
from kvhold.core.remote.events import Serves
from kvhold.core.rows import State

NAMESPACES = [b"\0\1n", b"\1\1n", b"\0\2n"]


def key(chain: int, position: int) -> bytes:
    return bytes([chain, position])


def geometry_of(geometry: int, world: int, whose: str = "n") -> tuple[bytes, int, tuple[int, ...]]:
    """Namespace, group and shards. ``whose`` are the instances that share the namespace: one, by its name, or all."""
    group = geometry % 3
    return bytes([group % 2, world]) + whose.encode(), group, (SIZES[geometry] * UNIT,) + (UNIT,) * (world - 1)


def chained(group: int) -> bool:
    """Whether objects of a group are of use only beside all that come before them."""
    return group != 1


small = st.integers(0, 11)
rarely = st.integers(0, 15).map(lambda number: number == 15)
lies = st.sampled_from(["", "", "", "", "", "spent", "foreign", "epoch", "unknown", "twice"])
records = st.lists(
    st.tuples(st.sampled_from([0, 0, 0, 1, 3]), st.integers(0, 1), st.integers(0, 2), st.integers(1, 5)), max_size=2
)
"""Pieces of chains: how far their geometry is from the engines', chain, first position, length."""


class Engines(CoreModel):
    """Rules about sessions, spaces and credits; the start and the logs' recovery."""

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

    def aim(self, number: int, which: int) -> tuple[Engine, int, Space | None]:
        """An engine and a space of it; mostly one of which something is in a log alone, if there is any."""
        cold = {name[:2] for name, offset in self.seen.items() if offset is None} if number % 4 else set()
        speakers = self.speakers()
        for engine in speakers[number % len(speakers) :] + speakers:
            for at, space in engine.spaces.items():
                if (space.namespace, space.group) in cold and engine.ready and not engine.broken:
                    return engine, at, space
        engine = self.speaker(number)
        return engine, *self.some_space(engine, which)

    # --- the start ----------------------------------------------------------------------------------------------

    @initialize(
        pages=st.sampled_from([6, 8, 12, PAGES]),
        geometry=st.integers(0, 2),
        slots=st.integers(1, 3),
        logs=st.sampled_from([1, 1, 1, 2, 0]),
        segments=st.sampled_from([8, 4, 3, 2]),
        found=st.lists(records, max_size=2),
        recovered=st.sampled_from([True, True, True, False]),
        diligence=st.sampled_from([4, 4, 1, 0]),
        stores=st.sampled_from([0, 0, 1, 1, 2]),
        shared=st.sampled_from([0, 1, 0, 1, 2]),
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
        stores: int = 0,
        shared: int = 0,
    ) -> None:
        """Two engines that share a namespace, and something stored; rules take it apart again."""
        self.diligence = diligence  # writes that end with each commit
        self.recovering: list[lev.Recovered] = []
        self.unready = list(range(logs))
        self.do(ev.Populated(pages))
        for log in range(logs):
            self.adopt(log, segments, found if log == 0 else [], geometry)
        for store in range(logs, logs + stores):
            self.do(StoreOpened(store))
        for store in range(logs + stores, logs + stores + shared):
            self.shared.append(store)
            self.serving.add(store)
            for event in opened(store):
                self.do(event)
            self.others_store(store, 0, geometry, 6)
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
                self.recovering.append(lev.Recovered(log, number, batch))
        self.do(lev.LogOpened(log, segments, SEGMENT, len(found)))
        self.do(lev.Segments(log, tuple(lives)))

    @precondition(lambda self: self.recovering or self.unready)
    @rule()
    def recover(self) -> None:
        """The next records of a log come; after the last ones it may be written."""
        if not self.recovering:
            self.do(lev.LogReady(self.unready.pop()))
            return
        event = self.recovering.pop(0)
        fresh: Fresh = {}
        for namespace, group, one, shards, _ in event.records:
            index = self.core.catalogue.find(namespace, group)
            name = namespace, group, one
            if (index is None or index.shards == shards) and name not in self.seen and name not in self.unrecovered:
                fresh[name] = {None}
        self.do(event, fresh)

    def others_store(self, store: int, chain: int, geometry: int, length: int) -> None:
        """Engines of other hosts fill a store."""
        namespace, group, _ = geometry_of(geometry, 1)
        there = self.disk.stores.setdefault(store, set())
        there |= {(namespace, group, key(chain, position)) for position in range(length)}

    @precondition(lambda self: self.shared)
    @rule(number=small, chain=st.integers(0, 2), geometry=st.integers(0, 2), length=st.integers(1, 12))
    def stored_elsewhere(self, number: int, chain: int, geometry: int, length: int) -> None:
        self.others_store(self.shared[number % len(self.shared)], chain, geometry, length)

    @precondition(lambda self: self.shared)
    @rule(number=small, serves=st.sampled_from([True, True, False]))
    def serves(self, number: int, serves: bool) -> None:
        """A store is out of service, or is back."""
        store = self.shared[number % len(self.shared)]
        (self.serving.add if serves else self.serving.discard)(store)
        self.do(Serves(store, serves))

    # --- sessions -----------------------------------------------------------------------------------------------

    @rule(
        instance=st.sampled_from(sorted(WORLDS)),
        geometry=st.integers(0, 2),
        slots=st.integers(1, 3),
        watch=st.booleans(),
        private=st.sampled_from([False, False, True]),
    )
    def arrive(self, instance: str, geometry: int, slots: int, watch: bool = True, private: bool = False) -> None:
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
            self.open_space(engine, space, geometry, slots, watch, private)

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
        self.owners[session] = engine
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
        kind=st.sampled_from(["lose", "populate", "purge", "populate", "close", "die", "populate", "purge"]),
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
        self.overtake(namespace)
        waiting = {record[:3] for event in self.recovering for record in event.records}
        self.unrecovered |= {name for name in waiting if namespace in (b"", name[0])}
        told = [effect.namespace for effect in self.do(ev.Purge(namespace)) if isinstance(effect, ev.Forget)]
        assert [one for one in told if one is not None] == [namespace] * len(self.core.storage.backings)

    def overtake(self, namespace: bytes, old: bool = False) -> None:
        """What was heard is not believed any more; what is on its way from elsewhere goes, but with what is old."""
        self.purges += 1
        self.said.clear()
        self.not_got.clear()
        if not old:
            self.overtaken |= {pair for pair in self.expected().items() if namespace in (b"", pair[0][0])}

    @rule(namespace=st.sampled_from([b"", *NAMESPACES]), older=st.sampled_from([1, 30, 1000]))
    def purge_old(self, namespace: bytes, older: int) -> None:
        """Some of what is stored now may go, and nothing that somebody holds is touched."""
        if self.recovering:
            return  # whether a record is that old is told by its segment
        self.condemned |= {name for name in self.seen if namespace in (b"", name[0])}
        self.purging.add(namespace)
        self.overtake(namespace, old=True)
        self.disk.partial = True
        self.do(ev.Purge(namespace, older))
        self.disk.partial = False

    # --- spaces and credits -------------------------------------------------------------------------------------

    @precondition(lambda self: self.speakers())
    @rule(
        number=small,
        space=st.integers(0, 2),
        geometry=st.integers(0, 3),
        slots=st.integers(0, 8),
        clash=rarely,
        watch=st.booleans(),
        private=st.sampled_from([False, False, False, True]),
    )
    def open(self, number: int, space: int, geometry: int, slots: int, clash: bool, watch: bool, private: bool) -> None:
        engine = self.speaker(number)
        if clash or (space not in engine.spaces and geometry < 3):
            self.open_space(engine, space, geometry, slots, watch, private)

    def open_space(
        self, engine: Engine, space: int, geometry: int, slots: int, watch: bool, private: bool = False
    ) -> None:
        scheduler = engine.scheduler
        assert scheduler is not None
        whose = engine.instance if private else "n"
        namespace, group, shards = geometry_of(geometry, WORLDS[engine.instance], whose)
        about = namespace, group, 2, shards, slots, watch
        event = ev.Open(scheduler.id, space, *about, chain=chained(group), private=private)
        if engine.broken:
            assert said(self.do(event)) == []
            return
        known = self.core.catalogue.find(namespace, group)
        if space in engine.spaces or (known is not None and known.shards != shards):
            self.refused(self.do(event), scheduler.id)
            return
        opened = engine.spaces[space] = Space(namespace, group, shards, slots, watch=watch)
        self.sizes[namespace, group] = opened.size
        if private:
            self.private.add(namespace)
        assert self.do(event)[0] == ev.Opened(scheduler.id, space, self.target(opened), "")

    def close(self, engine: Engine, which: int) -> None:
        at, space = self.some_space(engine, which)
        if space is None or engine.broken:
            return
        space.want, space.watch = 0, False
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
        [before] = space.names([parent])
        for name, slot in zip(space.names(keys), slots, strict=True):
            before, former = name, before
            if space.credits.get(slot.row) != slot:
                expected["stale"] += 1
                continue
            engine.spent.append(space.credits.pop(slot.row))
            known = name in fresh or self.seen.get(name) is not None or self.loading(name)
            reached = not former[2] or {former, name} & (self.seen.keys() | fresh.keys()) or self.loading(former)
            if known:
                expected["duplicates"] += 1
            elif chained(space.group) and not reached:
                expected["unreachable"] += 1
                continue
            else:
                expected["commits"] += 1
            if not known or full:
                fresh.setdefault(name, set()).add(slot.offset)
                self.content[slot.offset] = name
        if not space.want and not space.credits:
            del engine.spaces[at]
        self.do(event, fresh)
        told = ("stale", "duplicates", "commits", "unreachable")
        counted = {what: self.core.counters[what] - counters[what] for what in told}
        if full:  # what gives way for one may be the next
            over = self.core.counters["over_max_objects"] - counters["over_max_objects"]
            assert sum(counted.values()) + over == len(slots)
        else:
            assert counted == {what: expected[what] for what in counted}
        for _ in range(self.diligence):
            if other := [number for number, io in self.disk.flying.items() if not isinstance(io, ev.Read)]:
                self.do(self.disk.finish(min(other)))

    def loading(self, name: Name) -> bool:
        """Whether it is on its way to DRAM: then a store of it is not needed."""
        index = self.core.catalogue.find(*name[:2])
        row = index.get(name[2]) if index is not None else None
        return row is not None and self.core.catalogue.state[row] == State.LOADING

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
