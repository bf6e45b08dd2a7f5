"""Every setting has its effect in every topology: scheduler halves of each, with a real manager, one engine for all.

vLLM gives each rank of a dense model a data-parallel size of one; ranks of a mixture of experts keep theirs.
Adapters are in ``test_identity.py``.
"""

import tempfile
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pytest
from testbed.engine.bed import LLM, scheduler
from testbed.engine.kvhold_bed import scheduler_side, serving, until
from testbed.process.manager_process import Manager
from vllm import SamplingParams
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request

from kvhold import protocol as wire
from kvhold.client.channel import Channel
from kvhold.engines.common.attaching import make_attacher
from kvhold.engines.common.ranks import WorkerReport
from kvhold.engines.common.settings import Settings, load_settings
from kvhold.engines.vllm.names import engine_of, instance_of
from kvhold.engines.vllm.scheduler import SchedulerHalf
from kvhold.engines.vllm.topology import Topology

TOPOLOGIES: dict[str, dict[str, Any]] = {
    "alone": {},
    "tensor parallel": {"tensor_parallel_size": 2},
    "pipeline parallel": {"pipeline_parallel_size": 2},
    "data parallel, each rank for itself": {"data_parallel_index": 1},
    "data parallel in step": {"data_parallel_size": 2, "data_parallel_rank": 1, "data_parallel_index": 1},
    "behind another load balancer": {
        "data_parallel_size": 2,
        "data_parallel_rank": 1,
        "data_parallel_external_lb": True,
    },
}
BLOCKS, TOKENS = 12, 400


class Rig:
    """A manager, and scheduler halves of engines in any topology, whose workers do nothing but attach."""

    def __init__(self, llm: LLM, manager: Manager) -> None:
        self.manager = manager
        self._base, self._cache_manager = scheduler_side(llm), scheduler(llm).kv_cache_manager
        self._number = 0
        self.halves: list[SchedulerHalf] = []
        self._workers: list[Channel] = []

    def config(self, topology: str) -> Any:
        config = copy(self._base._config)
        config.parallel_config = copy(config.parallel_config)
        for name, value in TOPOLOGIES[topology].items():
            setattr(config.parallel_config, name, value)
        config.kv_transfer_config = copy(config.kv_transfer_config)
        self._number += 1
        config.kv_transfer_config.engine_id = f"rig{self._number}_dp1"
        return config

    def half(self, topology: str, **settings: Any) -> SchedulerHalf:
        """One that may store and restore."""
        config = self.config(topology)
        given = load_settings({"socket": str(self.manager.socket), **settings}, "the test", Settings)
        half = SchedulerHalf(config, self._base._cache, given)
        self.halves.append(half)
        world, stages = Topology.of(config.parallel_config).world, config.parallel_config.pipeline_parallel_size
        for rank in range(world):
            stage = rank * stages // world
            report = WorkerReport(rank, world, stage, rank, topology.encode(), b"%d" % stage, (4096,), False, "")
            hello = wire.Hello("worker", config.kv_transfer_config.engine_id, rank, world, report=report.packed())
            self._workers.append(Channel(self.manager.socket, hello, 60.0))
            self._workers[-1].send(wire.Mapped())
        half.bind_manager(self._cache_manager)
        until(lambda: step(half) is not None, "the half is attached")
        return half

    def end(self) -> None:
        for half in self.halves:
            half.shutdown()
        for worker in self._workers:
            worker.bye()
            worker.close()


def step(half: SchedulerHalf) -> Any:
    """A new engine step has begun: the spaces that it may speak of."""
    half.session.end_step()
    half.session.begin_step()
    return half._spaces.plain


@pytest.fixture(scope="module")
def engine_and_manager(llama_dir: Path) -> Iterator[tuple[LLM, Manager]]:
    with tempfile.TemporaryDirectory(prefix="kvhold-") as folder:
        manager = Manager(Path(folder))
        with serving(llama_dir, manager) as llm:
            yield llm, manager
        manager.kill()


