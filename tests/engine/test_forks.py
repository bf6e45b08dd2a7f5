"""Where prompts part, windows and states are kept, although only the engine can keep them and it remembers nothing."""

from pathlib import Path

import pytest
from testbed.engine.bed import generate, prompt
from testbed.engine.families import FAMILIES, Bench, Family, weights
from testbed.engine.kvhold_bed import counting, scheduler_side
from testbed.process.manager_process import Manager

from kvhold import protocol as wire
from kvhold.client.channel import Channel


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name in ("gemma3", "falcon_h1")], ids=lambda f: f.name)
def test_a_shared_beginning_is_learnt_across_resets(tmp_path: Path, manager: Manager, family: Family) -> None:
    """As fast as an engine that never forgets: the second prompt that parts there is the last to compute all."""
    with weights():
        bench = Bench(family, tmp_path, manager)
        unit, shared = bench.unit, bench.unit * 3
        stored = prompt(unit * 5 + 5, 1)
        prompts = [stored, *(stored[: shared + 7] + prompt(unit + 9, 50 + i) for i in range(4))]
        own = bench.own(prompts, 2)
        assert [output.cached for output in own] == [0, 0, shared, shared, shared]
        llm, restored = bench.engine(), []
        for tokens in prompts:
            restored += generate(llm, [tokens], 2)
            bench.forget()
        assert bench.equals_own(restored, own)
        bench.check_nothing_held()
        bench.close()


def test_it_is_explained_which_group_cut_a_hit(tmp_path: Path, manager: Manager) -> None:
    """The full attention reaches the fork, the windows before it were never kept."""
    family = next(family for family in FAMILIES if family.name == "gemma3")
    stored = prompt(165, 1)
    with weights():
        bench = Bench(family, tmp_path, manager)
        llm = bench.engine()
        kinds = [group.kind for group in scheduler_side(llm)._groups]
        generate(llm, [stored], 2)
        bench.forget()
        with counting() as counts:
            generate(llm, [stored[:103] + prompt(41, 50)], 2)
        assert counts["tokens_cut"] == counts["tokens_missed_not_stored"] == 128
        bench.close()
    channel = Channel(manager.socket, wire.Hello("admin"), 20)
    channel.send(wire.Explain())
    answers: list[wire.ManagerMessage] = []
    while not answers:
        answers = channel.receive(20)
    channel.close()
    [answer] = answers
    assert isinstance(answer, wire.Explained)
    windows = [number for number, kind in enumerate(kinds) if kind == "sliding-window attention"]
    assert any(f"cut by group {number}" in line for line in answer.lines for number in windows), answer.lines
