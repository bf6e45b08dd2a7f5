"""A manager of the engine's own: started as a child, gone with the engine, however that ends."""

import socket
import subprocess
import sys
import time
from pathlib import Path

from kvhold.client.channel import AttachError
from kvhold.protocol import SOCKET_TAKEN

_START_SECONDS = 20.0


class Embedded:
    """The child, if this process is the one that started it. A socket pair tells it when this process ends."""

    def __init__(self, path: Path, dram: int, huge_pages: bool) -> None:
        self.path = path
        self._dram = dram
        self._huge_pages = huge_pages
        self._child: subprocess.Popen[bytes] | None = None
        self._lifeline: socket.socket | None = None

    def start(self) -> None:
        """Start a manager unless ours is running, and wait until one listens. Raises AttachError."""
        if self._child is None or self._child.poll() is not None:
            self._spawn()
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            with socket.socket(socket.AF_UNIX) as probe:
                try:
                    probe.connect(str(self.path))
                    return
                except OSError:
                    pass
            if self._child is not None and self._child.poll() not in (None, SOCKET_TAKEN):
                raise AttachError(f"the engine's own manager ended with status {self._child.returncode}")
            time.sleep(0.01)
        raise AttachError(f"no manager came up on {self.path} within {_START_SECONDS:g} s")

    def _spawn(self) -> None:
        if self._lifeline is not None:
            self._lifeline.close()
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "kvhold.manager", str(self.path), str(self._dram)]
        command += [str(theirs.fileno()), str(int(self._huge_pages))]
        with theirs:
            self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()], start_new_session=True
            )
        self._lifeline = ours

    def close(self) -> None:
        """Let go of the child: it ends once no other process of the engine is attached."""
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None
