"""Which blocks of a request a later hit can ever reach: the engine's own rules, asked of its own managers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_coordinator import replay_boundaries
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from kvhold.engines.common.groups import Group

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


class Retention:
    """The kept ``groups`` of one engine, and what its managers know of each."""

    def __init__(self, manager: "KVCacheManager", groups: Sequence[Group]) -> None:
        coordinator = manager.coordinator
        self.groups = groups
        self.by_index = {group.index: at for at, group in enumerate(groups)}
        self.hash_tokens: int = manager.block_pool.hash_block_size
        self._coordinator = coordinator
        self._managers = [coordinator.single_type_managers[group.index] for group in groups]
        self._caching = manager.enable_caching

    def key(self, request: "Request", tokens: int) -> bytes:
        """The key of the block, whole or not, or of the state that ends after ``tokens`` of a request."""
        return bytes(request.block_hashes[tokens // self.hash_tokens - 1])

    def is_state(self, at: int, request: "Request", block: int, tokens: int, computed: int) -> bool:
        """Whether a block that the engine handed over holds the state after ``tokens``, once this step has run.

        A step that ends at ``computed`` leaves states at its beginning and its end, and where the engine had it save
        one. An offer of anything in between is wrong; vLLM 0.32 makes such where prompts part inside of a block. And
        the block must still be the one that the engine itself would find: an offer may be of an earlier pass.
        """
        manager = self._managers[at]
        checkpoint = getattr(manager, "_checkpoints", {}).get(request.request_id)
        if request.num_computed_tokens < tokens < computed and (checkpoint is None or checkpoint[0] != tokens):
            return False
        name = make_block_hash_with_group_id(BlockHash(self.key(request, tokens)), self.groups[at].index)
        return bool(manager.block_pool.cached_block_hash_to_block.contain(name, block))

    def blocks_to_begin(self, tokens: int) -> int:
        """At least as many blocks as the engine wants for a prompt of ``tokens`` without any hit."""
        wanted = 0
        for group, manager in zip(self.groups, self._managers, strict=True):
            if group.handed:
                wanted += 3 + manager.num_speculative_blocks  # the last state, the running one, one to save
            else:
                most = -(-tokens // group.block_tokens)
                wanted += min(most, manager.max_admission_blocks_per_request or most)
        return wanted

    def settled(self, at: int, computed: int) -> int:
        """How many of ``computed`` tokens have their final KV in a group: a drafter may write its last ones again."""
        again: int = self._coordinator.num_reprefillable_tokens
        return max(0, computed - again) if self._managers[at].use_eagle else computed

    def useful(
        self, at: int, start: int, end: int, request: "Request", resumed_at: Sequence[int] = ()
    ) -> Sequence[bool] | None:
        """Which of a group's blocks [start, end) can serve a hit; None for all.

        The engine expects requests to be resumed near the end of their prompt, and at the given numbers of tokens.

        Raises ValueError when the engine's answer is not about these blocks.
        """
        if not self._caching:
            return None
        manager, coordinator = self._managers[at], self._coordinator
        # vLLM 0.33 tells groups of drafters from those whose last block is dropped for them.
        dropping = getattr(coordinator, "drop_eagle_group_ids", coordinator.eagle_group_ids)
        boundaries = [
            *replay_boundaries(request.num_prompt_tokens, coordinator.scheduler_block_size, bool(dropping)),
            *resumed_at,
        ]
        if request.shared_prefix_boundary:
            boundaries.append(request.shared_prefix_boundary)
            if manager.use_eagle:  # who parts there lacks the block behind it, which would be dropped
                boundaries.append(request.shared_prefix_boundary - manager.block_size)
        mask: list[bool] | None = manager.reachable_block_mask(
            start_block=start,
            end_block=end,
            alignment_tokens=manager.cache_hit_alignment_tokens,
            kv_cache_spec=manager.kv_cache_spec,
            use_eagle=manager.use_eagle,
            retention_interval=coordinator.retention_interval,
            reachable_boundaries=boundaries,
            dcp_world_size=manager.dcp_world_size,
        )
        if mask is not None and len(mask) != end - start:
            raise ValueError(f"the engine's mask for {end - start} blocks has {len(mask)} entries")
        return mask
