"""The kinds of models: hand-made cache groups, small."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)


@dataclass(frozen=True)
class Kind:
    """A model and how it is run. ``layers`` are per group; names that begin with ``draft`` are an EAGLE head's."""

    name: str
    groups: Sequence[KVCacheSpec]
    layers: int = 2
    block_size: int = 16  # of cache_config: the recurrent groups', where there are some
    ranks: int = 1  # tensor parallel
    prefill_ranks: int = 1  # prefill context parallel
    token_ranks: int = 1  # decode context parallel
    run: int = 1  # cp_kv_cache_interleave_size
    kv_heads: int | None = None  # of the model, where there are fewer than ranks
    unit: int | None = None  # prefix_match_unit: tokens of a block hash
    layout: str = "LBHNC"
    eagle: tuple[int, ...] = ()  # groups with draft layers
    method: str = ""  # of speculative decoding
    drafts: int = 0
    policy: str = "fcfs"
    side: KVCacheSpec | None = None  # of every other layer of a group, as a sparse attention's indexer has
    decode: bool = False  # save_decode_cache
    partial: bool = False  # whether hits may end inside of a block

    def cache_groups(self) -> list[KVCacheGroupSpec]:
        groups = []
        for number, spec in enumerate(self.groups):
            names = [f"model.{number}.{layer}" for layer in range(self.layers)]
            if number in self.eagle:
                names[-1] = f"draft.{number}"
            if self.side is not None:
                specs = {name: self.side if at % 2 else spec for at, name in enumerate(names)}
                spec = UniformTypeKVCacheSpecs(block_size=spec.block_size, kv_cache_specs=specs)
            groups.append(KVCacheGroupSpec(names, spec, is_eagle_group=number in self.eagle))
        return groups

    @property
    def world(self) -> int:
        return self.ranks * self.prefill_ranks

    def block_tokens(self, spec: KVCacheSpec) -> int:
        """Tokens that a block of ``spec`` covers, on all ranks together."""
        return spec.block_size * (self.token_ranks if spec.dcp_sharded else 1)

    @property
    def recurrent(self) -> bool:
        return any(isinstance(spec, MambaSpec) for spec in self.groups)


def full(block: int = 16, heads: int = 2) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=8, dtype=torch.bfloat16)


def sliding(window: int, block: int = 16, heads: int = 2) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block, num_kv_heads=heads, head_size=8, dtype=torch.bfloat16, sliding_window=window
    )


def chunked(chunk: int, block: int = 16) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        block_size=block, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, attention_chunk_size=chunk
    )


def mla(block: int = 16, size: int = 24) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=size, dtype=torch.bfloat16, max_tp_shards=1)


def sliding_mla(window: int, block: int = 16) -> SlidingWindowMLASpec:
    return SlidingWindowMLASpec(
        block_size=block, num_kv_heads=1, head_size=24, dtype=torch.bfloat16, sliding_window=window
    )


def mamba(block: int = 16, page: int = 1024, **more: int) -> MambaSpec:
    """Two states per layer, padded to the page of an attention group."""
    return MambaSpec(
        block_size=block,
        shapes=((3, 20), (4, 8, 4)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=page,
        mamba_cache_mode="align",
        **more,
    )


INSIDE = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1}
"""Of a backend that can keep a state inside of a prefill."""

EAGLE: dict[str, Any] = {"method": "eagle", "drafts": 2, "eagle": (0,)}

KINDS = {
    kind.name: kind
    for kind in (
        Kind("full", [full()]),
        Kind("full_decode", [full()], decode=True),
        Kind("full_priority", [full()], policy="priority"),
        Kind("full_tp2", [full(heads=1)], ranks=2),
        Kind("full_outer", [full()], layout="BLHNC", layers=3),
        Kind("full_ngram", [full()], method="ngram", drafts=3),
        Kind("full_ngram_decode", [full()], method="ngram", drafts=3, decode=True),
        Kind("full_eagle", [full()], method="eagle", drafts=2, eagle=(0,)),
        Kind("sliding", [sliding(40)]),
        Kind("chunked", [chunked(64)]),
        Kind("recurrent", [mamba()]),
        Kind("gemma", [sliding(40), sliding(40), sliding(40), full()], layers=1),
        Kind("gemma_decode", [sliding(33), full()], decode=True),
        Kind("gemma_tp2", [sliding(40), full()], ranks=2),
        Kind("gemma_eagle", [sliding(40), full()], method="eagle", drafts=2, eagle=(1,)),
        Kind("two_sizes", [full(16), sliding(40, block=32, heads=1)]),
        Kind("two_sizes_eagle", [full(16), sliding(40, block=32, heads=1)], method="eagle", drafts=2, eagle=(0,)),
        Kind("two_windows", [sliding(17), sliding(70), full()], layout="BLHNC"),
        Kind("llama4", [chunked(64), chunked(64), full()], layers=1),
        Kind("mla_tp2", [mla()], ranks=2),
        Kind("mla_indexer_tp2", [mla()], side=mla(size=8), layers=4, ranks=2),
        Kind("sliding_mla_tp2", [sliding_mla(40), mla()], ranks=2),
        Kind("mamba_mla", [mamba(page=768), mla()]),
        Kind("mamba", [mamba(), full()]),
        Kind("mamba_decode", [mamba(), full()], decode=True),
        Kind("mamba_tp2", [mamba(page=1024), full()], ranks=2),
        Kind("mamba_partial", [mamba(32, 2048), full(32)], block_size=32, unit=16, partial=True),
        Kind("mamba_partial_fine", [mamba(64, 4096), full(64)], block_size=64, unit=16, partial=True, decode=True),
        Kind("mamba_inside", [mamba(**INSIDE), full()]),
        Kind("mamba_sliding", [mamba(), sliding(40), full()]),
        Kind("full_dcp2", [full(heads=1)], ranks=2, token_ranks=2, kv_heads=1),
        Kind("full_dcp2_tp4", [full(heads=1)], ranks=4, token_ranks=2, run=4, kv_heads=1, decode=True),
        Kind("full_dcp2_eagle", [full(heads=1)], ranks=2, token_ranks=2, kv_heads=1, **EAGLE),
        Kind("mla_dcp2_tp4", [mla()], ranks=4, token_ranks=2, run=16),
        Kind("mla_pcp2", [mla()], prefill_ranks=2),
        Kind("mla_pcp2_tp2", [mla()], ranks=2, prefill_ranks=2),
        Kind("mla_pcp2_dcp2_tp2", [mla()], ranks=2, prefill_ranks=2, token_ranks=2),
        Kind("mla_indexer_pcp2_dcp4", [mla()], side=mla(size=8), ranks=2, prefill_ranks=2, token_ranks=4, run=2),
        Kind("mamba_dcp2", [mamba(32), full(32, 1)], block_size=32, ranks=2, token_ranks=2, kv_heads=1, partial=True),
        Kind("mamba_mla_dcp2", [mamba(page=768), mla()], ranks=2, token_ranks=2, run=16, partial=True),
    )
}
