"""Where a prompt can be resumed, decided by the engine's own rules over what kvhold has.

vLLM's cache coordinator knows which blocks of which groups a hit needs. A second one of the same class is built here,
and the block pool underneath it replaced by one that answers from the manager's word instead of GPU memory.
"""

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator, get_kv_cache_coordinator

from kvhold.engines.common.groups import Group
from kvhold.engines.common.question import Hit
from kvhold.engines.vllm.groups import Unsupported

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

_HIT = object()


@dataclass(slots=True)
class _Pool:
    """Stands for a block pool: a block is in it if kvhold has it, or if it lies below the engine's own hit."""

    hash_block_size: int
    null_block: Any
    local: Container[bytes] = ()
    stored: Sequence[Container[bytes]] = ()

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: Sequence[int]) -> list[object] | None:
        if block_hash in self.local or all(block_hash in self.stored[group] for group in kv_cache_group_ids):
            return [_HIT] * len(kv_cache_group_ids)
        return None


class HitSearch:
    """The search for one engine; ``groups`` are those that are kept, in engine order."""

    def __init__(
        self, config: "VllmConfig", cache: "KVCacheConfig", manager: "KVCacheManager", groups: tuple[Group, ...]
    ) -> None:
        theirs = manager.coordinator
        if len(groups) == 1 and manager.block_pool.hash_block_size != groups[0].block_tokens:
            raise Unsupported(
                f"kvhold: prefix_match_unit={manager.block_pool.hash_block_size} cannot be used with this model's only "
                f"cacheable KV-cache group, whose blocks have {groups[0].block_tokens} tokens; leave it out"
            )
        self.groups = groups
        self.hash_tokens: int = manager.block_pool.hash_block_size
        self._coordinator = get_kv_cache_coordinator(
            kv_cache_config=replace(
                cache, num_blocks=1, kv_cache_groups=[cache.kv_cache_groups[group.index] for group in groups]
            ),
            max_model_len=manager.max_model_len,
            max_in_flight_tokens=config.max_in_flight_tokens,
            use_eagle=manager.use_eagle,
            enable_caching=True,
            enable_kv_cache_events=False,
            dcp_world_size=config.parallel_config.decode_context_parallel_size,
            pcp_world_size=1,
            scheduler_block_size=theirs.scheduler_block_size,
            hash_block_size=self.hash_tokens,
            num_prefill_lookahead=config.num_prefill_lookahead_tokens,
            allow_partial_hash_hits=theirs.enable_partial_hash_hits,
        )
        self._pool = _Pool(self.hash_tokens, self._coordinator.block_pool.null_block)
        self._coordinator.block_pool = self._pool
        for single in self._coordinator.single_type_managers:
            single.block_pool = self._pool
        self.unit: int = self.hash_tokens if self.partial else theirs.scheduler_block_size
        """Hits end at multiples of so many tokens."""

    @property
    def partial(self) -> bool:
        """Whether a hit may end inside of a block."""
        return bool(self._coordinator.enable_partial_hash_hits)

    def key_tokens(self, group: int) -> int:
        """Keys of the g-th group are the hashes at the multiples of so many tokens."""
        return self.hash_tokens if self.partial else self.groups[group].block_tokens

    def best(self, hashes: Sequence[bytes], local: int, limit: int, stored: Sequence[Collection[bytes]]) -> Hit:
        """The longest hit up to ``limit`` tokens; the engine's own is of ``local`` tokens.

        ``hashes`` are the request's, one per ``hash_tokens``; ``stored`` the keys that kvhold has, by group.
        """
        with _Filled(self._pool, frozenset(hashes[: local // self.hash_tokens]), stored):
            blocks, tokens, beyond = self._coordinator.find_longest_cache_hit(list(hashes), limit)
        needed = []
        for group, found in zip(self.groups, blocks, strict=True):
            first = local // group.block_tokens
            needed.append(tuple(at for at in range(first, len(found)) if found[at] is _HIT))
        return Hit(tokens, tuple(needed), tokens + beyond if beyond else 0)

    def shortest(
        self, hashes: Sequence[bytes], local: int, limit: int, stored: Sequence[Collection[bytes]]
    ) -> tuple[int, int]:
        """(group, tokens): which group ends the hit, and how far it would reach if it were alone."""
        if not isinstance(self._coordinator, HybridKVCacheCoordinator):
            return 0, self.best(hashes, local, limit, stored).tokens
        with _Filled(self._pool, frozenset(hashes[: local // self.hash_tokens]), stored):
            _, reached = self._coordinator.find_longest_cache_hit_per_group(list(hashes), limit)
        tokens = min(reached)
        return reached.index(tokens), tokens


class _Filled:
    """What a search may find; a failed one leaves nothing behind for the next request."""

    def __init__(self, pool: _Pool, local: Container[bytes], stored: Sequence[Container[bytes]]) -> None:
        self._pool, self._content = pool, (local, stored)

    def __enter__(self) -> None:
        self._pool.local, self._pool.stored = self._content

    def __exit__(self, *_: object) -> None:
        self._pool.local, self._pool.stored = (), ()
