"""Resets, pauses, sleep and weight updates: what is still found afterwards, and by whom."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from testbed.engine import bed
from testbed.engine.bed import LLM, abort, add, generate, prompt, reference, running, settle, step
from testbed.engine.families import FAMILIES, weights
from testbed.engine.kvhold_bed import check_nothing_held, scheduler_side, serving, status, warm_up
from testbed.process.manager_process import Manager

from engine.test_identity import PROMPTS, cached, change_weights, changed_truth, objects, run_until, stored
from kvhold.engines.vllm.loaded import Loaded


def core(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core


def sleep(llm: LLM) -> None:
    llm.sleep(1)
    llm.wake_up()


def pause(llm: LLM, mode: str = "abort") -> None:
    core(llm).pause_scheduler(mode, clear_cache=True)
    core(llm).resume_scheduler()


def keep(llm: LLM) -> None:
    pause(llm, "keep")


def reset(llm: LLM) -> None:
    assert llm.reset_prefix_cache(reset_connector=True)


def reset_all(llm: LLM) -> None:
    assert llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)


PARTIAL = next(family for family in FAMILIES if family.name == "granite_partial")
WAYS = (sleep, pause, keep, reset, reset_all)


def namespaces(manager: Manager) -> int:
    return len({index["namespace"] for index in status(manager.socket)["spaces"]})


def test_what_is_loaded_is_what_is_stored_under(llama_dir: Path, manager: Manager) -> None:
    """Weights that did not change keep their namespace, whatever was reset; the same change has the same name."""
    old, new = reference(llama_dir, PROMPTS), changed_truth(llama_dir)
    assert old != new
    with serving(llama_dir, manager) as llm:
        free = bed.free_blocks(llm)
        assert generate(llm, PROMPTS) == old
        stored(llm, manager, 24)
        for way in WAYS * 8:  # forty resets
            way(llm)
        for way in WAYS:
            way(llm)
            outputs = generate(llm, PROMPTS)
            assert (outputs, cached(outputs)) == (old, [384, 384]), way.__name__
        assert (objects(manager), namespaces(manager)) == (24, 1)
        # what is changed while it is paused, asleep, or before a reset
        core(llm).pause_scheduler("keep", clear_cache=True)
        change_weights(llm)
        core(llm).resume_scheduler()
        warm_up(llm)
        outputs = generate(llm, PROMPTS)
        assert (outputs, cached(outputs)) == (new, [0, 0])
        stored(llm, manager, 48)
        for way in WAYS * 8:
            way(llm)
        outputs = generate(llm, PROMPTS)
        assert (outputs, cached(outputs)) == (new, [384, 384])
        assert namespaces(manager) == 2
        check_nothing_held(llm, free, manager.socket)
    with serving(llama_dir, manager) as llm:  # of the old weights, which are those in the files
        outputs = generate(llm, PROMPTS)
        assert (outputs, cached(outputs)) == (old, [384, 384])
        change_weights(llm)
        reset(llm)
        outputs = generate(llm, PROMPTS)
        assert (outputs, cached(outputs)) == (new, [384, 384]), "another engine has made the same change"
        # What the CPU backend packs anew on loading nobody can look at; where it packs nothing, weights are as before.
        packs = any(not values.numel() for values in bed.runner(llm).model.parameters())
        bed.runner(llm).reload_weights()
        reset(llm)
        warm_up(llm)
        outputs = generate(llm, PROMPTS)
        assert (outputs, cached(outputs)) == (old, [0, 0] if packs else [384, 384])


def test_weights_that_cannot_be_looked_at_are_nobodys(
    llama_dir: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loaded, "_models", lambda self: [])
    expected = reference(llama_dir, PROMPTS)
    with serving(llama_dir, manager) as llm:
        generate(llm, PROMPTS)
        stored(llm, manager, 24)
        reset(llm)
        warm_up(llm)
        outputs = generate(llm, PROMPTS)
        assert (outputs, cached(outputs)) == (expected, [0, 0])
        stored(llm, manager, 48)
        assert llm.reset_prefix_cache()
        assert cached(generate(llm, PROMPTS)) == [384, 384]
        for _ in range(3):
            reset(llm)
            warm_up(llm)
            generate(llm, PROMPTS)
        stored(llm, manager, 48)  # what was stored under a random name is forgotten with that name
        assert namespaces(manager) == 2


def test_workers_that_never_say_what_is_loaded_stop_no_request(
    llama_dir: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(llama_dir, manager) as llm:
        generate(llm, PROMPTS)
        settle(llm)
        monkeypatch.setattr(scheduler_side(llm).resets.doubt, "take_answers", lambda loaded: None)
        reset(llm)
        assert cached(generate(llm, PROMPTS)) == [0, 0]


def test_a_reset_that_fails_is_not_reported_as_done(
    llama_dir: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = changed_truth(llama_dir)
    with serving(llama_dir, manager) as llm:
        generate(llm, PROMPTS)
        stored(llm, manager, 24)
        half = scheduler_side(llm)
        outdated = half._spaces.outdated
        for part, name in ((half._questions, "drop_all"), (half._publishing, "forget_all"), (outdated, "mark")):
            with monkeypatch.context() as patch:
                patch.setattr(part, name, lambda *_: 1 // 0)
                assert llm.reset_prefix_cache(reset_connector=True) is False
        change_weights(llm)
        assert generate(llm, PROMPTS) == new, "nothing that was stored before is served"
        stored(llm, manager, 24)
        reset(llm)
        warm_up(llm)
        assert generate(llm, PROMPTS) == new
        stored(llm, manager, 48)


@contextmanager
def late(llm: LLM, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """What requests have completed is published at their end alone: slots come late."""
    half = scheduler_side(llm)
    plan = half._publishing.plan

    def without_slots(*args: Any) -> None:
        slots, half.control.credit = half.control.credit, {}
        plan(*args)
        half.control.credit = slots

    with patch.context() as patched:
        patched.setattr(half._publishing, "plan", without_slots)
        yield


def test_an_engine_in_this_process_sleeps_although_blocks_wait_to_be_copied(
    llama_dir: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops stepping at the last token, so that what the last step completed waits for the next one."""
    with serving(llama_dir, manager) as llm:
        free = bed.free_blocks(llm)
        with late(llm, monkeypatch):
            generate(llm, [prompt(400, 1)], 1)
        assert scheduler_side(llm).holding
        sleep(llm)
        assert bed.free_blocks(llm) == free
        stored(llm, manager, 12)
        assert cached(generate(llm, [prompt(400, 1)], 1)) == [384]
        # for workers in other processes it is dropped
        monkeypatch.setattr("kvhold.engines.vllm.resets.worker_here", lambda instance: None)
        with late(llm, monkeypatch):
            generate(llm, [prompt(400, 2)], 1)
        sleep(llm)
        check_nothing_held(llm, free, manager.socket)
        stored(llm, manager, 12)


