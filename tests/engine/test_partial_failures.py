"""A restore that goes wrong in part, or is wanted only in part: what is right is kept, the rest is computed."""

from pathlib import Path
from typing import Any

import pytest
from testbed.engine.bed import Output, add, drain, generate, prompt, reference, scheduler, settle, step
from testbed.engine.families import FAMILIES, weights
from testbed.engine.kvhold_bed import check_identity, check_nothing_held, counting, free_blocks, serving, until
from testbed.process.manager_process import Manager

from kvhold.copy.host import HostCopier

TOKENS = prompt(333, 1)
FAMILY = {family.name: family for family in FAMILIES}


class FailingAt:
    """The n-th object of a restore cannot be copied, once."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int) -> None:
        self._left = number
        restore = HostCopier.restore

        def failing(copier: HostCopier, *args: Any) -> None:
            self._left -= 1
            if self._left == -1:
                raise OSError("injected")
            restore(copier, *args)

        patch.setattr(HostCopier, "restore", failing)


@pytest.mark.parametrize("number", [0, 1, 5, 9])
def test_one_group_keeps_what_came_before_the_failure(
    llama_dir: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    expected = reference(llama_dir, [TOKENS])
    with serving(llama_dir, manager) as llm, counting() as counts:
        free = free_blocks(llm)
        generate(llm, [TOKENS])
        assert llm.reset_prefix_cache()
        FailingAt(monkeypatch, number)
        name = add(llm, "r", TOKENS)
        while not counts["load_failures"]:
            step(llm)
        assert scheduler(llm).requests[name].num_computed_tokens == 32 * number
        assert drain(llm)["r"] == expected[0]
        assert counts["loads"] == 1, "a request that failed once is not restored again"
        check_nothing_held(llm, free, manager.socket)
        check_identity(counts)
        # what the failure left is right for the next one, too
        assert generate(llm, [TOKENS]) == expected


@pytest.mark.parametrize("name", ["gemma3", "falcon_h1"])
@pytest.mark.parametrize("number", [0, 3])
def test_several_groups_compute_the_whole_request(
    tmp_path: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    """vLLM ends an engine that reports failed blocks of several groups, and keeps nothing of a failed request."""
    family = FAMILY[name]
    with weights():
        folder = family.write(tmp_path)
        expected = reference(folder, [TOKENS], **family.options)
        with serving(folder, manager, **family.options) as llm, counting() as counts:
            free = free_blocks(llm)
            generate(llm, [TOKENS])
            settle(llm)
            assert llm.reset_prefix_cache()
            FailingAt(monkeypatch, number)
            request = add(llm, "r", TOKENS)
            while not counts["load_failures"]:
                step(llm)
            assert scheduler(llm).requests[request].num_computed_tokens == 0
            assert drain(llm)["r"] == expected[0]
            assert counts["loads"] == 1
            check_nothing_held(llm, free, manager.socket)
            check_identity(counts)
            assert generate(llm, [TOKENS]) == expected


@pytest.mark.parametrize(("name", "failures"), [("llama", 0), ("gemma3", 1), ("falcon_h1", 1)])
def test_a_hit_that_the_engine_trims_is_planned_anew(
    tmp_path: Path, llama_dir: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch, name: str, failures: int
) -> None:
    """vLLM 0.32 trims only hits of models whose windows it computes anew; here any engine is told less than promised.

    A shorter hit in whole blocks is a part of the longer one. With a window or a recurrent state it needs what was not
    leased, and the request is computed.
    """
    from kvhold.engines.vllm.restores import Restores

    matched = Restores.matched_tokens

    def trimmed(half: Restores, request: Any, computed: int) -> tuple[int | None, bool]:
        found, later = matched(half, request, computed)
        return (found - 32, later) if found else (found, later)

    with weights():
        folder = FAMILY[name].write(tmp_path) if name in FAMILY else llama_dir
        options = FAMILY[name].options if name in FAMILY else {}
        expected = reference(folder, [TOKENS], **options)
        with serving(folder, manager, **options) as llm, counting() as counts:
            free = free_blocks(llm)
            generate(llm, [TOKENS])
            settle(llm)
            assert llm.reset_prefix_cache()
            monkeypatch.setattr(Restores, "matched_tokens", trimmed)
            assert generate(llm, [TOKENS]) == expected
            assert (counts["loads"], counts["load_failures"]) == (1, failures)
            check_nothing_held(llm, free, manager.socket)


def test_a_restore_that_cannot_begin_concerns_no_other_request(
    llama_dir: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of its own that it shares with requests that run are not among those that failed."""
    from kvhold.client.control import Control

    shared = prompt(96, 1)
    failing, other = shared + prompt(200, 2), shared + prompt(60, 3)
    expected = reference(llama_dir, [failing, other], [4, 40])
    patient = {"step_budget_ms": 10_000}  # the manager's answer comes in the step that asks, while the other runs
    with serving(llama_dir, manager, settings=patient) as llm, counting() as counts:
        generate(llm, [failing], 4)
        settle(llm)
        assert llm.reset_prefix_cache()
        name = add(llm, "other", other, 40)
        for _ in range(10):
            step(llm)
        computed = scheduler(llm).requests[name].num_computed_tokens
        start = Control.start
        monkeypatch.setattr(Control, "start", lambda control, question: start(control, question) and False)
        add(llm, "failing", failing, 4)
        done: dict[str, Output] = {}

        def failed() -> float:
            done.update((output.request_id, output) for output in step(llm))
            return counts["load_failures"]

        until(failed, "the restore fails")
        assert scheduler(llm).requests[name].num_computed_tokens > computed
        done |= drain(llm)
        assert done["other"] == expected[1]
        assert done["failing"] == expected[0]
