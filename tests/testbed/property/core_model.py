"""The naive reference: what each engine was told and did, in sets and dictionaries, and what must follow from it.

It never asks what the core remembers, but for one thing: which objects are known now and where. Which of them are
evicted is the core's choice; the model knows what must not go, and what lies in each slot of the arena.
"""

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from testbed.core.core_world import Slot, audit, known, offsets_of, slots_of
from testbed.core.fake_disks import FakeDisk, Name, name_of, size_of

from kvhold.core import Core
from kvhold.core import events as ev
from kvhold.core.events import Effect, Event, Gone, Reason, Role
from kvhold.core.eviction import POLICIES
from kvhold.core.limits import Limits
from kvhold.core.log.segments import HEADER
from kvhold.core.remote.backing import RemoteBacking
from kvhold.core.rows import State

UNIT = 4096
PAGE = 2 * UNIT
PAGES = 16
SLICE = 4
WORLDS = {"one": 1, "two": 1, "tri": 2}
SIZES = [1, 2, 3, 2]
"""Units of an object by geometry. The third spans pages; the fourth has the first's name."""
SEGMENT = 12 * UNIT
"""Five of the smallest records, or two of the largest, and a footer."""
LIMITS = {
    "prepared_share": 0.7,
    "engine_share": 0.6,
    "credit_share": 0.25,
    "max_objects": 1000,
    "queries": 3,
    "operations": 4,
    "read_bytes": 3 * UNIT,
    "write_batch": 4 * (HEADER + UNIT),
    "write_queue": 16,
    "write_rate": 0,
    "second_touch": False,
    "answer_ns": 50,
    "hung_ns": 50,
    "lease_ns": 90,
    "hear_ns": 10,
    "stall_ns": 120,
    "retry_ns": 80,
    "ask_ns": 15,
    "ask_batch": 3,
    "ask_keys": 8,
    "asks": 2,
    "heard": 4096,
    "there_ns": 60,
    "absent_ns": 20,
    "not_got_ns": 200,
    "get_ns": 30,
    "proved_ns": 100,
}
"""Little of everything, so that budgets and deadlines are met often."""


Fresh = dict[Name, set[int | None]]
"""What an event may make known, and where."""


class Piece(NamedTuple):
    """One leased object."""

    name: Name
    offset: int
    size: int


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
    watch: bool = False
    announced: set[Name] = field(default_factory=set)  # what its engine was told can be found, and not that it is gone

    @property
    def size(self) -> int:
        return sum(self.shards)

    def same(self, other: "Space") -> bool:
        """Whether the two name the same objects."""
        return (self.namespace, self.group) == (other.namespace, other.group)

    def names(self, keys: list[bytes]) -> list[Name]:
        return [(self.namespace, self.group, key) for key in keys]


@dataclass
class Asked:
    """One operation that is not over, as its engine sees it."""

    revision: int
    exact: bool
    space: Space | None
    names: list[Name]
    skip: int = 0
    chosen: list[Name] = field(default_factory=list)  # what may be read for it
    crowded: bool = False  # there were too many questions, or answers
    waits: bool = False
    asks: bool = False  # it was told that others are asked
    read: set[Name] = field(default_factory=set)  # from a log, since it was asked
    awaited: set[Name] = field(default_factory=set)  # of those, what it was told to wait for
    answered: int | None = None  # when
    started: int | None = None
    stalled: bool = False
    short: bool = False
    spoiled: bool = False
    pieces: list[Piece] = field(default_factory=list)


@dataclass
class Look:
    """A lookup that is not answered: what it names, part by part."""

    parts: list[list[Name]]


