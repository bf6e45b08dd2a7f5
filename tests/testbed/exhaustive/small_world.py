"""A world small enough to be searched: two engines, three objects, a few slots, one log, and what each owner was told.

It can do every move that is possible in a state, checks all that must hold there, and gives the state a name that is
the same for all states that differ in nothing that matters.
"""

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from typing import Any

from testbed.core.core_world import Slot, audit, known, offsets_of, pack, segment_of, slots_of
from testbed.core.fake_disks import FakeDisk, Name
from testbed.core.second_backing import StoreBacking, StoreOpened
from testbed.core.shared_store import opened

from kvhold.core import Core
from kvhold.core import events as ev
from kvhold.core.asking import mark_of
from kvhold.core.backing import Io
from kvhold.core.events import Effect, Gone, Role
from kvhold.core.eviction import POLICIES
from kvhold.core.history import History
from kvhold.core.limits import Limits
from kvhold.core.log import events as lev
from kvhold.core.log.device import LogIo
from kvhold.core.log.segments import HEADER, Segment
from kvhold.core.remote.backing import RemoteBacking
from kvhold.core.rows import State
from kvhold.core.sessions import Attachment, Operation, Phase

UNIT = 4096
A0, A1, B0 = b"a\0", b"a\1", b"b\2"
NAMESPACES = (b"A", b"B")
"""By space number. A holds the chain of A0 and A1, B holds B0."""
NAMES: dict[bytes, Name] = {A0: (b"A", 0, A0), A1: (b"A", 0, A1), B0: (b"B", 0, B0)}
OP = 7
STORE, SHARED = 8, 9
MOST_REVISIONS = 2
MOST_GENERATIONS = 2

Move = tuple[Any, ...]


@dataclass(frozen=True)
class Setting:
    """One small world. ``wants`` are the credits that each engine asks for by space; None is a space not opened yet."""

    name: str
    pages: int
    page: int
    wants: tuple[int | None, ...]
    sizes: tuple[int, ...] = (1, 1)
    segments: int = 0
    records: int = 1
    """Records that a segment has room for."""
    store: bool = False
    """There is a store that finds objects by their name."""
    shared: tuple[bytes, ...] | None = None
    """There is a store that others fill, too, and this is what they have put there."""
    found: tuple[bytes, ...] = ()
    """What the log has at the start: one object to a segment."""
    present: bool = True
    """Both engines are there already."""
    stored: tuple[bytes, ...] = ()
    deaths: bool = True
    private: bool = False
    """Each engine has a namespace of its own, which nobody else comes to know: 0 has A, 1 has B."""
    policy: str = "lru"
    """A name of :data:`kvhold.core.eviction.POLICIES`."""
    limits: Limits = field(default_factory=lambda: LIMITS)

    def opens(self, engine: int) -> list[int]:
        """The spaces that an engine has open or may open."""
        return [engine] if self.private else list(range(len(self.wants)))


LIMITS = Limits(
    prepared_share=0.75,
    engine_share=0.75,
    credit_share=1.0,
    read_bytes=UNIT,
    write_batch=HEADER + UNIT,
    answer_ns=2,
    hung_ns=2,
    lease_ns=5,
    hear_ns=2,
    stall_ns=11,
    retry_ns=3,
    ask_ns=2,
    ask_batch=1,
    ask_keys=4,
    asks=2,
    heard=8,
    there_ns=4,
    absent_ns=2,
    not_got_ns=6,
    get_ns=3,
    proved_ns=4,
)


@dataclass
class Asked:
    """One revision as its owner knows it."""

    revision: int
    exact: bool
    names: list[Name]
    skip: int = 0
    phase: Phase = Phase.MATCHING
    pieces: list[tuple[Name, int, int]] = field(default_factory=list)  # name, offset, size
    spoiled: bool = False
    ends: int = 0  # when it is over, if it was answered, is not started by then, and its owner is heard


@dataclass
class Owner:
    """One generation of one engine."""

    engine: int
    sessions: dict[int, Role] = field(default_factory=dict)  # not proved gone
    closed: set[int] = field(default_factory=set)
    mapped: bool = False
    broken: bool = False
    credits: dict[int, list[Slot]] = field(default_factory=dict)
    spent: Slot | None = None
    asked: Asked | None = None
    looks: bool = False  # a lookup of it is not answered
    replaced: bool = False  # and another question has taken its place
    announced: set[Name] = field(default_factory=set)  # told to be found, and not yet told to be gone

    @property
    def scheduler(self) -> int | None:
        return next((one for one, role in self.sessions.items() if role is Role.SCHEDULER), None)

    def has(self, role: Role) -> bool:
        return role in self.sessions.values()


