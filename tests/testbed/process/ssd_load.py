"""Engines that know every byte they stored, and a reader of the log that knows the format's description alone.

What an object holds follows from its namespace, its key and how often the namespace was purged before: bytes of an
object that was purged are never right again, although its key is stored anew.
"""

import ctypes
import itertools
import os
import random
import struct
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testbed.process.manager_process import Manager, all_written
from testbed.process.peers import NAMESPACE, Peer, keys_of, populated, status, until

from kvhold import protocol as wire

HERE = Path(__file__).parent
BLOCK = 4096
Life = tuple[int, int]
"""Number and seq of a segment's life."""


class Lost(Exception):
    """The manager closed a connection, or is gone."""


@dataclass(frozen=True)
class Space:
    """One engine's objects: a shard for each of its ranks."""

    name: str
    namespace: bytes
    shards: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(self.shards)


SMALL = Space("small", NAMESPACE, (32 << 10, 32 << 10))
LARGE = Space("large", bytes(range(100, 132)), (160 << 10,))
SPACES = (SMALL, LARGE)


@dataclass
class Known:
    """What survives a manager: how often each namespace was purged, and what must or must not be found."""

    purges: Counter[bytes] = field(default_factory=Counter)
    asked_for_purge: set[bytes] = field(default_factory=set)  # and not told that it is done
    stored: set[tuple[bytes, int]] = field(default_factory=set)  # since the last purge
    _made: OrderedDict[tuple[bytes, int, int], bytes] = field(default_factory=OrderedDict)

    def payload(self, space: Space, key: int, purges: int | None = None) -> bytes:
        name = space.namespace, key, self.purges[space.namespace] if purges is None else purges
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = random.Random(repr(name)).randbytes(space.size)
            if len(self._made) > 1000:
                self._made.popitem(last=False)
        return made

    def purged(self, namespaces: Iterable[bytes]) -> None:
        """It was answered: nothing stored before is ever found again."""
        for namespace in namespaces:
            self.purges[namespace] += 1
            self.stored = {name for name in self.stored if name[0] != namespace}
            self.asked_for_purge.discard(namespace)


class Client:
    """Both halves of an engine whose ranks are all here, with slots for ``space``. Raises Lost."""

    def __init__(self, path: Path, space: Space, known: Known, slots: int = 16) -> None:
        self.space = space
        self.known = known
        self._ops = itertools.count(1)
        ranks = len(space.shards)
        self._scheduler = Peer(path)
        self._workers = [Peer(path) for _ in range(ranks)]
        self._scheduler.join("scheduler", space.name, 0, ranks)
        for rank, worker in enumerate(self._workers):
            worker.join("worker", space.name, rank, ranks)
            worker.map()
        self._scheduler.ready()
        self.credit = self._scheduler.open(slots, space.namespace.hex(), world=ranks, shard=space.shards[0])
        mapping = self._workers[0].mapping
        assert mapping is not None
        self._mapping = mapping

    def send(self, *messages: wire.ClientMessage) -> None:
        try:
            self._scheduler.send(*messages)
        except OSError as error:
            raise Lost from error

    def hear(self) -> wire.ManagerMessage:
        message = self._scheduler.receive()
        if message is None:
            raise Lost
        assert not isinstance(message, wire.Refused), message.reason
        return message

    def publish(self, chain: list[int], start: int, count: int) -> int:
        """Store up to ``count`` objects of ``chain`` from ``start`` on, as many as there are slots for; how many."""
        peer, space = self._scheduler, self.space
        while not peer.rows:
            self.hear()
        part = chain[start : start + min(count, len(peer.rows))]
        for key, offset in zip(part, peer.offsets, strict=False):
            ctypes.memmove(self._mapping.address + offset, self.known.payload(space, key), space.size)
        rows, epochs = array("I", peer.rows[: len(part)]), array("Q", peer.epochs[: len(part)])
        del peer.rows[: len(part)], peer.offsets[: len(part)], peer.epochs[: len(part)]
        parent = keys_of([chain[start - 1]]) if start else b""
        self.known.stored.update((space.namespace, key) for key in part)
        self.send(wire.Commit(1, parent, start, keys_of(part), rows.tobytes(), epochs.tobytes(), space.shards))
        return len(part)

    def store(self, chain: list[int]) -> None:
        """Publish all of ``chain``, and wait until it was heard."""
        done = 0
        while done < len(chain):
            done += self.publish(chain, done, self.credit)
        self.sync()

    def leave_asked(self, chain: list[int]) -> None:
        """Ask, and do not wait for the answer."""
        self.send(wire.Query(next(self._ops), 1, 1, 0, keys_of(chain)))

    def ask(self, chain: list[int]) -> wire.Answer:
        """Ask, look at every byte of the answer, and let go of it. Older answers are let go of unseen."""
        op = next(self._ops)
        self.send(wire.Query(op, 1, 1, 0, keys_of(chain)))
        while True:
            answer = self.hear()
            if not isinstance(answer, wire.Answer):
                continue
            if answer.op == op:
                break
            self.send(wire.Release(((answer.op, 1),)))
        offsets = array("Q", answer.offsets)
        assert len(offsets) == answer.resident <= len(chain)
        for key, offset in zip(chain, offsets, strict=False):
            here = ctypes.string_at(self._mapping.address + offset, self.space.size)
            assert here == self.known.payload(self.space, key), self._what(key, here)
            assert (self.space.namespace, key) in self.known.stored, f"{key:#x} was purged, or never stored"
        self.send(wire.Release(((op, 1),)))
        return answer

    def tiers(self, keys: list[int]) -> bytes:
        """Of each key, 0 if it is nowhere, 1 if it is in DRAM, 2 if it is on an SSD alone."""
        self.send(wire.Lookup(next(self._ops), ((1, keys_of(keys)),)))
        while not isinstance(answer := self.hear(), wire.Residency):
            pass
        return answer.tiers[0]

    def sync(self) -> None:
        """Return when the manager has handled all that was said."""
        self.send(wire.Query(0, 1, 1 << 40, 0, b""))
        while not (isinstance(answer := self.hear(), wire.Answer) and answer.op == 0):
            pass

    def bye(self) -> None:
        self._scheduler.bye()
        for worker in self._workers:
            worker.bye()

    def close(self) -> None:
        for peer in (self._scheduler, *self._workers):
            peer.close()

    def _what(self, key: int, here: bytes) -> str:
        purges = self.known.purges[self.space.namespace]
        former = [before for before in range(purges) if here == self.known.payload(self.space, key, before)]
        return f"{self.space.name} {key:#x}: " + (
            f"from before purge {former[0] + 1} of {purges}" if former else "wrong"
        )


