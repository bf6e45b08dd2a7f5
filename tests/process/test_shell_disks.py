"""The manager's loop with disks that are slow, unordered and failing: whatever they do, an answer's bytes are right.

Everything is real but the disks: sockets, frames, the arena, the loop, threads that answer late. What an object holds
follows from its key; disks keep bytes by place, and lose, refuse or delay what they like.
"""

import itertools
import random
import tempfile
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from testbed.core.second_backing import StoreOpened
from testbed.core.shared_store import opened
from testbed.process.manager_process import all_written
from testbed.process.peers import KEY_BYTES, NAMESPACE, Engine, keys_of, status, until

from kvhold import protocol as wire
from kvhold.client.attacher import Attacher
from kvhold.client.control import Geometry
from kvhold.core import events as ev
from kvhold.core.limits import Limits
from kvhold.core.log import events as lev
from kvhold.engines.common.blocking import Blocking
from kvhold.manager.config import ManagerConfig
from kvhold.manager.listener import Listener
from kvhold.manager.memory import ArenaMemory
from kvhold.manager.server import Server
from kvhold.protocol import Tier

SHARD = 32 << 10
DRAM = 2 << 20
SEGMENT = 512 << 10
SEGMENTS = 12
CHAINS, LENGTH = 6, 40
DEEDS = ["store", "store", "ask", "ask", "again", "twice", "release", "started", "purge", "spoiled"]
Held = dict[int, tuple[int, list[tuple[int, int]]]]
"""By operation: its revision, and (key, offset) of what is leased."""


