"""The engine takes its KV cache's memory away and gives it back, as vLLM's sleep mode does from 0.33 on."""

from pathlib import Path

import pytest
from testbed.engine.bed import add, drain, free_blocks, generate, prompt, reference, settle, step, worker_half
from testbed.engine.kvhold_bed import check_nothing_held, counting, serving, until, worker_side
from testbed.process.manager_process import Manager

from kvhold.copy import host

PROMPTS = [prompt(400, seed) for seed in range(2)]


def test_a_restore_ends_before_the_memory_goes(
    llama_dir: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = reference(llama_dir, PROMPTS)
    with counting() as counts, serving(llama_dir, manager) as llm:
        free = free_blocks(llm)
        assert generate(llm, PROMPTS) == truth
        settle(llm)
        assert llm.reset_prefix_cache()
        monkeypatch.setattr(host, "STEP_BYTES", 1)  # one block a step
        add(llm, "slow", PROMPTS[0])
        until(lambda: step(llm) == [] and worker_side().copies.loads, "the restore is begun")
        [(_, job, _)] = worker_side().copies.loads.values()
        assert not job.ended
        for _ in range(2):  # the engine may say so twice
            worker_half().unregister_kv_caches()
        assert job.ended
        assert worker_side().copies._copier._pages == []  # type: ignore[union-attr]
        assert drain(llm) == {"slow": truth[0]}
        assert (counts["loads"], counts["load_failures"]) == (1, 0)
        for _ in range(2):
            worker_half().restore_kv_caches()
        assert llm.reset_prefix_cache()
        restored = generate(llm, PROMPTS)
        assert restored == truth
        assert [output.cached for output in restored] == [384, 384]
        check_nothing_held(llm, free, manager.socket)


def test_without_its_memory_nothing_is_restored_or_stored(llama_dir: Path, manager: Manager) -> None:
    new = prompt(300, 7)
    truth = reference(llama_dir, [*PROMPTS, new])
    with counting() as counts, serving(llama_dir, manager) as llm:
        free = free_blocks(llm)
        generate(llm, PROMPTS)
        settle(llm)
        assert llm.reset_prefix_cache()
        worker_half().unregister_kv_caches()
        published = counts["publishes"]
        assert generate(llm, [*PROMPTS, new]) == truth
        settle(llm)
        assert counts["load_failures"] == counts["loads"] == 2
        assert counts["publish_failures"] == counts["publishes"] - published > 0
        check_nothing_held(llm, free, manager.socket)


def test_caches_of_another_size_stay_unregistered(llama_dir: Path, manager: Manager) -> None:
    truth = reference(llama_dir, PROMPTS)
    with counting() as counts, serving(llama_dir, manager) as llm:
        generate(llm, PROMPTS)
        settle(llm)
        assert llm.reset_prefix_cache()
        half = worker_side()
        worker_half().unregister_kv_caches()
        caches = half._caches
        half._caches = {name: cache[:, :1] for name, cache in caches.items()}
        worker_half().restore_kv_caches()
        assert generate(llm, PROMPTS) == truth
        assert counts["load_failures"] == counts["loads"] == 2
        half._caches = caches
        worker_half().restore_kv_caches()
        for hits in (0, 384):
            assert llm.reset_prefix_cache()
            assert [output.cached for output in generate(llm, PROMPTS)] == [hits, hits]
            settle(llm)
