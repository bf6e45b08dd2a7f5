"""Clients of a manager, raw enough to break every rule of its protocol, and other means of looking at it."""

import ctypes
import itertools
import json
import os
import re
import select
import socket
import struct
import time
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from kvhold import protocol as wire
from kvhold.client.arena import ArenaMapping

DEADLINE = 60.0
KEY_BYTES = 8
NAMESPACE = bytes(range(32))
SHARD = 4096

T = TypeVar("T")


def until(condition: Callable[[], T], what: str, deadline: float = DEADLINE) -> T:
    """The first true value of ``condition``, asked again and again."""
    end = time.monotonic() + deadline
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {deadline} s: {what}"
        time.sleep(0.005)
    return value


def keys_of(numbers: Iterable[int]) -> bytes:
    return b"".join(struct.pack("<Q", number) for number in numbers)


class Peer:
    """One connection. Everything it takes and gives is JSON, so that a puppet can be told to do it."""

    def __init__(self, path: str | Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.socket.settimeout(DEADLINE)
        self.socket.connect(str(path))
        self.rows: list[int] = []
        self.offsets: list[int] = []
        self.epochs: list[int] = []
        self.mapping: ArenaMapping | None = None
        self.shards: dict[int, tuple[int, ...]] = {}
        self._ops = itertools.count(1)
        self._reader = wire.FrameReader()
        self._inbox: list[wire.ManagerMessage] = []
        self.descriptors: list[int] = []

    # --- frames -------------------------------------------------------------------------------------------------

    def raw(self, data: bytes) -> None:
        self.socket.sendall(data)

    def send(self, *messages: wire.ClientMessage) -> None:
        self.raw(b"".join(map(wire.frame, messages)))

    def receive(self) -> wire.ManagerMessage | None:
        """The next message, or None when the manager closed the connection."""
        while not self._inbox:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.socket, 1 << 20, 1)
            except ConnectionResetError:
                return None
            self.descriptors += descriptors
            if not data:
                return None
            self._inbox += map(wire.FROM_MANAGER.decode, self._reader.feed(data))
        message = self._inbox.pop(0)
        if isinstance(message, wire.Grant):
            self.rows += array("I", message.rows)
            self.offsets += array("Q", message.offsets)
            self.epochs += array("Q", message.epochs)
        return message

    def expect(self, kind: type[T]) -> T:
        """The next message of ``kind``; others are passed over."""
        while True:
            message = self.receive()
            if isinstance(message, kind):
                return message
            assert message is not None, f"closed before {kind.__name__}"
            assert not isinstance(message, wire.Refused), message.reason

    def refusal(self) -> str:
        """Why the manager ends this connection; waits until it has."""
        reason = ""
        while (message := self.receive()) is not None:
            if isinstance(message, wire.Refused):
                reason = message.reason
        return reason

    # --- a session ----------------------------------------------------------------------------------------------

    def join(self, role: str, instance: str = "", rank: int = 0, world: int = 1) -> int:
        """Introduce oneself; the session's token."""
        self.raw(wire.PREAMBLE + wire.frame(wire.Hello(role, instance, rank, world, "test")))
        return self.expect(wire.Welcome).token

    def arena_fd(self) -> int:
        """The arena's descriptor, which came with the Welcome."""
        (descriptor,) = self.descriptors
        self.descriptors.clear()
        return descriptor

    def map(self) -> None:
        """Map the arena that came with the Welcome, and say so."""
        descriptor = self.arena_fd()
        self.mapping = ArenaMapping(descriptor, os.fstat(descriptor).st_size, 0)
        os.close(descriptor)
        self.send(wire.Mapped())

    def write(self, offset: int, text: str) -> None:
        assert self.mapping is not None
        ctypes.memmove(self.mapping.address + offset, text.encode(), len(text))

    def read(self, offset: int, size: int) -> str:
        assert self.mapping is not None
        return ctypes.string_at(self.mapping.address + offset, size).decode()

    def ready(self) -> None:
        self.expect(wire.Ready)

    def open(
        self,
        slots: int,
        namespace: str = NAMESPACE.hex(),
        space: int = 1,
        world: int = 1,
        shard: int = SHARD,
        watch: bool = False,
        label: str = "",
    ) -> int:
        """Open a space and wait for its ``slots``; how many credits the manager keeps granted."""
        self.shards[space] = (shard,) * world
        self.send(wire.Open(space, bytes.fromhex(namespace), 0, KEY_BYTES, self.shards[space], slots, watch, label))
        opened = self.expect(wire.Opened)
        assert not opened.note, opened.note
        self.slots(min(slots, opened.credit))
        return opened.credit

    def slots(self, count: int) -> None:
        """Wait until ``count`` granted slots are here."""
        while len(self.rows) < count:
            self.expect(wire.Grant)

    def commit(self, keys: list[int], space: int = 1) -> None:
        """Publish a chain of ``keys`` into the first granted slots."""
        rows, epochs = array("I", self.rows[: len(keys)]), array("Q", self.epochs[: len(keys)])
        del self.rows[: len(keys)], self.offsets[: len(keys)], self.epochs[: len(keys)]
        self.send(wire.Commit(space, b"", 0, keys_of(keys), rows.tobytes(), epochs.tobytes(), self.shards[space]))

    def ask(self, keys: list[int], skip: int = 0, space: int = 1) -> list[int]:
        """[operation, resident keys, arena offsets of those that are leased now...]"""
        op = next(self._ops)
        self.send(wire.Query(op, 1, space, skip, keys_of(keys)))
        answer = self.expect(wire.Answer)
        assert answer.op == op
        return [op, answer.resident, *array("Q", answer.offsets)]

    def release(self, op: int) -> None:
        self.send(wire.Release(((op, 1),)))

    def sync(self) -> None:
        """Return when the manager has handled all that this scheduler session sent."""
        self.send(wire.Query(0, 1, 1 << 40, 0, b""))
        self.expect(wire.Answer)

    def retire(self, token: int) -> None:
        self.send(wire.Retire(token))

    def send_bye(self) -> None:
        self.send(wire.Bye())

    def bye(self) -> None:
        self.send_bye()
        assert self.refusal() == ""

    def close(self) -> None:
        self.socket.close()


