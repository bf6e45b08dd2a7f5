"""A manager of the engine's own: started as a child, gone with the engine, however that ends."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from kvhold.client.channel import AttachError
from kvhold.host import peer
from kvhold.protocol import SOCKET_TAKEN

_START_SECONDS = 20.0
_REASON_BYTES = 2048
_ENGINES_OWN = ("OMP_", "GOMP_", "KMP_", "LD_PRELOAD")
"""What an engine sets for its own threads: they would bind the manager's to the engine's busiest cores."""


class Embedded:
    """The child, if this process is the one that started it.

    A socket pair tells it when this process ends, and this process why it could not start.
    """

    def __init__(self, path: Path, dram: int, huge_pages: bool, ssd: str | None) -> None:
        self.path = path
        self.dram = dram
        self._huge_pages = huge_pages
        self._ssd = ssd
        self._child: subprocess.Popen[bytes] | None = None
        self._lifeline: socket.socket | None = None
        self._was_up = False
        self._is_new = False  # nobody was told of the child yet
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
            if self._needs_a_child():
                self._spawn()
            assert self._child is not None
            if (listener := self._listener()) is not None:
                self._was_up, self._failures = True, 0
                started = self._is_new and listener == self._child.pid
                self._is_new = False
                return started
            if (ended := self._child.poll()) not in (None, SOCKET_TAKEN):
                reason = self._reason() or f"it ended with status {ended}"
                raise self._failed(f"the engine's own manager did not start: {reason}")
            time.sleep(0.02)
        raise self._failed(f"no manager came up on {self.path} within {_START_SECONDS:g} s")

    def _needs_a_child(self) -> bool:
        """There is none, somebody else's took its place, or it served and ended."""
        ended = None if self._child is None else self._child.poll()
        return self._child is None or ended == SOCKET_TAKEN or (self._was_up and ended is not None)

    def _listener(self) -> int | None:
        """The process that listens, if any does."""
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.path))
            except OSError:
                return None
            return peer(probe)[0]

    def _reason(self) -> str:
        """What the child, which has ended, said about that."""
        assert self._lifeline is not None
        try:
            return self._lifeline.recv(_REASON_BYTES, socket.MSG_DONTWAIT).decode(errors="replace")
        except OSError:
            return ""

    def _failed(self, reason: str) -> AttachError:
        self._failures += 1
        self._not_before = time.monotonic() + min(60.0, 2.0**self._failures)
        self._failure = reason
        self._was_up = True  # the next start begins with a new child
        return AttachError(reason)

    def _spawn(self) -> None:
        if self._lifeline is not None:
            self._lifeline.close()
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "kvhold.manager", str(self.path), str(self.dram)]
        command += [str(theirs.fileno()), str(int(self._huge_pages)), *([self._ssd] if self._ssd else [])]
        with theirs:
            self._was_up, self._is_new = False, True
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if not name.startswith(_ENGINES_OWN)},
            )
        self._lifeline = ours

    def close(self) -> None:
        """Let go of the child: it ends once no other process of the engine is attached."""
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None
