"""Two tensor-parallel ranks: each has its part of every object, and weights of its own to look at after a reset."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from testbed.engine import bed
from testbed.engine.bed import LLM, Output, add, generate, prompt, running
from testbed.engine.kvhold_bed import check_nothing_held, scheduler_side, serving, status, until, warm_up
from testbed.process.manager_process import Manager

from engine.test_identity import cached, run_until, stored
from engine.test_resets import WAYS, core, keep, namespaces, reset

PARALLEL: dict[str, Any] = {"tensor_parallel_size": 2, "worker_extension_cls": "testbed.engine.retrained.Retrained"}
PROMPTS = [prompt(400, seed) for seed in range(2)]
LONG = prompt(1500, 7)


@pytest.fixture(autouse=True)
def _processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def retrain(llm: LLM, rank: int) -> None:
    core(llm).collective_rpc("retrain", args=(rank, 1.3))


def one_by_one(llm: LLM, prompts: Sequence[list[int]]) -> list[Output]:
    return [generate(llm, [tokens])[0] for tokens in prompts]


def test_all_ranks_weights_are_what_is_stored_under(llama_dir: Path, manager: Manager) -> None:
    """A rank alone may have changed; engines of the same ranks with the same change share what they compute."""
    with running(llama_dir, connector=None, enable_prefix_caching=False, **PARALLEL) as llm:
        old = one_by_one(llm, PROMPTS)
        retrain(llm, 1)
        *half, half_long = one_by_one(llm, [*PROMPTS, LONG])
        retrain(llm, 0)
        *new, long = one_by_one(llm, [*PROMPTS, LONG])
    assert old != half != new != old
    assert half_long.tokens != long.tokens

    def check(llm: LLM, expected: list[Output], found: int) -> None:
        warm_up(llm)
        outputs = one_by_one(llm, PROMPTS)
        assert (outputs, cached(outputs)) == (expected, [found, found])

    with serving(llama_dir, manager, **PARALLEL) as llm:
        free = bed.free_blocks(llm)
        sessions = [(each["role"], each["rank"]) for each in status(manager.socket)["sessions"]]
        assert sorted(sessions) == [("scheduler", 0), ("worker", 0), ("worker", 1)]
        check(llm, old, 0)
        stored(llm, manager, 24)
        for way in WAYS * 2:
            way(llm)
            check(llm, old, 384)
        assert namespaces(manager) == 1
        retrain(llm, 1)
        reset(llm)
        check(llm, half, 0)
        stored(llm, manager, 48)
        keep(llm)
        check(llm, half, 384)
        # a request runs meanwhile, and goes on with what it has
        add(llm, "777", LONG, 64)
        run_until(llm, lambda: len(scheduler_side(llm)._publishing._open) > 0)
        core(llm).pause_scheduler("keep", clear_cache=True)
        retrain(llm, 0)
        core(llm).resume_scheduler()
        check(llm, new, 0)
        assert not llm.llm_engine.has_unfinished_requests()
        reset(llm)
        check(llm, new, 384)
        [answer] = one_by_one(llm, [LONG])
        assert answer.tokens == long.tokens, "nothing is found of what other weights have computed"
        check_nothing_held(llm, free, manager.socket)
        assert namespaces(manager) == 3
    until(lambda: not status(manager.socket)["instances"], "the sessions end")
    with serving(llama_dir, manager, **PARALLEL) as llm:  # of the weights in the files
        check(llm, old, 384)
        for rank, expected in ((1, half), (0, new)):
            retrain(llm, rank)
            reset(llm)
            check(llm, expected, 384)
        assert namespaces(manager) == 3
