"""An SSD that is stricter than real ones, and fails on demand; and a small stand-in for the core that drives a log."""

import errno
import os
import queue
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Lock
from typing import Any

from kvhold.core.log.events import Forget, Read, Reuse, Seal, Stored, ToLog, Write
from kvhold.core.log.segments import BLOCK, HEADER
from kvhold.tiers.ssd.directory import claim_log, trim_log
from kvhold.tiers.ssd.executor import Executor
from kvhold.tiers.ssd.files import blocks, check_aligned
from kvhold.tiers.ssd.footer import Record
from kvhold.tiers.ssd.format import Flaw
from kvhold.tiers.ssd.recover import Found, Recovery
from kvhold.tiers.ssd.survey import Log, segment_head, segment_name

SECTOR = 512
ROOT = Path("/ssd")


def open_log(path: Path, budget: int, **how: Any) -> Log:
    """What a manager does with a directory, with nothing between the claim and the rest."""
    opened = claim_log(path, budget, **how)
    trim_log(opened)
    return opened


@dataclass
class FakeFile:
    now: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes]] = field(default_factory=list)  # writes since the last sync; -1 is a new size

    def resize(self, size: int) -> None:
        _resize(self.now, size)
        self.pending.append((-1, size.to_bytes(8, "little")))

    def write(self, offset: int, data: bytes) -> None:
        if offset + len(data) > len(self.now):
            self.resize(offset + len(data))
        self.now[offset : offset + len(data)] = data
        self.pending.append((offset, data))

    def sync(self) -> None:
        self.durable = bytearray(self.now)
        self.pending.clear()

    def after_power_loss(self, choose: Callable[[int], int]) -> "FakeFile":
        """``choose(n)`` picks one of n. Each unsynced write is kept, lost, or torn between sectors."""
        image = bytearray(self.durable)
        for offset, data in self.pending:
            fate = choose(3)
            if fate == 0:
                continue
            if offset < 0:
                _resize(image, int.from_bytes(data, "little"))
                continue
            if len(image) < offset + len(data):
                _resize(image, offset + len(data))
            mask = (1 << len(data) // SECTOR) - 1 if fate == 1 else choose(1 << min(62, len(data) // SECTOR))
            for index in range(len(data) // SECTOR):
                if mask >> index % 62 & 1:
                    start = index * SECTOR
                    image[offset + start : offset + start + SECTOR] = data[start : start + SECTOR]
        return FakeFile(bytearray(image), image)


def _resize(data: bytearray, size: int) -> None:
    if size < len(data):
        del data[size:]
    else:
        data.extend(bytes(size - len(data)))


class FakeFiles:
    """Files in memory. ``fault(operation, name)`` may return an errno, ``short(bytes)`` how many are done at once.

    Operations named in ``blocked`` wait for their event.
    """

    def __init__(self) -> None:
        self.files: dict[str, FakeFile] = {}
        self.durable_names: dict[str, FakeFile] = {}
        self.free = 1 << 40
        self.fault: Callable[[str, str], int] = lambda operation, name: 0
        self.short: Callable[[int], int] = lambda size: size
        self.blocked: dict[str, Event] = {}
        self.calls: list[tuple[str, str, int, int]] = []  # operation, name, offset, bytes
        self._handles: dict[int, tuple[str, FakeFile, bool]] = {}
        self._locks: dict[str, int] = {}
        self._next = 3
        self._lock = Lock()

    # --- what may happen to it

    def after_kill(self) -> "FakeFiles":
        """What the next process finds: all that was done, none of the locks."""
        fresh = FakeFiles()
        fresh.files, fresh.durable_names, fresh.free = self.files, self.durable_names, self.free
        return fresh

    def after_power_loss(self, choose: Callable[[int], int]) -> "FakeFiles":
        fresh = FakeFiles()
        names = dict(self.durable_names)
        for name in sorted(set(self.files) | set(names)):  # what was not synced of the names may or may not be there
            if self.files.get(name) is not names.get(name) and choose(2):
                if name in self.files:
                    names[name] = self.files[name]
                else:
                    del names[name]
        fresh.files = {name: file.after_power_loss(choose) for name, file in names.items()}
        fresh.durable_names = dict(fresh.files)
        return fresh

    def vanish(self) -> None:
        """Somebody removes the directory."""
        self.files.clear()
        self.fault = lambda operation, name: errno.ENOENT

    @property
    def open_handles(self) -> list[str]:
        return [name for name, _, _ in self._handles.values()]

    # --- the layer

    def lock(self, path: Path) -> int:
        with self._lock:
            if path.name in self._locks:
                raise BlockingIOError(errno.EAGAIN, "locked")
            self.files.setdefault(path.name, FakeFile())
            self._locks[path.name] = handle = self._add(path.name, True)
            return handle

    def make_directory(self, directory: Path) -> None:
        self._may("make_directory", str(directory))

    def check_private(self, directory: Path, names: Iterable[str]) -> None:
        """It is nobody else's."""

    def names(self, directory: Path) -> dict[str, int]:
        self._may("names", str(directory))
        return {name: len(file.now) for name, file in self.files.items()}

    def open_segment(self, path: Path, *, create: bool = False, write: bool = True) -> int:
        self._may("create" if create and path.name not in self.files else "open", path.name)
        with self._lock:
            if path.name not in self.files:
                if not create:
                    raise FileNotFoundError(errno.ENOENT, "no such file")
                self.files[path.name] = FakeFile()
            return self._add(path.name, write)

    def size(self, handle: int) -> int:
        return len(self._handles[handle][1].now)

    def preadv(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        name, file, _ = self._handles[handle]
        check_aligned(buffers, offset)
        want = sum(len(buffer) for buffer in buffers)
        self._may("read", name, offset, want)
        data = memoryview(bytes(file.now[offset : offset + self._short(want)]))
        for buffer in buffers:
            part = data[: len(buffer)]
            buffer[: len(part)] = part
            data = data[len(part) :]
        return min(self._last, max(0, len(file.now) - offset))

    def pwritev(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        name, file, write = self._handles[handle]
        check_aligned(buffers, offset)
        assert write, f"{name} was opened to be read"
        data = b"".join(buffers)
        self._may("write", name, offset, len(data))
        data = data[: self._short(len(data))]
        file.write(offset, data)
        return len(data)

    def fdatasync(self, handle: int) -> None:
        name, file, _ = self._handles[handle]
        self._may("sync", name)
        file.sync()

    def allocate(self, handle: int, size: int) -> None:
        name, file, _ = self._handles[handle]
        self._may("allocate", name, 0, size)
        file.resize(size)

    def close(self, handle: int) -> None:
        name, _, _ = self._handles.pop(handle)
        if self._locks.get(name) == handle:
            del self._locks[name]

    def remove(self, path: Path) -> None:
        self._may("remove", path.name)
        self.files.pop(path.name, None)

    def replace(self, source: Path, target: Path) -> None:
        self._may("replace", target.name)
        self.files[target.name] = self.files.pop(source.name)

    def sync_names(self, directory: Path) -> None:
        self._may("sync_names", str(directory))
        self.durable_names = dict(self.files)

    def free_bytes(self, directory: Path) -> int:
        return self.free

    def _add(self, name: str, write: bool) -> int:
        self._next += 1
        self._handles[self._next] = (name, self.files[name], write)
        return self._next

    def _short(self, size: int) -> int:
        self._last = self.short(size)
        return self._last

    def _may(self, operation: str, name: str, offset: int = 0, size: int = 0) -> None:
        self.calls.append((operation, name, offset, size))
        event = self.blocked.get(operation)
        if event is not None:
            event.wait()
        code = self.fault(operation, name)
        if code:
            raise OSError(code, os.strerror(code))


@dataclass(frozen=True)
class Item:
    """An object's name and shape; its bytes follow from them."""

    key: bytes
    namespace: bytes = b"n" * 32
    group: int = 0
    shards: tuple[int, ...] = (BLOCK, 2 * BLOCK)

    @property
    def name(self) -> tuple[bytes, int, bytes]:
        return (self.namespace, self.group, self.key)

    @property
    def payload(self) -> bytes:
        return random.Random(repr(self)).randbytes(sum(self.shards))


class Driver:
    """What core and shell do with a log, in small: places records, carries out effects, waits for answers."""

    def __init__(
        self,
        files: FakeFiles,
        budget: int = 4 * (128 << 10) + (64 << 10),
        segment_bytes: int = 128 << 10,
        sync_seconds: float = 3600.0,
        log: Log | None = None,
    ) -> None:
        self.files = files
        self.log = log or open_log(ROOT, budget, min_free=0, segment_bytes=segment_bytes, files=files)
        self.arena = blocks(256 << 10)
        self.kept: dict[int, bool] = {}
        self.answers: queue.Queue[tuple[int, tuple[int, ...]]] = queue.Queue()
        self.executor = Executor(
            self.log,
            self.arena,
            self._done,
            readers=2,
            sync_seconds=sync_seconds,
        )
        self.seq = self.log.newest_seq
        self.segment = -1
        self.end = 1 << 40  # behind all that an earlier process wrote
        self._io = 0
        self._offset = 0

    def _done(self, io: int, failed: tuple[int, ...], kept: bool, ages: tuple[int, ...]) -> None:
        self.kept[io] = kept
        self.answers.put((io, failed))

    def io(self) -> int:
        self._io += 1
        return self._io

    def do(self, effect: ToLog) -> tuple[int, ...]:
        """Carry ``effect`` out; the positions that failed."""
        self.executor.submit(effect)
        io, failed = self.answers.get(timeout=60)
        assert io == effect.io
        return failed

    def begin(self, segment: int) -> bool:
        self.seq += 1
        self.segment, self.end = segment, HEADER
        return not self.do(Reuse(self.io(), 0, segment, self.seq))

    def placed(self, items: Sequence[Item], *, fill: bool = True) -> tuple[Stored, ...]:
        """Where ``items`` would go next."""
        stored = []
        at = self.end
        for depth, item in enumerate(items):
            size = sum(item.shards)
            if self._offset + size > len(self.arena):
                self._offset = 0
            if fill:
                self.arena[self._offset : self._offset + size] = item.payload
            place = (item.namespace, item.group, item.key, b"parent", depth, item.shards, self._offset, 0, at)
            stored.append(Stored(*place))
            self._offset += size
            at += HEADER + size
        return tuple(stored)

    def store(self, items: Sequence[Item]) -> tuple[int, ...]:
        """Append; on failure the end stays behind the last good one."""
        objects = self.placed(items)
        failed = self.do(Write(self.io(), 0, objects, self.segment, self.seq))
        good = [stored for index, stored in enumerate(objects) if index not in failed]
        if good:
            self.end = good[-1].at + HEADER + sum(good[-1].shards)
        return failed

    def seal(self) -> bool:
        return not self.do(Seal(self.io(), 0, self.segment, self.seq, self.end))

    def forget(self, *items: Item, namespace: bytes | None = None) -> bool:
        names = tuple(item.name for item in items)
        return not self.do(Forget(self.io(), 0, names, namespace, self.seq, self.end))

    def recover(self) -> "Recovered":
        """What a recovery would find now."""
        heads = list(self.log.heads)
        for segment, number in enumerate(self.log.numbers):
            if segment_name(number) in self.files.files:
                found = segment_head(self.files, self.log.segment_path(segment), self.log.id)
                right = isinstance(found, Flaw) or (found.log, found.number) == (self.log.id, number)
                heads[segment] = found if right else Flaw.FOREIGN
        return Recovered(replace(self.log, heads=heads))

    def read(self, record: Record) -> bytes | None:
        """The payload of a record, if it proves to be right."""
        namespace, group, key, shards, _, segment, seq, at, _ = record
        self.arena[: sum(shards)] = b"\xee" * sum(shards)
        stored = Stored(namespace, group, key, b"", 0, shards, 0, 0, at)
        failed = self.do(Read(self.io(), 0, (stored,), segment, seq))
        return None if failed else bytes(self.arena[: sum(shards)])

    def close(self) -> None:
        assert self.executor.close(10)
        self.log.close()
        assert self.answers.empty(), "answered twice"
        assert not self.files.open_handles


class Recovered:
    """All that a recovery says."""

    def __init__(self, log: Log) -> None:
        self.records: list[Record] = []
        self.segments: list[Found] = []
        recovery = Recovery(log)
        for part in recovery:
            if isinstance(part, Found):
                self.segments.append(part)
            else:
                self.records += part
        self.counts = recovery.counts

    @property
    def keys(self) -> set[bytes]:
        return {record[2] for record in self.records}

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)


def items(*names: str, **rest: object) -> list[Item]:
    return [Item(name.encode(), **rest) for name in names]  # type: ignore[arg-type]
