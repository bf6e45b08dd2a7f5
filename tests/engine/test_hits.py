"""Where a prompt can be resumed, by the engine's own search over what is stored."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from testbed.engine.storing import attention, keys
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec

from kvhold.engines.vllm.groups import kept_groups
from kvhold.engines.vllm.hits import HitSearch


def searching(*specs: Any, hash_tokens: int, context_ranks: int = 1) -> HitSearch:
    groups = [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)]
    cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    register_all_kvcache_specs(None)
    unit = max(spec.block_size for spec in specs) * context_ranks
    manager = KVCacheManager(
        cache, 1 << 20, scheduler_block_size=unit, hash_block_size=hash_tokens, dcp_world_size=context_ranks
    )
    parallel = SimpleNamespace(decode_context_parallel_size=context_ranks)
    config: Any = SimpleNamespace(parallel_config=parallel, max_in_flight_tokens=8192, num_prefill_lookahead_tokens=0)
    return HitSearch(config, cache, manager, kept_groups(config, cache))


def states(block_size: int) -> MambaSpec:
    return MambaSpec(block_size=block_size, shapes=((4, 8),), dtypes=(torch.float32,), mamba_cache_mode="align")


def window(block_size: int, tokens: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=tokens
    )


def test_a_failed_search_leaves_nothing_for_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    search = searching(attention(16), window(16, 32), hash_tokens=16)
    mine = keys(8)
    there = [frozenset(mine)] * 2
    assert search.best(mine, 0, 128, there).tokens == 128
    find = search._coordinator.find_longest_cache_hit

    def failing(*args: Any) -> Any:
        find(*args)
        raise RuntimeError("injected")

    monkeypatch.setattr(search._coordinator, "find_longest_cache_hit", failing)
    with pytest.raises(RuntimeError, match="injected"):
        search.best(mine, 64, 128, there)
    monkeypatch.undo()
    assert (search._pool.local, search._pool.stored) == ((), ())
    assert search.best(mine, 0, 128, [frozenset()] * 2).tokens == 0


def test_a_search_is_not_bounded_by_the_size_of_its_pool_and_changes_nothing() -> None:
    search = searching(attention(16), window(16, 64), hash_tokens=16)
    mine = keys(5000)
    there = [frozenset(mine)] * 2
    for _ in range(2):
        hit = search.best(mine, 0, 5000 * 16, there)
        assert hit.tokens == 5000 * 16
        assert hit.needed == (tuple(range(5000)), tuple(range(4996, 5000)))


def test_a_state_counts_only_at_its_own_boundary() -> None:
    search = searching(attention(16), states(16), hash_tokens=16)
    mine = keys(8)
    attended = frozenset(mine)
    assert search.best(mine, 0, 128, [attended, frozenset({mine[4]})]).needed == ((0, 1, 2, 3, 4), (4,))
    assert search.best(mine, 0, 64, [attended, frozenset({mine[4]})]).tokens == 0
    assert search.best(mine, 32, 128, [attended, frozenset({mine[4]})]).needed == ((2, 3, 4), (4,))
    assert search.best(mine, 80, 128, [attended, frozenset({mine[4]})]).tokens == 80, "the engine has as much itself"


def test_a_hit_ends_inside_of_a_block_only_where_the_engine_resumes_there() -> None:
    coarse = searching(attention(64), states(64), hash_tokens=16)
    assert coarse.partial
    mine = keys(8)
    hit = coarse.best(mine, 0, 127, [frozenset({mine[3], mine[5]}), frozenset({mine[5]})])
    assert (hit.tokens, hit.needed) == (96, ((0, 1), (1,)))
    alone = searching(attention(16), hash_tokens=16)
    assert not alone.partial
    with_window = searching(attention(64), window(16, 64), hash_tokens=16)
    assert not with_window.partial
    assert with_window.unit == 64


def test_with_context_parallel_ranks_a_block_covers_the_tokens_of_all() -> None:
    search = searching(attention(16), hash_tokens=32, context_ranks=2)
    assert (search.groups[0].block_tokens, search.key_tokens(0), search.unit) == (32, 32, 32)
    hit = search.best(keys(8), 64, 256, [frozenset(keys(6))])
    assert (hit.tokens, hit.needed) == (192, ((2, 3, 4, 5),))
