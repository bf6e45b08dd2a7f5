"""What a worker half begins and reports in a step, with a copy engine that ends copies when the test does."""

import tempfile
import uuid
from array import array
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from testbed.engine.vllm_config import tiny_config
from testbed.process.manager_process import Manager
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvhold import protocol as wire
from kvhold.client.arena import ArenaMapping
from kvhold.client.channel import Channel
from kvhold.copy.job import Job
from kvhold.copy.layout import PagedLayout
from kvhold.engines.common.accounts import Accounts
from kvhold.engines.common.plans import CopyReport, Load, Publish, StepPlan
from kvhold.engines.vllm.connector import KvHoldConnector
from kvhold.engines.vllm.stats import KvHoldStats


class Copying:
    """Stands for a copy engine of host memory: notes what is begun, and ends it when the test does."""

    def __init__(self, layouts: Sequence[PagedLayout]) -> None:
        self.begun: list[tuple[Any, ...]] = []
        self.jobs: list[Job] = []

    def register(self, arena: ArenaMapping) -> None:
        pass

    unregister = register

    def begin_restore(self, arena: ArenaMapping, parts: Any) -> Job:
        return self._begin("restore", *[(group, list(mine), list(offsets)) for group, mine, offsets in parts])

    def begin_publish(self, arena: ArenaMapping, group: int, mine: Sequence[int], offsets: Sequence[int]) -> Job:
        return self._begin("publish", group, list(mine), list(offsets))

    def _begin(self, *what: Any) -> Job:
        self.begun.append(what)
        self.jobs.append(Job(1))
        return self.jobs[-1]

    def advance(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Rank:
    """One rank's connector, attached, and the copies that it begins."""

    connector: KvHoldConnector
    copying: Copying
    incarnation: int

    @property
    def begun(self) -> list[tuple[Any, ...]]:
        return self.copying.begun

    def plan(
        self, step: int, loads: list[Load], publishes: list[Publish], starts: Any = ((0, 4096, 8192, 12288),)
    ) -> StepPlan:
        return StepPlan(step, self.incarnation, loads, publishes, starts)

    def step(self, plan: StepPlan) -> None:
        """What the engine has a worker do in a step, but for asking what has ended."""
        self.connector.bind_connector_metadata(plan)
        self.connector.start_load_kv(cast(Any, None))
        self.connector.wait_for_save()
        self.connector.clear_connector_metadata()

    def results(self) -> tuple[set[str], set[str], set[int]]:
        """Restores that have ended, those that are failed as a whole, and blocks that were not filled."""
        results = self.connector.get_transfer_results(set())
        return results.finished_recving, results.failed_recving, self.connector.get_block_ids_with_load_errors()


@pytest.fixture(scope="module")
def a_manager() -> Iterator[Manager]:
    with tempfile.TemporaryDirectory(prefix="kvhold-") as folder:
        process = Manager(Path(folder), dram="32MiB")
        yield process
        process.kill()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return tiny_config(tmp_path_factory.mktemp("tiny"), 1024)


@pytest.fixture
def ranks(base: VllmConfig, a_manager: Manager) -> Iterator[Callable[..., Rank]]:
    """Makes attached ranks of an engine of four; ``groups`` are how many layers of each cache group a rank has."""
    made: list[Rank] = []

    def make(*groups: int, rank: int = 0) -> Rank:
        config = copy(base)
        config.model_config = copy(base.model_config)
        config.model_config.hf_text_config = copy(base.model_config.hf_text_config)
        config.model_config.hf_text_config.num_key_value_heads = 4
        parallel = config.parallel_config = copy(base.parallel_config)
        parallel.tensor_parallel_size = parallel.world_size = 4
        parallel.rank = rank
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="KvHoldConnector",
            kv_role="kv_both",
            engine_id=str(uuid.uuid4()),
            kv_connector_extra_config={"socket": str(a_manager.socket)},
        )
        spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32)
        names = [[f"layer {at}.{layer}" for layer in range(layers)] for at, layers in enumerate(groups or (1,))]
        cache = KVCacheConfig(16, [], [KVCacheGroupSpec(layers, spec) for layers in names])
        copiers: list[Copying] = []
        connector = KvHoldConnector(config, KVConnectorRole.WORKER, cache)
        with patch("kvhold.copy.host.HostCopier", lambda layouts: copiers.append(Copying(layouts)) or copiers[0]):
            connector.register_kv_caches(
                {
                    layer: torch.zeros((16, spec.page_size_bytes), dtype=torch.uint8)
                    for group in names
                    for layer in group
                }
            )
        made.append(Rank(connector, copiers[0], arena_of(a_manager.socket)))
        return made[-1]

    yield make
    for each in made:
        for job in each.copying.jobs:
            if not job.ended:
                job.end()
        each.connector.shutdown()


def arena_of(socket: Path) -> int:
    """Which arena the manager has."""
    channel = Channel(socket, wire.Hello("admin"), 60.0)
    try:
        return channel.welcome.incarnation
    finally:
        channel.close()