def purge(path: Path, known: Known, namespace: bytes = b"") -> None:
    """Purge, and wait until that is done."""
    namespaces = {namespace} if namespace else {space.namespace for space in SPACES}
    known.asked_for_purge |= namespaces
    try:
        admin = Peer(path)
        admin.join("admin")
        admin.send(wire.Purge(namespace))
        answer = admin.receive()
        admin.close()
    except (OSError, AssertionError) as error:
        raise Lost from error
    if answer is None:
        raise Lost
    assert isinstance(answer, wire.Purged), answer
    known.purged(namespaces)


def look(path: Path) -> dict[str, Any]:
    """:func:`peers.status`; Lost when the manager is gone."""
    try:
        return status(path)
    except OSError as error:
        raise Lost from error
    except AssertionError as error:
        if "closed before" not in str(error):
            raise
        raise Lost from error


def reports(path: Path, condition: Callable[[dict[str, Any]], object], what: str) -> dict[str, Any]:
    """The first report of which ``condition`` is true."""

    def fits() -> dict[str, Any] | None:
        report = look(path)
        return report if condition(report) else None

    report = until(fits, what)
    assert report is not None
    return report


def is_rebuilt(report: dict[str, Any]) -> bool:
    """Whether all that was found at start can be asked for."""
    return bool(report["logs"]) and all(log["ready"] for log in report["logs"])


def at_rest(report: dict[str, Any]) -> bool:
    """Whether all that is to be written is written."""
    return is_rebuilt(report) and all_written(report)


def settle(path: Path) -> dict[str, Any]:
    return reports(path, at_rest, "all is written")


def rebuilt(path: Path) -> dict[str, Any]:
    return reports(path, is_rebuilt, "the index is rebuilt")


# --- the directory ----------------------------------------------------------------------------------------------------


def records(directory: Path) -> dict[Life, dict[tuple[bytes, int], bytes]]:
    """By life of a segment and (namespace, key): payloads, found by headers as docs/ssd-format.md has them."""
    lives: dict[Life, dict[tuple[bytes, int], bytes]] = {}
    for path in sorted(directory.glob("kvhold-*.segment")):
        data = path.read_bytes()
        if data[:8] != b"kvholdSG":
            continue
        uuid = data[16:32]
        seq, number = struct.unpack_from("<QI", data, 32)
        assert path.name == f"kvhold-{number:08}.segment"
        found = lives[number, seq] = {}
        at = BLOCK
        while data[at : at + 8] == b"kvholdRC" and data[at + 16 : at + 32] == uuid:
            its_seq, its_number, _group, its_at, length, size = struct.unpack_from("<QIIQQQ", data, at + 32)
            if (its_seq, its_number, its_at) != (seq, number, at):
                break
            namespace, width = data[at + 80 : at + 112], data[at + 120]
            (key,) = struct.unpack("<Q", data[at + 128 : at + 128 + width])
            found[namespace, key] = data[at + BLOCK : at + BLOCK + size]
            at += length
    return lives


