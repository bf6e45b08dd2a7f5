"""A real manager as a child process that tests may kill, stop and restart."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

START_DEADLINE = 60.0
EXIT_DEADLINE = 60.0


class Manager:
    """``kvhold serve`` on ``folder/kvhold.sock``, its output in ``folder/manager.log``.

    Keep ``folder`` short: a Unix socket's path ends at 107 bytes.
    """

    def __init__(
        self, folder: Path, *options: str, dram: str = "256MiB", program: Sequence[str] = ("-m", "kvhold.cli")
    ) -> None:
        self.socket = folder / "kvhold.sock"
        self.log = folder / "manager.log"
        self._command = [sys.executable, *program, "serve", "--dram", dram, "--socket", str(self.socket), *options]
        self.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def start(self) -> None:
        """Start the process and return when its socket accepts."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=_environment()
            )
        deadline = time.monotonic() + START_DEADLINE
        while not self._accepts():
            if not self.alive:
                raise RuntimeError(f"the manager exited with {self._process.returncode}:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"no manager on {self.socket} after {START_DEADLINE} s:\n{self.log_tail()}")
            time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL, also of a stopped process; returns when it is gone. A dead manager stays dead."""
        self._process.kill()
        self._process.wait(EXIT_DEADLINE)

    def terminate(self) -> int:
        """SIGTERM; returns the exit status."""
        self._process.terminate()
        return self._process.wait(EXIT_DEADLINE)

    def stop(self) -> None:
        """SIGSTOP; returns when the process no longer runs, while its socket still accepts."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def cont(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """Kill what runs and start again on the same socket."""
        self.kill()
        self.start()

    def log_tail(self, size: int = 4000) -> str:
        return self.log.read_text(errors="replace")[-size:]

    def _accepts(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(10.0)
            try:
                probe.connect(str(self.socket))
            except OSError:
                return False
            return True


def all_written(report: dict[str, Any]) -> bool:
    """Whether, by its report, a manager has written all that it is to write to SSD."""
    return not report["io_pending"] and not any(one["queued_writes"] for one in (*report["logs"], *report["stores"]))


def _environment() -> dict[str, str]:
    """The child imports the kvhold that the tests import, installed or not."""
    spec = importlib.util.find_spec("kvhold")
    paths = [str(Path(spec.origin).parents[1])] if spec and spec.origin else []
    return os.environ | {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)}
