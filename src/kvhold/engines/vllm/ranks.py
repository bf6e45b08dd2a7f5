"""What the ranks of one engine hold of an object: who writes which part of it, and where each reads its own.

Each worker half packs a :class:`WorkerReport` for its scheduler half, and the manager hands it on: the engine's own
handshake between the two has room for one connector alone.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from kvhold.client.control import padded
from kvhold.engines.vllm.identity import keeps_drafts
from kvhold.protocol import MAX_REPORT

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_HEADS = re.compile(r"(kv|key_value)\w*heads")
_SPLIT_BY_HEADS = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker's geometry. ``digest`` must be the same on all ranks, ``stage_digest`` on those of one pipeline stage.

    ``shard_bytes`` are its part of an object, by group; 0 where it has no layer. ``owner`` is the rank whose part its
    own is a copy of: itself, unless ranks hold the same KV. ``summary`` is for a person, ``loaded``
    a digest of the weights that the engine has started with; empty where that is not known.
    """

    rank: int
    world: int
    stage: int
    owner: int
    digest: bytes
    stage_digest: bytes
    shard_bytes: tuple[int, ...]
    private: bool
    summary: str
    loaded: bytes = b""

    def packed(self) -> bytes:
        """For the way through the manager."""
        return msgspec.msgpack.encode(replace(self, summary=self.summary[: MAX_REPORT // 8]))


@dataclass(frozen=True, slots=True)
class Shards:
    """One group's objects: ``writes`` are the padded bytes of each rank that has a part of its own, in rank order.

    A rank's part begins ``starts[rank]`` bytes into an object; ranks that hold the same KV have the same start.
    """

    writes: dict[int, int]
    starts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ranks:
    """All ranks of an engine. ``digests`` are what makes their KV incompatible with that of others.

    ``loaded`` are digests of the weights they have started with, in rank order.
    """

    shards: tuple[Shards, ...]
    digests: tuple[bytes, ...]
    private: bool
    loaded: tuple[bytes, ...] = ()


_decoder = msgspec.msgpack.Decoder(WorkerReport)


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


def agree(packed: Iterable[bytes]) -> Ranks:
    """The word of all ranks' reports. Raises ValueError, listing them, when they disagree."""
    try:
        by_rank = {report.rank: report for report in map(_decoder.decode, packed)}
    except msgspec.MsgspecError as error:
        raise ValueError(f"kvhold: a worker's report cannot be read: {error}") from None
    world = next((report.world for report in by_rank.values()), 0)
    if not world or set(by_rank) != set(range(world)):
        raise ValueError(f"kvhold: of {world} workers, ranks {sorted(by_rank)} have said what their KV cache is")
    stages: dict[int, bytes] = {}
    common = {(report.digest, report.world, report.private, len(report.shard_bytes)) for report in by_rank.values()}
    agreed = len(common) == 1 and all(
        stages.setdefault(report.stage, report.stage_digest) == report.stage_digest
        and report.owner in by_rank
        and by_rank[report.owner].shard_bytes == report.shard_bytes
        for report in by_rank.values()
    )
    if not agreed:
        listed = "; ".join(f"rank {rank}: {report.summary}" for rank, report in sorted(by_rank.items()))
        raise ValueError(f"kvhold: the workers of this engine disagree about their KV cache: {listed}")
    first = by_rank[min(by_rank)]
    return Ranks(
        tuple(_shards(by_rank, group) for group in range(len(first.shard_bytes))),
        (first.digest, *(digest for _, digest in sorted(stages.items()))),
        first.private,
        tuple(report.loaded for _, report in sorted(by_rank.items())),
    )


def _shards(by_rank: dict[int, WorkerReport], group: int) -> Shards:
    writes: dict[int, int] = {}
    starts: dict[int, int] = {}
    at = 0
    for rank, report in sorted(by_rank.items()):
        size = padded(report.shard_bytes[group])
        if report.owner == rank:
            starts[rank] = at
            if size:
                writes[rank] = size
            at += size
    return Shards(writes, tuple(starts[report.owner] for _, report in sorted(by_rank.items())))