class SmallWorld:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.now = 1
        total = setting.pages * setting.page * UNIT
        self.core = Core(setting.page * UNIT, total, setting.limits, POLICIES[setting.policy])
        self.core.common.history = self.core.catalogue.history = History(1)  # it decides nothing, and is large to copy
        self.content: dict[int, Name] = {}
        self.disk = FakeDisk(self.content)
        self.owners: list[Owner] = []
        self.generations = [0, 0]
        self.condemned: set[Name] = set()
        self.behind: frozenset[int] = frozenset()  # sessions that have said something which is not handled yet
        self.answered = 0
        self.next_session = 1
        self.refusals = 0
        self._tell(ev.Populated(setting.pages))
        if setting.segments:
            self._open_log()
        if setting.store:
            self._tell(StoreOpened(STORE))
        if setting.shared is not None:
            self.disk.stores[SHARED] = {NAMES[key] for key in setting.shared}
            for event in opened(SHARED):
                self._tell(event)
        if setting.present:
            for engine in (0, 1):
                self.apply(("join", engine, Role.SCHEDULER))
                self.apply(("join", engine, Role.WORKER))
                self.apply(("map", engine))
                for space in setting.opens(engine):
                    if setting.wants[space] is not None:
                        self.apply(("open", engine, space))
        for key in setting.stored:
            self.run()
            self.apply(("commit", 0, (key,), "right"))
            self.run()
            while self.disk.flying:
                self.apply(("done", min(self.disk.flying), ()))
                self.run()
            self._sure(0).spent = None

    def _open_log(self) -> None:
        setting = self.setting
        size = UNIT * (2 + setting.records * (1 + max(setting.sizes)))
        self._tell(lev.LogOpened(0, setting.segments, size))
        lives = tuple((number, number + 1) for number in range(len(setting.found)))
        self._tell(lev.Segments(0, tuple((*life, 0) for life in lives)))
        for (number, seq), key in reversed(list(zip(lives, setting.found, strict=True))):
            name = NAMES[key]
            self.disk.adopt(0, number, seq, [(name, self.size_of(name))], room=size)
            shards = (self.size_of(name),)
            self._tell(lev.Recovered(0, number, ((*name, shards, HEADER),)))
        self._tell(lev.LogReady(0))

    def size_of(self, name: Name) -> int:
        return UNIT * self.setting.sizes[NAMESPACES.index(name[0])]

    # --- copies -------------------------------------------------------------------------------------------------

    def dump(self) -> bytes:
        assert not self.core.has_work
        return pickle.dumps(self, pickle.HIGHEST_PROTOCOL)

    @staticmethod
    def load(data: bytes) -> "SmallWorld":
        world: SmallWorld = pickle.loads(data)
        return world

    # --- what is possible ---------------------------------------------------------------------------------------

    def current(self, engine: int) -> Owner | None:
        return next((one for one in self.owners if one.engine == engine and not one.broken), None)

    def moves(self) -> Iterator[Move]:
        setting = self.setting
        for engine in (0, 1):
            owner = self.current(engine)
            if owner is None:
                if self.generations[engine] < MOST_GENERATIONS:
                    yield from (("join", engine, role) for role in Role)
                continue
            for role in Role:
                if not owner.has(role):
                    yield "join", engine, role
            if owner.has(Role.WORKER) and not owner.mapped:
                yield "map", engine
            if owner.scheduler is not None:
                yield from self._spoken(engine, owner)
        if setting.deaths:
            for number, owner in enumerate(self.owners):
                for session, role in owner.sessions.items():
                    if session not in owner.closed:
                        yield "left", number, role, Gone.UNKNOWN
                        if role is Role.SCHEDULER:
                            yield "left", number, role, Gone.SAID
                    yield "left", number, role, Gone.DEAD
        yield "purge", b""
        yield "purge", b"A"
        if self.core.next_deadline is not None:
            yield ("tick",)
            for engine in (0, 1):
                owner = self.current(engine)
                if owner is not None and owner.asked is not None and owner.asked.phase is Phase.ANSWERED:
                    yield "tick", engine
        for io, effect in self.disk.flying.items():
            yield "done", io, ()
            if not isinstance(effect, ev.Forget):
                yield "done", io, (0,)
            if isinstance(effect, ev.Ask):
                yield "lost", io
        if self.disk.answered:
            yield ("done again",)

    def _spoken(self, engine: int, owner: Owner) -> Iterator[Move]:
        for space in self.setting.opens(engine):
            if space not in owner.credits:
                yield "open", engine, space
            elif self.setting.wants[space] is None or self.setting.private:
                yield "close", engine, space
        for space, slots in owner.credits.items():
            if slots:
                for key in (A0, A1) if space == 0 else (B0,):
                    yield "commit", engine, (key,), "right"
                if len(slots) > 1 and space == 0:
                    yield "commit", engine, (A0, A1), "right"
                yield "commit", engine, (A0 if space == 0 else B0,), "epoch"
                yield "commit", engine, (A0 if space == 0 else B0,), "shards"
                yield "return", engine, space, "right"
                yield "return", engine, space, "epoch"
        if 0 in owner.credits and owner.spent is not None:
            yield "commit", engine, (A0,), "spent"
            yield "return", engine, 0, "spent"
        other = self.current(1 - engine)
        if other is not None and other.credits.get(0) and 0 in owner.credits:
            yield "commit", engine, (A0,), "foreign"
            yield "return", engine, 0, "foreign"
        asked = owner.asked
        if asked is None or (asked.revision < MOST_REVISIONS and asked.phase is not Phase.STARTED):
            yield "query", engine, (A0, A1), 0
            yield "query", engine, (A0, A1), 1
            yield "query", engine, (A0,), 0
            yield "prepare", engine, (A1,)
            if 1 in owner.credits:
                yield "prepare", engine, (A0, B0)
        if asked is None and self.setting.shared is not None and (owner.replaced or not owner.looks):
            yield "lookup", engine
        if asked is not None:
            yield "again", engine
            yield "release", engine, 0
            yield "release", engine, 1
            if asked.phase is Phase.ANSWERED:
                yield "started", engine
            if asked.phase in (Phase.ANSWERED, Phase.STARTED) and not asked.spoiled:
                yield "spoiled", engine

    # --- moves --------------------------------------------------------------------------------------------------

    def apply(self, move: Move) -> list[Effect]:
        kind, *what = move
        method = getattr(self, "_" + kind.replace(" ", "_"))
        refusals = self.refusals
        effects: list[Effect] = method(*what)
        expected = kind in ("again", "query", "open") or (kind == "commit" and what[2] == "shards")
        assert self.refusals == refusals or expected, f"{move} was refused"
        return effects

    def run(self) -> None:
        for _ in range(1000):
            if not self.core.has_work:
                return
            self._step()
        raise AssertionError("work without end")

    def _tell(self, event: ev.Event) -> list[Effect]:
        before, forgotten = self.known(), self.core.counters["forgotten"]
        effects = self._announced(event, before, self._told(self.core.handle(event, self.now)))
        self._forgot(before, forgotten)
        return effects

    def _step(self) -> list[Effect]:
        before, forgotten = self.known(), self.core.counters["forgotten"]
        effects = self._announced(None, before, self._told(self.core.step()))
        self._forgot(before, forgotten)
        return effects

    def _forgot(self, before: dict[Name, int | None], forgotten: int) -> None:
        """What is private is forgotten when nobody has it open, and nothing else ever is."""
        gone = {name for name in self.left() if name in before} - self.known().keys()
        assert self.core.counters["forgotten"] - forgotten <= len(gone), "somebody has it open"

    def left(self) -> set[Name]:
        """What is private and of no use to anybody: who had it open is gone for certain, or has closed it."""
        opened = {space for owner in self.owners for space in owner.credits}
        lost = [name for name in NAMES.values() if NAMESPACES.index(name[0]) not in opened]
        return set(lost) if self.setting.private else set()

    def _announced(self, event: ev.Event | None, before: dict[Name, int | None], effects: list[Effect]) -> list[Effect]:
        """All engines watch all that they have open: each was told what went, and of its commits what is there."""
        after, committed = self.known(), set[Name]()
        if isinstance(event, ev.Commit) and not any(isinstance(effect, ev.Refuse) for effect in effects):
            committed = {NAMES[event.keys[at : at + 2]] for at in range(0, len(event.keys), 2)}
        elif isinstance(event, ev.Done):  # what has come from elsewhere
            committed = set(after.keys() - before.keys())
        for owner in self.owners:
            mine = isinstance(event, ev.Done) or (isinstance(event, ev.Commit) and event.session == owner.scheduler)
            should, removed = owner.announced | (committed if mine else set()), list[Name]()
            for effect in effects:
                if isinstance(effect, ev.Added | ev.Removed) and effect.session == owner.scheduler:
                    assert effect.space in owner.credits, "it is closed"
                    assert len(effect.keys) == 2, "more than a batch"
                    if isinstance(effect, ev.Added):
                        assert mine
                        owner.announced.add(NAMES[effect.keys])
                    else:
                        removed.append(NAMES[effect.keys])
                        owner.announced.discard(NAMES[effect.keys])
            if owner.broken or owner.scheduler is None:
                continue
            opened = {NAMESPACES[space] for space in owner.credits}
            owner.announced = {name for name in owner.announced if name[0] in opened}
            assert owner.announced == {name for name in should & after.keys() if name[0] in opened}
            gone = {name for name in before.keys() - after.keys() if name[0] in opened}
            assert gone <= set(removed) <= (gone | committed) - after.keys()
            assert len(removed) == len(set(removed)), "it was told twice"
        return effects

    def _join(self, engine: int, role: Role) -> list[Effect]:
        owner = self.current(engine)
        session, self.next_session = self.next_session, self.next_session + 1
        if owner is None:
            owner = Owner(engine)
        effects = self.core.handle(ev.Joined(session, role, f"engine {engine}", 0, 1), self.now)
        if isinstance(effects[0], ev.Accept):
            owner.sessions[session] = role
            if owner not in self.owners:
                self.owners.append(owner)
                self.generations[engine] += 1
        else:
            self.refusals -= 1  # too much is orphaned: a lawful answer
        return self._told(effects)

    def _map(self, engine: int) -> list[Effect]:
        owner = self._sure(engine)
        owner.mapped = True
        return self._tell(ev.Mapped(next(one for one, role in owner.sessions.items() if role is Role.WORKER)))

    def _left(self, number: int, role: Role, how: Gone) -> list[Effect]:
        owner = self.owners[number]
        session = next(one for one, its in owner.sessions.items() if its is role)
        owner.broken = True
        if how is Gone.UNKNOWN:
            owner.closed.add(session)
        else:
            owner.closed.discard(session)
            del owner.sessions[session]
        if not owner.sessions:
            self.owners.remove(owner)
        return self._tell(ev.Left(session, how))

    def _sure(self, engine: int) -> Owner:
        owner = self.current(engine)
        assert owner is not None
        return owner

    def _open(self, engine: int, space: int) -> list[Effect]:
        owner = self._sure(engine)
        assert owner.scheduler is not None
        shards = (UNIT * self.setting.sizes[space],)
        want = self.setting.wants[space]
        refusals = self.refusals
        owner.credits[space] = []
        slots = 1 if want is None else want
        about = NAMESPACES[space], 0, 2, shards, slots
        effects = self._tell(
            ev.Open(owner.scheduler, space, *about, watch=True, chain=True, private=self.setting.private)
        )
        if self.refusals > refusals:  # it was not closed altogether yet
            del owner.credits[space]
        return effects

    def _close(self, engine: int, space: int) -> list[Effect]:
        """A client closes what it returned all credits of, or is about to."""
        owner = self._sure(engine)
        assert owner.scheduler is not None
        slots = owner.credits.pop(space)
        effects = self._tell(ev.Close(owner.scheduler, space))
        return effects + (self._tell(ev.Return(owner.scheduler, *pack(slots))) if slots else [])

    def _slots(self, engine: int, space: int, count: int, lie: str) -> list[Slot]:
        owner = self._sure(engine)
        match lie:
            case "right":
                taken, owner.credits[space][:count] = owner.credits[space][:count], []
                owner.spent = taken[-1]
                return taken
            case "spent":
                assert owner.spent is not None
                return [owner.spent]
            case "foreign":
                return [self._sure(1 - engine).credits[0][0]]
            case "epoch":
                slot = owner.credits[space][0]
                return [Slot(slot.row, slot.offset, slot.epoch - 1)]
        return owner.credits[space][:count]

    def _commit(self, engine: int, keys: tuple[bytes, ...], lie: str) -> list[Effect]:
        owner = self._sure(engine)
        assert owner.scheduler is not None
        space = 1 if B0 in keys else 0
        slots = self._slots(engine, space, len(keys), lie)
        known, expected = self.known(), self.expected()
        if lie == "right":
            for key, slot in zip(keys, slots, strict=True):
                self.content[slot.offset] = NAMES[key]
                self.condemned.discard(NAMES[key])
        shards = (UNIT * self.setting.sizes[space],) if lie != "shards" else ()
        parent = A0 if keys == (A1,) else b""
        effects = self._tell(ev.Commit(owner.scheduler, space, parent, 0, b"".join(keys), *pack(slots), shards))
        if keys == (A1,) and not {NAMES[A0], NAMES[A1]} & (known.keys() | expected):
            assert NAMES[A1] not in self.known(), "nobody can reach it"
        if lie != "right":
            self._nothing_happened(known, effects)
            assert (lie == "shards") == any(isinstance(effect, ev.Refuse) for effect in effects)
        return effects

    def _return(self, engine: int, space: int, lie: str) -> list[Effect]:
        owner = self._sure(engine)
        assert owner.scheduler is not None
        slots = self._slots(engine, space, 1, lie)
        before = self.core.counters["returns"]
        effects = self._tell(ev.Return(owner.scheduler, *pack(slots)))
        assert self.core.counters["returns"] - before == (lie == "right")
        return effects

    def _nothing_happened(self, known: dict[Name, int | None], effects: list[Effect]) -> None:
        """What is not to be believed changes no object; it may only be the occasion to do what had to wait."""
        if not any(isinstance(effect, ev.Grant) for effect in effects):
            assert self.known() == known

    def _ask(self, engine: int, asked: Asked) -> tuple[int, int]:
        owner = self._sure(engine)
        assert owner.scheduler is not None
        owner.asked = asked
        owner.replaced = owner.looks
        return owner.scheduler, asked.revision

    def _query(self, engine: int, keys: tuple[bytes, ...], skip: int) -> list[Effect]:
        former = self._sure(engine).asked
        revision = 1 if former is None else former.revision + 1
        session, _ = self._ask(engine, Asked(revision, False, [NAMES[key] for key in keys], skip))
        return self._asking(engine, ev.Query(session, OP, revision, 0, skip, b"".join(keys)))

    def _prepare(self, engine: int, keys: tuple[bytes, ...]) -> list[Effect]:
        former = self._sure(engine).asked
        revision = 1 if former is None else former.revision + 1
        session, _ = self._ask(engine, Asked(revision, True, [NAMES[key] for key in keys]))
        parts = tuple((NAMESPACES.index(NAMES[key][0]), key) for key in keys)
        used = ((0, A0),) if keys == (A1,) else ()
        return self._asking(engine, ev.Prepare(session, OP, revision, parts, used))

    def _lookup(self, engine: int) -> list[Effect]:
        owner = self._sure(engine)
        assert owner.scheduler is not None
        owner.looks, owner.replaced = True, False
        parts = ((0, A0 + A1), (1, B0)) if 1 in owner.credits else ((0, A0 + A1),)
        return self._tell(ev.Lookup(owner.scheduler, OP, parts))

    def _asking(self, engine: int, event: ev.Query | ev.Prepare) -> list[Effect]:
        refusals = self.refusals
        effects = self._tell(event)
        assert self.refusals == refusals
        return effects

    def _again(self, engine: int) -> list[Effect]:
        """The same revision once more, as after a confusion: it is not asked twice, nor while it is being restored."""
        owner = self._sure(engine)
        assert owner.scheduler is not None
        assert owner.asked is not None
        started = owner.asked.phase is Phase.STARTED
        revision = owner.asked.revision + started
        pieces = list(owner.asked.pieces)
        effects = self._tell(ev.Query(owner.scheduler, OP, revision, 0, 0, A0))
        assert started == any(isinstance(effect, ev.Refuse) for effect in effects)
        assert owner.asked is not None
        assert owner.asked.pieces == pieces
        return effects

    def _release(self, engine: int, back: int) -> list[Effect]:
        owner = self._sure(engine)
        assert owner.scheduler is not None
        assert owner.asked is not None
        revision = owner.asked.revision - back
        if not back:
            owner.asked = None
        return self._tell(ev.Release(owner.scheduler, ((OP, revision),)))

    def _started(self, engine: int) -> list[Effect]:
        owner = self._sure(engine)
        assert owner.scheduler is not None
        assert owner.asked is not None
        owner.asked.phase = Phase.STARTED
        return self._tell(ev.Started(owner.scheduler, (OP,)))

    def _spoiled(self, engine: int) -> list[Effect]:
        owner = self._sure(engine)
        assert owner.scheduler is not None
        assert owner.asked is not None
        owner.asked.spoiled = True
        return self._tell(ev.RestoreFailed(owner.scheduler, OP))

    def _purge(self, namespace: bytes) -> list[Effect]:
        self.condemned |= {name for name in self.known().keys() | self.expected() if namespace in (b"", name[0])}
        return self._tell(ev.Purge(namespace))

    def _tick(self, *behind: int) -> list[Effect]:
        """The next deadline passes; engines that are ``behind`` have said something that is not handled yet."""
        deadline = self.core.next_deadline
        assert deadline is not None
        self.now = max(self.now, deadline)
        before = self._timed()
        owners = [self._sure(engine) for engine in behind]
        self.behind = frozenset(owner.scheduler for owner in owners if owner.scheduler is not None)
        effects = self._tell(ev.Tick(self.behind))
        self.behind = frozenset()
        assert self._timed() < before or self.core.next_deadline != deadline, (
            "a deadline passed, and nothing came of it"
        )
        for owner in self.owners:
            asked = owner.asked
            if asked is None or asked.phase is not Phase.ANSWERED or owner.broken:
                continue
            if owner in owners and asked.ends <= self.now:
                asked.ends = self.now + self.setting.limits.hear_ns
            assert asked.ends > self.now, "a lease outlives its time, and nobody is behind"
        return effects

    def _timed(self) -> int:
        return sum(len(timer._begun) for timer in self.timers)

    @property
    def timers(self) -> tuple[Any, ...]:
        ops = self.core.operations
        return ops._answers, ops._leases, ops._unheard, ops._restores, self.core.storage.asking._begun

    def _done(self, io: int, failing: tuple[int, ...]) -> list[Effect]:
        return self._tell(self.disk.finish(io, failing))

    def _lost(self, io: int) -> list[Effect]:
        """A store could not be asked."""
        self.disk.finish(io)
        return self._tell(ev.Found(io, failed=True))

    def _done_again(self) -> list[Effect]:
        stale, known = self.core.counters["stale_io"], self.known()
        effects = self._tell(ev.Done(self.disk.answered[-1]))
        assert self.core.counters["stale_io"] == stale + 1
        self._nothing_happened(known, effects)
        return effects

    # --- what is told -------------------------------------------------------------------------------------------

    def _told(self, effects: list[Effect]) -> list[Effect]:
        for effect in effects:
            match effect:
                case ev.Grant():
                    self._granted(effect)
                case ev.Answer():
                    self._answer(effect)
                case ev.Stalled():  # this is for the operator: it may be of an engine that was lost
                    mine = [one.asked for one in self.owners if one.scheduler == effect.session]
                    assert all(asked is not None and asked.phase is Phase.STARTED for asked in mine)
                case ev.Waiting() | ev.Expired():
                    asked = self._asker(effect).asked
                    assert asked is not None
                    if isinstance(effect, ev.Waiting):
                        before = (Phase.MATCHING, Phase.ASKING) if effect.objects else (Phase.MATCHING,)
                        assert effect.revision == asked.revision
                        assert asked.phase in before
                        asked.phase = Phase.WAITING if effect.objects else Phase.ASKING
                    else:
                        assert (effect.revision, asked.phase) == (asked.revision, Phase.ANSWERED), "it was in use"
                        assert effect.session not in self.behind, "its owner was not heard"
                        self._asker(effect).asked = None
                case ev.Residency():
                    owner = self._asker(effect)
                    assert owner.looks, "it was answered already"
                    owner.looks = owner.replaced = False
                case ev.Ask():
                    names = {*effect.names}
                    assert names.isdisjoint(self.known()), "it is here"
                    others = [io for io in self.disk.flying.values() if isinstance(io, ev.Ask)]
                    assert all(names.isdisjoint(io.names) for io in others), "it is being asked for"
                    self.disk.take(effect)
                case ev.Write() | ev.Read() | ev.Forget() | lev.Reuse() | lev.Seal():
                    self.disk.take(effect)
                case ev.Cancel():
                    read = self.disk.flying[effect.io]
                    assert isinstance(read, ev.Read)
                    slots = self.slots()
                    holds = [self.core.catalogue.leases[slots[stored.offset]] for stored in read.objects]
                    assert set(holds) == {1}, "somebody else waits for it"
                    self.disk.take(effect)
                case ev.Refuse():
                    self.refusals += 1
        return effects

    def _asker(self, effect: ev.Grant | ev.Answer | ev.Waiting | ev.Expired | ev.Residency) -> Owner:
        """The living owner that is told this."""
        return next(one for one in self.owners if one.scheduler == effect.session and not one.broken)

    def _granted(self, grant: ev.Grant) -> None:
        owner = self._asker(grant)
        for slot in slots_of(grant):
            size = UNIT * self.setting.sizes[grant.space]
            for offset, length in [*self.held(), *self.disk.extents]:
                assert slot.offset + size <= offset or offset + length <= slot.offset, "granted under its owner"
            for at in range(slot.offset, slot.offset + size, UNIT):
                self.content.pop(at, None)  # its new owner may write at once
            owner.credits[grant.space].append(slot)

    def _answer(self, answer: ev.Answer) -> None:
        owner = self._asker(answer)
        asked = owner.asked
        assert asked is not None
        assert (answer.op, answer.revision) == (OP, asked.revision), "the answer of another revision"
        assert asked.phase < Phase.ANSWERED, "it was answered already"
        offsets = offsets_of(answer)
        assert 0 <= answer.resident <= len(asked.names)
        if asked.exact:
            assert answer.resident in (0, len(asked.names)), "all or nothing"
        assert bool(answer.reason) == (answer.resident < len(asked.names))
        names = asked.names[asked.skip : answer.resident]
        assert len(offsets) == len(names)
        asked.phase, asked.ends = Phase.ANSWERED, self.now + self.setting.limits.lease_ns
        asked.pieces = [(name, at, self.size_of(name)) for name, at in zip(names, offsets, strict=True)]
        self.answered += 1
        for name, at, _ in asked.pieces:
            assert self.content.get(at) == name, "a lease of something else"
        if not offsets:
            owner.asked = None

    # --- what must hold -----------------------------------------------------------------------------------------

    def held(self) -> list[tuple[int, int]]:
        """(offset, size) of all that anybody who is not proved gone may touch."""
        return self.credits() + [piece[1:] for one in self.owners if one.asked for piece in one.asked.pieces]

    def credits(self) -> list[tuple[int, int]]:
        sizes = self.setting.sizes
        return [
            (slot.offset, UNIT * sizes[space])
            for owner in self.owners
            for space, slots in owner.credits.items()
            for slot in slots
        ]

    def known(self) -> dict[Name, int | None]:
        """What can be found, and where in the arena if it can be read there."""
        catalogue = self.core.catalogue
        here = (State.RESIDENT, State.LEASED)
        return {
            (index.namespace.name, index.group, key): catalogue.offset[row] if catalogue.state[row] in here else None
            for index in catalogue.indexes.values()
            for key, row in known(index).items()
            if not catalogue.expected(row)
        }

    def expected(self) -> set[Name]:
        """What is on its way from elsewhere, and nobody has here."""
        catalogue = self.core.catalogue
        return {
            (index.namespace.name, index.group, key)
            for index in catalogue.indexes.values()
            for key, row in known(index).items()
            if catalogue.expected(row)
        }

    def slots(self) -> dict[int, int]:
        """The row of every used slot, by offset."""
        return {
            run.base + position * run.size: row
            for run in self.core.arena.runs
            if run is not None
            for position, row in enumerate(run.rows)
            if row >= 0
        }

    def check(self) -> None:
        core, catalogue = self.core, self.core.catalogue
        audit(core)
        known = self.known()
        for name, offset in known.items():
            assert offset is None or self.content.get(offset) == name, "something else would be found"
        used = self.slots()
        credits = self.credits()
        units = [at + more for at, size in credits for more in range(0, size, UNIT)]
        assert len(units) == len(set(units)), "granted to two"
        for at, _ in credits:
            assert catalogue.state[used[at]] in (State.CREDIT, State.ORPHANED), "granted, and something else"
        for owner in self.owners:
            for name, at, _ in owner.asked.pieces if owner.asked else ():
                assert catalogue.state[used[at]] in (State.LEASED, State.DOOMED), "leased, and something else"
                assert self.content.get(at) == name, "overwritten under its reader"
        for at, _ in self.disk.extents:
            assert catalogue.leases[used[at]] > 0, "an I/O touches what nobody holds"
        self.disk_agrees()
        if core.has_work:
            return
        for owner in self.owners:
            if owner.asked is not None and owner.asked.spoiled:
                assert not {at for _, at, _ in owner.asked.pieces} & set(known.values()), "spoiled, and found again"
        assert not self.condemned & known.keys(), "purged, and found again"
        self.condemned.clear()
        assert self.left().isdisjoint(known), "nobody comes to know it any more"
        for owner in self.owners:
            if not owner.broken and owner.asked is not None:
                assert owner.asked.phase is not Phase.MATCHING, "no work is left, and no answer came"
                assert owner.asked.phase is Phase.STARTED or core.next_deadline is not None
            assert owner.broken or not owner.looks or owner.replaced or core.next_deadline is not None, (
                "a lookup was never answered"
            )

    def disk_agrees(self) -> None:
        """What is said to be in the log is there."""
        catalogue = self.core.catalogue
        for row in range(len(catalogue.state)):
            if catalogue.place[row]:
                log, segment, at = segment_of(self.core, row)
                index = catalogue.indexes[catalogue.owner[row]]
                life = self.disk.lives[log.number, segment.number]
                assert life.seq == segment.seq
                assert life.records[at] == (index.namespace.name, index.group, catalogue.key[row])

    def close(self) -> None:
        """Whatever is going on: I/O ends, questions are answered, owners go, and then nothing is held."""
        core = self.core
        self.run()
        for _ in range(100):
            if not self.disk.flying:
                break
            self._done(min(self.disk.flying), ())
            self.run()
        assert not any(isinstance(io, ev.Read) for io in self.disk.flying.values()), "reads without end"
        for owner in self.owners:
            asked = owner.asked
            assert owner.broken or asked is None or asked.phase >= Phase.ANSWERED, "a question was never answered"
            assert owner.broken or not owner.looks or owner.replaced, "a lookup was never answered"
        while self.owners:
            self._left(0, next(iter(self.owners[0].sessions.values())), Gone.DEAD)
            self.run()
        for _ in range(100):
            if not self.disk.flying:
                break
            self._done(min(self.disk.flying), ())
            self.run()
        self.check()
        states = core.accounts()
        assert not any(states[name] for name in ("credit", "leased", "doomed", "orphaned", "loading"))
        assert not core.sessions
        assert not core.attachments
        assert not core.operations._waiters
        assert not core.budgets.answering
        assert not core.storage.reading.queued
        assert not core.storage.pending
        self._purge(b"")
        self.run()
        self.check()
        assert core.accounts()["free_pages"] == core.arena.total
        assert not core.catalogue.indexes

    # --- the state's name ---------------------------------------------------------------------------------------

    def digest(self) -> bytes:
        """The same for states that differ only in numbers that nobody compares, or in which engine is which."""
        assert not self.core.has_work
        return min(blake2b(repr(self._canonical(swap)).encode(), digest_size=12).digest() for swap in (0, 1))

    def _canonical(self, swap: int) -> tuple[Any, ...]:
        return Canon(self, swap).all()


