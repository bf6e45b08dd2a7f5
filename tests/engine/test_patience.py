"""How long requests wait for a manager that is slow or does not run, in every topology."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.engine.bed import generate, prompt, reference
from testbed.engine.kvhold_bed import (
    attached,
    check_identity,
    counting,
    in_step_with_others,
    scheduler_side,
    serving,
    until,
)
from testbed.process.manager_process import Manager

from kvhold.engines.common import patience, questions
from kvhold.engines.vllm.scheduler import SchedulerHalf

PROMPTS = [prompt(400, seed) for seed in range(3)]
SLOW = (
    "import time; from kvhold.manager.heartbeat import Heartbeat; beat = Heartbeat.beat; "
    "Heartbeat.beat = lambda self: (time.sleep(0.05), beat(self))[1]; from kvhold.cli import main; main()"
)
"""A manager each turn of which takes longer than a step's budget and 30 ms."""


@pytest.fixture
def slow(short_folder: Path) -> Iterator[Manager]:
    process = Manager(short_folder, program=("-c", SLOW))
    yield process
    print(process.log_tail())
    process.kill()


@pytest.fixture(params=["alone", "data parallel in step"])
def topology(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Engines of a mixture of experts keep their data-parallel size, and run in step with others."""
    if request.param != "alone":
        in_step_with_others(monkeypatch)
    return str(request.param)


def worth(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Every prompt takes as long as a test's deadline to compute, or no time at all."""
    monkeypatch.setattr(patience, "_LEAST", seconds)
    monkeypatch.setattr(patience, "_MOST", seconds)


@pytest.mark.usefixtures("topology")
def test_hits_that_are_worth_it_are_waited_for(llama_dir: Path, slow: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    worth(monkeypatch, 60.0)
    monkeypatch.setattr("kvhold.engines.common.session.SILENT_SECONDS", 60.0)
    expected = reference(llama_dir, PROMPTS)
    with serving(llama_dir, slow, settings={"answer_deadline_ms": None}) as llm, counting() as counts:
        assert generate(llm, PROMPTS) == expected
        assert llm.reset_prefix_cache()
        for tokens, output in zip(PROMPTS, expected, strict=True):
            [restored] = generate(llm, [tokens])
            assert restored == output
            assert restored.cached == 384
        assert counts["answers_overdue"] == 0
        check_identity(counts)


def test_what_came_too_late_for_a_hit_is_not_stored_again(
    llama_dir: Path, slow: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "_LATE_SECONDS", 60.0)
    with serving(llama_dir, slow) as llm, counting() as counts:
        generate(llm, PROMPTS)
        assert counts["blocks_published"] == 36
        assert llm.reset_prefix_cache()
        half = scheduler_side(llm)
        half.control._silent_seconds = 60.0
        half._patience._fixed = 0.0
        outputs = generate(llm, PROMPTS, 200)  # it runs until the answer is here
        assert [output.cached for output in outputs] == [0, 0, 0]
        assert counts["answers_overdue"] == 3
        assert counts["blocks_published"] == 36, "it was known to be there before the request ended"
        until(lambda: _leases(half) == 0, "nothing is leased")


def _leases(half: SchedulerHalf) -> int:
    half.control.take_up()
    return len(half.control._asked)


def test_a_stopped_manager_is_asked_nothing_more(llama_dir: Path, manager: Manager) -> None:
    expected = reference(llama_dir, PROMPTS)
    with serving(llama_dir, manager, settings={"answer_deadline_ms": 20}) as llm, counting() as counts:
        half = scheduler_side(llm)
        manager.stop()
        assert generate(llm, PROMPTS) == expected
        until(lambda: half.control.silent, "it is noticed that the manager does not run")
        overdue = counts["answers_overdue"]
        assert 1 <= overdue <= 3
        for _ in range(2):
            assert llm.reset_prefix_cache()
            assert generate(llm, PROMPTS) == expected
        assert counts["answers_overdue"] == overdue
        assert counts["tokens_missed_deadline"] == 3 * 3 * 384
        manager.cont()
        until(lambda: attached(llm) and not half.control.silent, "it runs again")
        assert llm.reset_prefix_cache()
        half._patience._fixed = 60.0
        assert [output.cached for output in generate(llm, PROMPTS)] == [384, 384, 384]


def test_patience_follows_what_computing_a_prompt_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(patience.time, "monotonic", lambda: now[0])
    mine = patience.Patience(None)
    assert mine.of(1) == patience._LEAST
    assert mine.of(8000) == 0.5, "before anything is known"
    for _ in range(50):  # two steps in flight, a second each
        mine.step_begins(1000)
        now[0] += 1.0
        mine.step_begins(1)
        mine.step_ends()
        mine.step_ends()
    assert mine.of(500) == pytest.approx(0.25)
    assert mine.of(1 << 20) == patience._MOST
    now[0] += 100  # an idle engine does not become a slow one
    mine.step_begins(1000)
    now[0] += 1.0
    mine.step_ends()
    assert mine.of(500) == pytest.approx(0.25)
    assert patience.Patience(0.02).of(1 << 20) == 0.02
