"""A small world around a core: engines that keep their own books, and an audit of the core's from the outside in."""

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvhold.core import Core
from kvhold.core import events as ev
from kvhold.core.catalogue import State
from kvhold.core.events import Effect, Event, Gone, Role

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

    def __init__(self, pages: int = 16, page: int = PAGE, populated: int | None = None) -> None:
        self.core = Core(page, pages * page)
        self.log: list[Event | None] = []  # None is a step
        self.told: list[Effect] = []
        self.engines: dict[int, Engine] = {}  # by scheduler session
        self._next_session = 1
        self.handle(ev.Populated(pages if populated is None else populated))

    def session(self) -> int:
        self._next_session += 1
        return self._next_session - 1

    def handle(self, event: Event) -> list[Effect]:
        self.log.append(event)
        return self._done(self.core.handle(event))

    def step(self) -> list[Effect]:
        self.log.append(None)
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
        return effects

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
        index = self.core.catalogue._by_name.get((namespace, group))
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
    ) -> list[Effect]:
        self.shards[space] = shards or (size // self.world,) * self.world
        opening = ev.Open(self.scheduler, space, namespace, group, 8, self.shards[space], slots)
        return self.world_.settle(opening)

    def take(self, count: int, space: int = 0) -> list[Slot]:
        taken, self.slots[space][:count] = self.slots[space][:count], []
        assert len(taken) == count
        return taken

    def commit_event(
        self, keys: list[bytes], slots: list[Slot], space: int = 0, parent: bytes = b"", shards: tuple[int, ...] = ()
    ) -> ev.Commit:
        return ev.Commit(self.scheduler, space, parent, b"".join(keys), *pack(slots), shards or self.shards[space])

    def commit(self, keys: list[bytes], space: int = 0, parent: bytes = b"") -> list[Effect]:
        """Store one batch of a chain."""
        return self.world_.settle(self.commit_event(keys, self.take(len(keys), space), space, parent))

    def store(self, keys: list[bytes], space: int = 0) -> None:
        """Store a chain in batches of what is granted."""
        parent, done = b"", 0
        while done < len(keys):
            batch = keys[done : done + len(self.slots[space])]
            assert batch, "no slot is granted"
            self.commit(batch, space, parent)
            parent, done = batch[-1], done + len(batch)

    def query_event(self, keys: list[bytes], space: int = 0, skip: int = 0, op: int | None = None) -> ev.Query:
        if op is None:
            op, self.next_op = self.next_op, self.next_op + 1
        return ev.Query(self.scheduler, op, space, skip, b"".join(keys))

    def query(self, keys: list[bytes], space: int = 0, skip: int = 0, op: int | None = None) -> ev.Answer:
        """Ask, and let all work end."""
        (answer,) = self.world_.settle(self.query_event(keys, space, skip, op))
        assert isinstance(answer, ev.Answer)
        return answer

    def release(self, *ops: int) -> list[Effect]:
        return self.world_.settle(ev.Release(self.scheduler, ops))

    def back(self, slots: list[Slot]) -> list[Effect]:
        return self.world_.settle(ev.Return(self.scheduler, *pack(slots)))

    def leave(self, how: Gone = Gone.DEAD) -> list[Effect]:
        effects: list[Effect] = []
        for session in [self.scheduler, *self.workers]:
            effects += self.world_.settle(ev.Left(session, how))
        return effects


def audit(core: Core) -> None:
    """Every column, list, index and account of ``core`` agrees with every other one."""
    cat, arena = core.catalogue, core.arena
    rows = range(len(cat.state))
    sized = [row for row in rows if cat.state[row] not in (State.FREE, State.HEAD)]

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
    objects = {row for row in sized if cat.state[row] in (State.RESIDENT, State.LEASED)}
    found: dict[int, bytes] = {}
    for index in cat.indexes.values():
        assert index.users or len(index), "an idle index is kept"
        mine = [(row, key) for part in index.maps for key, row in part.items()]
        assert len(mine) == len(index)
        for row, key in mine:
            assert index.get(key) == row
            assert (cat.key[row], cat.owner[row], cat.size[row]) == (key, index.id, index.size)
            assert row not in found
            found[row] = key
    assert found.keys() == objects
    assert all(not cat.key[row] for row in rows if row not in objects), "a key outlives its object"

    # Recency: each object is in the list of its size and nowhere else; stamps never grow towards the old end.
    listed: list[int] = []
    for size, head in cat._heads.items():
        row, stamp = cat.older[head], cat._clock
        while row != head:
            assert cat.older[cat.newer[row]] == cat.newer[cat.older[row]] == row
            assert cat.size[row] == size
            assert cat.stamp[row] <= stamp
            listed.append(row)
            assert len(listed) <= len(rows)
            row, stamp = cat.older[row], cat.stamp[row]
    assert len(listed) == len(objects)
    assert set(listed) == objects

    # Spare rows are the free ones.
    assert sorted(cat._spare) == [row for row in rows if cat.state[row] == State.FREE]

    # Leases and credits: what rows say is what their owners hold, and more only while a release is under way.
    leased = Counter(
        row for held in core.attachments.values() for lease in held.leases.values() for row in lease.rows[lease.skip :]
    )
    for row in rows:
        assert cat.leases[row] >= leased[row]
        assert cat.leases[row] == leased[row] or core.has_work
        assert (cat.leases[row] > 0) == (cat.state[row] in (State.LEASED, State.DOOMED))
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