def log_io(io: Io) -> LogIo:
    """An I/O with its segment, which is the log's to know of a read; one of a store has none."""
    if isinstance(io, LogIo):
        return io
    if isinstance(io.backing, StoreBacking | RemoteBacking):
        return LogIo(0, io.backing, io.kind)
    return LogIo(0, io.backing, io.kind, segment=io.backing.device.reading[io.number])  # type: ignore[attr-defined]


_DESCRIBED = (
    *("log", "queue", "queued", "rows", "expected", "reading", "reads", "flushes", "lost"),
    *("paused_until", "wrote_at", "wrote", "reads_again", "full_until"),
)
"""Of a device, what is named field by field: the rest is plain values."""


class Canon:
    """A full description of a state without work, in names instead of numbers.

    Objects are named by their key, everything else by who holds it; where that leaves a tie, by what comes first, which
    costs a merge and no more. Left out are: counters; the history; what was announced; how a heap of lists lags behind
    them; the order of free slots of a run and of free rows (only a purge in slices sees the numbers of rows); which
    engine came first (only the order in which they are granted something sees that); clocks, of which only what is left
    to each deadline counts. What is explored is real all the same: leaving something out can only merge states that
    differ.
    """

    def __init__(self, world: SmallWorld, swap: int) -> None:
        self.world, self.swap = world, swap
        self.core, self.catalogue = world.core, world.core.catalogue
        current = {session: owner for owner in world.owners for session in owner.sessions}
        attachments = self.core.attachments.values()
        self.engine = {held.id: int(held.instance[-1]) ^ swap for held in attachments}
        place = {id(owner): number for number, owner in enumerate(world.owners)}
        order = sorted(attachments, key=lambda held: (self.engine[held.id], place[id(current[min(held.sessions)])]))
        self.attachments = {held.id: (self.engine[held.id], number) for number, held in enumerate(order)}
        self.order = order
        self.names = self._names()

    def _names(self) -> dict[int, tuple[Any, ...]]:
        catalogue = self.catalogue
        held: dict[int, list[Any]] = {}
        for attachment in self.order:
            who = self.attachments[attachment.id]
            for number, space in attachment.spaces.items():
                for row in space.credits:
                    held.setdefault(row, []).append(("credit", who, number))
            for op in attachment.operations.values():
                for part in op.parts:
                    for position, row in enumerate(part.rows):
                        held.setdefault(row, []).append(("lease", who, part.index.namespace.name, position))
        for io in self.core.storage.ios.values():
            for position, row in enumerate(io.rows):
                held.setdefault(row, []).append(("io", io.kind, (at := log_io(io).segment) and at.number, position))
        for position, row in enumerate(self.core.storage.reading.queued):
            held.setdefault(row, []).append(("queued", position))
        names: dict[int, tuple[Any, ...]] = {}
        anonymous: list[tuple[Any, ...]] = []
        for row, state in enumerate(catalogue.state):
            if state in (State.FREE, State.HEAD):
                continue
            if catalogue.key[row]:
                names[row] = (catalogue.indexes[catalogue.owner[row]].namespace.name, catalogue.key[row])
            else:
                anonymous.append((repr(sorted(map(repr, held.get(row, [])))), catalogue.offset[row], row))
        for number, (_, _, row) in enumerate(sorted(anonymous)):
            names[row] = ("", number)
        return names

    def name(self, row: int) -> Any:
        return self.names.get(row)

    def named(self, rows: Any) -> list[Any]:
        return [self.names.get(row) for row in rows]

    def left(self, timer: Any) -> list[int]:
        return [min(self.world.now - begun, 20) for begun in timer._begun.values()]

    def all(self) -> tuple[Any, ...]:
        core, world = self.core, self.world
        operations, credits = core.operations, core.credits
        feeding = credits._freed != self.catalogue.freed, min(self.catalogue.recency.passed - credits._passed, 30)
        return (
            self.rows(),
            self.runs(),
            self.recency(),
            [self.attachment(held) for held in self.order],
            [(self.attachments[held], number) for held, number in credits._hungry if held in self.attachments],
            feeding if credits._hungry else None,
            [
                (self.name(row), [(self.operation(op), times) for op, times in waiting.items()])
                for row, waiting in operations._waiters.items()
            ],
            [
                [(self.operation(op), age) for op, age in zip(timer._begun, self.left(timer), strict=True)]
                for timer in world.timers
            ],
            self.storage(),
            [self.owner(owner) for owner in sorted(world.owners, key=lambda one: one.engine ^ self.swap)],
            [world.generations[engine ^ self.swap] for engine in (0, 1)],
            self.disk(),
        )

    def rows(self) -> list[Any]:
        catalogue, content = self.catalogue, self.world.content
        found = []
        for row, name in self.names.items():
            slot = catalogue.state[row] != State.COLD
            found.append(
                (
                    name,
                    catalogue.state[row],
                    catalogue.leases[row],
                    catalogue.owner[row] and catalogue.indexes[catalogue.owner[row]].namespace.name,
                    catalogue.place[row],
                    catalogue.there[row],
                    self.follower(row),
                    content.get(catalogue.offset[row]) if slot else None,
                )
            )
        return sorted(found, key=repr)

    def follower(self, row: int) -> Any:
        after = self.catalogue.after[row]
        return self.name(after) if after >= 0 and self.catalogue.before[after] == row else None

    def runs(self) -> tuple[Any, ...]:
        arena = self.core.arena
        runs = {run.base: run for run in arena.runs if run is not None}
        return (
            [
                (base, run.size, run.draining, len(run.free), sorted(map(repr, self.named(run.used_rows()))))
                for base, run in sorted(runs.items())
            ],
            [(size, list(opened)) for size, opened in sorted(arena._open.items())],
            arena._lowest_free,
        )

    def recency(self) -> list[Any]:
        catalogue = self.catalogue
        lists = [(index.namespace.name, index.recency) for index in catalogue.indexes.values()]
        lists.append((b"", catalogue.cold_list))
        lists.sort(key=lambda entry: entry[0])
        listed = [(owner, row) for owner, lst in lists for row in catalogue.recency.rows_of(lst)]
        ranks = {stamp: rank for rank, stamp in enumerate(sorted({catalogue.stamp[row] for _, row in listed}))}
        kept = getattr(catalogue.recency, "_kept", {})  # 2Q: which of the two queues of a list a row is in
        return [(owner, self.name(row), ranks[catalogue.stamp[row]], kept[row] if kept else 0) for owner, row in listed]

    def operation(self, op: Operation) -> tuple[Any, ...]:
        return (self.attachments.get(op.attachment.id), op.revision, op.phase)

    def attachment(self, held: Attachment) -> tuple[Any, ...]:
        operations = [
            (
                op.revision,
                op.exact,
                op.phase,
                [(part.index.namespace.name, part.skip, self.named(part.rows)) for part in op.parts],
                op.charged,
                op.missing,
                sorted(map(repr, self.named(op.failed))),
                sorted(map(repr, self.named(op.read))),
                op.asked,
                op.reason,
                op.search and (op.search.part, op.search.start, op.search.reached, op.search.asked, op.search.late),
                op.search and (op.looks, len(op.search.event.parts) if op.looks else op.search.event.keys),  # type: ignore
                sorted(op.asks),
            )
            for op in held.operations.values()
        ]
        sessions = [(s.role, s.mapped, s.id in held.lost) for s in held.sessions.values()]
        spaces = [
            (number, space.index.namespace.name, space.want, sorted(map(repr, self.named(space.credits))))
            for number, space in held.spaces.items()
        ]
        counts = held.answering, held.prepared
        return self.attachments[held.id], held.broken, held.ready, sessions, operations, spaces, counts

    def storage(self) -> list[Any]:
        storage = self.core.storage
        reading = storage.reading
        told: list[Any] = [self.named(reading.queued), list(reading.queued.values()), reading.bytes]
        told.append(sorted((repr(self.name(row)), tried) for row, tried in reading._tried.items()))
        for io in storage.ios.values():
            own = log_io(io)
            where: Any = io.backing.number
            if own.segment is not None:
                where = own.segment.number, own.segment.seq - io.backing.device.log.seq  # type: ignore[attr-defined]
            dirty = [self.dirty(one) for one in own.dirty]
            told.append((io.kind, where, self.named(io.rows), own.places, dirty, io.bytes, io.cancelled))
        asking = storage.asking
        told.append([(self.marks(ask.marks), list(map(self.operation, ask.waiting))) for ask in asking.asks.values()])
        told.append([ask.cleared == asking.heard.cleared for ask in asking.asks.values()])
        told.append(self.marks(asking.heard._marks))
        for backing in storage.backings.values():
            epoch = self.catalogue.epoch
            if isinstance(backing, RemoteBacking):
                told.append(backing.usable)
                told.append([self.name(one.row) if epoch[one.row] == one.epoch else None for one in backing.queue])
                told.append([(self.name(row), backing._begun - number) for row, number in backing.writing.items()])
                told.append(self.left(backing._reads))
                told.append(self.named(backing._late))
                patience = self.core.common.limits.proved_ns
                offers = [(self.name(row), self.world.now - at) for row, at in enumerate(backing._offered)]
                told.append(sorted((repr(name), min(age, patience)) for name, age in offers if name is not None))
                continue
            if isinstance(backing, StoreBacking):
                told.append([self.name(one.row) if epoch[one.row] == one.epoch else None for one in backing.queue])
                told.append([(self.name(row), backing._begun - number) for row, number in backing.writing.items()])
                told.append(self.left(backing.reads))
                continue
            device = backing.device  # type: ignore[attr-defined]
            log, now = device.log, self.world.now
            told.append([self.dirty(one) for one in device.queue])
            told.append(self.left(device.reads))
            told.append([max(0, at - now) for at in (device.paused_until, device.reads_again, device.full_until)])
            told += [getattr(device, one.name) for one in fields(device) if one.name not in _DESCRIBED]
            ends = [one and one.number for one in (log.open, log.next, log.erasing)]
            told.append((list(log.free), list(log.fresh), [one.number for one in log.sealed], ends))
            told += [self.segment(log.seq, one) for _, one in sorted(log.segments.items())]
        return told

    def marks(self, marks: Iterable[int]) -> Any:
        """What keys are asked for, or what was heard of them and for how long that counts."""
        heard, now, find = self.core.common.heard, self.world.now, self.catalogue.find
        indexes = [(name, index) for name in NAMES.values() if (index := find(*name[:2])) is not None]
        names = {mark_of(SHARED, index, name[2]): name for name, index in indexes}
        until = dict(zip(heard._marks, heard._until, strict=True))
        words = [(names.get(mark), heard.of(mark, now), max(0, until.get(mark, 0) - now)) for mark in marks if mark]
        return [word for word in words if word[0] is not None and (word[1] or isinstance(marks, list))]

    def dirty(self, dirty: Any) -> Any:
        same = self.catalogue.epoch[dirty.row] == dirty.epoch
        return self.name(dirty.row) if same else None, dirty.parent, dirty.depth, dirty.retried, dirty.again

    def segment(self, newest: int, segment: Segment) -> tuple[Any, ...]:
        place = self.catalogue.place
        there = [self.name(row) if place[row] >> 28 & 0xFFFFFF == segment.number else None for row in segment.rows]
        tables = sorted(segment.tables.values())
        mark = segment.number, segment.seq - newest, segment.end, segment.readers, segment.closing, segment.live
        return mark, there, tables

    def owner(self, owner: Owner) -> tuple[Any, ...]:
        asked, spent, catalogue = owner.asked, owner.spent, self.catalogue
        known = spent and self.name(spent.row)
        return (
            owner.engine ^ self.swap,
            owner.broken,
            owner.mapped,
            [(role, session in owner.closed) for session, role in owner.sessions.items()],
            {space: sorted(repr(self.name(slot.row)) for slot in slots) for space, slots in owner.credits.items()},
            spent and (known, known and catalogue.epoch[spent.row] == spent.epoch),
            asked and (asked.revision, asked.exact, asked.names, asked.skip, asked.phase, asked.spoiled),
            asked and sorted(name for name, _, _ in asked.pieces),
            owner.looks,
            owner.replaced,
        )

    def disk(self) -> list[Any]:
        disk = self.world.disk
        newest = max(disk._seqs.values(), default=0)
        lives = [(at, one.seq - newest, one.end, one.records, one.sealed) for at, one in sorted(disk.lives.items())]
        flying = [(type(io).__name__, number in disk.cancelled) for number, io in disk.flying.items()]
        forgotten = [(log, seq - newest, at) for log, (seq, at) in disk._forgotten.items()]
        forgets = [(io.seq - newest, io.at) for io in disk.flying.values() if isinstance(io, lev.Forget)]
        stores = [sorted(names) for names in disk.stores.values()], [sorted(names) for names in disk._kept.values()]
        return [lives, flying, forgotten, forgets, stores, bool(disk.answered)]
