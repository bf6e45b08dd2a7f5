"""A small world around a core: engines that keep their own books, and an audit of the core's from the outside in."""

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from testbed.core.fake_disks import FakeDisk, Flying, Name
from testbed.core.second_backing import StoreBacking, StoreOpened

from kvhold.core import Core
from kvhold.core import events as ev
from kvhold.core.backing import PLACE_BITS
from kvhold.core.catalogue import Catalogue
from kvhold.core.events import Effect, Event, Gone, Role
from kvhold.core.eviction import POLICIES, Policy
from kvhold.core.indexes import Index
from kvhold.core.limits import Limits
from kvhold.core.log import events as lev
from kvhold.core.log.backing import LogBacking
from kvhold.core.log.segments import HEADER, Log, Segment, unpack
from kvhold.core.lru import CLOSED, LRU, RecencyList
from kvhold.core.rows import State
from kvhold.core.sessions import Phase
from kvhold.core.twoq import TwoQ, TwoQList

PAGE = 16 << 10
SLOT = 4 << 10
"""The smallest slot; four fit in a page."""
NAMESPACE = b"n" * 32


def chain(length: int, name: str = "a") -> list[bytes]:
    """The keys of one chain, 8 bytes each."""
    return [f"{name[:4]:<4}{i:04}".encode() for i in range(length)]


@dataclass(frozen=True)
class Slot:
    """One granted slot, as an engine knows it."""

    row: int
    offset: int
    epoch: int


def slots_of(grant: ev.Grant) -> list[Slot]:
    return [
        Slot(*s) for s in zip(array("I", grant.rows), array("Q", grant.offsets), array("Q", grant.epochs), strict=True)
    ]


def offsets_of(answer: ev.Answer) -> list[int]:
    return list(array("Q", answer.offsets))


def pack(slots: Iterable[Slot]) -> tuple[bytes, bytes]:
    slots = list(slots)
    return array("I", [s.row for s in slots]).tobytes(), array("Q", [s.epoch for s in slots]).tobytes()


