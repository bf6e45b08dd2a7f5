"""vLLM with kvhold, without it, and with vLLM's ExampleConnector: throughput without reuse, and time to first token.

    ./dev run python benchmarks/engine.py [--rounds 5] [--requests 8] [--tokens 512]

One process, one engine at a time, variants in turns. The model is the demo's (SmolLM2-135M, float32 or as given).
"""

import os

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from figures import in_turns, median, ratios, spread
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

from kvhold.cli.demo_model import ensure_model

VARIANTS: dict[str, dict[str, Any] | None] = {
    "without": None,
    "kvhold": {"kv_connector": "KvHoldConnector"},
    "example": {"kv_connector": "ExampleConnector"},
}
LENGTHS = (128, 512, 1024)


@contextmanager
def engine(model: str, variant: str, folder: str) -> Any:
    options = VARIANTS[variant]
    transfer = None
    if options is not None:
        extra = {"shared_storage_path": folder} if variant == "example" else {"dram": "2GiB"}
        transfer = KVTransferConfig(kv_role="kv_both", kv_connector_extra_config=extra, **options)
    llm = LLM(
        model,
        kv_transfer_config=transfer,
        block_size=32,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=2048,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=1 << 30,
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
    try:
        generate(llm, [[7, 8, 9]], 1)
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()


def generate(llm: LLM, prompts: list[list[int]], tokens: int) -> tuple[float, int]:
    """(seconds, cached tokens) of a batch."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
    begun = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    return time.perf_counter() - begun, sum(output.num_cached_tokens or 0 for output in outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    model = str(ensure_model(print))
    rng = random.Random(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[rng.randrange(10, 40_000) for _ in range(length)] for _ in range(count)]

    def throughput(variant: str) -> Callable[[], float]:
        def run() -> float:
            with tempfile.TemporaryDirectory() as folder, engine(model, variant, folder) as llm:
                seconds, cached = generate(llm, prompts(options.requests, options.tokens), 16)
                assert not cached
                return options.requests * (options.tokens + 16) / seconds

        return run

    print(f"throughput without reuse, {options.requests} prompts of {options.tokens} tokens, 16 generated")
    measured = in_turns(options.rounds, **{variant: throughput(variant) for variant in VARIANTS})
    for variant, values in measured.items():
        against = ratios(values, measured["without"])
        goal = "; goal 0.98, " + ("met" if median(against) >= 0.98 else "missed") if variant == "kvhold" else ""
        print(f"  {variant:8} {spread(values)} tokens/s, of no connector {spread(against)}{goal}")

    print("time to first token, milliseconds: computed, and restored after a reset")
    for length in LENGTHS:
        cold: dict[str, list[float]] = {"kvhold": [], "example": []}
        restored: dict[str, list[float]] = {"kvhold": [], "example": []}
        for variant in cold:
            with tempfile.TemporaryDirectory() as folder, engine(model, variant, folder) as llm:
                for _ in range(options.rounds):
                    [prompt] = prompts(1, length)
                    cold[variant].append(generate(llm, [prompt], 1)[0] * 1e3)
                    assert llm.reset_prefix_cache()
                    seconds, cached = generate(llm, [prompt], 1)
                    assert cached >= length - 64, f"{variant} restored only {cached} of {length}"
                    restored[variant].append(seconds * 1e3)
        for variant in cold:
            print(
                f"  {length:5} tokens, {variant:8} cold {spread(cold[variant])}, restored {spread(restored[variant])}, "
                f"ratio {spread(ratios(restored[variant], cold[variant]))}"
            )


if __name__ == "__main__":
    main()