def lives(directory: Path) -> set[Life]:
    """Which lives of segments are there, by their headers."""
    found = set()
    for path in directory.glob("kvhold-*.segment"):
        with path.open("rb") as file:
            head = file.read(BLOCK)
        if head[:8] == b"kvholdSG":
            seq, number = struct.unpack_from("<QI", head, 32)
            found.add((number, seq))
    return found


def right_records(directory: Path, known: Known) -> dict[Life, set[tuple[bytes, int]]]:
    """The (namespace, key) of each life whose bytes are those that were stored since the last purge."""
    sizes = {space.namespace: space for space in SPACES}
    return {
        life: {name for name, payload in found.items() if payload == known.payload(sizes[name[0]], name[1])}
        for life, found in records(directory).items()
    }


def bytes_of(directory: Path) -> int:
    """What a directory takes: of blocks on the disk and of the files' lengths, whichever is more."""
    blocks = length = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                found = entry.stat()
            except FileNotFoundError:  # a temporary file, renamed meanwhile
                continue
            blocks += found.st_blocks * 512
            length += found.st_size
    return max(blocks, length)


def no_damage(report: dict[str, Any]) -> None:
    """No disk failed, and nothing that was read was wrong."""
    assert not report["counters"].get("read_failed"), report["counters"]
    for log in report["logs"]:
        assert not log["errors"], log
        assert not log["rejected"], log


def calm(manager: Manager) -> None:
    """The manager's log tells of no exception."""
    said = manager.log.read_text(errors="replace")
    assert "Traceback" not in said, said[-4000:]


# --- a disk that fails to order ---------------------------------------------------------------------------------------

OLD = list(range(1, 121))
NEW = list(range(1001, 1061))
"""Chains: of the first, most is on the SSD alone once the second is stored, which is in DRAM."""


class Disk:
    """A manager on a disk that fails to order, and an engine that knows what it stored."""

    def __init__(self, serve: Callable[..., Manager], folder: Path, *options: str) -> None:
        self.faults = folder / "faults"
        self.faults.mkdir()
        self.directory = folder / "ssd"
        self.known = Known()
        program = (str(HERE / "ssd_faulty.py"), str(self.faults))
        ssd = ("--ssd", f"{self.directory}:32MiB", "--ssd-min-free", "1MiB")
        self.manager = serve(*ssd, *options, dram="8MiB", program=program)
        populated(self.manager.socket)
        self.client = Client(self.manager.socket, SMALL, self.known, slots=4)

    def fill(self) -> None:
        """OLD is on the SSD, most of it only there; NEW is in DRAM, too."""
        for start in range(0, len(OLD), 20):  # what is evicted before it is written would be lost
            self.client.store(OLD[start : start + 20])
            settle(self.manager.socket)
        self.client.store(NEW)
        no_damage(settle(self.manager.socket))
        tiers = self.client.tiers(OLD)
        assert tiers.count(2) > 20, tiers
        assert tiers.count(0) == 0, tiers
        assert self.client.tiers(NEW) == b"\1" * len(NEW)
        self.cold = [key for key, tier in zip(OLD, tiers, strict=True) if tier == 2]

    def order(self, what: str, text: str = "") -> None:
        fresh = self.faults / f"{what}.new"  # never half an order
        fresh.write_text(text)
        fresh.rename(self.faults / what)

    def end_of(self, what: str) -> None:
        (self.faults / what).unlink()

    def report(self) -> dict[str, Any]:
        return look(self.manager.socket)

    def hits(self, keys: list[int]) -> None:
        answer = self.client.ask(keys)
        assert (answer.resident, answer.reason) == (len(keys), ""), answer

    def misses(self, keys: list[int], reason: str) -> None:
        answer = self.client.ask(keys)
        assert (answer.resident, answer.reason) == (0, reason), answer

    def dram_works(self) -> None:
        self.hits(NEW[:8])
        self.client.store([key + (1 << 32) for key in NEW[:4]])
        self.hits([key + (1 << 32) for key in NEW[:4]])

    def again(self) -> None:
        """Start a manager in the place of one that ended."""
        self.manager.start()
        populated(self.manager.socket)
        rebuilt(self.manager.socket)
        self.client = Client(self.manager.socket, SMALL, self.known, slots=4)

    def ends(self) -> None:
        assert self.manager.terminate() == 0
        calm(self.manager)