class World:
    """A core, a log of what was told to it, and an audit after every event."""

    def __init__(
        self,
        pages: int = 16,
        page: int = PAGE,
        populated: int | None = None,
        limits: Limits | None = None,
        policy: Policy = POLICIES["lru"],
    ) -> None:
        self.core = Core(page, pages * page, limits, policy)
        self.now = 1
        self.log: list[tuple[Event | None, int]] = []  # None is a step
        self.told: list[Effect] = []
        self.engines: dict[int, Engine] = {}  # by scheduler session
        self.content: dict[int, Name] = {}  # of slots, by offset
        self.disk = FakeDisk(self.content)
        self._next_session = 1
        self.handle(ev.Populated(pages if populated is None else populated))

    def session(self) -> int:
        self._next_session += 1
        return self._next_session - 1

    def handle(self, event: Event) -> list[Effect]:
        self.now += 1
        self.log.append((event, self.now))
        return self._done(self.core.handle(event, self.now))

    def handle_unaudited(self, event: Event) -> list[Effect]:
        """The same for a core whose books are wrong already."""
        self.now += 1
        return self.core.handle(event, self.now)

    def step(self) -> list[Effect]:
        self.log.append((None, self.now))
        return self._done(self.core.step())

    def run(self, limit: int = 10_000) -> list[Effect]:
        """Step until there is nothing left to do."""
        effects: list[Effect] = []
        for _ in range(limit):
            if not self.core.has_work:
                return effects
            effects += self.step()
        raise AssertionError(f"still at work after {limit} steps")

    def settle(self, event: Event) -> list[Effect]:
        """``event`` and all work that it leaves."""
        return self.handle(event) + self.run()

    def _done(self, effects: list[Effect]) -> list[Effect]:
        self.told += effects
        audit(self.core)
        for effect in effects:
            if isinstance(effect, ev.Grant):
                self.engines[effect.session].slots.setdefault(effect.space, []).extend(slots_of(effect))
            elif isinstance(effect, ev.ToBacking):
                self.disk.take(effect)  # type: ignore[arg-type]
        return effects

    # --- logs

    def open_log(
        self,
        keys: Iterable[bytes] = (),
        size: int = SLOT,
        segments: int = 4,
        segment_bytes: int = 1 << 20,
        log: int = 0,
        group: int = 0,
    ) -> None:
        """A log that has ``keys`` from before, one after the other in its first segment."""
        records = [((NAMESPACE, group, key), size) for key in keys]
        life = self.disk.adopt(log, 0, 1, records, segment_bytes) if records else None
        self.handle(lev.LogOpened(log, segments, segment_bytes, 1))
        if life is not None:
            found = tuple((*name, (size,), at) for at, name in life.records.items())
            self.handle(lev.Segments(log, ((0, 1, 0),)))
            self.handle(lev.Recovered(log, 0, found))
        self.handle(lev.LogReady(log))

    def open_store(self, number: int = 8) -> None:
        """A store that finds objects by their name."""
        self.handle(StoreOpened(number))

    def flying(self, kind: type[Flying]) -> list[Flying]:
        """I/Os of a kind that are not answered, in order."""
        return [io for _, io in sorted(self.disk.flying.items()) if isinstance(io, kind)]

    def complete(self, kind: type[Flying], failing: Iterable[int] = ()) -> list[Effect]:
        """Answer the oldest I/O of a kind, and let all work end."""
        return self.settle(self.disk.finish(self.flying(kind)[0].io, failing))

    def finish(self) -> list[Effect]:
        """Answer all I/O well, until there is none."""
        effects: list[Effect] = []
        while self.disk.flying:
            effects += self.settle(self.disk.finish(min(self.disk.flying)))
        return effects

    def tick(self, after: int = 0) -> list[Effect]:
        """So many nanoseconds later."""
        self.now += after
        return self.settle(ev.Tick())

    def engine(self, instance: str = "engine", world: int = 1, space: bool = True, **geometry: object) -> "Engine":
        """An engine of which every session is here and mapped, with space 0 open unless told otherwise."""
        engine = Engine(self, instance, world)
        engine.join()
        if space:
            engine.open(**geometry)  # type: ignore[arg-type]
        return engine

    @property
    def accounts(self) -> dict[str, int]:
        return {name: size for name, size in self.core.accounts().items() if size}

    def resident(self, keys: list[bytes], group: int = 0, namespace: bytes = NAMESPACE) -> list[bytes]:
        """Which of ``keys`` the core has, without asking it in a way that touches anything."""
        index = self.core.catalogue.find(namespace, group)
        return [key for key in keys if index is not None and index.get(key) is not None]


