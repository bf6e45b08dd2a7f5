"""A remote store's executor as the manager has one, with an arena of its own and a queue of what it tells."""

import mmap
import os
import queue
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from kvhold.core.events import Ask, Cancel, Done, Forget, Found, Read, Stored, Write
from kvhold.core.remote.events import Serves
from kvhold.tiers.remote.executor import RemoteExecutor
from kvhold.tiers.remote.record import name
from kvhold.tiers.remote.url import parse_remote

ARENA = 16 << 20
SHARDS = (4096, 12288)
SIZE = sum(SHARDS)
NAMESPACE = b"n" * 32
PATIENCE = 60.0
BACKING = 7


class Remote:
    """``objects`` of this bed are numbers: number i has its own key, its own bytes, and the slot at i * SIZE."""

    def __init__(self, url: str, **options: Any) -> None:
        self.config = parse_remote(url)
        self.fd = os.memfd_create("remote-test")
        os.ftruncate(self.fd, ARENA)
        self.arena = mmap.mmap(self.fd, ARENA)
        self.told: dict[int, Done | Found] = {}
        self.serves = False
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._io = count(1)
        self.executor = RemoteExecutor(self.config, self.fd, ARENA, self._events.put, **options)
        self.executor.start(BACKING)

    def close(self) -> None:
        assert self.executor.close(PATIENCE)
        self.arena.close()
        os.close(self.fd)

    def until(self, what: Callable[[], Any]) -> Any:
        """Hear what is told until ``what`` is so."""
        deadline = time.monotonic() + PATIENCE
        while not (so := what()):
            try:
                event = self._events.get(timeout=0.02)
            except queue.Empty:
                assert time.monotonic() < deadline, self.executor.report()
                continue
            if isinstance(event, Serves):
                assert event.backing == BACKING
                assert event.serves != self.serves
                self.serves = event.serves
            else:
                assert event.io not in self.told, "answered twice"
                self.told[event.io] = event
        return so

    def wait_until_it_serves(self) -> None:
        self.until(lambda: self.serves)

    @property
    def pid(self) -> int:
        pid = self.executor.report()["pid"]
        assert isinstance(pid, int)
        return pid

    def counts(self, name: str = "counts") -> dict[str, int]:
        counts = self.executor.report()[name]
        assert isinstance(counts, dict)
        return counts

    # --- objects

    def key(self, number: int) -> bytes:
        return b"key%013d" % number

    def name(self, number: int) -> str:
        return name(self.config.pool, NAMESPACE, 0, self.key(number))

    def path(self, number: int) -> Path:
        """Where a shared folder has it."""
        return Path(self.config.path) / self.name(number)

    def bytes_of(self, number: int) -> bytes:
        return (b"%08d" % number) * (SIZE // 8)

    def slot(self, number: int) -> slice:
        return slice(number * SIZE, (number + 1) * SIZE)

    def stored(self, number: int, age: int = 0, at: int | None = None, namespace: bytes = NAMESPACE) -> Stored:
        where = number if at is None else at
        return Stored(namespace, 0, self.key(number), b"", 0, SHARDS, where * SIZE, age)

    # --- I/O

    def submit(self, kind: Any, *what: Any) -> int:
        io = next(self._io)
        self.executor.submit(kind(io, BACKING, *what))
        return io

    def cancel(self, io: int) -> None:
        self.executor.submit(Cancel(io, BACKING))

    def end(self, io: int) -> Any:
        return self.until(lambda: self.told.get(io))

    def put(self, *numbers: int, age: int = 0) -> Done:
        for number in numbers:
            self.arena[self.slot(number)] = self.bytes_of(number)
        return self.end(self.submit(Write, tuple(self.stored(number, age) for number in numbers)))  # type: ignore[no-any-return]

    def get(self, *numbers: int, at: int = 500) -> Done:
        objects = tuple(self.stored(number, at=at + index) for index, number in enumerate(numbers))
        return self.end(self.submit(Read, objects))  # type: ignore[no-any-return]

    def has(self, at: int, number: int) -> bool:
        return bytes(self.arena[self.slot(at)]) == self.bytes_of(number)

    def ask(self, *numbers: int) -> Found:
        return self.end(self.submit(Ask, tuple((NAMESPACE, 0, self.key(number)) for number in numbers)))  # type: ignore[no-any-return]

    def forget(self, *numbers: int, namespace: bytes | None = None) -> Done:
        names = tuple((NAMESPACE, 0, self.key(number)) for number in numbers)
        return self.end(self.submit(Forget, names, namespace))  # type: ignore[no-any-return]


def keeps_what_it_is_given(remote: Remote, count: int) -> None:
    """So many objects are put, asked for, got, and removed, by name and with their namespace."""
    assert remote.put(*range(count)).failed == ()
    assert remote.ask(count - 1, count, 0).there == (0, 2)
    assert remote.get(2, count, 0).failed == (1,)
    assert remote.has(500, 2)
    assert remote.has(502, 0)
    assert remote.forget(0, 1).failed == ()
    assert remote.ask(0, 1, 2).there == (2,)
    assert remote.forget(namespace=b"another").failed == ()
    assert remote.ask(2).there == (0,)
    assert remote.forget(namespace=NAMESPACE).failed == ()
    assert remote.ask(*range(count)).there == ()


def await_listener(port: int, process: "subprocess.Popen[bytes]") -> None:
    """Until somebody listens on the port of this host, which ``process`` will, unless it ends."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)


def fails_while_frozen(remote: Remote, server: int, doing: str) -> Any:
    """What is told of a call that a stopped process ``server`` does not answer: the remote's own process is dead."""
    pid = remote.pid
    os.kill(server, signal.SIGSTOP)
    try:
        if doing == "ask":
            io = remote.submit(Ask, ((NAMESPACE, 0, remote.key(0)),))
        elif doing == "get":
            io = remote.submit(Read, (remote.stored(0, at=500),))
        else:
            io = remote.submit(Write, (remote.stored(1),))
        told = remote.end(io)
        assert told.failed
        assert not Path(f"/proc/{pid}").exists(), "answered while it may still write"
    finally:
        os.kill(server, signal.SIGCONT)
    remote.until(lambda: not remote.serves)
    remote.wait_until_it_serves()
    return told