def text_of(key: int) -> str:
    return f"object {key:08} " * (SHARD // 16)


class SlowStore:
    """Answers from a thread of its own, a few I/Os at a time in any order; ``luck`` decides what fails."""

    named = ""

    def __init__(self, arena: memoryview, luck: random.Random) -> None:
        self.submitted = 0
        self.answered = 0
        self._arena = arena
        self._luck = luck
        self._waiting: list[ev.ToBacking] = []
        self._changed = threading.Condition()
        self._closing = False

    def start(self, number: int, tell: Callable[[ev.Event], None]) -> None:
        threading.Thread(target=self._run, args=(tell,), daemon=True).start()

    def submit(self, effect: ev.ToBacking) -> None:
        with self._changed:
            if not isinstance(effect, ev.Cancel):
                self.submitted += 1
                self._waiting.append(effect)
            self._changed.notify()

    def report(self) -> dict[str, object]:
        return {}

    def close(self, seconds: float) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()

    def _run(self, tell: Callable[[ev.Event], None]) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if self._closing:
                    return
                # Writes and what concerns places stay in order; reads overtake as they like.
                reads = [io for io in self._waiting if isinstance(io, ev.Read)]
                others = [io for io in self._waiting if not isinstance(io, ev.Read)]
                io = self._luck.choice(reads + others[:1])
                self._waiting.remove(io)
            done = self._carry_out(io)
            self.answered += 1
            tell(done)
            if self._luck.random() < 0.1:
                tell(done)  # a second answer means nothing

    def _carry_out(self, io: ev.ToBacking) -> ev.Done | ev.Found:
        raise NotImplementedError

    def _payload(self, stored: ev.Stored) -> bytes:
        return bytes(self._arena[stored.offset : stored.offset + SHARD])

    def _fill(self, stored: ev.Stored, payload: bytes | None) -> bool:
        """Fill a slot, perhaps with something else; whether that went well."""
        good = payload is not None and self._luck.random() >= 0.05
        self._arena[stored.offset : stored.offset + SHARD] = payload if good and payload is not None else bytes(SHARD)
        return good


class SlowDisk(SlowStore):
    """A log: it keeps bytes by place."""

    named = "log"

    def __init__(self, arena: memoryview, luck: random.Random) -> None:
        super().__init__(arena, luck)
        self.records: dict[tuple[int, int, int], tuple[tuple[bytes, int, bytes], bytes]] = {}
        self.lives: dict[int, int] = {}

    def start(self, number: int, tell: Callable[[ev.Event], None]) -> None:
        tell(lev.LogOpened(number, SEGMENTS, SEGMENT))
        tell(lev.Segments(number, ()))
        tell(lev.LogReady(number))
        super().start(number, tell)

    def _carry_out(self, io: ev.ToBacking) -> ev.Done:
        failed: list[int] = []
        if isinstance(io, lev.Write):
            for position, stored in enumerate(io.objects):
                if failed or self._luck.random() < 0.03:
                    failed.append(position)
                    continue
                name = stored.namespace, stored.group, stored.key
                self.records[io.segment, io.seq, stored.at] = name, self._payload(stored)
        elif isinstance(io, lev.Read):
            for position, stored in enumerate(io.objects):
                name, payload = self.records[io.segment, io.seq, stored.at]
                assert name == (stored.namespace, stored.group, stored.key)
                if not self._fill(stored, payload):
                    failed.append(position)
        elif isinstance(io, lev.Reuse):
            assert io.seq > self.lives.get(io.segment, 0)
            self.lives[io.segment] = io.seq
            if self._luck.random() < 0.1:
                failed.append(0)
        elif self._luck.random() < 0.1:
            failed.append(0)
        return ev.Done(io.io, tuple(failed))


class SlowDictionary(SlowStore):
    """A store that keeps bytes by name, loses some, and says of some that it could not look."""

    named = "store"

    def __init__(self, arena: memoryview, luck: random.Random) -> None:
        super().__init__(arena, luck)
        self.kept: dict[tuple[bytes, int, bytes], bytes] = {}

    def start(self, number: int, tell: Callable[[ev.Event], None]) -> None:
        tell(StoreOpened(number))
        super().start(number, tell)

    def _carry_out(self, io: ev.ToBacking) -> ev.Done:
        failed: list[int] = []
        kept = isinstance(io, ev.Read) and self._luck.random() < 0.03
        if isinstance(io, ev.Forget):
            gone = [name for name in self.kept if io.namespace in (b"", name[0]) or name in io.names]
            for name in gone:
                del self.kept[name]
            return ev.Done(io.io)
        assert isinstance(io, ev.Read | ev.Write)
        for position, stored in enumerate(io.objects):
            name = stored.namespace, stored.group, stored.key
            if isinstance(io, ev.Write):
                if self._luck.random() < 0.03:
                    failed.append(position)
                else:
                    self.kept[name] = self._payload(stored)
            elif kept or not self._fill(stored, self.kept.get(name)):
                failed.append(position)
        while self.kept and self._luck.random() < 0.1:
            del self.kept[self._luck.choice(list(self.kept))]
        return ev.Done(io.io, tuple(failed), kept)


class SharedDictionary(SlowDictionary):
    """A store that has to be asked: others have put some chains there. It is late, lies, and loses what it has."""

    named = "remote"

    def __init__(self, arena: memoryview, luck: random.Random) -> None:
        super().__init__(arena, luck)
        self.names: Counter[str] = Counter()
        for chain in range(0, CHAINS, 2):
            for position in range(LENGTH):
                self.put(chain << 16 | position)

    def put(self, number: int) -> None:
        self.kept[NAMESPACE, 0, keys_of([number])] = text_of(number).ljust(SHARD)[:SHARD].encode()

    def start(self, number: int, tell: Callable[[ev.Event], None]) -> None:
        for event in opened(number):
            tell(event)
        SlowStore.start(self, number, tell)

    def _carry_out(self, io: ev.ToBacking) -> ev.Done | ev.Found:
        if isinstance(io, ev.Read):
            before = len(io.objects)
            done = super()._carry_out(io)
            assert isinstance(done, ev.Done)
            self.names["got"] += before - len(done.failed)
            return done
        if not isinstance(io, ev.Ask):
            return super()._carry_out(io)
        self.names["asked"] += len(io.names)
        if self._luck.random() < 0.1:
            threading.Event().wait(0.03)  # longer than a question waits
        there = [at for at, name in enumerate(io.names) if (name in self.kept) != (self._luck.random() < 0.01)]
        return ev.Found(io.io, tuple(there), failed=self._luck.random() < 0.05)


class Silent(SharedDictionary):
    """It never says anything."""

    def _run(self, tell: Callable[[ev.Event], None]) -> None:
        pass


KINDS: dict[str, list[type[SlowStore]]] = {
    "log": [SlowDisk],
    "store": [SlowDictionary],
    "both": [SlowDisk, SlowDictionary],
    "shared": [SharedDictionary],
    "beside": [SlowDisk, SharedDictionary],
}


@contextmanager
def manager(luck: random.Random, kinds: list[type[SlowStore]]) -> Iterator[tuple[Path, list[SlowStore]]]:
    with tempfile.TemporaryDirectory(prefix="kvhold-") as folder:
        path = Path(folder) / "kvhold.sock"
        memory = ArenaMemory(DRAM, huge_pages=False)
        disks = [kind(memory.view, luck) for kind in kinds]
        config = ManagerConfig(
            path, DRAM, limits=Limits(retry_ns=10_000_000, write_batch=256 << 10, read_bytes=256 << 10)
        )
        listener = Listener(path)
        server = Server(config, listener, memory, disks)
        listener.listen()
        loop = threading.Thread(target=server.run)
        loop.start()
        try:
            yield path, disks
        finally:
            server.stop()
            loop.join(60)
            assert not loop.is_alive()


def write(engine: Engine, chain: list[int], done: int, count: int) -> int:
    """Publish ``count`` more objects of ``chain`` after its first ``done``; how many are published then."""
    scheduler = engine.scheduler
    scheduler.slots(1)
    part = chain[done : done + min(count, len(scheduler.rows))]
    for key, offset in zip(part, scheduler.offsets, strict=False):
        engine.worker.write(offset, text_of(key))
    rows, epochs = array("I", scheduler.rows[: len(part)]), array("Q", scheduler.epochs[: len(part)])
    del scheduler.rows[: len(part)], scheduler.offsets[: len(part)], scheduler.epochs[: len(part)]
    parent = keys_of([chain[done - 1]]) if done else b""
    scheduler.send(wire.Commit(1, parent, done, keys_of(part), rows.tobytes(), epochs.tobytes(), (SHARD,)))
    return done + len(part)


def ask(engine: Engine, op: int, revision: int, chain: list[int], held: Held) -> None:
    """Ask, perhaps change one's mind, and look at every byte of the answer."""
    engine.scheduler.send(wire.Query(op, revision, 1, 0, keys_of(chain)))
    while (answer := engine.scheduler.expect(wire.Answer)).revision != revision:
        pass
    assert answer.op == op
    offsets = array("Q", answer.offsets)
    assert len(offsets) == answer.resident <= len(chain)
    leased = list(zip(chain, offsets, strict=False))
    for key, offset in leased:
        assert engine.worker.read(offset, 16 * (SHARD // 16)) == text_of(key)
    held[op] = revision, leased
    if not leased:
        del held[op]


def look(engine: Engine, op: int, chain: list[int], held: Held) -> None:
    """Ask where a chain is, then for exactly its beginning that is anywhere, and look at every byte of that."""
    engine.scheduler.send(wire.Lookup(op, ((1, keys_of(chain)),)))
    (tiers,) = engine.scheduler.expect(wire.Residency).tiers
    assert len(tiers) == len(chain)
    there = chain[: (tiers + b"\0").index(0)]
    engine.scheduler.send(wire.Prepare(op, 1, ((1, keys_of(there)),)))
    answer = engine.scheduler.expect(wire.Answer)
    offsets = array("Q", answer.offsets)
    assert (answer.op, answer.resident) == (op, len(offsets))
    assert len(offsets) in (0, len(there))
    for key, offset in zip(there, offsets, strict=False):
        assert engine.worker.read(offset, SHARD) == text_of(key).ljust(SHARD)[:SHARD]
    if offsets:
        held[op] = 1, list(zip(there, offsets, strict=False))


def play(seed: int, steps: int, kinds: list[type[SlowStore]]) -> dict[str, int]:
    luck = random.Random(seed)
    chains = [[chain << 16 | position for position in range(LENGTH)] for chain in range(CHAINS)]
    with manager(random.Random(seed + 1), kinds) as (path, disks):
        engines = [Engine(path, name, slots=8, shard=SHARD) for name in ("one", "two")]
        held: list[Held] = [{}, {}]
        op = 0
        for _ in range(steps):
            who = luck.randrange(2)
            engine, mine, chain = engines[who], held[who], luck.choice(chains)
            match luck.choice([*DEEDS, "look", "look"] if SharedDictionary in kinds else DEEDS):
                case "look":
                    op += 1
                    look(engine, op, chain[: luck.randrange(1, LENGTH)], mine)
                case "store":
                    at = luck.choice([0, 0, LENGTH // 2])
                    for _ in range(luck.randrange(1, 5)):
                        at = write(engine, chain, at, 8)
                        if at >= LENGTH:
                            break
                case "ask":
                    op += 1
                    ask(engine, op, 1, chain[: luck.randrange(1, LENGTH)], mine)
                case "again" if mine:
                    one = luck.choice(list(mine))
                    ask(engine, one, mine[one][0] + 1, chain, mine)
                case "twice":
                    op += 1
                    engine.scheduler.send(wire.Query(op, 1, 1, 0, keys_of(luck.choice(chains))))
                    ask(engine, op, 2, chain, mine)
                case "release" if mine:
                    one = luck.choice(list(mine))
                    engine.scheduler.send(wire.Release(((one, mine.pop(one)[0]),)))
                case "started" if mine:
                    # What was leased is still there however long it takes.
                    one = luck.choice(list(mine))
                    engine.scheduler.send(wire.Started((one,)))
                    revision, leased = mine.pop(one)
                    for key, offset in leased:
                        assert engine.worker.read(offset, 16) == text_of(key)[:16]
                    engine.scheduler.send(wire.Release(((one, revision),)))
                case "spoiled" if mine and luck.random() < 0.3:
                    engine.scheduler.send(wire.RestoreFailed(luck.choice(list(mine))))
                case "purge" if luck.random() < 0.05:
                    admin = type(engine.scheduler)(path)
                    admin.join("admin")
                    admin.send(wire.Purge())
                    assert isinstance(admin.receive(), wire.Purged | wire.Refused)  # the disk may not take it
                    admin.close()
            if len(mine) > 3:
                one = next(iter(mine))
                engine.scheduler.send(wire.Release(((one, mine.pop(one)[0]),)))
        for engine in engines:
            engine.bye()

        def quiet() -> bool:
            said = status(path)
            held = [said["accounts"][name] for name in ("credit", "leased", "loading", "doomed", "orphaned")]
            return not any(held) and all_written(said)

        until(quiet, "all I/O is answered, and nothing is held")
        assert [disk.submitted for disk in disks] == [disk.answered for disk in disks]
        said = status(path)
        assert {kind: each["backings"] for kind, each in said["kept"].items()} == Counter(kind.named for kind in kinds)
        assert [each["kind"] for each in said["stores"]] == [kind.named for kind in kinds if kind is not SlowDisk]
        counters: dict[str, int] = said["counters"]
        for shared in (disk for disk in disks if isinstance(disk, SharedDictionary)):
            counters |= shared.names
        found = ("keys_asked", "keys_resident", "keys_read")
        misses = [name for name in counters if name.startswith("keys_") and name not in found]
        assert counters["keys_asked"] == counters["keys_resident"] + sum(counters[name] for name in misses)
        return counters


@pytest.mark.parametrize(("kinds", "seeds"), [("log", 4), ("store", 2), ("both", 2), ("shared", 2), ("beside", 2)])
def test_answers_are_right_whatever_disks_do(kinds: str, seeds: int) -> None:
    total: Counter[str] = Counter()
    for seed in range(seeds):
        total.update(play(seed, 150, KINDS[kinds]))
    assert total["read_objects"] > 80, "hardly anything came from a disk"
    assert total["write_objects"] > 200
    assert total["read_failed"] > 0
    assert SharedDictionary not in KINDS[kinds] or min(total["asked"], total["got"]) > 0, "nothing was fetched"


def test_what_others_have_put_into_a_store_is_restored_here() -> None:
    """Two hosts as far as it matters: two managers with arenas of their own, and one store."""
    chain = list(range(8))
    kept: dict[tuple[bytes, int, bytes], bytes] = {}
    never = random.Random(0)
    never.random = lambda: 0.99  # type: ignore[method-assign]
    with manager(never, [SharedDictionary]) as (here, mine), manager(never, [SharedDictionary]) as (there, others):
        for store in (*mine, *others):
            assert isinstance(store, SharedDictionary)
            store.kept = kept
        one, two = Engine(here, "one", slots=8, shard=SHARD), Engine(there, "two", slots=8, shard=SHARD)
        held: Held = {}
        ops = itertools.count(1)
        ask(two, next(ops), 1, chain, held)
        assert not held, "nobody has it"
        write(one, chain, 0, len(chain))
        until(lambda: len(kept) == len(chain), "it is in the store")

        def restored() -> bool:  # that it was not there is believed for a second
            op = next(ops)
            ask(two, op, 1, chain, held)
            return op in held

        until(restored, "it is fetched")
        (leased,) = [leased for _, leased in held.values()]
        assert [key for key, _ in leased] == chain
        assert status(there)["kept"]["remote"] == {"backings": 1, "backed_objects": len(chain)}
        one.bye()
        two.bye()


def test_threads_restore_what_others_have_and_store_it_here_all_the_same() -> None:
    never = random.Random(0)
    never.random = lambda: 0.99  # type: ignore[method-assign]
    with manager(never, [SharedDictionary]) as (path, _):
        face = Blocking("one", "test", lambda half: Attacher(half, [path], None, True))
        try:
            assert face.wait(60)
            space = face.open(Geometry(NAMESPACE, 0, KEY_BYTES, (SHARD,), "test"), 8)
            keys, rows = [keys_of([number]) for number in range(8)], np.zeros((4, SHARD), np.uint8)
            assert face.look(space, keys, 60) == bytes([Tier.ELSEWHERE] * 8)
            buffers = [[(row.ctypes.data, SHARD)] for row in rows]
            assert face.publish(space, keys[:4], buffers, 60) == [True] * 4
            assert face.look(space, keys, 60) == bytes([Tier.DRAM] * 4 + [Tier.ELSEWHERE] * 4)
            hit = face.find(space, keys[4:], 60)
            assert face.restore(hit, buffers) == 4
            assert [bytes(row) for row in rows] == [text_of(at).ljust(SHARD)[:SHARD].encode() for at in range(4, 8)]
        finally:
            face.close()


def test_a_store_that_never_answers_holds_up_nobody() -> None:
    """Questions about what is not here are answered all the same; what is stored here is found; the manager ends."""
    chain = list(range(8))
    with manager(random.Random(0), [Silent]) as (path, _):
        engine = Engine(path, "one", slots=8, shard=SHARD)
        held: Held = {}
        ask(engine, 1, 1, chain, held)
        look(engine, 2, chain, held)
        assert not held
        write(engine, chain, 0, len(chain))
        ask(engine, 3, 1, chain, held)
        assert len(held[3][1]) == len(chain)
        admin = type(engine.scheduler)(path)
        admin.join("admin")
        admin.send(wire.Flush())
        assert isinstance(admin.receive(), wire.Flushed), "a flush is about what is kept here"
        engine.bye()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 140))
def test_answers_are_right_for_long(seed: int) -> None:
    play(seed, 600, list(KINDS.values())[seed % len(KINDS)])