@dataclass
class Engine:
    """One attachment: what its halves were told they hold."""

    instance: str
    halves: dict[int, Half] = field(default_factory=dict)  # those not proved gone
    broken: bool = False
    ready: bool = False
    spaces: dict[int, Space] = field(default_factory=dict)
    spent: list[Slot] = field(default_factory=list)
    asked: dict[int, Asked] = field(default_factory=dict)
    looks: dict[int, Look] = field(default_factory=dict)
    recalled: dict[int, int] = field(default_factory=dict)

    @property
    def scheduler(self) -> Half | None:
        return next((half for half in self.halves.values() if half.role is Role.SCHEDULER and not half.closed), None)

    @property
    def parts(self) -> set[int]:
        """Who is here: 0 is the scheduler half, 1 the worker of rank 0, and so on."""
        return {half.rank + 1 if half.role is Role.WORKER else 0 for half in self.halves.values()}

    @property
    def pending(self) -> int:
        return sum(one.answered is None for one in self.asked.values()) + len(self.looks)

    def held(self) -> list[tuple[int, int]]:
        credits = [(slot.offset, space.size) for space in self.spaces.values() for slot in space.credits.values()]
        return credits + [(piece.offset, piece.size) for one in self.asked.values() for piece in one.pieces]


class Before(NamedTuple):
    """What an event found, as far as a check of what it did needs it."""

    view: dict[Name, int | None]
    held: int
    prepared: dict[int, int]
    used: dict[bytes, int]
    objects: int
    counters: Counter[str]


