"""In-process vLLM engines on the CPU that start in a fraction of a second and whose output is compared bit for bit.

Import this module before vLLM and torch: both read the environment once. Only one engine can be open at a time,
because vLLM keeps the worker half of the connector in a global.
"""

import os

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler, worker and both connector halves live in this process
    "OMP_NUM_THREADS": "1",  # makes outputs independent of batching, and steps twenty times faster on few cores
    "TORCHDYNAMO_DISABLE": "1",  # or the first logprobs on a machine wait 20 s for a C++ compiler
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import gc
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

# PyPI's builds of these want CUDA and break on a CPU torch, and transformers imports whatever it finds installed.
for _name in ("torchvision", "torchaudio", "torchcodec"):
    try:
        importlib.import_module(_name)
    except (ImportError, OSError, RuntimeError):
        sys.modules[_name] = None  # type: ignore[assignment]  # "not installed", for this process

from vllm import LLM, RequestOutput, SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown, get_kv_transfer_group  # noqa: E402
from vllm.model_executor.models import registry  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

PATIENCE = 60.0
"""Seconds until what still waits is taken to hang. Steps that wait are quick: their number says nothing."""
Tokens = list[int]


@dataclass(frozen=True)
class Output:
    """What a finished request returned. Equal means the same tokens and the same logprobs to the last bit."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None
    cached: int = field(compare=False)
    request_id: str = field(compare=False)

    @classmethod
    def of(cls, request: RequestOutput) -> "Output":
        completion = request.outputs[0]
        tokens = tuple(completion.token_ids)
        logprobs = tuple(at[token].logprob for at, token in zip(completion.logprobs or (), tokens, strict=True))
        return cls(tokens, logprobs, completion.finish_reason, request.num_cached_tokens or 0, request.request_id)


# Life of an engine

_open: list[LLM] = []
_kernels_bound = False


def engine(
    model_dir: Path,
    *,
    connector: dict[str, Any] | None,
    role: str = "kv_both",
    **llm_kwargs: Any,
) -> LLM:
    """Start an engine; ``connector`` is kvhold's ``kv_connector_extra_config``, None starts without a connector."""
    if _open:
        raise RuntimeError("another engine is open in this process: close it first")
    options: dict[str, Any] = {
        "load_format": "auto" if list(model_dir.glob("*.safetensors")) else "dummy",
        "use_tqdm_on_load": False,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "block_size": 32,
        "kv_cache_memory_bytes": 64 << 20,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "seed": 0,
    }
    if connector is not None:
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="KvHoldConnector",
            kv_connector_module_path="kvhold.engines.vllm.connector",
            kv_connector_extra_config=connector,
            kv_role=role,
        )
    try:
        with _fast():
            llm = LLM(str(model_dir), **options | llm_kwargs)
    except BaseException:
        ensure_kv_transfer_shutdown()  # or the next engine would inherit this one's worker half
        raise
    _open.append(llm)
    return llm


def close(llm: LLM) -> None:
    _open.remove(llm)
    with _fast():
        try:
            llm.llm_engine.engine_core.shutdown()
        finally:
            ensure_kv_transfer_shutdown()


@contextmanager
def running(model_dir: Path, *, connector: dict[str, Any] | None, **kwargs: Any) -> Iterator[LLM]:
    llm = engine(model_dir, connector=connector, **kwargs)
    try:
        yield llm
    finally:
        close(llm)


@contextmanager
def _fast() -> Iterator[None]:
    """Leave out what dominates start and stop.

    That is: full garbage collections, binding the CPU kernels a second time, and a child process that imports vLLM
    again to look at an architecture it has not seen before.
    """
    global _kernels_bound
    bind = current_platform.register_triton_kernel_overrides
    with (
        patch.object(gc, "collect", return_value=0),
        patch.object(registry, "_run_in_subprocess", lambda inspect: inspect()),
        patch.object(current_platform, "register_triton_kernel_overrides", (lambda: None) if _kernels_bound else bind),
    ):
        yield
    _kernels_bound = True


# Parts of an engine


