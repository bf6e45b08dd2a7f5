"""Which rank writes what of an object, and where each reads: tensor and pipeline parallelism, replicated KV."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from testbed.engine.bed import generate, prompt
from testbed.engine.kvhold_bed import scheduler_side, serving, worker_side
from testbed.process.manager_process import Manager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvhold.engines.common.plans import CopyReport
from kvhold.engines.common.ranks import Ranks, Shards, WorkerReport, agree
from kvhold.engines.vllm.topology import replicas
from kvhold.protocol import MAX_REPORT


def reports(*sizes: tuple[int, ...], stages: int = 1, copies: int = 1) -> list[WorkerReport]:
    """One report per rank; ``sizes`` are a rank's bytes per block by group, equal in a stage."""
    world = len(sizes)
    each = world // stages
    return [
        WorkerReport(
            rank,
            world,
            rank // each,
            rank - rank % each % copies,
            b"same",
            b"stage %d" % (rank // each),
            size,
            private=False,
            summary=f"rank {rank}",
        )
        for rank, size in enumerate(sizes)
    ]


def agreed(told: Iterable[WorkerReport]) -> Ranks:
    return agree([report.packed() for report in told])


def test_each_rank_has_a_part_of_its_own() -> None:
    ranks = agreed(reports((4096, 100), (4096, 100)))
    assert ranks.shards == (Shards({0: 4096, 1: 4096}, (0, 4096)), Shards({0: 4096, 1: 4096}, (0, 4096)))
    assert ranks.digests == (b"same", b"stage 0")


def test_replicated_kv_is_stored_once_and_read_by_all() -> None:
    assert agreed(reports(*[(5000,)] * 4, copies=4)).shards == (Shards({0: 8192}, (0, 0, 0, 0)),)
    assert agreed(reports(*[(5000,)] * 4, copies=2)).shards == (Shards({0: 8192, 2: 8192}, (0, 0, 8192, 8192)),)


def test_pipeline_stages_have_layers_of_their_own() -> None:
    """The second stage has twice the layers of the first group and none of the second."""
    ranks = agreed(reports((4096, 4096), (4096, 4096), (8192, 0), (8192, 0), stages=2))
    assert ranks.shards[0] == Shards({0: 4096, 1: 4096, 2: 8192, 3: 8192}, (0, 4096, 8192, 16384))
    assert ranks.shards[1].writes == {0: 4096, 1: 4096}
    assert ranks.digests == (b"same", b"stage 0", b"stage 1")
    replicated = agreed(reports(*[(4096,)] * 4, stages=2, copies=2))
    assert replicated.shards == (Shards({0: 4096, 2: 4096}, (0, 0, 4096, 4096)),)


@pytest.mark.parametrize(
    "wrong",
    [
        {"digest": b"other"},
        {"stage_digest": b"other"},
        {"world": 3},
        {"private": True},
        {"shard_bytes": (4096, 1)},
        {"owner": 7},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_disagreement_stops_the_start_and_lists_the_ranks(wrong: dict[str, object]) -> None:
    first, second = reports((4096,), (4096,))
    with pytest.raises(ValueError, match=r"disagree about their KV cache: rank 0: rank 0; rank 1: rank 1"):
        agreed([first, replace(second, **wrong)])  # type: ignore[arg-type]


def test_replicas_must_have_equal_parts() -> None:
    first, second = reports((4096,), (4096,), copies=2)
    with pytest.raises(ValueError, match="disagree"):
        agreed([first, replace(second, shard_bytes=(8192,))])


def test_reports_that_are_missing_or_are_none_are_no_word() -> None:
    first, _ = reports((4096,), (4096,))
    for told in ([], [first.packed()], [first.packed(), first.packed()]):
        with pytest.raises(ValueError, match="have said what their KV cache is"):
            agree(told)
    with pytest.raises(ValueError, match="cannot be read"):
        agree([b"\x80"])


def test_a_report_of_many_groups_is_no_longer_than_the_manager_takes() -> None:
    [report] = reports(((1 << 40) - 1,) * 64)
    assert len(replace(report, summary="x" * 100_000).packed()) <= MAX_REPORT


def test_who_owns_no_part_writes_none_and_is_not_waited_for(llama_dir: Path, manager: Manager) -> None:
    with serving(llama_dir, manager) as llm:
        half, worker = scheduler_side(llm), worker_side()
        assert worker.copies is not None
        assert half._spaces.ranks is not None
        worker.copies._report = replace(worker.copies._report, owner=1)  # as if another rank held the same KV
        generate(llm, [prompt(100, 1)])
        assert not worker.copies.publishes
        assert half._batches.holding, "the owner's copy is what ends the hold"
        [batch] = half._batches._batches
        writes = [shards.writes for shards in half._spaces.ranks.shards]
        half._batches.ended(CopyReport({batch: dict(writes[0])}), writes)
        assert not half._batches.holding


def configured(tensor_parallel: int, specs: list[Any], token_ranks: int = 1, **model: Any) -> tuple[Any, Any]:
    parallel = SimpleNamespace(tensor_parallel_size=tensor_parallel, decode_context_parallel_size=token_ranks)
    text = SimpleNamespace(to_dict=lambda: {"num_attention_heads": 8, **model})
    config = SimpleNamespace(
        parallel_config=parallel, speculative_config=None, model_config=SimpleNamespace(hf_text_config=text)
    )
    groups = [KVCacheGroupSpec([str(number)], spec) for number, spec in enumerate(specs)]
    return config, KVCacheConfig(9, [], groups)


KV: dict[str, Any] = {"block_size": 16, "head_size": 64, "dtype": torch.float16}
ONE_HEAD = FullAttentionSpec(num_kv_heads=1, **KV)
STATE = MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="align")


@pytest.mark.parametrize(
    ("tensor_parallel", "specs", "model", "expected"),
    [
        (2, [ONE_HEAD], {"num_key_value_heads": 1}, 2),
        (8, [ONE_HEAD, SlidingWindowSpec(num_kv_heads=1, sliding_window=64, **KV)], {"num_key_value_heads": 2}, 4),
        (2, [ONE_HEAD], {"num_key_value_heads": 2}, 1),
        (2, [FullAttentionSpec(num_kv_heads=4, **KV)], {"num_key_value_heads": 8}, 1),
        (1, [ONE_HEAD], {"num_key_value_heads": 1}, 1),
        # a state is split by other rules; layers may differ in their heads; who knows what is not said
        (2, [ONE_HEAD, STATE], {"num_key_value_heads": 1}, 1),
        (2, [ONE_HEAD], {"num_key_value_heads": 1, "num_global_key_value_heads": 2}, 1),
        (2, [ONE_HEAD], {"num_key_value_heads": [1, 2]}, 1),
        (2, [ONE_HEAD], {}, 1),
        (4, [ONE_HEAD], {"num_key_value_heads": 3}, 1),
    ],
)
def test_which_ranks_hold_the_same_heads(
    tensor_parallel: int, specs: list[Any], model: dict[str, Any], expected: int
) -> None:
    assert replicas(*configured(tensor_parallel, specs, **model)) == expected


def test_what_the_engine_says_of_replicas_counts() -> None:
    config, cache = configured(4, [ONE_HEAD])
    cache.kv_tp_replicas = 4
    assert replicas(config, cache) == 4


def test_ranks_that_share_the_tokens_may_still_hold_the_same_heads() -> None:
    """There the engine itself counts no replicas; ranks with the same tokens are told apart by their topology."""
    latent = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float16, max_tp_shards=1)
    assert replicas(*configured(4, [latent, latent], token_ranks=2)) == 4
    assert replicas(*configured(4, [latent, STATE], token_ranks=2)) == 1
    assert replicas(*configured(4, [ONE_HEAD], token_ranks=2, num_key_value_heads=1)) == 4
    assert replicas(*configured(4, [ONE_HEAD], token_ranks=2)) == 1
