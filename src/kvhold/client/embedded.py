"""An engine's own manager: the engine starts it, and it ends after the engine, however that ends.

It is no child of the engine's: vLLM's server kills all that its engine has started as soon as it is told to end, and
what waits to be written to SSD would be lost. It sees by itself that the engine is gone.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvhold import protocol as wire
from kvhold.client.channel import AttachError, Channel
from kvhold.folders import NoFolder, is_default, new_socket
from kvhold.host import is_dead, peer
from kvhold.protocol import SOCKET_TAKEN

_START_SECONDS = 20.0
_WRITE_SECONDS = 3.0
"""How long the engine's end waits for an SSD; vLLM gives it five seconds, unless it gives none."""
_REASON_BYTES = 2048
_ENGINES_OWN = ("OMP_", "GOMP_", "KMP_", "LD_PRELOAD")
"""What an engine sets for its own threads: they would bind the manager's to the engine's busiest cores."""
_LAUNCH = """
import os, socket, sys
waits, begins = os.pipe()
if not os.fork():
    os.setsid()
    with socket.socket(fileno=os.dup(int(sys.argv[1]))) as lifeline:
        socket.send_fds(lifeline, [str(os.getpid()).encode()], [os.pidfd_open(os.getpid())])
    os.execv(sys.argv[2], sys.argv[2:])
os.close(begins)
os.read(waits, 1)
"""
"""Starts the rest of its arguments, which first hands over a hold on its process; and ends, so it is nobody's child.
It leads a session, which the kernel gives a share of the cores of its own."""


class _Manager:
    """A manager that this process has started, and a socket over which it says why it could not start."""

    def __init__(self, path: Path, dram: int, huge_pages: bool, ssd: str | None, eviction: str) -> None:
        self.pid = -1
        self.ended = False
        self.taken = False
        """Whether it ended because another one has the socket."""
        self.reason = ""
        self._pidfd = -1
        self._lifeline, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        its_end = str(theirs.fileno())
        options = [str(path), str(dram), its_end, str(int(huge_pages)), eviction, *([ssd] if ssd else [])]
        with theirs:
            launched = subprocess.run(
                [sys.executable, "-IS", "-c", _LAUNCH, its_end, sys.executable, "-m", "kvhold.manager", *options],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if not name.startswith(_ENGINES_OWN)},
                check=False,
            )
        self._lifeline.setblocking(False)
        try:
            said, [self._pidfd], _, _ = socket.recv_fds(self._lifeline, _REASON_BYTES, 1)
            self.pid = int(said)
        except (OSError, ValueError):
            self.ended, self.reason = True, f"its launch ended with status {launched.returncode}"

    def look(self) -> None:
        """Notice whether it has ended, and what it said about that."""
        if self.ended or not is_dead(self._pidfd):
            return
        self.ended = True
        try:
            said = self._lifeline.recv(_REASON_BYTES).decode(errors="replace")
        except OSError:
            said = ""
        status, _, reason = said.partition(" ")
        self.taken = status == str(SOCKET_TAKEN)
        self.reason = reason or "it ended without a word"

    def close(self) -> None:
        """Let go of it. Doing so again does nothing."""
        self._lifeline.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class Embedded:
    """The manager on one of ``paths``, if this process is the one that started it.

    A socket pair tells it when this process ends, and this process why it could not start.
    """

    def __init__(
        self, paths: Sequence[Path], dram: int, huge_pages: bool, ssd: str | None, eviction: str = "lru"
    ) -> None:
        self.paths = paths
        self.path = paths[0]
        """Where it was seen last; it moves where its folder goes away."""
        self.dram = dram
        self._huge_pages = huge_pages
        self._ssd = ssd
        self._eviction = eviction
        self._manager: _Manager | None = None
        self._was_up = False
        self._is_new = False  # nobody was told of it yet
        self._failures = 0
        self._failure = ""
        self._not_before = 0.0

    def start(self) -> bool:
        """Start a manager unless ours is running, and wait until one listens. Raises AttachError.

        True, once, of each that this process started; another process's may have been faster.
        One that ends before it listens is started again later and later: its cause is rarely gone at once.
        """
        if time.monotonic() < self._not_before:
            raise AttachError(self._failure)
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            if (manager := self._running()) is None:
                manager = self._spawn()
            if (listener := self._listener()) is not None:
                self._was_up, self._failures = True, 0
                started = self._is_new and listener == manager.pid
                self._is_new = False
                return started
            if manager.ended and not manager.taken:
                raise self._failed(f"the engine's own manager did not start: {manager.reason}")
            time.sleep(0.02)
        raise self._failed(f"no manager came up on {self.path.name} within {_START_SECONDS:g} s")

    def _running(self) -> _Manager | None:
        """The one that was started, unless somebody else's took its place, or it served and ended."""
        if self._manager is None:
            return None
        self._manager.look()
        return None if self._manager.taken or (self._was_up and self._manager.ended) else self._manager

    def _listener(self) -> int | None:
        """The process that listens, if any does."""
        for path in self.paths:
            with socket.socket(socket.AF_UNIX) as probe:
                try:
                    probe.connect(str(path))
                    pid, user = peer(probe)
                except OSError:
                    continue
                if user == os.getuid():
                    self.path = path
                    return pid
        return None

    def _failed(self, reason: str) -> AttachError:
        self._failures += 1
        self._not_before = time.monotonic() + min(60.0, 2.0**self._failures)
        self._failure = reason
        self._was_up = True  # the next start begins with a new one
        return AttachError(reason)

    def _spawn(self) -> _Manager:
        if self._manager is not None:
            self._manager.close()
        try:
            path = new_socket(self.path.name) if is_default(self.path) else self.path
        except NoFolder as error:
            raise self._failed(f"the engine's own manager did not start: {error}") from None
        self._manager = _Manager(path, self.dram, self._huge_pages, self._ssd, self._eviction)
        self._was_up, self._is_new = False, True
        return self._manager

    def write_out(self) -> None:
        """Have it write what waits for its SSD, for a few seconds: a container may end with its engine."""
        if self._ssd is None:
            return
        end = time.monotonic() + _WRITE_SECONDS
        try:
            channel = Channel(self.path, wire.Hello("admin"), _WRITE_SECONDS)
        except AttachError:
            return
        channel.send(wire.Flush())
        while not channel.lost and (left := end - time.monotonic()) > 0:
            if channel.receive(left):
                break
        channel.close()

    def close(self) -> None:
        """Let go of it: it ends once no other process of the engine is attached."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None
