"""What the last step of a request has completed is kept, although nothing of it is left to step for."""

from pathlib import Path
from typing import Any

import pytest
from testbed.engine.bed import abort, add, generate, prompt, reference, scheduler, scheduler_half, settle, step
from testbed.engine.families import FAMILIES, hit_unit, weights
from testbed.engine.kvhold_bed import check_nothing_held, counting, free_blocks, serving
from testbed.process.manager_process import Manager

PARTIAL = next(family for family in FAMILIES if family.name == "granite_partial")


def test_a_state_inside_of_a_block_outlives_its_request(
    tmp_path: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine ends a chunk at the last boundary before the prompt's end; a request that ends there leaves its state.

    With the state goes the attention block that it stands in, as far as it is filled.
    """
    tokens = prompt(96, 5)
    with weights():
        folder = PARTIAL.write(tmp_path)
        expected = reference(folder, [tokens], **PARTIAL.options)
        with serving(folder, manager, **PARTIAL.options) as llm, counting() as counts:
            free = free_blocks(llm)
            connector, tails = scheduler_half(llm), []
            register = connector.register_finished_partial_tail

            def also(request: Any, tables: Any, handed: Any) -> bool:
                tails.append(handed)
                answer = register(request, tables, handed)
                assert not answer, "the request's blocks are not kept waiting"
                assert scheduler(llm).has_requests(), "the engine steps until they are stored"
                return answer

            monkeypatch.setattr(connector, "register_finished_partial_tail", also)
            name = add(llm, "r", tokens)
            step(llm)
            assert scheduler(llm).requests[name].num_computed_tokens == 64
            published = counts["blocks_published"]
            abort(llm, "r")
            assert [handed[0][2] for handed in tails] == [64]
            assert counts["blocks_published"] == published + len(scheduler(llm).kv_cache_config.kv_cache_groups)
            settle(llm)
            check_nothing_held(llm, free, manager.socket)
            assert llm.reset_prefix_cache()
            assert generate(llm, [tokens]) == expected
            assert counts["tokens_hit"] == 64
            check_nothing_held(llm, free, manager.socket)


def test_a_tail_without_slots_or_session_is_not_waited_for(
    tmp_path: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    with weights():
        folder = PARTIAL.write(tmp_path)
        with serving(folder, manager, **PARTIAL.options) as llm:
            free = free_blocks(llm)
            add(llm, "r", prompt(96, 5))
            step(llm)
            abort(llm, "r")
            manager.kill()  # between the tail and the step that would have carried it
            settle(llm)
            assert free_blocks(llm) == free
            assert llm.reset_prefix_cache()


@pytest.mark.parametrize(("name", "dense"), [("gemma3", False), ("falcon_h1", True)])
def test_generated_blocks_are_kept_on_demand(tmp_path: Path, manager: Manager, name: str, dense: bool) -> None:
    """A window's last blocks are still there when a text ends. States are what the engine hands over: it is told to."""
    family = next(family for family in FAMILIES if family.name == name)
    options = dict(family.options)
    if dense:
        options["prefix_cache_retention_interval"] = None
    with weights():
        folder = family.write(tmp_path)
        for decode in (False, True):
            tokens = prompt(200, 6 + decode)
            with serving(folder, manager, settings={"save_decode_cache": decode}, **options) as llm:
                unit = hit_unit(llm)
                [output] = generate(llm, [tokens], 2 * unit)
                settle(llm)
                assert llm.reset_prefix_cache()
                text = tokens + list(output.tokens)
                [again] = generate(llm, [text], 1)
                kept = len(text) - 1 if decode else len(tokens) - 1
                assert again.cached == kept // unit * unit


def test_a_short_request_is_stored_whole_in_a_small_arena(llama_dir: Path, short_folder: Path) -> None:
    """It may write an eighth of the arena at once, and the rest as slots are granted again."""
    tokens = prompt(59 * 32 + 5, 3)
    manager = Manager(short_folder, dram="4MiB")
    try:
        with serving(llama_dir, manager, credits=16) as llm, counting() as counts:
            free = free_blocks(llm)
            generate(llm, [tokens], 1)
            assert counts["blocks_published"] < 59, "more than is granted at once"
            settle(llm)
            check_nothing_held(llm, free, manager.socket)
            assert counts["blocks_published"] == 59
            assert llm.reset_prefix_cache()
            [again] = generate(llm, [tokens], 1)
            assert again.cached == 59 * 32
    finally:
        manager.kill()