@pytest.fixture
def rig(engine_and_manager: tuple[LLM, Manager]) -> Iterator[Rig]:
    rig = Rig(*engine_and_manager)
    yield rig
    rig.end()


def request(name: str, seed: int = 0) -> Request:
    made = Request(name, list(range(TOKENS)), SamplingParams(max_tokens=8), None)
    made.block_hashes = [BlockHash(bytes([seed, block]) * 16) for block in range(BLOCKS)]
    return made


def store(half: SchedulerHalf, seed: int = 0) -> None:
    """Have the manager know the blocks of such a request."""
    control, [space], ranks = half.control, half._spaces.plain or (), half._spaces.ranks
    assert ranks is not None
    until(lambda: step(half) and len(control.credit[space]) >= BLOCKS, "slots are granted")
    shards = tuple(ranks.shards[0].writes.values())
    keys = request("", seed).block_hashes
    control.commit(space, b"", 0, keys, control.credit[space].take(BLOCKS), shards)


def asks(half: SchedulerHalf, asked: Any) -> tuple[int | None, bool]:
    """What a step is told of a waiting request."""
    step(half)
    return half.restores.matched_tokens(asked, 0)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_how_long_a_request_and_a_step_may_wait(rig: Rig, topology: str) -> None:
    patient = rig.half(topology, answer_deadline_ms=60_000, step_budget_ms=5)
    hasty = rig.half(topology, answer_deadline_ms=0, step_budget_ms=0)
    store(patient)
    rig.manager.stop()
    try:
        asked = request("r")
        assert [asks(patient, asked) for _ in range(3)] == [(None, False)] * 3, "it is deferred, in any topology"
        assert patient.session.budget.exhausted == 3
        assert patient.session.budget.waited >= 0.015
        assert asks(hasty, asked) == (0, False)
        assert (hasty.session.budget.exhausted, hasty.session.budget.waited) == (0, 0.0)
    finally:
        rig.manager.cont()
    until(lambda: asks(patient, asked) == (BLOCKS * 32, True), "what is stored is found")
    halves, hurried = (patient, rig.half(topology, read_deadline_ms=0)), []
    rig.manager.stop()  # whose answer would end the question
    try:
        for half in halves:
            question = half.control.ask((half._spaces.plain or ())[0], 0, b"k" * 32)
            half.control._asked[question.op].waiting = True  # as the manager says that it reads from an SSD
            half.control.answer(question)
            hurried.append(half.control._asked[question.op].hurried)
    finally:
        rig.manager.cont()
    assert hurried == [False, True], "who may not wait for reads takes what is there"


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_what_is_kept_and_for_whom(rig: Rig, topology: str) -> None:
    plain, other = rig.half(topology), rig.half(topology, epoch="step-1200", save_decode_cache=True)
    same = rig.half(topology, epoch="step-1200")
    store(other, seed=1)
    until(lambda: asks(same, request("a", seed=1)) == (BLOCKS * 32, True), "the same epoch finds it")
    until(lambda: asks(plain, request("b", seed=1)) == (0, False), "another one does not")
    grown = request("c")
    grown.num_prompt_tokens = 100
    assert plain._publishing._limit(grown) == 100
    assert other._publishing._limit(grown) == BLOCKS * 32


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_engines_own_manager_is_one_for_all_ranks(rig: Rig, topology: str) -> None:
    half = rig.half(topology)
    settings = load_settings({"dram": "64MiB", "ssd": "/var/cache/kvhold:64MiB"}, "the test", Settings)
    first, second = rig.config(topology), rig.config(topology)
    second.kv_transfer_config.engine_id = first.kv_transfer_config.engine_id.replace("_dp1", "_dp0")
    names = [engine_of(instance_of(config)) for config in (first, second)]
    own = [make_attacher(half, name, settings, reads=False)._embedded for name in names]
    assert [(each.dram, each._ssd, each._huge_pages) for each in own if each] == [(64 << 20, settings.ssd, False)] * 2
    assert own[0] is not None
    assert own[1] is not None
    assert own[0].path == own[1].path
