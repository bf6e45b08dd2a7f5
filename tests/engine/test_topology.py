"""Ranks are numbered as vLLM numbers them, and ranks that hold the same KV write it once."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ParallelConfig
from vllm.distributed import parallel_state

from kvhold.engines.vllm.topology import Topology

GRIDS = [
    Topology(tensor=4, prefill=1, decode=1, stages=2),
    Topology(tensor=4, prefill=1, decode=2, stages=2),
    Topology(tensor=8, prefill=1, decode=8, stages=1),
    Topology(tensor=2, prefill=2, decode=1, stages=2),
    Topology(tensor=2, prefill=2, decode=2, stages=1),
    Topology(tensor=2, prefill=4, decode=4, stages=2),
    Topology(tensor=2, prefill=2, decode=4, stages=2),
]


def groups_of_vllm(grid: Topology, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[int]]]:
    """The groups of ranks that vLLM makes for such an engine, by name."""
    made: dict[str, list[list[int]]] = {}

    def make(groups: Any, *args: Any, group_name: str, **kwargs: Any) -> SimpleNamespace:
        made[group_name] = [list(ranks) for ranks in groups]
        return SimpleNamespace(world_size=len(made[group_name][0]), rank_in_group=0)

    parallel = ParallelConfig(
        tensor_parallel_size=grid.tensor,
        prefill_context_parallel_size=grid.prefill,
        decode_context_parallel_size=grid.decode,
        pipeline_parallel_size=grid.stages,
        distributed_executor_backend="mp",
    )
    assert grid == Topology.of(parallel)
    assert grid.world == parallel.world_size
    config = SimpleNamespace(parallel_config=parallel, engram_config=None, model_config=None)
    distributed = SimpleNamespace(
        is_initialized=lambda: True,
        get_world_size=lambda: grid.world,
        get_rank=lambda: 0,
        get_backend=lambda group: "gloo",
    )
    monkeypatch.setattr("vllm.config.get_current_vllm_config", lambda: config)
    monkeypatch.setattr(parallel_state.torch, "distributed", distributed)
    monkeypatch.setattr(parallel_state, "init_model_parallel_group", make)
    monkeypatch.setattr(parallel_state, "get_world_group", lambda: SimpleNamespace(local_rank=0, device_group=None))
    for name in ("_TP", "_ETP", "_ENGRAM_DP", "_DCP", "_PCP", "_PP", "_DP", "_EP", "_EPLB"):
        monkeypatch.setattr(parallel_state, name, None, raising=False)
    parallel_state.initialize_model_parallel(grid.tensor, grid.stages, grid.prefill, grid.decode)
    return made


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_ranks_are_numbered_as_the_engine_numbers_them(grid: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = groups_of_vllm(grid, monkeypatch)
    monkeypatch.undo()
    for ranks in groups["pp"]:
        assert [grid.stage(rank) for rank in ranks] == list(range(grid.stages))
    for ranks in groups["dcp"]:
        assert len({grid.stage(rank) for rank in ranks}) == 1
    held = {
        rank: (grid.stage(rank), at if grid.decode > 1 else 0)
        for group in groups["dcp"]
        for at, rank in enumerate(group)
    }
    for rank in range(grid.world):  # with one head for all, a rank's KV is that of its stage's layers and its tokens
        same = [other for other in range(grid.world) if held[other] == held[rank]]
        assert grid.owner(rank, replicas=grid.tensor, alike=True) == same[0]
    assert len(grid.shards(grid.tensor, alike=True)) == grid.decode


def test_heads_and_tokens_both_tell_ranks_apart() -> None:
    grid = Topology(tensor=8, prefill=1, decode=2, stages=1)
    owners = [grid.owner(rank, replicas=4, alike=True) for rank in range(8)]
    assert owners == [0, 1, 0, 1, 4, 5, 4, 5]
    assert grid.shards(4, alike=True) == ((0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0))


def test_what_is_not_known_to_be_alike_is_stored_by_every_rank() -> None:
    grid = Topology(tensor=2, prefill=2, decode=1, stages=1)
    assert [grid.owner(rank, replicas=1, alike=True) for rank in range(4)] == [0, 1, 0, 1]
    assert [grid.owner(rank, replicas=1, alike=False) for rank in range(4)] == [0, 1, 2, 3]
