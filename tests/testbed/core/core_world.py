"""A small world around a core: engines that keep their own books, and an audit of the core's from the outside in."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from testbed.core.fake_disks import FakeDisk, Flying, Name
from testbed.core.second_backing import StoreBacking, StoreOpened

from kvhold.core import Core
from kvhold.core import events as ev
from kvhold.core.backing import PLACE_BITS
from kvhold.core.events import Effect, Event, Gone, Role
from kvhold.core.eviction import POLICIES, Policy
from kvhold.core.indexes import Index
from kvhold.core.limits import Limits
from kvhold.core.log import events as lev
from kvhold.core.log.backing import LogBacking
from kvhold.core.log.segments import Log, Segment, unpack
from kvhold.core.rows import State

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


def audit(core: Core) -> None:
    """The core's own rules hold, and those of the backing that only tests have."""
    assert core.audit() == []
    cat, storage = core.catalogue, core.storage
    for number, backing in storage.backings.items():
        if isinstance(backing, StoreBacking):
            writes = [io for io in storage.ios.values() if io.kind == "write" and io.backing is backing]
            assert sorted(backing.writing) == sorted(row for io in writes for row in io.rows)
            waiting = [row for row, place in storage.reading.queued.items() if place >> PLACE_BITS == number]
            assert backing.expected == {row for row in waiting if cat.state[row] == State.LOADING}
