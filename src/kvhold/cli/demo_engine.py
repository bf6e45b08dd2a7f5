"""The demo's hold on an engine process: starting it, asking it, and ending it however the demo ends."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import typer

from kvhold import protocol as wire
from kvhold.cli.ask import ask
from kvhold.host import peer

BLOCK = 32
"""Tokens of a block; vLLM's own default on the CPU is 128."""
CONTEXT = 8192
"""Tokens that the model can look back on."""
CONNECTOR = {"kv_connector": "KvHoldConnector", "kv_role": "kv_both"}
_ANSWER_MS = 10_000
"""Until a question is given up: on a busy machine a manager may take longer than kvhold's default."""
_GOODBYE_SECONDS = 60.0
_LOG_LINES = 15


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


@dataclass(frozen=True)
class Answer:
    """What a request brought, and where its prompt's tokens came from."""

    text: str
    tokens: list[int]
    logprobs: list[float]
    first_token_seconds: float
    metrics: dict[str, float]

    def metric(self, name: str) -> int:
        return int(self.metrics.get(name, 0))


def whole_blocks(tokens: int) -> int:
    """How many of a prompt's ``tokens`` a cache can have: whole blocks, and the last token is always computed."""
    return (tokens - 1) // BLOCK * BLOCK


class EngineProcess:
    """An engine in a process of its own, with ``folder`` for its log and as the home of its manager's socket."""

    def __init__(
        self, name: str, model: Path, prompt_tokens: int, folder: Path, verbose: bool, settings: dict[str, Any]
    ) -> None:
        self.name = name
        self._log = folder / f"engine-{name}.log"
        settings = settings | {"answer_deadline_ms": _ANSWER_MS}
        options = {
            "model": str(model),
            "seed": 0,
            "block_size": BLOCK,
            "max_model_len": CONTEXT,
            "max_num_seqs": 1,
            # One step for the whole blocks and one for the rest of the prompt. So the rest is computed in a step of the
            # same shape, whether the blocks before it were computed or restored: kernels choose by shape in which order
            # they sum, and without this the cold answer would differ in the last bits, with and without kvhold.
            "max_num_batched_tokens": whole_blocks(prompt_tokens),
            "enforce_eager": True,
            "disable_log_stats": False,
            "kv_transfer_config": CONNECTOR | {"kv_connector_extra_config": settings},
        }
        command = [sys.executable, "-m", "kvhold.cli.demo_worker", json.dumps(options)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if verbose else log,
                text=True,
                env=_environment(folder, verbose),
                start_new_session=True,  # Ctrl-C is the demo's to handle
            )
        self.about: dict[str, Any] = {}

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._kill()

    def await_start(self) -> None:
        """Raises DemoError, with the end of the log, when the engine does not come up."""
        self.about = self._read()

    def run(self, tokens: list[int], limit: int) -> Answer:
        return Answer(**self._ask(order="run", tokens=tokens, limit=limit))

    def reset_prefix_cache(self) -> None:
        """Empty the engine's own cache, and leave kvhold's alone: vLLM's ``reset_prefix_cache()``."""
        if not self._ask(order="reset"):
            raise DemoError(f"engine {self.name} refused to reset its prefix cache: blocks are still in use")

    def end(self) -> None:
        """Let the engine shut down as it does when its user is done."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_GOODBYE_SECONDS)
        except subprocess.TimeoutExpired:
            raise DemoError(f"engine {self.name} did not end within {_GOODBYE_SECONDS:g} s") from None

    def log_tail(self) -> list[str]:
        with self._log.open(errors="replace") as log:
            return [line.rstrip() for line in deque(log, _LOG_LINES)]

    def _ask(self, **order: Any) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer's absence says so
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            try:
                status: int | str = self._process.wait(_GOODBYE_SECONDS)
            except subprocess.TimeoutExpired:
                status = "none: it hangs"
            log = "\n  ".join(self.log_tail()) or "(see above)"
            raise DemoError(f"engine {self.name} ended with status {status}; the end of its log:\n  {log}")
        return json.loads(line)

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass


def _environment(folder: Path, verbose: bool) -> dict[str, str]:
    threads = max(1, len(os.sched_getaffinity(0)) // 2)  # a busy core stops all threads that wait for it
    return {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "TMPDIR": str(folder),  # what an interrupted engine leaves there goes with the folder
        "KVHOLD_RUNTIME_DIR": str(
            folder / "kvhold"
        ),  # of nobody else: the demo neither finds nor fills the host's own manager
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or both engines would use the same cores
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # quicker to start
        "TORCHDYNAMO_DISABLE": "1",  # or the first logprobs wait for a C++ compiler
        "VLLM_LOGGING_LEVEL": "INFO" if verbose else "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def find_socket(folder: Path) -> Path | None:
    """The socket of the manager that an engine with this ``folder`` has started."""
    return next((folder / "kvhold").glob("e-*.sock"), None)


def manager_report(folder: Path) -> dict[str, Any] | None:
    """What ``kvhold status --json`` says; None when no manager answers."""
    path = find_socket(folder)
    if path is None:
        return None
    try:
        reply = ask(path, wire.Status())
    except typer.Exit:
        return None
    assert isinstance(reply, wire.StatusReply)
    report: dict[str, Any] = json.loads(reply.document)
    return report


def await_populated(folder: Path, seconds: float) -> None:
    """Wait until the manager has taken its memory, so that what this costs the engine is not measured."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        report = manager_report(folder)
        if report is None or report["arena"]["populated"] >= report["arena"]["bytes"]:
            return
        time.sleep(0.1)


def await_written(folder: Path, seconds: float) -> None:
    """Wait until the manager has written to SSD what it has stored."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        report = manager_report(folder)
        waits = report is not None and (report["io_pending"] or any(log["queued_writes"] for log in report["logs"]))
        if report is None or not waits:
            return
        time.sleep(0.05)


def kill_manager(folder: Path) -> None:
    """End the manager as a crash would."""
    pid = _manager_pid(folder)
    if pid is None:
        return
    process = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(process, signal.SIGKILL)
        select.select([process], [], [], _GOODBYE_SECONDS)
    finally:
        os.close(process)


def end_manager(folder: Path, seconds: float) -> bool:
    """Wait until the manager has gone after its last engine. If it does not go, kill it and return False."""
    pid = _manager_pid(folder)
    if pid is None:
        return True
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if select.select([process], [], [], seconds)[0]:
            return True
        signal.pidfd_send_signal(process, signal.SIGKILL)
        return False
    finally:
        os.close(process)


def _manager_pid(folder: Path) -> int | None:
    """The process that listens on the manager's socket, even if it does not answer."""
    path = find_socket(folder)
    if path is None:
        return None
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return None
        return peer(probe)[0]
