"""One engine of the demo, as a process of its own: ``python -m kvhold.cli.demo_worker OPTIONS``.

OPTIONS are those of ``vllm.LLM``, as JSON, but for the type of its numbers and the memory that they need, which this
process chooses. Orders come on standard input and answers go to standard output, one line of JSON each; whatever vLLM
prints goes to standard error. The process ends with its input.
"""

import json
import os
import sys
import time
from typing import Any

KV_NUMBERS = 128 << 20
"""Numbers that the KV cache has room for: the longest prompt takes 94 million."""
WARM_UP = 20
"""Tokens of a first request that is not measured: less than a block, so that kvhold neither stores nor restores it."""


def main() -> None:
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        engine = Engine(json.loads(sys.argv[1]) | _numbers())
        _tell(answers, engine.describe())
        for line in sys.stdin:
            match json.loads(line):
                case {"order": "run", "tokens": tokens, "limit": limit}:
                    _tell(answers, engine.run(tokens, limit))
                case {"order": "reset"}:
                    _tell(answers, engine.llm.reset_prefix_cache())
                case other:
                    raise ValueError(f"unknown order {other}")
        engine.close()
    os._exit(0)  # freeing all that torch has allocated would take seconds more


def _tell(answers: Any, answer: object) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _numbers() -> dict[str, Any]:
    """The type of numbers that is fast here: a processor may have to emulate bfloat16, at a quarter of the speed."""
    import torch
    from vllm.platforms import current_platform

    fast = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    dtype = torch.float32 if current_platform.is_cpu() and not fast else torch.bfloat16
    return {"dtype": str(dtype).removeprefix("torch."), "kv_cache_memory_bytes": KV_NUMBERS * dtype.itemsize}


class Engine:
    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._dtype = options["dtype"]
        self.llm = LLM(**options)
        self._requests = 0
        self.run(list(range(100, 100 + WARM_UP)), 2)

    def describe(self) -> dict[str, Any]:
        import torch
        from vllm.platforms import current_platform
        from vllm.version import __version__

        return {
            "vllm": __version__,
            "device": current_platform.device_type,
            "dtype": self._dtype,
            "threads": torch.get_num_threads(),
        }

    def run(self, tokens: list[int], limit: int) -> dict[str, Any]:
        """The greedy answer of up to ``limit`` tokens, when its first token came, and what the engine's metrics
        say about the request."""
        from vllm import SamplingParams

        engine, before = self.llm.llm_engine, _metrics()
        self._requests += 1
        sampling = SamplingParams(max_tokens=limit, temperature=0, logprobs=1)
        first = 0.0
        begun = time.perf_counter()
        engine.add_request(str(self._requests), {"prompt_token_ids": tokens}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                answer = output.outputs[0]  # type: ignore[union-attr]  # of a model that generates
                if answer.token_ids and not first:
                    first = time.perf_counter() - begun
        logprobs = [at[token].logprob for at, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        return {
            "text": answer.text,
            "tokens": list(answer.token_ids),
            "logprobs": logprobs,
            "first_token_seconds": first,
            "metrics": {name: value - before.get(name, 0) for name, value in _metrics().items()},
        }

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def _metrics() -> dict[str, float]:
    """Counters of kvhold by name, and vLLM's count of prompt tokens by where they came from."""
    from prometheus_client import REGISTRY

    found: dict[str, float] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith("kvhold:") and sample.name.endswith("_total"):
                found[sample.name.removeprefix("kvhold:").removesuffix("_total")] = sample.value
            elif sample.name == "vllm:prompt_tokens_by_source_total":
                found[sample.labels["source"]] = sample.value
    return found


if __name__ == "__main__":
    main()
