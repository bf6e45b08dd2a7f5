"""Data-parallel ranks of a mixture of experts: none can step without the others, and each is an engine of its own."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from testbed.engine.bed import prompt, running
from testbed.engine.engine_process import packed
from testbed.engine.kvhold_bed import status, until
from testbed.engine.models import write_llama
from testbed.engine.rank_in_step import RanksInStep
from testbed.process.manager_process import Manager
from vllm.lora.request import LoRARequest

from engine.test_identity import LORA, tokens, write_adapter
from engine.test_identity import ask as ask_one
from engine.test_patience import SLOW
from engine.test_resets import namespaces

PROMPTS = [prompt(400, seed) for seed in range(3)]
BLOCKS = 12
"""Of each prompt."""


class Rig:
    """Two ranks, what they are told to be and what they answer without kvhold."""

    def __init__(self, folder: Path) -> None:
        self.model = write_llama(folder / "model", num_local_experts=4)  # which vLLM goes by
        self.adapter = write_adapter(folder / "tuned", 1)
        changing = {"worker_extension_cls": "testbed.engine.retrained.Retrained"}
        with running(self.model, connector=None, enable_prefix_caching=False, **LORA, **changing) as llm:
            loaded = LoRARequest("tuned", 1, str(self.adapter))
            self.expected = [packed(ask_one(llm, tokens([each]))[0]) for each in PROMPTS]
            self.adapted = [packed(ask_one(llm, tokens([each]), loaded)[0]) for each in PROMPTS]
            llm.llm_engine.engine_core.collective_rpc("retrain", args=(0, 1.3))
            self.changed = [packed(ask_one(llm, tokens([each]))[0]) for each in PROMPTS]
        self.manager = Manager(folder, program=("-c", SLOW))
        connector = {"socket": str(self.manager.socket), "answer_deadline_ms": 60_000}
        self.ranks = RanksInStep(self.model, connector, **LORA)

    def objects(self) -> int:
        return int(status(self.manager.socket)["objects"])

    def stored(self, prompts: int) -> None:
        until(lambda: self.objects() == prompts * BLOCKS, f"all of {prompts} prompts is stored")

    def check(self, rank: int, expected: Sequence[dict[str, Any]], found: int, adapter: Path | None = None) -> None:
        """One after the other, ``rank`` answers as it should, and finds so many tokens of each prompt."""
        for each, output in zip(PROMPTS, expected, strict=True):
            [answer] = self.ranks.ask([(rank, each)], adapter)
            assert answer["cached"] == found
            assert (answer["tokens"], answer["logprobs"]) == (output["tokens"], output["logprobs"])


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with tempfile.TemporaryDirectory(prefix="kvhold-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        rig = Rig(Path(folder))
        try:
            rig.ranks.await_start()
            yield rig
        finally:
            rig.ranks.close()
            print(rig.manager.log_tail())
            rig.manager.kill()


def test_a_rank_restores_what_another_has_computed(rig: Rig) -> None:
    """However slow the manager is; a rank without a request steps along, and both may ask at once."""
    rig.check(0, rig.expected, 0)
    rig.stored(3)
    rig.check(1, rig.expected, BLOCKS * 32)
    rig.check(1, rig.adapted, 0, rig.adapter)
    rig.stored(6)
    rig.check(0, rig.adapted, BLOCKS * 32, rig.adapter)
    assert rig.ranks.call("reset_prefix_cache") == [True, True]
    answers = rig.ranks.ask([(rank, each) for each in PROMPTS for rank in (0, 1)])
    assert [answer["cached"] for answer in answers] == [BLOCKS * 32] * 6
    assert [answer["tokens"] for answer in answers] == [each["tokens"] for each in rig.expected for _ in range(2)]


WAYS: dict[str, Sequence[tuple[Any, ...]]] = {
    "/pause": (("pause_scheduler", "abort"), ("resume_scheduler",)),
    "/pause?mode=keep": (("pause_scheduler", "keep"), ("resume_scheduler",)),
    "/pause?mode=wait": (("pause_scheduler", "wait"), ("resume_scheduler",)),
    "/sleep": (("sleep", 1), ("wake_up",)),
    "/reset_prefix_cache?reset_external=true": (("reset_prefix_cache", False, True),),
    "/reset_prefix_cache?reset_running_requests=true&reset_external=true": (("reset_prefix_cache", True, True),),
}
"""What vLLM's server has each rank do."""


def test_each_rank_stores_under_the_weights_that_it_has(rig: Rig) -> None:
    ranks, whole = rig.ranks, BLOCKS * 32
    ranks.ask([(0, each) for each in PROMPTS])
    until(lambda: rig.objects() % (3 * BLOCKS) == 0, "all of them is stored")
    before = namespaces(rig.manager)
    for number, way in enumerate([*WAYS, *WAYS]):
        for call in WAYS[way]:
            ranks.call(*call)
        rig.check(number % 2, rig.expected, whole)
    assert namespaces(rig.manager) == before, "weights that stay keep their name"
    objects = rig.objects()
    # a request runs on the other rank meanwhile, and goes on with what it has
    running = ranks.begin([(1, prompt(1500, 7))])
    ranks.call("pause_scheduler", "keep")
    ranks.call("collective_rpc", "retrain", None, (0, 1.3), ranks=[0])
    ranks.call("resume_scheduler")
    rig.check(0, rig.changed, 0)
    ranks.answers(running)
    until(lambda: rig.objects() >= objects + 3 * BLOCKS, "what the changed rank has computed is stored")
    rig.check(1, rig.expected, whole)
    ranks.call("collective_rpc", "retrain", None, (0, 1.3), ranks=[1])
    ranks.call("reset_prefix_cache", False, True)
    for rank in (1, 0):
        rig.check(rank, rig.changed, whole)
    assert namespaces(rig.manager) == before + 1
    ranks.call("collective_rpc", "retrain", None, (0, 1.0))
    ranks.call("reset_prefix_cache", False, True)
    for rank in (0, 1):
        rig.check(rank, rig.expected, whole)