def scheduler(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def runner(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def scheduler_half(llm: LLM) -> Any:
    return _ours(scheduler(llm).connector)


def worker_half() -> Any:
    return _ours(get_kv_transfer_group())


def _ours(connector: Any) -> Any:
    """kvhold's connector, which may be a child of ``MultiConnector``."""
    children = getattr(connector, "sub_connectors", [connector])
    return next((child for child in children if type(child).__name__ == "KvHoldConnector"), connector)


def free_blocks(llm: LLM) -> int:
    return scheduler(llm).kv_cache_manager.block_pool.get_num_free_blocks()


def block_ids(llm: LLM, internal_id: str) -> tuple[list[int], ...]:
    """The blocks a live request holds, per cache group."""
    return scheduler(llm).kv_cache_manager.get_block_ids(internal_id)


# Requests


def prompt(n: int, seed: int = 0) -> Tokens:
    """``n`` tokens; prompts of one seed are prefixes of each other, those of two seeds differ from the start."""
    return [(i * 37 + 11 + seed * 101 + (i * i * (seed + 3)) % 29) % 500 + 3 for i in range(n)]


def generate(
    llm: LLM, prompts: Sequence[Tokens], max_tokens: int | Sequence[int] = 8, *, salt: str | None = None
) -> list[Output]:
    """Run the prompts as one batch, greedily. The engine stops stepping at the last token: see ``settle``."""
    limits = _limits(prompts, max_tokens)
    requests = llm.generate(
        [_inputs(tokens, salt) for tokens in prompts], [_greedy(limit) for limit in limits], use_tqdm=False
    )
    return [Output.of(request) for request in requests]


def add(
    llm: LLM,
    rid: str,
    tokens: Tokens,
    max_tokens: int = 8,
    *,
    salt: str | None = None,
    transfer: dict[str, Any] | None = None,
) -> str:
    """Queue a request; returns the engine's internal id, which is the one that schedulers and connectors see."""
    return llm.llm_engine.add_request(rid, _inputs(tokens, salt), _greedy(max_tokens, transfer))


def abort(llm: LLM, rid: str) -> None:
    llm.llm_engine.abort_request([rid])


def step(llm: LLM) -> list[Output]:
    """One engine step; returns the requests that finished in it."""
    return [Output.of(request) for request in llm.llm_engine.step() if request.finished]


def drain(llm: LLM, seconds: float = PATIENCE) -> dict[str, Output]:
    """Step until every request has its output; returns them by the id given to ``add``."""
    return _step_while(llm, llm.llm_engine.has_unfinished_requests, seconds)


def settle(llm: LLM, seconds: float = PATIENCE) -> dict[str, Output]:
    """Step until the scheduler holds nothing more: also delayed frees, aborted loads and the connector's own work."""
    return _step_while(llm, scheduler(llm).has_requests, seconds)


def _step_while(llm: LLM, busy: Callable[[], bool], seconds: float) -> dict[str, Output]:
    outputs: dict[str, Output] = {}
    end = time.monotonic() + seconds
    while busy():
        if time.monotonic() > end:
            raise TimeoutError(f"still busy after {seconds} s with {sorted(scheduler(llm).requests)}")
        outputs |= {output.request_id: output for output in step(llm)}
    return outputs


def _inputs(tokens: Tokens, salt: str | None) -> Any:
    return {"prompt_token_ids": tokens} | ({"cache_salt": salt} if salt else {})


def _greedy(max_tokens: int, transfer: dict[str, Any] | None = None) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0,
        logprobs=1,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": transfer} if transfer else None,
    )


def _limits(prompts: Sequence[Tokens], max_tokens: int | Sequence[int]) -> list[int]:
    limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
    if len(limits) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts, but {len(limits)} limits")
    return limits


# The truth

_references: dict[tuple[Any, ...], Output] = {}


def reference(
    model_dir: Path, prompts: Sequence[Tokens], max_tokens: int | Sequence[int] = 8, **llm_kwargs: Any
) -> list[Output]:
    """What the model says without any cache, one request at a time.

    Remembered for the session; call it while no engine is open, one start then serves all prompts not yet known.
    """
    options = tuple(sorted(llm_kwargs.items()))
    keys = [(model_dir, options, tuple(p), n) for p, n in zip(prompts, _limits(prompts, max_tokens), strict=True)]
    if unknown := dict.fromkeys(key for key in keys if key not in _references):
        with running(model_dir, connector=None, enable_prefix_caching=False, **llm_kwargs) as llm:
            for key in unknown:
                _, _, tokens, limit = key
                [_references[key]] = generate(llm, [list(tokens)], limit)
    return [_references[key] for key in keys]