class CoreModel:
    """Drives a core and a disk, and checks all that either says."""

    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.now = 1
        self.limits = Limits(**LIMITS)  # type: ignore[arg-type]
        self.core = Core(PAGE, PAGES * PAGE, self.limits, POLICIES[self.policy])
        self.log: list[tuple[Event | None, int]] = []
        self.told: list[list[Effect]] = []
        self.engines: list[Engine] = []
        self.halves: dict[int, Half] = {}
        self.owners: dict[int, Engine] = {}  # by session, also of those that are gone
        self.content: dict[int, Name] = {}  # offset -> what lies there in full
        self.disk = FakeDisk(self.content)
        self.seen: dict[Name, int | None] = {}  # what is known, and its slot if it can be read there
        self.epochs: set[int] = set()
        self.condemned: set[Name] = set()  # what a purge or a quarantine under way may take
        self.purging: set[bytes] = set()  # namespaces; what is stored meanwhile into slots granted before may go too
        self.doomed: set[Name] = set()  # what it must take: all of that but what was stored again
        self.reading: dict[int, list[Name]] = {}  # by I/O
        self.ending: set[Name] = set()  # chosen by operations whose end may still be under way
        self.unrecovered: set[Name] = set()  # what is in a log but must not come back
        self.sizes: dict[tuple[bytes, int], int] = {}
        self.steady: set[Name] = set()  # what was known all the time since a listing has begun
        self.ever: set[Name] = set()  # and what was at any time
        self.private: set[bytes] = set()  # namespaces of one instance each
        self.shared: list[int] = []  # stores that are asked
        self.serving: set[int] = set()  # those of them that serve
        self.said: dict[tuple[int, int, bytes], int] = {}  # until when it counts what one has said of a key
        self.believed: set[Name] = set()  # what any was ever said to have
        self.not_got: dict[tuple[int, int, bytes], int] = {}  # until when it is not tried again
        self.asking: dict[int, int] = {}  # by ask that is not answered, how many purges there had been
        self.purges = 0
        self.overtaken: set[tuple[Name, int]] = set()  # what was on its way from elsewhere at a purge, and where to
        self.next_session = 1
        self.behind: frozenset[int] = frozenset()  # sessions that have said something which is not handled yet
        self.unheard: dict[int, int] = {}  # by session, until when its leases may outlive their time, as it was behind

    # --- doing and checking -------------------------------------------------------------------------------------

    def view(self) -> dict[Name, int | None]:
        catalogue = self.core.catalogue
        here = (State.RESIDENT, State.LEASED)
        return {
            (index.namespace.name, index.group, key): catalogue.offset[row] if catalogue.state[row] in here else None
            for index in catalogue.indexes.values()
            for key, row in known(index).items()
            if not catalogue.expected(row)
        }

    def expected(self) -> dict[Name, int]:
        """What is on its way from elsewhere and nobody has here, and where to."""
        catalogue = self.core.catalogue
        return {
            (index.namespace.name, index.group, key): catalogue.offset[row]
            for index in catalogue.indexes.values()
            for key, row in known(index).items()
            if catalogue.expected(row)
        }

    def told_of(self, backing: int, name: Name) -> tuple[int, int, bytes]:
        """What one backing says something about."""
        index = self.core.catalogue.find(*name[:2])
        return backing, index.id if index is not None else 0, name[2]

    def before(self) -> Before:
        core, states = self.core, self.core.accounts()
        return Before(
            self.seen,
            states["leased"] + states["doomed"] + states["loading"],
            {number: held.prepared for number, held in core.attachments.items()},
            {name: owner.used for name, owner in core.catalogue.namespaces.items()},
            core.objects,
            Counter(core.counters),
        )

    def do(self, event: Event | None, fresh: Fresh | None = None, back: int = 0) -> list[Effect]:
        """Tell the core (None: one step); ``fresh`` is what may become known by it, and where.

        Time goes on with each event; ``back`` is by how much the shell's clock is wrong.
        """
        fresh = fresh or {}
        before = self.before()
        fetched = self.comes(event) if isinstance(event, ev.Done) else {}
        fresh |= {name: {offset} for name, offset in fetched.items()}
        if isinstance(event, ev.Done) and event.io in self.reading:
            names = [name for at, name in enumerate(self.reading.pop(event.io)) if at not in event.failed]
            for one in [one for engine in self.engines for one in engine.asked.values() if one.answered is None]:
                one.read.update(names)
                one.awaited.update(names if one.waits else ())
        if isinstance(event, ev.Found) and isinstance(self.disk.ended, ev.Ask):
            self.hears(event, self.disk.ended)
        if event is None:
            self.log.append((None, self.now))
            effects = self.core.step()
        else:
            told = self.now + 1 - back
            self.log.append((event, told))
            effects = self.core.handle(event, told)
            went_back = self.core.counters["clock_went_back"] - before.counters["clock_went_back"]
            assert went_back == (told < self.now)
            self.now = max(told, self.now)
        self.told.append(effects)
        audit(self.core)
        self.seen = after = self.view()
        self.forgotten(before)
        self.moved(event, before, fresh, effects)
        self.budgets(event, before, effects)
        self.doomed -= fresh.keys()
        self.doomed |= {name for name, offset in fetched.items() if (name, offset) in self.overtaken and name in after}
        self.condemned |= {name for name in fresh if self.purging & {b"", name[0]}}
        for effect in effects:
            self.effect(effect, before)
        # Of what one commit puts in, the first may give way to the next when there are too many objects.
        unsure = set(fresh) if core_is_full(self.core) else set[Name]()
        self.announced(event, before, fresh, effects, unsure)
        self.steady = (self.steady & after.keys()) - unsure
        self.ever |= after.keys()
        if not self.core.has_work:
            assert self.doomed.isdisjoint(after), "it outlived a purge"
            self.condemned, self.doomed, self.ending, self.purging = set(), set(), set(), set()
            self.overtaken.clear()
        return effects

    def comes(self, event: ev.Done) -> dict[Name, int]:
        """What comes from elsewhere with the end of a read. What does not come is not tried again for a while."""
        flying, expected = self.disk.ended, self.expected()
        if not isinstance(flying, ev.Read) or flying.io != event.io or event.io not in self.core.storage.ios:
            return {}
        mine = {at: name_of(stored) for at, stored in enumerate(flying.objects) if name_of(stored) in expected}
        cancelled = self.core.storage.ios[event.io].cancelled
        for at, name in mine.items():
            if at in event.failed and not cancelled:
                self.not_got[self.told_of(flying.backing, name)] = self.now + 1 + self.limits.not_got_ns
        return {name: expected[name] for at, name in mine.items() if at not in event.failed}

    def hears(self, event: ev.Found, flying: ev.Ask) -> None:
        """What a store said counts for a while, if no purge came between."""
        if event.failed or self.asking.pop(flying.io) != self.purges:
            return
        for at, name in enumerate(flying.names):
            there = at in event.there
            lasts = self.limits.there_ns if there else self.limits.absent_ns
            self.said[self.told_of(flying.backing, name)] = self.now + 1 + lasts
            self.believed |= {name} if there else set()

    def asks(self, ask: ev.Ask) -> None:
        """Others are asked for what somebody wants to know, once, and not for what is private or here or was heard."""
        assert ask.backing in self.serving
        assert len(ask.names) <= self.limits.ask_batch
        wanted = {name for engine in self.engines for one in engine.asked.values() for name in one.names[one.skip :]}
        wanted |= {
            name for engine in self.engines for one in engine.looks.values() for part in one.parts for name in part
        }
        assert set(ask.names) <= wanted, "nobody wants to know"
        others = [io for io in self.disk.flying.values() if isinstance(io, ev.Ask) and io.backing == ask.backing]
        assert len(others) < self.limits.asks
        for name in ask.names:
            assert name[0] not in self.private
            assert name not in self.seen
            assert not any(name in io.names for io in others), "it is being asked for"
            assert self.said.get(self.told_of(ask.backing, name), 0) <= self.now, "it was said just now"
            assert self.not_got.get(self.told_of(ask.backing, name), 0) <= self.now, "it did not come just now"
        self.asking[ask.io] = self.purges

    def fetches(self, read: ev.Read) -> None:
        """What nobody has here is read from where it was said to be, and not where it did not come from just now."""
        expected = self.expected()
        for stored in read.objects:
            name = name_of(stored)
            if expected.get(name) == stored.offset:
                assert name in self.believed
                assert name[0] not in self.private
                assert self.not_got.get(self.told_of(read.backing, name), 0) <= self.now

    def looked(self, residency: ev.Residency) -> None:
        """Elsewhere is what was ever said to be there."""
        look = self.owners[residency.session].looks.pop(residency.op, None)
        for tiers, names in zip(residency.tiers, look.parts, strict=True) if look is not None else ():
            assert len(tiers) in (0, len(names))
            assert {
                name for name, tier in zip(names, tiers, strict=False) if tier == ev.Tier.ELSEWHERE
            } <= self.believed

    def forgotten(self, before: Before) -> None:
        """What is private is forgotten as soon as its instance has it open no more, and nothing else ever is."""
        opened = {(space.namespace, space.group) for engine in self.engines for space in engine.spaces.values()}
        left = {name for name in before.view if name[0] in self.private and name[:2] not in opened}
        count = self.core.counters["forgotten"] - before.counters["forgotten"]
        assert count <= len(left - self.seen.keys()), "somebody has it open"
        assert self.core.has_work or left.isdisjoint(self.seen), "nobody comes to know it any more"
        self.condemned |= left

    def effect(self, effect: Effect, before: Before) -> None:
        if isinstance(effect, ev.Read):
            wanted = {name for engine in self.engines for one in engine.asked.values() for name in one.chosen}
            assert {name_of(stored) for stored in effect.objects} <= wanted | self.ending, "nobody asked for that"
            self.reading[effect.io] = [name_of(stored) for stored in effect.objects]
            self.fetches(effect)
        if isinstance(effect, ev.Ask):
            self.asks(effect)
        if isinstance(effect, ev.ToBacking):
            self.disk.take(effect)  # type: ignore[arg-type]
            if isinstance(effect, ev.Read | ev.Write):
                self.no_overlap([(stored.offset, size_of(stored)) for stored in effect.objects], effect)
        match effect:
            case ev.Grant():
                self.granted(effect)
            case ev.Recall():
                engine = self.halves[effect.session].engine
                assert (
                    len(engine.spaces[effect.space].credits) > effect.keep == self.target(engine.spaces[effect.space])
                )
                engine.recalled[effect.space] = effect.keep
            case ev.Answer():
                self.answered(effect, before)
            case ev.Waiting():
                one = self.halves[effect.session].engine.asked[effect.op]
                assert one.revision == effect.revision
                assert not one.waits
                assert one.answered is None
                assert effect.objects or (self.shared and not one.asks and not one.exact)
                one.waits, one.asks = effect.objects > 0, True
            case ev.Residency():
                self.looked(effect)
            case ev.Expired():
                engine = self.halves[effect.session].engine
                one = engine.asked.pop(effect.op)
                assert one.revision == effect.revision
                assert not engine.broken
                assert one.answered is not None
                assert one.started is None
                assert self.now - one.answered >= self.limits.lease_ns
                assert effect.session not in self.behind
            case ev.Stalled():
                one = self.owners[effect.session].asked[effect.op]
                assert one.started is not None
                assert self.now - one.started >= self.limits.stall_ns
                assert not one.stalled
                one.stalled = True

    def no_overlap(self, extents: list[tuple[int, int]], but: Effect | None = None) -> None:
        """Slots that are given away are nobody else's; those of a write may be read meanwhile, but not written."""
        others = [piece for engine in self.engines for piece in engine.held()] if not isinstance(but, ev.Write) else []
        if isinstance(but, ev.Write):
            granted = [
                (s.offset, sp.size) for e in self.engines for sp in e.spaces.values() for s in sp.credits.values()
            ]
            others += granted
        for io in self.disk.flying.values():
            copies = isinstance(io, ev.Write) and isinstance(but, ev.Write) and io.backing != but.backing
            if io is not but and not copies and isinstance(io, ev.Read | ev.Write):
                others += [(stored.offset, size_of(stored)) for stored in io.objects]
        for mine, size in extents:
            assert 0 <= mine <= self.core.arena.total - size
            for offset, length in others:
                assert mine + size <= offset or offset + length <= mine

    def moved(self, event: Event | None, before: Before, fresh: Fresh, effects: list[Effect]) -> None:
        """What is known, and where, changed only as it may."""
        after = self.seen
        over = {(effect.session, effect.op) for effect in effects if isinstance(effect, ev.Expired)}
        held = {
            piece[:2]
            for engine in self.engines
            for op, one in engine.asked.items()
            if not over or engine.scheduler is None or (engine.scheduler.id, op) not in over
            for piece in one.pieces
        }
        ios = [io for io in self.disk.flying.values() if isinstance(io, ev.Read | ev.Write)]
        held |= {(name_of(stored), stored.offset) for io in ios for stored in io.objects}
        for name, offset in before.view.items():
            if name not in after:
                assert (name, offset) not in held or name in self.condemned, "it was held"
            elif after[name] != offset and offset is not None:
                assert after[name] in {None, *fresh.get(name, ())}, "it moved"
                assert (name, offset) not in held, "it was held"
            elif after[name] != offset:
                assert isinstance(event, ev.Done) or name in fresh, "nothing came from a log"
        for name in after.keys() - before.view.keys():
            assert name in fresh, "from nowhere"
            assert after[name] in fresh[name]
        for name, offset in after.items():
            assert offset is None or self.content.get(offset) == name, "wrong bytes"

    def announced(
        self, event: Event | None, before: Before, fresh: Fresh, effects: list[Effect], unsure: set[Name]
    ) -> None:
        """Who watches a space knows of what it has committed there since whether it can be found.

        But for what is ``unsure``: it may have given way, and been put in again.
        """
        after = self.seen
        told = [effect for effect in effects if isinstance(effect, ev.Added | ev.Removed)]
        refused = any(isinstance(effect, ev.Refuse) for effect in effects)
        watching = [
            (engine.scheduler.id, number, space)
            for engine in self.engines
            if engine.scheduler is not None and not engine.broken
            for number, space in engine.spaces.items()
            if space.watch
        ]
        left: dict[tuple[bytes, int], list[Name]] = {}
        assert {(effect.session, effect.space) for effect in told} <= {(who, number) for who, number, _ in watching}
        for who, number, space in watching:
            should, removed = set(space.announced), list[Name]()
            if isinstance(event, ev.Commit) and (event.session, event.space) == (who, number) and not refused:
                should |= set(space.names(two_by_two(event.keys)))
            if isinstance(event, ev.Done):
                should |= {name for name in fresh if name[:2] == (space.namespace, space.group)}
            for effect in told:
                if (effect.session, effect.space) != (who, number):
                    continue
                names = space.names(two_by_two(effect.keys))
                assert 0 < len(names) <= SLICE
                if isinstance(effect, ev.Added):
                    if isinstance(event, ev.Done):
                        assert set(names) <= fresh.keys(), "it did not come"
                    else:
                        assert isinstance(event, ev.Commit)
                        assert event.session == who
                    space.announced |= set(names)
                else:
                    space.announced -= set(names)
                    removed += names
            assert space.announced ^ (should & after.keys()) <= unsure
            assert space.announced <= after.keys()
            gone = [name for name in before.view.keys() - after.keys() if name[:2] == (space.namespace, space.group)]
            assert set(gone) <= set(removed)
            assert set(removed) - set(gone) <= fresh.keys(), "it is still there"
            assert len(removed) == len(set(removed)) or unsure
            assert left.setdefault((space.namespace, space.group), removed) == removed, "one was told something else"

    def budgets(self, event: Event | None, before: Before, effects: list[Effect]) -> None:
        core, limits, total, after = self.core, self.limits, self.core.arena.total, self.before()
        written = sum(size_of(s) for effect in effects if isinstance(effect, ev.Write) for s in effect.objects)
        assert after.held - written <= max(before.held, int(limits.prepared_share * total))
        for number, prepared in after.prepared.items():
            assert prepared <= max(before.prepared.get(number, 0), int(limits.engine_share * total))
        assert after.objects <= max(before.objects, limits.max_objects)
        for name, used in after.used.items():
            quota = limits.quotas.get(name)
            if quota is None:
                continue
            assert used <= max(before.used.get(name, 0), quota.limit)
            asks = isinstance(event, ev.Query | ev.Prepare) or core.has_work or event is None or self.hungry(name)
            if before.used.get(name, 0) <= quota.floor and not asks and not core.arena.draining_pages:
                full = before.objects >= limits.max_objects
                mine = {one for one, offset in before.view.items() if one[0] == name and offset is not None}
                assert full or self.condemned or isinstance(event, ev.Done) or mine <= after.view.keys()
        for counter in (after.counters, core.counters):
            short = sum(counter[f"keys_{reason}"] for reason in Reason if reason)
            assert counter["keys_asked"] == counter["keys_resident"] + short

    def hungry(self, namespace: bytes) -> bool:
        spaces = [space for engine in self.engines for space in engine.spaces.values() if space.namespace == namespace]
        return any(len(space.credits) < self.target(space) for space in spaces)

    def target(self, space: Space) -> int:
        wanting = [one for engine in self.engines if not engine.broken for one in engine.spaces.values() if one.want]
        share = int(self.limits.credit_share * PAGES * PAGE) // max(2, len(wanting))
        if quota := self.limits.quotas.get(space.namespace):
            alike = sum(one.namespace == space.namespace for one in wanting)
            share = min(share, int(self.limits.credit_share * quota.limit) // max(1, alike))
        return min(space.want, max(1, share // space.size))

    def granted(self, grant: ev.Grant) -> None:
        engine = self.halves[grant.session].engine
        assert not engine.broken
        assert engine.scheduler is self.halves[grant.session]
        space = engine.spaces[grant.space]
        for slot in slots_of(grant):
            assert slot.epoch not in self.epochs
            self.no_overlap([(slot.offset, space.size)])
            self.epochs.add(slot.epoch)
            self.content.pop(slot.offset, None)
            space.credits[slot.row] = slot
        assert len(space.credits) <= self.target(space)

    # --- answers ------------------------------------------------------------------------------------------------

    def answered(self, answer: ev.Answer, before: Before) -> None:
        if answer.reason is Reason.DETACHED:
            return  # the question's rule knows when
        engine = self.halves[answer.session].engine
        assert not engine.broken
        one = engine.asked[answer.op]
        assert one.revision == answer.revision, "an answer to another question"
        assert one.answered is None, "answered twice"
        one.answered, one.short = self.now, bool(answer.reason)
        resident, offsets = answer.resident, offsets_of(answer)
        assert resident <= len(one.names)
        leased = one.names[one.skip : resident]
        assert len(offsets) == len(leased)
        for name, offset in zip(leased, offsets, strict=True):
            assert self.content.get(offset) == name, "wrong bytes"
        positions = array("I", answer.read)
        assert len(set(positions)) == len(positions)
        read = [leased[position] for position in positions]
        assert one.awaited & set(leased) <= set(read) <= one.read
        pieces = [Piece(name, offset, self.sizes[name[:2]]) for name, offset in zip(leased, offsets, strict=True)]
        one.pieces = pieces
        self.ending.update(one.chosen)
        one.chosen = []
        if one.exact:
            assert resident in (0, len(one.names))
            assert (resident < len(one.names)) == bool(answer.reason) or not one.names
        self.reasoned(engine, one, answer, before)
        if not pieces:
            del engine.asked[answer.op]

    def reasoned(self, engine: Engine, one: Asked, answer: ev.Answer, before: Before) -> None:
        reason, resident = answer.reason, answer.resident
        if reason is Reason.NONE:
            assert resident == len(one.names)
        if one.exact or one.waits or one.asks or one.crowded:
            return
        assert (resident < len(one.names)) == bool(reason)
        if len(one.names) <= SLICE:
            assert all(name in before.view for name in one.names[:resident])
        match reason:
            case Reason.NOT_STORED:
                name = one.names[resident]
                assert before.view.get(name) is None
                assert name not in before.view or self.core.storage.backings  # in a segment that is being given up
            case Reason.BUDGET:
                assert one.names[resident] in before.view or one.names[resident] in self.believed
            case Reason.DEADLINE | Reason.READ_FAILED:
                assert len(one.names) > SLICE, "it did not wait"  # a read may end while other slices are matched
            case Reason.REMOTE_LATE:
                late = any(one._late for one in self.core.storage.backings.values() if isinstance(one, RemoteBacking))
                assert len(one.names) > SLICE or self.asks_are_full() or late, "it did not wait"
            case Reason.REMOTE_DOWN:
                assert self.shared
                assert not self.serving

    def asks_are_full(self) -> bool:
        asks = Counter(io.backing for io in self.disk.flying.values() if isinstance(io, ev.Ask))
        return any(asks[number] >= self.limits.asks for number in self.shared)

    def over(self, engine: Engine, op: int) -> None:
        """The operation ends by what is told to the core next."""
        one = engine.asked.pop(op, None)
        if one is not None:
            self.ending.update(one.chosen)

    # --- sessions -----------------------------------------------------------------------------------------------

    def refused(self, effects: list[Effect], session: int) -> None:
        """A refused session is closed by the shell; its process may live."""
        assert [type(effect) for effect in said(effects)] == [ev.Refuse]
        self.leave(self.halves[session], Gone.UNKNOWN)

    def leave(self, half: Half, how: Gone) -> None:
        engine = half.engine
        others = [other for other in engine.halves if other != half.id]
        parted = [] if engine.broken or how is Gone.SAID else others
        engine.broken = True
        half.closed = True
        if how is not Gone.UNKNOWN:
            del engine.halves[half.id], self.halves[half.id]
            if not engine.halves:
                for op in list(engine.asked):
                    self.over(engine, op)
                self.engines.remove(engine)
        effects = self.do(ev.Left(half.id, how))
        assert [effect.session for effect in effects if isinstance(effect, ev.Detach)] == parted

    def drain(self) -> None:
        for _ in range(1000):
            if not self.core.has_work:
                return
            self.do(None)
        raise AssertionError("work without an end")

    def finish(self) -> None:
        """Fair completions: every I/O is answered well, and time goes on."""
        for _ in range(2000):
            self.drain()
            if self.disk.flying:
                self.do(self.disk.finish(min(self.disk.flying)))
            elif (at := self.core.storage.next_deadline) is not None:
                self.now = max(self.now, at)
                self.do(ev.Tick())
            else:
                return
        raise AssertionError("I/O without an end")

    # --- always -------------------------------------------------------------------------------------------------

    def check_owners(self) -> None:
        """What engines and I/O hold is in the right state, and what is in it is right."""
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
                    assert state_of(slot.offset, space.size) == (State.ORPHANED if engine.broken else State.CREDIT)
            for one in engine.asked.values():
                for name, offset, size in one.pieces:
                    assert state_of(offset, size) in (State.LEASED, State.DOOMED)
                    assert self.content[offset] == name
        for io in self.disk.flying.values():
            if isinstance(io, ev.Read | ev.Write):
                allowed = (State.LOADING, State.DOOMED) if isinstance(io, ev.Read) else (State.LEASED, State.DOOMED)
                assert all(state_of(stored.offset, size_of(stored)) in allowed for stored in io.objects)
        assert self.core.storage.pending == len(self.disk.flying)

    def check_operations(self) -> None:
        for engine in self.engines:
            attachment = self.core.sessions[next(iter(engine.halves))].attachment
            known = attachment.operations.keys() | (engine.looks.keys() if self.core.has_work else set())
            assert known == engine.asked.keys() | engine.looks.keys()  # a lookup is none if nothing can be asked

    def check_rest(self) -> None:
        """With no work left, nothing is held but by an engine or an I/O, and nobody waits for nothing."""
        core, states = self.core, self.core.accounts()
        if core.has_work:
            return
        queued, unanswered = bool(core.storage.reading.queued), False
        asks = any(isinstance(io, ev.Ask) for io in self.disk.flying.values())
        held, extents = Counter[str](), set(self.disk.extents)
        for engine in self.engines:
            for space in engine.spaces.values():
                held["orphaned" if engine.broken else "credit"] += len(space.credits) * space.size
            for one in engine.asked.values():
                extents.update((piece.offset, piece.size) for piece in one.pieces)
                unanswered |= one.answered is None
                if one.answered is None and not engine.broken:
                    assert one.waits or one.asks, "a question was never answered"
                    assert queued or asks or any(map(self.disk.reads, one.chosen)), "it waits for nothing"
            assert asks or not engine.looks or engine.broken, "a lookup was never answered"
        assert (states["credit"], states["orphaned"]) == (held["credit"], held["orphaned"])
        rest = states["leased"] + states["doomed"] + states["loading"] - sum(size for _, size in extents)
        assert rest >= 0
        assert rest == 0 or queued or unanswered
        assert not queued or core.storage.reading.bytes >= self.limits.read_bytes

    def check_room(self) -> None:
        """Nobody waits for credits beside free room."""
        arena = self.core.arena
        if self.core.has_work:
            return
        for engine in self.engines:
            for space in engine.spaces.values():
                if engine.broken or engine.scheduler is None or len(space.credits) >= self.target(space):
                    continue
                quota = self.limits.quotas.get(space.namespace)
                used = self.core.catalogue.namespaces[space.namespace].used
                if quota is None or used + space.size <= quota.limit:
                    assert not arena._open.get(space.size)
                    assert arena._find(arena.span_of(space.size)) is None


def said(effects: list[Effect]) -> list[Effect]:
    """All but grants, recalls, removals and I/O, which any event may bring."""
    others = (ev.Grant, ev.Recall, ev.Removed, ev.ToBacking)
    return [effect for effect in effects if not isinstance(effect, others)]


def core_is_full(core: Core) -> bool:
    return core.objects + SLICE > core.catalogue.limits.max_objects


def two_by_two(packed: bytes) -> list[bytes]:
    """The keys of the model, two bytes each."""
    return [packed[at : at + 2] for at in range(0, len(packed), 2)]