def test_the_digest_of_a_model_is_of_all_its_tensors(llama_dir: Path) -> None:
    with running(llama_dir, connector=None) as llm:
        loaded = Loaded()
        assert loaded.digest() == b"", "no worker is being set up here"
        loaded._worker = core(llm).model_executor.driver_worker.worker
        before = loaded.digest()
        generate(llm, PROMPTS)
        assert loaded.digest() == before
        model = bed.runner(llm).model
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        assert len(tensors) > 10
        packed = [module for module in model.modules() if any(not p.numel() for p in module.parameters(recurse=False))]
        for module in packed:  # the CPU backend's functions have the weights
            function = module.cpu_linear
            module.cpu_linear = lambda *args, function=function: function(*args)
            assert loaded.digest() not in (before, b"")
            del module.cpu_linear
            assert loaded.digest() == b"", "nothing stands for the weights"
            module.cpu_linear = function
            assert loaded.digest() == before
        for name, tensor in tensors.items():
            if not tensor.numel():
                continue
            last = tensor.data.view(-1)[-1:]
            kept = last.clone()
            last.add_(1)
            assert loaded.digest() != before, name
            last.copy_(kept)
        assert loaded.digest() == before


def test_a_pause_clears_the_cache_although_a_tail_waits_for_a_step(tmp_path: Path, manager: Manager) -> None:
    """vLLM raises in its own step where a block is held; a state that a request left behind is one."""
    tokens = prompt(96, 5)
    with weights():
        folder = PARTIAL.write(tmp_path)
        expected = reference(folder, [tokens], **PARTIAL.options)
        with serving(folder, manager, **PARTIAL.options) as llm:
            free = bed.free_blocks(llm)
            add(llm, "r", tokens)
            step(llm)
            abort(llm, "r")
            assert scheduler_side(llm).holding
            pause(llm)
            assert not core(llm).scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
            warm_up(llm)
            outputs = generate(llm, [tokens])
            assert (outputs, cached(outputs)) == (expected, [64])
            settle(llm)
            check_nothing_held(llm, free, manager.socket)


def test_after_a_reset_that_was_refused_a_plain_one_is_enough(tmp_path: Path, manager: Manager) -> None:
    """What counts is that the engine's own cache is empty, by whichever reset; for hits inside of blocks as well."""
    texts = [prompt(300, seed) for seed in (7, 8)]
    with weights():
        folder = PARTIAL.write(tmp_path)
        expected = reference(folder, texts, **PARTIAL.options)
        with serving(folder, manager, **PARTIAL.options) as llm:
            add(llm, "a", texts[0])
            step(llm)
            assert not llm.reset_prefix_cache(reset_connector=True), "a request runs"
            run_until(llm, lambda: not llm.llm_engine.has_unfinished_requests())
            settle(llm)
            assert llm.reset_prefix_cache()
            warm_up(llm)
            before = objects(manager)
            assert generate(llm, texts) == expected
            settle(llm)
            assert objects(manager) > before, "what is new is stored again"
            assert llm.reset_prefix_cache()
            outputs = generate(llm, texts)
            assert outputs == expected
            assert min(cached(outputs)) > 0