class Engine:
    """Both halves of an engine instance with one rank in this process, attached, with ``slots`` of a space."""

    def __init__(
        self,
        path: Path,
        instance: str,
        slots: int = 8,
        namespace: bytes = NAMESPACE,
        shard: int = SHARD,
        watch: bool = False,
        label: str = "",
    ) -> None:
        self.scheduler, self.worker = Peer(path), Peer(path)
        self.scheduler_token = self.scheduler.join("scheduler", instance)
        self.worker_token = self.worker.join("worker", instance)
        self.worker.map()
        self.scheduler.ready()
        self.credit = self.scheduler.open(slots, namespace.hex(), shard=shard, watch=watch, label=label)

    def store(self, keys: list[int]) -> None:
        """Publish ``keys``, as many at a time as there may be credits."""
        for start in range(0, len(keys), self.credit):
            part = keys[start : start + self.credit]
            self.scheduler.slots(len(part))
            self.scheduler.commit(part)
        self.scheduler.sync()

    def works(self, keys: list[int]) -> None:
        """The chain ``keys`` is here, and can be leased and released."""
        op, resident, *offsets = self.scheduler.ask(keys)
        assert (resident, len(offsets)) == (len(keys), len(keys))
        self.scheduler.release(op)
        self.scheduler.sync()

    def bye(self) -> None:
        self.scheduler.bye()
        self.worker.bye()


def status(path: Path) -> dict[str, Any]:
    """The manager's report, after a look at its first rule: every byte of the arena is somewhere."""
    admin = Peer(path)
    admin.join("admin")
    admin.send(wire.Status())
    report: dict[str, Any] = json.loads(admin.expect(wire.StatusReply).document)
    admin.close()
    accounts = report["accounts"]
    assert min(accounts.values()) >= 0, accounts
    assert sum(accounts.values()) == report["arena"]["populated"], report
    return report


def populated(path: Path) -> None:
    """Wait until the whole arena may be used."""

    def full() -> bool:
        arena = status(path)["arena"]
        return bool(arena["populated"] == arena["bytes"])

    until(full, "arena populated")


def http_address(log: Path) -> str:
    """Where the manager says in its log that it answers HTTP."""
    found = until(lambda: re.search(r"http://\S+", log.read_text()), "the address in the log")
    assert found is not None
    return found[0]


def listening_pid(path: Path) -> int:
    """Which process listens on ``path``."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(path))
        pid, _, _ = struct.unpack("iII", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(pid)


class Watched:
    """A process of somebody else's, whose end can be waited for."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def gone(self, wait: float = 0.0) -> bool:
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(wait * 1000))

    def close(self) -> None:
        os.close(self._pidfd)
