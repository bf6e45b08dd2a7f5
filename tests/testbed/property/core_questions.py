"""What engines ask, and what follows an answer."""

from collections import Counter
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import (
    precondition,
    rule,
)
from testbed.core.fake_disks import Name
from testbed.property.core_model import (
    Asked,
    Engine,
    Look,
    Space,
    said,
    two_by_two,
)
from testbed.property.core_rules import Engines, key, rarely, small

from kvhold.core import events as ev
from kvhold.core.events import Reason
from kvhold.core.rows import State

HERE = (State.RESIDENT, State.LEASED)


class Questions(Engines):
    """Rules about operations."""

    def some_keys(self, space: Space | None, which: int, chain: int, length: int, twist: str) -> list[bytes]:
        known = sorted(name for name in self.seen if space and name[:2] == (space.namespace, space.group))
        cold = [name for name in known if self.seen[name] is None]
        if known and twist != "far":
            chain = known[which * chain % len(known)][2][0]
        if cold and which % 4 and twist != "far":
            chain, position = cold[which % len(cold)][2]
            length = max(length, position + 1)
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
        torn: bool = False,
    ) -> None:
        engine, at, space = self.aim(number, which)
        keys = self.some_keys(space, which, chain, length, twist)
        one = Asked(revision, False, space, space.names(keys) if space else [], skip)
        one.chosen = one.names[skip:]
        event = ev.Query(engine.scheduler.id, op, revision, 7 if space is None else at, skip, b"".join(keys))
        self.ask(engine, replace(event, keys=event.keys + b"!" * torn), one, torn)

    @precondition(lambda self: self.speakers())
    @rule(
        number=small,
        parts=st.lists(st.tuples(small, st.integers(0, 1), st.integers(0, 6)), max_size=3),
        twist=st.sampled_from(["", "", "", "gap", "twice"]),
        op=st.integers(0, 5),
        revision=st.integers(1, 4),
        used=st.lists(st.tuples(small, st.integers(0, 1), st.integers(0, 6)), max_size=2),
        torn=rarely,
    )
    def prepare(
        self,
        number: int,
        parts: list[tuple[int, int, int]],
        twist: str,
        op: int,
        revision: int,
        used: list[tuple[int, int, int]],
        torn: bool,
    ) -> None:
        """Exactly these, of none to three spaces; and the engine has others itself."""
        engine, at, space = self.aim(number, 0)
        named: list[tuple[int, bytes]] = []
        names: list[Name] = []
        demand = 0
        for which, chain, length in parts:
            if named:
                at, space = self.some_space(engine, which)
            keys = self.some_keys(space, which, chain, length, twist if length else "")
            named.append((7 if space is None else at, b"".join(keys)))
            if space is not None:
                names += space.names(keys)
                demand += len(keys) * space.size
        marked: list[tuple[int, bytes]] = []
        mine: list[Name] = []
        for which, chain, length in used:
            at, space = self.some_space(engine, which)
            keys = self.some_keys(space, which, chain, length, twist if length else "")
            marked.append((7 if space is None else at, b"".join(keys) + b"!" * torn))
            mine += space.names(keys) if space is not None else []
        spaces = [engine.spaces.get(number) for number, _ in (*named, *marked)]
        # A question about nothing at all is one all the same: it names no space that is not there.
        one = Asked(revision, True, spaces[0] if spaces else None, names, chosen=names)
        event = ev.Prepare(engine.scheduler.id, op, revision, tuple(named), tuple(marked))
        calm, clock = not self.core.has_work, self.core.catalogue.recency.clock.count
        self.ask(engine, event, one, torn and bool(marked), demand, nothing=not spaces)
        if calm and number % 2 and (engine.asked.get(op) is one or one.answered) and not one.crowded:
            self.drain()
            index_of = self.core.catalogue.find
            found = [(i, i.get(name[2])) for name in mine if (i := index_of(*name[:2])) is not None]
            rows = [row for _, row in found if row is not None]
            stamps = [self.core.catalogue.stamp[row] for row in rows if self.core.catalogue.state[row] in HERE]
            assert all(stamp > clock for stamp in stamps), "the engine has it, and it ages"

    def ask(
        self,
        engine: Engine,
        event: ev.Query | ev.Prepare,
        one: Asked,
        torn: bool = False,
        demand: int = 0,
        nothing: bool = False,
    ) -> None:
        """Put a question, of which the model knows whether it is taken, refused, ignored or over budget at once."""
        op, former = event.op, engine.asked.get(event.op)
        detached = [ev.Answer(event.session, op, event.revision, 0, b"", Reason.DETACHED)]
        if engine.broken or not engine.ready:
            assert said(self.do(event)) == detached
        elif torn and one.space is not None:
            self.refused(self.do(event), event.session)
        elif former is not None and former.revision >= event.revision:
            counted = self.core.counters["stale"]
            assert said(self.do(event)) == []
            assert self.core.counters["stale"] == counted + 1
        elif former is not None and former.started is not None:
            self.refused(self.do(event), event.session)
        elif one.space is None and not nothing:
            self.over(engine, op)
            engine.looks.pop(op, None)
            assert said(self.do(event)) == detached
        else:
            replaced = former is not None or op in engine.looks
            pending = engine.pending - (op in engine.looks or (former is not None and former.answered is None))
            crowded = pending >= self.limits.queries
            crowded |= len(engine.asked) + len(engine.looks) - replaced >= self.limits.operations
            engine.looks.pop(op, None)
            self.over(engine, op)
            share = min(self.limits.engine_share, self.limits.prepared_share)
            large = demand > share * self.core.arena.total
            engine.asked[op] = one
            if crowded:
                one.crowded = True
            answers = [effect for effect in self.do(event) if isinstance(effect, ev.Answer) and effect.op == op]
            if crowded:
                assert [(a.resident, a.reason) for a in answers] == [(0, Reason.BUDGET)]
            elif not replaced:
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

    @precondition(lambda self: self.shared and self.speakers())
    @rule(number=small, which=small, chain=st.integers(0, 2), length=st.integers(1, 9), twice=st.booleans())
    def elsewhere(self, number: int, which: int, chain: int, length: int, twice: bool) -> None:
        """A prompt comes that other hosts have computed; they say so at once, and what they have comes later."""
        engine = self.speaker(number)
        op = next((op for op in range(6) if op not in engine.asked), 5)
        _, space = self.some_space(engine, which)
        if space is None:
            return
        there = self.disk.stores.setdefault(self.shared[number % len(self.shared)], set())
        there |= {(space.namespace, space.group, key(chain, position)) for position in range(length)}
        for who in (number, number + 1)[: 1 + twice]:
            if self.speakers():
                self.query(who, which, chain, length, 0, "far", op, 4)
        for io in [number for number, io in self.disk.flying.items() if isinstance(io, ev.Ask)]:
            self.do(self.disk.finish(io))
            self.drain()

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
        engine.looks[99] = Look(names)  # if it is to be asked for
        effects = self.do(event)
        while not any(isinstance(effect, ev.Residency) and effect.op == 99 for effect in effects):
            if not self.core.has_work:
                hungry = True  # others go on, too
            effects = effects + (self.do(None) if self.core.has_work else self.do(self.disk.finish(self.an_ask())))
        engine.looks.pop(99, None)
        here = [*map(list, (catalogue.stamp, catalogue.older, catalogue.leases, catalogue.state, catalogue.bytes))]
        assert hungry or here == before or said(effects) != effects
        (residency,) = [effect for effect in effects if isinstance(effect, ev.Residency) and effect.op == 99]
        tiers = [[0 if n not in seen else 1 if seen[n] is not None else 2 for n in part] for part in names]
        expected = tuple(bytes(part) if ok else b"" for part, ok in zip(tiers, known, strict=True))
        found = tuple(part.replace(b"\3", b"\0") for part in residency.tiers)
        assert replace(residency, tiers=found) == ev.Residency(engine.scheduler.id, 99, expected) or seen != self.seen
        assert self.shared or found == residency.tiers
        answers = any(isinstance(effect, ev.Answer) for effect in effects)  # of others, which have heard of it, too
        assert self.core.counters["keys_asked"] == counters["keys_asked"] or (answers and self.shared)

    def an_ask(self) -> int:
        return min(number for number, io in self.disk.flying.items() if isinstance(io, ev.Ask))

    @precondition(lambda self: self.shared and self.speakers())
    @rule(
        number=small,
        parts=st.lists(st.tuples(small, st.integers(0, 2), st.integers(0, 12)), min_size=1, max_size=3),
        op=st.integers(0, 5),
    )
    def look(self, number: int, parts: list[tuple[int, int, int]], op: int) -> None:
        """A lookup of which nobody waits for the answer; what else has its name goes on, or takes its place."""
        engine = self.speaker(number)
        spaces = [self.some_space(engine, which) for which, _, _ in parts]
        if any(space is None for _, space in spaces):
            return
        names = [
            space.names([key(chain, position) for position in range(length)])
            for (_, space), (_, chain, length) in zip(spaces, parts, strict=True)
            if space is not None
        ]
        packed = tuple((at, b"".join(name[2] for name in part)) for (at, _), part in zip(spaces, names, strict=True))
        free = not engine.broken and engine.ready and op not in engine.asked
        self.drain()  # what nobody else can have is answered without an operation, whatever comes after it
        crowded = engine.pending - (op in engine.looks) >= self.limits.queries
        crowded |= len(engine.asked) + len(engine.looks) - (op in engine.looks) >= self.limits.operations
        if not engine.broken:
            engine.looks.pop(op, None)
        if free and not crowded:
            engine.looks[op] = Look(names)
        self.do(ev.Lookup(engine.scheduler.id, op, packed))
        if not engine.broken and op not in self.core.sessions[engine.scheduler.id].attachment.operations:
            engine.looks.pop(op, None)  # it is answered with what is known here
        if crowded:
            self.drain()
            assert op not in engine.looks or not free, "it waits with too many"

    @precondition(lambda self: self.speakers())
    @rule(number=small, which=small, meanwhile=st.lists(st.sampled_from(["io", "store", "step"]), max_size=3))
    def listed(self, number: int, which: int, meanwhile: list[str]) -> None:
        """What can be found all the while is in a listing, and once unless it was given another row."""
        engine = self.speaker(number)
        _, space = self.some_space(engine, which)
        if space is None:
            return
        self.steady = {name for name in self.seen if name[:2] == (space.namespace, space.group)}
        self.ever = set(self.seen)
        moves, found = self.core.catalogue.moves, list[Name]()
        cursor, first = 0, True
        while first or cursor:
            effects = self.do(ev.List(10**6, space.namespace, space.group, cursor))
            while not (told := [effect for effect in effects if isinstance(effect, ev.Listed)]):
                effects = self.do(None)
            names = space.names(two_by_two(told[0].keys))
            assert len(names) == len(told[0].tiers) <= ev.MAX_LISTED
            found += names
            cursor, first = told[0].cursor, False
            what = meanwhile.pop() if meanwhile else ""
            if what == "io" and self.disk.flying:
                self.do(self.disk.finish(min(self.disk.flying)))
            elif what == "store":
                self.store(number, which, number % 2, 12)
            elif what == "step":
                self.do(None)
        counted = Counter(found)
        assert self.steady <= set(found) <= self.ever
        assert self.core.catalogue.moves != moves or all(counted[name] == 1 for name in self.steady)

    @precondition(lambda self: self.speakers())
    @rule(number=small, which=small, op=st.integers(0, 5), torn=rarely)
    def cut(self, number: int, which: int, op: int, torn: bool) -> None:
        """It is only told of."""
        engine = self.speaker(number)
        at, space = self.some_space(engine, which)
        event = ev.Cut(engine.scheduler.id, op, 7 if space is None else at, b"k" if torn else b"kk", 3)
        if torn and space is not None and not engine.broken:
            self.refused(self.do(event), engine.scheduler.id)
        else:
            assert said(self.do(event)) == []

    @precondition(lambda self: any(engine.asked for engine in self.speakers()))
    @rule(number=small, which=small, older=rarely)
    def answer_now(self, number: int, which: int, older: bool) -> None:
        """What waits for reads is answered in its engine's next turn."""
        holders = [engine for engine in self.speakers() if engine.asked]
        engine = holders[number % len(holders)]
        op = sorted(engine.asked)[which % len(engine.asked)]
        one = engine.asked[op]
        waits = (one.waits or one.asks) and one.answered is None and not older and not engine.broken
        assert said(self.do(ev.AnswerNow(engine.scheduler.id, op, one.revision - older))) == []
        if waits:
            self.drain()
            assert one.answered is not None

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
        self.do(ev.RestoreFailed(engine.scheduler.id, op))

    @precondition(lambda self: self.speakers() and not self.core.has_work)
    @rule(number=small, op=st.one_of(st.none(), st.integers(1, 5)))
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
                    assert f"/{number} of instance {engine.instance}" in text

    @precondition(lambda self: self.core.has_work)
    @rule(slices=st.integers(1, 4))
    def step(self, slices: int) -> None:
        for _ in range(slices):
            self.do(None)
