"""A manager of the engine's own: started as a child, gone with the engine, however that ends."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from kvhold.client.channel import AttachError
from kvhold.protocol import SOCKET_TAKEN

_START_SECONDS = 20.0
_ENGINES_OWN = ("OMP_", "GOMP_", "KMP_", "LD_PRELOAD")
"""What an engine sets for its own threads: they would bind the manager's to the engine's busiest cores."""


class Embedded:
    """The child, if this process is the one that started it. A socket pair tells it when this process ends."""

    def __init__(self, path: Path, dram: int, huge_pages: bool, ssd: str | None) -> None:
        self.path = path
        self._dram = dram
        self._huge_pages = huge_pages
        self._ssd = ssd
        self._child: subprocess.Popen[bytes] | None = None
        self._lifeline: socket.socket | None = None
        self._was_up = False
        self._failures = 0
        self._failure = ""
        self._not_before = 0.0

    def start(self) -> None:
        """Start a manager unless ours is running, and wait until one listens. Raises AttachError.

        One that ends before it listens is started again later and later: its cause is rarely gone at once.
        """
        if time.monotonic() < self._not_before:
            raise AttachError(self._failure)
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            if self._needs_a_child():
                self._spawn()
            if self._listens():
                self._was_up, self._failures = True, 0
                return
            assert self._child is not None
            if (ended := self._child.poll()) not in (None, SOCKET_TAKEN):
                self._fail(f"the engine's own manager ended with status {ended}")
            time.sleep(0.02)
        self._fail(f"no manager came up on {self.path} within {_START_SECONDS:g} s")

    def _needs_a_child(self) -> bool:
        """There is none, somebody else's took its place, or it served and ended."""
        ended = None if self._child is None else self._child.poll()
        return self._child is None or ended == SOCKET_TAKEN or (self._was_up and ended is not None)

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.path))
            except OSError:
                return False
        return True

    def _fail(self, reason: str) -> NoReturn:
        self._failures += 1
        self._not_before = time.monotonic() + min(60.0, 2.0**self._failures)
        self._failure = reason
        self._was_up = True  # the next start begins with a new child
        raise AttachError(reason)

    def _spawn(self) -> None:
        if self._lifeline is not None:
            self._lifeline.close()
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "kvhold.manager", str(self.path), str(self._dram)]
        command += [str(theirs.fileno()), str(int(self._huge_pages)), *([self._ssd] if self._ssd else [])]
        with theirs:
            self._was_up = False
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