def test_a_step_is_stored_once_however_often_it_is_asked_for_and_also_without_a_forward_pass(
    ranks: Callable[..., Rank],
) -> None:
    rank = ranks()
    connector = rank.connector
    connector.bind_connector_metadata(rank.plan(1, [], [Publish(1, 0, [3], array("Q", [0]))]))
    connector.wait_for_save()
    connector.wait_for_save()
    connector.clear_connector_metadata()
    assert len(rank.begun) == 1
    connector.bind_connector_metadata(rank.plan(2, [], [Publish(2, 0, [4], array("Q", [0]))]))
    connector.clear_connector_metadata()  # there was nothing to compute, so nobody said that it is over
    assert len(rank.begun) == 2
    connector.clear_connector_metadata()
    assert [what[2] for what in rank.begun] == [[3], [4]]


def test_a_stage_that_never_comes_to_its_saves_makes_them_with_the_next_step(ranks: Callable[..., Rank]) -> None:
    """vLLM's first model runner leaves them out on all but the last pipeline stage of an engine that speculates."""
    rank = ranks()
    rank.connector.bind_connector_metadata(rank.plan(1, [], [Publish(1, 0, [3], array("Q", [0]))]))
    rank.connector.bind_connector_metadata(rank.plan(2, [], []))
    assert rank.begun == [("publish", 0, [3], [0])]


def test_each_rank_copies_its_own_part(ranks: Callable[..., Rank]) -> None:
    load, publish = Load("r", [(0, [3, 4], array("Q", [0, 65536]))], [3, 4]), Publish(1, 0, [5], array("Q", [131072]))
    for number, start in enumerate((0, 4096, 8192, 12288)):
        rank = ranks(rank=number)
        rank.step(rank.plan(1, [load], [publish]))
        assert rank.begun == [("restore", (0, [3, 4], [start, 65536 + start])), ("publish", 0, [5], [131072 + start])]


def test_a_rank_copies_nothing_of_a_group_that_it_has_no_layers_of(ranks: Callable[..., Rank]) -> None:
    rank = ranks(1, 0)
    load = Load("r", [(0, [3], array("Q", [0])), (1, [4], array("Q", [0]))], [3, 4])
    publishes = [Publish(1, 0, [5], array("Q", [0])), Publish(2, 1, [6], array("Q", [0]))]
    rank.step(rank.plan(1, [load], publishes, ((0,), (0,))))
    assert rank.begun == [("restore", (0, [3], [0])), ("publish", 0, [5], [0])]


@pytest.mark.parametrize("groups", [1, 2])
def test_a_failure_is_told_no_later_than_the_end(groups: int, ranks: Callable[..., Rank]) -> None:
    rank = ranks(*[1] * groups)
    loads = [
        Load(name, [(0, mine, array("Q", [0, 0, 0]))], mine) for name, mine in (("a", [3, 4, 5]), ("b", [6, 7, 8]))
    ]
    rank.step(rank.plan(1, loads, [], ((0,),) * groups))
    assert rank.results() == (set(), set(), set())
    bad, good = rank.copying.jobs
    bad.done = 1
    bad.end("injected")
    assert rank.results() == (({"a"}, set(), {4, 5}) if groups == 1 else ({"a"}, {"a"}, set()))
    good.end()
    assert rank.results() == ({"b"}, set(), set())
    assert rank.results() == (set(), set(), set()), "told once"


def test_a_load_that_cannot_begin_ends_as_a_failed_one(ranks: Callable[..., Rank]) -> None:
    """Its request waits for the end of it."""
    rank = ranks()
    elsewhere = Load("r", [(0, [3], array("Q", [0]))], [3])
    rank.step(replace(rank.plan(1, [elsewhere], [], ((0,),)), incarnation=rank.incarnation + 1))  # another manager's
    rank.step(rank.plan(2, [Load("s", [], [4])], []))
    assert rank.results() == ({"r", "s"}, set(), {3, 4})
    assert rank.begun == []


def test_copies_of_a_failed_batch_are_told_and_others_go_on(ranks: Callable[..., Rank]) -> None:
    rank = ranks()
    rank.step(rank.plan(1, [], [Publish(1, 0, [3], array("Q", [0])), Publish(2, 0, [4], array("Q", [0]))]))
    first, second = rank.copying.jobs
    second.end("injected")
    assert rank.connector.build_connector_worker_meta() == CopyReport({2: {0: -1}})
    assert rank.connector.build_connector_worker_meta() is None
    first.end()
    assert rank.connector.build_connector_worker_meta() == CopyReport({1: {0: 4096}})


def test_reports_of_ranks_become_one() -> None:
    one = CopyReport({1: {0: 4096}, 2: {0: -1}})
    two = CopyReport({1: {1: 4096}, 3: {1: 4096}})
    assert one.aggregate(two) == CopyReport({1: {0: 4096, 1: 4096}, 2: {0: -1}, 3: {1: 4096}})
    assert one == CopyReport({1: {0: 4096}, 2: {0: -1}}), "neither is changed"


def test_counts_of_ranks_and_steps_add_up() -> None:
    first, second = Accounts(), Accounts()
    first.add("loads")
    first.add("load_bytes", 100, rank=0)
    second.add("loads", 2)
    second.add("load_bytes", 50, rank=1)
    taken, other = KvHoldStats.taken(first), KvHoldStats.taken(second)
    assert taken is not None
    assert other is not None
    assert KvHoldStats.taken(first) is None
    assert taken.aggregate(other).reduce() == {"loads": 3, "load_bytes/0": 100, "load_bytes/1": 50}
