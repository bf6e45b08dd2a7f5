"""Engines with pipeline stages: each stage keeps its own layers' part of every object."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from testbed.engine.bed import Output, free_blocks, generate, prompt, settle
from testbed.engine.families import FAMILIES, Bench, Family, weights
from testbed.engine.fuzz import Chaos, check_at_random, requests
from testbed.engine.kvhold_bed import (
    check_identity,
    check_nothing_held,
    counting,
    serving,
    status,
    until,
)
from testbed.engine.staged_worker import CHAOS
from testbed.process.manager_process import Manager

STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, "worker_cls": "testbed.engine.staged_worker.StagedWorker"}
PROMPTS = [prompt(170, 80 + seed) for seed in range(4)]
LAYERS: dict[str, Sequence[str]] = {  # vLLM wants each kind of layer on each stage
    "gemma3": ["sliding_attention", "full_attention"] * 2,
    "qwen3_next": [*["linear_attention"] * 3, "full_attention"] * 2,
}
LLAMA = Family("llama", "llama", 22)


def staged(family: Family) -> Family:
    layers = LAYERS.get(family.name)
    if layers is None:
        return family
    return replace(family, config=family.config | {"num_hidden_layers": len(layers), "layer_types": layers})


STAGED = {
    family.name: staged(family)
    for family in [LLAMA, *FAMILIES]
    if family.name in ("llama", *LAYERS, "gpt_oss", "llama4", "falcon_h1", "deepseek_v2")
}


def daily(*names: str) -> list[Any]:
    """All families, those of ``names`` also in the tests of every day."""
    return [pytest.param(name, marks=() if name in names else pytest.mark.long) for name in STAGED]


@pytest.fixture(autouse=True)
def _processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


@pytest.mark.parametrize("name", daily("gemma3", "qwen3_next"))
def test_stages_restore_what_they_computed(name: str, tmp_path: Path, manager: Manager) -> None:
    """As the same model without stages; what is restored is as what the engine's own cache has, to the last bit."""
    family = STAGED[name]
    with weights(), counting() as counts:
        bench = Bench(family, tmp_path, manager)
        truth, kept = bench.truth(PROMPTS), 170 // bench.unit * bench.unit
        bench.close()
        with serving(family.write(tmp_path), manager, credits=4, **family.options, **STAGES) as llm:
            free = free_blocks(llm)

            def each(cached: int) -> list[Output]:
                outputs = [generate(llm, [tokens])[0] for tokens in PROMPTS]
                assert [output.cached for output in outputs] == [cached] * len(PROMPTS)
                settle(llm)
                return outputs

            assert each(0) == truth
            own = each(kept)
            for _ in range(2):
                assert llm.reset_prefix_cache()
                assert each(kept) == own
            check_nothing_held(llm, free, manager.socket)
        check_identity(counts)
    until(lambda: not status(manager.socket)["instances"], "the sessions ended")


@pytest.mark.long
def test_stages_of_several_ranks(tmp_path: Path, manager: Manager) -> None:
    folder = STAGED["gemma3"].write(tmp_path)
    with serving(folder, manager, credits=4, tensor_parallel_size=2, **STAGES) as llm:
        free = free_blocks(llm)
        sessions = status(manager.socket)["sessions"]
        assert sorted(each["rank"] for each in sessions if each["role"] == "worker") == [0, 1, 2, 3]
        cold = [generate(llm, [tokens])[0] for tokens in PROMPTS]
        settle(llm)
        assert llm.reset_prefix_cache()
        restored = [generate(llm, [tokens])[0] for tokens in PROMPTS]
        assert restored == cold
        assert [output.cached for output in restored] == [160] * len(PROMPTS)
        check_nothing_held(llm, free, manager.socket)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
@pytest.mark.parametrize("name", daily("llama"))
def test_at_random(name: str, manager: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The fuzz with two steps in flight, and copies that fail or end on one stage but not on the other."""
    rng, family = random.Random(seed), STAGED[name]
    prompts, limits = requests(rng, 30, 4, 180, 50, 26)
    chaos = tmp_path / "chaos"
    chaos.touch()
    monkeypatch.setenv(CHAOS, str(chaos))
    monkeypatch.setattr(Chaos, "end", lambda self: chaos.unlink(missing_ok=True))
    options = {"settings": {"answer_deadline_ms": 200, "save_decode_cache": seed % 2 == 0}, **STAGES}
    options["num_gpu_blocks_override"] = family.pool + seed
    bench = Bench(family, tmp_path, manager)
    check_at_random(bench, monkeypatch, rng, prompts, limits, seed % 2 == 0, **options)
