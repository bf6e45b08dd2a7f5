"""A real SGLang engine as a child process, driven by lines; the processes of its ranks are its children."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SHIMS = Path(__file__).parent / "shims"
START_SECONDS = 300.0
ANSWER_SECONDS = 300.0
PAGE = 32

_OPTIONS: dict[str, Any] = {
    "load_format": "auto",
    "skip_tokenizer_init": True,
    "device": "cpu",
    "dtype": "float32",  # so that what is restored can be compared to the bit
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "page_size": PAGE,
    "mem_fraction_static": 0.05,
    "max_total_tokens": 8192,
    "context_length": 2048,
    "log_level": "info",
    "enable_hierarchical_cache": True,
    "hicache_ratio": 2,
    "hicache_mem_layout": "page_first_direct",
    "hicache_io_backend": "direct",
    "hicache_write_policy": "write_through",
    "hicache_storage_prefetch_policy": "wait_complete",
}
KVHOLD: dict[str, Any] = {
    "backend_name": "kvhold",
    "module_path": "kvhold.engines.sglang.backend",
    "class_name": "KvholdStorage",
    "interface_v1": 1,
    "hicache_storage_pass_prefix_keys": True,
    "prefetch_threshold": 64,
    # A busy machine is no fault.
    "find_deadline_ms": 20_000,
    "publish_deadline_ms": 20_000,
    "read_deadline_ms": 20_000,
}
"""SGLang's extra configuration for kvhold."""


def arguments(model: Path, extra: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
    """SGLang's arguments for an engine of ``model``, with a storage of the configuration ``extra`` if there is one."""
    storage: dict[str, Any] = {}
    if extra is not None:
        storage = {
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config": json.dumps(KVHOLD | extra),
        }
    return _OPTIONS | {"model_path": str(model)} | storage | options


def environment(given: dict[str, Any]) -> dict[str, str]:
    """The environment in which an engine with such arguments runs on a CPU."""
    ranks = given.get("tp_size", 1) * given.get("pp_size", 1)
    cores = sorted(os.sched_getaffinity(0))
    return os.environ | {
        "PYTHONPATH": os.pathsep.join((str(SHIMS), os.environ.get("PYTHONPATH", ""))),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # compiling takes a minute
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(ranks)),
    }


class Sglang:
    """An engine of ``model``, whose output goes to ``log``. ``extra`` is its storage's configuration, if it has one."""

    def __init__(self, model: Path, log: Path, extra: dict[str, Any] | None, **options: Any) -> None:
        set_up = options.pop("environment", {})
        self.log = log
        given = arguments(model, extra, **options)
        read, write = os.pipe()
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "testbed.sglang.driven", str(write), json.dumps(given)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                pass_fds=[write],
                start_new_session=True,
                env=environment(given) | set_up,
            )
        os.close(write)
        self._replies = read
        self._heard = b""
        try:
            self._answer(START_SECONDS)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> "Sglang":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, do: str, **given: Any) -> Any:
        """What the engine answers to one line."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **given}).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer(ANSWER_SECONDS)

    def generate(self, *prompts: list[int], **given: Any) -> list[dict[str, Any]]:
        """All at once; none may fail."""
        answers: list[dict[str, Any]] = self.ask("generate", prompts=prompts, **given)
        assert all(answer["reason"]["type"] == "length" for answer in answers), answers
        return answers

    def attach(self, extra: dict[str, Any], policy: str | None = None) -> None:
        """Attach a storage of this configuration at run time, perhaps with another prefetch ``policy``."""
        self._once_idle("attach", extra=json.dumps(KVHOLD | extra), policy=policy)

    def detach(self) -> None:
        """Detach the storage at run time."""
        self._once_idle("detach")

    def flush(self) -> None:
        """Empty the engine's own caches, as users do."""
        self._once_idle("flush")

    def _once_idle(self, do: str, **given: Any) -> None:
        """Until it succeeds: a request that only just ended and pages that are still written keep SGLang from it."""
        end = time.monotonic() + 120
        while not self.ask(do, **given):
            assert time.monotonic() < end, f"no {do} succeeds:\n{self.tail()}"
            time.sleep(0.05)

    def tail(self, size: int = 6000) -> str:
        return self.log.read_text(errors="replace")[-size:]

    def close(self) -> None:
        """Let it end as users do, and take what is left."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        self.kill()

    def kill(self) -> None:
        """SIGKILL, all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)
        if self._replies >= 0:
            os.close(self._replies)
            self._replies = -1

    def _answer(self, seconds: float) -> Any:
        end = time.monotonic() + seconds
        while b"\n" not in self._heard:
            ready, _, _ = select.select([self._replies], [], [], max(0.0, end - time.monotonic()))
            piece = os.read(self._replies, 1 << 20) if ready else b""
            if not piece:
                raise AssertionError(f"the engine {'ended' if ready else 'does not answer'}:\n{self.tail()}")
            self._heard += piece
        line, _, self._heard = self._heard.partition(b"\n")
        return json.loads(line)
