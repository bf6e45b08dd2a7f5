"""How one engine's ranks are numbered, and which of them hold the same KV."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from kvhold.engines.vllm.identity import keeps_drafts

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_HEADS = re.compile(r"(kv|key_value)\w*heads")
_SPLIT_BY_HEADS = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks of one engine: pipeline stages of ``prefill`` x ``tensor`` ranks, the tensor-parallel rank fastest.

    ``prefill`` ranks share the work of a prompt (prefill context parallelism), and each ends up with the KV of all of
    it. ``decode`` ranks of a stage share its tokens (decode context parallelism): they are taken in the order in which
    the prefill rank is the fastest. Source: ``vllm.distributed.parallel_state.initialize_model_parallel`` and
    ``vllm.v1.worker.gpu.pcp_manager``, vLLM 0.32 and 0.33.
    """

    tensor: int
    prefill: int
    decode: int
    stages: int

    @classmethod
    def of(cls, parallel: "ParallelConfig") -> "Topology":
        return cls(
            parallel.tensor_parallel_size,
            parallel.prefill_context_parallel_size,
            parallel.decode_context_parallel_size,
            parallel.pipeline_parallel_size,
        )

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self._ranks_of_a_stage * self.stages

    @property
    def _ranks_of_a_stage(self) -> int:
        return self.tensor * self.prefill

    def stage(self, rank: int) -> int:
        """The pipeline stage of ``rank``."""
        return rank // self._ranks_of_a_stage

    def owner(self, rank: int, replicas: int, alike: bool) -> int:
        """The first rank that holds the same KV as ``rank``, so that its shard of an object is stored once.

        ``replicas`` tensor-parallel ranks in a row hold the same heads. ``alike`` says that what a rank holds depends
        on its heads and its tokens alone, so that prefill ranks with the same of both hold the same.
        """
        in_stage = rank % self._ranks_of_a_stage
        shards = [self._shard(other, replicas, alike) for other in range(in_stage + 1)]
        return rank - in_stage + shards.index(shards[in_stage])

    def shards(self, replicas: int, alike: bool) -> tuple[tuple[int, int, int], ...]:
        """The shards that a stage's ranks write of an object, in the order of those ranks."""
        return tuple(dict.fromkeys(self._shard(rank, replicas, alike) for rank in range(self._ranks_of_a_stage)))

    def _shard(self, rank: int, replicas: int, alike: bool) -> tuple[int, int, int]:
        """(heads, tokens, prefill rank where that matters): equal for ranks of a stage that hold the same KV."""
        prefill, tensor = divmod(rank, self.tensor)
        tokens = (tensor * self.prefill + prefill) % self.decode
        return tensor // replicas, tokens, 0 if alike else prefill


def replicas(config: "VllmConfig", cache: "KVCacheConfig") -> int:
    """How many consecutive tensor-parallel ranks hold the same heads of keys and values, in all layers.

    vLLM says so of MLA; where ranks share the tokens (decode context parallelism) it says 1, although ranks with the
    same tokens still hold the same. Fewer heads of keys and values than ranks are given to several ranks each, in
    order, by its ``QKVParallelLinear``; that is relied on only for models whose layers all have the same number of
    them.
    """
    parallel = config.parallel_config
    specs = _specs(cache)
    told = cache.kv_tp_replicas
    if parallel.decode_context_parallel_size > 1:
        told = max(told, _told_by_layers(specs, parallel.tensor_parallel_size))
    if told > 1 or keeps_drafts(config):
        return max(1, told)
    text = config.model_config.hf_text_config.to_dict()
    heads = text.get("num_key_value_heads")
    if (
        {name for name in text if _HEADS.search(name)} != {"num_key_value_heads"}
        or not isinstance(heads, int)
        or not all(type(spec) in _SPLIT_BY_HEADS and spec.num_kv_heads == 1 for spec in specs)
        or heads < 1
        or parallel.tensor_parallel_size % heads
    ):
        return 1
    return parallel.tensor_parallel_size // heads


def _told_by_layers(specs: Sequence[KVCacheSpec], tensor_parallel: int) -> int:
    """vLLM's own ``kv_cache_groups_tp_replicas``, as it answers where no rank holds a part of the tokens."""
    if not all(isinstance(spec, AttentionSpec) and spec.max_tp_shards is not None for spec in specs):
        return 1
    return math.gcd(tensor_parallel, *(max(1, tensor_parallel // spec.max_tp_shards) for spec in specs))


def attention_alone(cache: "KVCacheConfig") -> bool:
    """Whether all that the engine keeps is attention's: a recurrent state is split by rules of its own."""
    return all(isinstance(spec, AttentionSpec) for spec in _specs(cache))


def _specs(cache: "KVCacheConfig") -> list[KVCacheSpec]:
    return [spec for group in cache.kv_cache_groups for spec in iter_layer_specs(group.kv_cache_spec)]