@dataclass
class Engine:
    world_: World
    instance: str
    world: int
    scheduler: int = 0
    workers: list[int] = field(default_factory=list)
    slots: dict[int, list[Slot]] = field(default_factory=dict)  # granted and not yet used, by space
    shards: dict[int, tuple[int, ...]] = field(default_factory=dict)
    names: dict[int, tuple[bytes, int]] = field(default_factory=dict)  # namespace and group, by space
    next_op: int = 1000

    def join(self) -> list[Effect]:
        handle, effects = self.world_.handle, []
        self.scheduler = self.world_.session()
        self.world_.engines[self.scheduler] = self
        effects += handle(ev.Joined(self.scheduler, Role.SCHEDULER, self.instance, 0, self.world))
        for rank in range(self.world):
            self.workers.append(self.world_.session())
            effects += handle(ev.Joined(self.workers[-1], Role.WORKER, self.instance, rank, self.world))
            effects += handle(ev.Mapped(self.workers[-1]))
        return effects

    def open(
        self,
        space: int = 0,
        size: int = SLOT,
        slots: int = 1000,
        group: int = 0,
        namespace: bytes = NAMESPACE,
        shards: tuple[int, ...] = (),
        watch: bool = False,
        key_bytes: int = 8,
        chain: bool = False,
        private: bool = False,
    ) -> list[Effect]:
        self.shards[space] = shards or (size // self.world,) * self.world
        self.names[space] = namespace, group
        shards = self.shards[space]
        about = namespace, group, key_bytes, shards, slots, watch
        return self.world_.settle(ev.Open(self.scheduler, space, *about, chain=chain, private=private))

    def take(self, count: int, space: int = 0) -> list[Slot]:
        taken, self.slots[space][:count] = self.slots[space][:count], []
        assert len(taken) == count
        return taken

    def commit_event(
        self, keys: list[bytes], slots: list[Slot], space: int = 0, parent: bytes = b"", shards: tuple[int, ...] = ()
    ) -> ev.Commit:
        return ev.Commit(self.scheduler, space, parent, 0, b"".join(keys), *pack(slots), shards or self.shards[space])

    def commit(self, keys: list[bytes], space: int = 0, parent: bytes = b"") -> list[Effect]:
        """Store one batch of a chain."""
        for key, slot in zip(keys, self.slots[space], strict=False):
            self.world_.content[slot.offset] = (*self.names[space], key)
        return self.world_.settle(self.commit_event(keys, self.take(len(keys), space), space, parent))

    def store(self, keys: list[bytes], space: int = 0) -> None:
        """Store a chain in batches of what is granted."""
        parent, done = b"", 0
        while done < len(keys):
            batch = keys[done : done + len(self.slots[space])]
            assert batch, "no slot is granted"
            self.commit(batch, space, parent)
            parent, done = batch[-1], done + len(batch)

    def query_event(
        self, keys: list[bytes], space: int = 0, skip: int = 0, op: int | None = None, revision: int = 1
    ) -> ev.Query:
        if op is None:
            op, self.next_op = self.next_op, self.next_op + 1
        return ev.Query(self.scheduler, op, revision, space, skip, b"".join(keys))

    def query(
        self, keys: list[bytes], space: int = 0, skip: int = 0, op: int | None = None, revision: int = 1
    ) -> ev.Answer:
        """Ask, and let all work end."""
        (answer,) = self.world_.settle(self.query_event(keys, space, skip, op, revision))
        assert isinstance(answer, ev.Answer)
        return answer

    def prepare(
        self,
        *parts: tuple[int, list[bytes]],
        op: int,
        revision: int = 1,
        used: Iterable[tuple[int, list[bytes]]] = (),
    ) -> list[Effect]:
        """Ask for exactly (space, keys)..., and let all work end."""
        packed, marked = (tuple((space, b"".join(keys)) for space, keys in named) for named in (parts, used))
        return self.world_.settle(ev.Prepare(self.scheduler, op, revision, packed, marked))

    def release(self, *ops: int, revision: int = 1) -> list[Effect]:
        return self.world_.settle(ev.Release(self.scheduler, tuple((op, revision) for op in ops)))

    def back(self, slots: list[Slot]) -> list[Effect]:
        return self.world_.settle(ev.Return(self.scheduler, *pack(slots)))

    def leave(self, how: Gone = Gone.DEAD) -> list[Effect]:
        effects: list[Effect] = []
        for session in [self.scheduler, *self.workers]:
            effects += self.world_.settle(ev.Left(session, how))
        return effects


def known(index: Index) -> dict[bytes, int]:
    """Rows of all keys of ``index``."""
    return {key: row for part in index.maps for key, row in part.items()}


def segment_of(core: Core, row: int) -> tuple[Log, Segment, int]:
    """Where a row's record is: log, segment and byte offset in it."""
    number, segment, at = unpack(core.catalogue.place[row])
    backing = core.storage.backings[number]
    assert isinstance(backing, LogBacking)
    return backing.device.log, backing.device.log.segments[segment], at


def audit_lru(cat: Catalogue, recency: LRU[Any], lists: list[RecencyList[Any]]) -> None:
    """Stamps never grow towards the old end, and each list that has rows is looked at."""
    for lst in lists:
        assert cat.state[lst.head] == State.HEAD
        row, stamp = cat.older[lst.head], recency.clock.count
        while row != lst.head:
            assert cat.older[cat.newer[row]] == cat.newer[cat.older[row]] == row
            assert cat.stamp[row] <= stamp
            row, stamp = cat.older[row], cat.stamp[row]
        entries = [entry for entry in recency._heaps.get(lst.size, []) if entry[2] is lst]
        if lst is not lists[-1]:
            assert len(entries) == lst.queued
            assert lst.queued or cat.newer[lst.head] == lst.head, "a list with objects is never looked at"
            assert not entries or row == cat.newer[lst.head] or entries[0][0] <= cat.stamp[cat.newer[lst.head]]
    queued = [entry for heap in recency._heaps.values() for entry in heap]
    closed = [entry for entry in queued if entry[2].head == CLOSED]
    assert len(closed) == sum(recency._closed.values()) <= len(queued) / 2 + 1
    assert len(queued) - len(closed) <= len(lists) - 1


def audit_twoq(cat: Catalogue, recency: TwoQ[Any], lists: dict[int | None, TwoQList[Any]]) -> None:
    """Each row is in the queue that it is said to be in, and those are counted."""
    counts: dict[int, list[int]] = {}
    for lst in lists.values():
        queues = recency._probation.rows_of(lst.probation), recency._main.rows_of(lst.main)
        members = [list(queue) for queue in queues]
        assert [len(queue) for queue in members] == lst.count
        assert all(recency._kept[row] == kept for kept, queue in enumerate(members) for row in queue)
        for kept, queue in enumerate(members):
            counts.setdefault(lst.size, [0, 0])[kept] += len(queue)
    assert {size: count for size, count in counts.items() if any(count)} == recency._counts
    audit_lru(cat, recency._probation, [lst.probation for lst in lists.values()])
    audit_lru(cat, recency._main, [lst.main for lst in lists.values()])


def audit(core: Core) -> None:
    """Every column, list, index and account of ``core`` agrees with every other one."""
    cat, arena = core.catalogue, core.arena
    rows = range(len(cat.state))
    sized = [row for row in rows if cat.state[row] not in (State.FREE, State.HEAD, State.COLD)]

    # Bytes: by state, and to the byte over the arena.
    by_state = Counter(dict.fromkeys(range(State.HEAD + 1), 0))
    for row in sized:
        by_state[cat.state[row]] += cat.size[row]
    assert dict(by_state) == dict(enumerate(cat.bytes))
    assert sum(core.accounts().values()) == arena.total
    assert min(core.accounts().values()) >= 0

    # Slots: each belongs to one row, each row's slot is where the arena says.
    runs = {id(run): run for run in arena.runs if run is not None}.values()
    used: dict[int, int] = {}
    for run in runs:
        pages = [page for page, at in enumerate(arena.runs) if at is run]
        assert pages == list(range(run.base // arena.page, run.base // arena.page + run.span))
        assert len(run.rows) == run.count == run.span * arena.page // run.size > 0
        assert sorted(run.free) == [i for i, row in enumerate(run.rows) if row < 0]
        assert len(run.free) < run.count, "an empty run keeps its pages"
        used |= {run.base + i * run.size: row for i, row in enumerate(run.rows) if row >= 0}
        assert all(cat.size[row] == run.size for row in run.used_rows())
        assert not (run.draining and any(cat.state[row] == State.RESIDENT for row in run.used_rows()))
        assert (run.base in arena._open.get(run.size, {})) == (bool(run.free) and not run.draining)
    assert used == {cat.offset[row]: row for row in sized}
    assert len(used) == len(sized)
    assert arena.free_pages == arena.runs.count(None)
    assert arena.free_slot_bytes == sum(len(run.free) * run.size for run in runs)
    assert arena.draining_pages == sum(run.span for run in runs if run.draining)
    assert arena.slack_bytes == sum(run.span * arena.page - run.count * run.size for run in runs)

    # Indexes and rows say the same of every object.
    kept = (State.RESIDENT, State.LEASED, State.LOADING, State.COLD)
    objects = {row for row in rows if cat.state[row] in kept}
    found: dict[int, bytes] = {}
    for index in cat.indexes.values():
        assert index.users or len(index) or index.slots, "an idle index is kept"
        mine = [(row, key) for key, row in known(index).items()]
        assert len(mine) == len(index)
        assert 0 <= index.read <= index.found <= index.asked
        assert index.used_at is None or 0 <= index.used_at <= core.common.now
        assert index.slots == sum(cat.owner[row] == index.id for row in sized)
        for row, key in mine:
            assert index.get(key) == row
            assert (cat.key[row], cat.owner[row], cat.size[row]) == (key, index.id, index.size)
            assert row not in found
            found[row] = key
    assert found.keys() == objects
    assert len(objects) == cat.objects
    assert sum(index.asked for index in cat.indexes.values()) <= core.counters["keys_asked"]
    assert sum(index.found for index in cat.indexes.values()) <= core.counters["keys_resident"]
    assert sum(index.read for index in cat.indexes.values()) <= core.counters["keys_read"]
    assert all(not cat.key[row] for row in rows if row not in objects), "a key outlives its object"
    assert cat.cold == sum(cat.state[row] == State.COLD for row in rows)
    assert cat.backed == sum(cat.kept(row) for row in objects)
    for namespace in cat.namespaces.values():
        assert namespace.used == sum(index.slots * index.size for index in namespace.indexes.values())
    assert {id(n) for n in cat.namespaces.values()} == {id(index.namespace) for index in cat.indexes.values()}

    # Recency: each object is in its index's list and nowhere else.
    lists = {index.id: index.recency for index in cat.indexes.values()} | {None: cat.cold_list}
    listed: set[int] = set()
    for owner, lst in lists.items():
        members = list(cat.recency.rows_of(lst))
        assert all(cat.state[row] == State.COLD if owner is None else cat.owner[row] == owner for row in members)
        assert listed.isdisjoint(members)
        assert len(set(members)) == len(members)
        listed.update(members)
    assert listed == {row for row in objects if cat.state[row] != State.LOADING}
    heads = sum(cat.state[row] == State.HEAD for row in rows)
    if isinstance(cat.recency, TwoQ):
        assert heads == 2 * len(lists)
        audit_twoq(cat, cat.recency, lists)
    else:
        assert heads == len(lists)
        assert isinstance(cat.recency, LRU)
        audit_lru(cat, cat.recency, list(lists.values()))

    # Spare rows are the free ones.
    assert sorted(cat.spare) == [row for row in rows if cat.state[row] == State.FREE]

    # Leases: what rows say is what operations and I/O hold, and more only while a release is under way.
    operations = [op for held in core.attachments.values() for op in held.operations.values()]
    leased = Counter(row for op in operations for part in op.parts for row in part.leased)
    for io in core.storage.ios.values():
        leased.update(io.rows)
    leased.update(list(core.storage.reading.queued))  # a dictionary would be added up
    for row in rows:
        assert cat.leases[row] >= leased[row]
        assert cat.leases[row] == leased[row] or core.has_work
        assert (cat.leases[row] > 0) == (cat.state[row] in (State.LEASED, State.DOOMED, State.LOADING))
    for held in core.attachments.values():
        assert held.prepared == sum(op.charged for op in held.operations.values())
        assert held.answering == sum(op.phase < Phase.ANSWERED for op in held.operations.values())
        for op in held.operations.values():
            assert 0 <= op.charged <= sum(len(part.leased) * part.index.size for part in op.parts)
            # One that lacks nothing is answered in its turn, or never if its owner is lost.
            assert op.phase is not Phase.WAITING or op.missing > 0 or held.broken or core.has_work
    if not core.has_work:
        assert core.budgets.answering == sum(held.answering for held in core.attachments.values())

    # Credits
    granted = Counter(
        row for held in core.attachments.values() for space in held.spaces.values() for row in space.credits
    )
    waiting = {row for row in sized if cat.state[row] in (State.CREDIT, State.LIMBO)}
    assert granted.keys() <= waiting
    assert granted.keys() == waiting or core.has_work
    assert set(granted.values()) <= {1}
    users = Counter(space.index.id for held in core.attachments.values() for space in held.spaces.values())
    for index in cat.indexes.values():
        assert index.users == users[index.id]

    # Who watches what is open, and nothing is left to be told.
    watchers = {
        (space.index.id, (held.scheduler.id, number))
        for held in core.attachments.values()
        for number, space in held.spaces.items()
        if space.watcher is not None and held.scheduler is not None
    }
    assert watchers == {(index.id, who) for index in cat.indexes.values() for who in index.watchers}
    assert not cat.gone

    # Logs: places are distinct and in segments that are there, and what is live, read and under way adds up.
    storage = core.storage
    loading = {row for row in rows if cat.state[row] == State.LOADING}
    assert set(storage.reading._tried) <= loading
    assert loading <= storage.reading.queued.keys() | storage.reading._reading.keys()
    placed = [row for row in rows if cat.place[row]]
    kept = [row for row in rows if cat.kept(row)]
    assert set(placed) <= objects
    assert len({cat.place[row] for row in placed}) == len(placed)
    assert all(cat.kept(row) for row in rows if cat.state[row] in (State.COLD, State.LOADING))
    assert not any(cat.there[row] for row in rows if row not in objects)
    live: Counter[tuple[int, int]] = Counter()
    for row in placed:
        log, segment, at = segment_of(core, row)
        assert at >= HEADER
        assert at + HEADER + cat.size[row] <= segment.end
        assert row in segment.rows
        live[log.number, segment.number] += HEADER + cat.size[row]
    reading: Counter[tuple[int, int]] = Counter()
    for row in storage.reading.queued:
        if cat.state[row] == State.LOADING and cat.place[row] == storage.reading.queued[row]:
            log, segment, _ = segment_of(core, row)
            reading[log.number, segment.number] += 1
    for io in storage.ios.values():
        if isinstance(io.backing, LogBacking) and io.kind in ("read", "seal"):
            segment = io.backing.device.reading[io.number] if io.kind == "read" else io.segment  # type: ignore[attr-defined]
            reading[io.backing.number, segment.number] += len(io.rows) or 1
    assert storage.reading.bytes == sum(io.bytes for io in storage.ios.values() if io.kind == "read")
    for number, backing in storage.backings.items():
        assert backing.number == number
        assert backing.objects == sum(core.common.backings.of(at) is backing for row in kept for at in cat.places(row))
        if isinstance(backing, StoreBacking):
            writes = [io for io in storage.ios.values() if io.kind == "write" and io.backing is backing]
            assert sorted(backing.writing) == sorted(row for io in writes for row in io.rows)
            waiting = [row for row, place in storage.reading.queued.items() if place >> PLACE_BITS == number]
            assert backing.expected == {row for row in waiting if cat.state[row] == State.LOADING}
            continue
        assert isinstance(backing, LogBacking)
        device = backing.device
        reads = [io.number for io in storage.ios.values() if io.kind == "read" and io.backing is backing]
        assert sorted(device.reading) == sorted(device.reads._begun) == sorted(reads)
        waiting = [row for row, place in storage.reading.queued.items() if place >> PLACE_BITS == number]
        assert device.expected.keys() == {row for row in waiting if cat.state[row] == State.LOADING}
        assert device.log.number == number
        log = device.log
        for segment in log.segments.values():
            assert segment.live == live[log.number, segment.number]
            assert segment.readers == reading[log.number, segment.number]
        numbers = [*log.free, *log.fresh, *log.segments]
        assert len(numbers) == len(set(numbers))
        roles = [*log.sealed, *(one for one in (log.open, log.next, log.erasing) if one is not None)]
        roles += [segment for segment in log.segments.values() if segment.closing]
        assert sorted(segment.number for segment in roles) == sorted(log.segments), "a segment is lost"
        ordered = [segment.seq for segment in log.sealed]
        assert ordered == sorted(ordered)
        writes = [io for io in storage.ios.values() if io.kind == "write" and io.backing is backing]
        assert len(writes) == device.writing
        assert device.rows == {row for io in writes for row in io.rows}
