"""What a KV cache must hold, and the memory that holds it.

Nothing is computed: the bytes of a token's KV are a function of all tokens up to it, of the layer and of the rank, so
whoever knows a request's tokens can check every byte that a model would read.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from testbed.oracle.oracle_kinds import Kind
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

Array = np.ndarray[Any, Any]

VOCABULARY = 40
NULL_FILL = 0xA5
_MASK = (1 << 64) - 1
_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)


class WrongBytes(AssertionError):
    """A model would have read something else than what was computed for its tokens."""


class Tape:
    """The tokens of a request, and a digest of each of their prefixes: ``digests[p]`` stands for tokens 0 to p."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens: list[int] = []
        self._digests = np.zeros(64, np.uint64)
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def digests(self) -> Array:
        return self._digests[: len(self.tokens)]

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            at = len(self.tokens)
            if at == len(self._digests):
                self._digests = np.concatenate([self._digests, np.zeros_like(self._digests)])
            before = int(self._digests[at - 1]) if at else 0x243F6A8885A308D3
            self._digests[at] = after(before, token)
            self.tokens.append(token)

    def next(self) -> int:
        """The token that the model samples after these."""
        return 100 + int(self._digests[len(self.tokens) - 1] >> np.uint64(33)) % VOCABULARY


def after(digest: int, token: int) -> int:
    mixed = ((digest ^ (token + 2)) * 0xD1342543DE82EF95 + 0x2545F4914F6CDD1D) & _MASK
    return mixed ^ mixed >> 29


def first_needed(spec: KVCacheSpec, computed: int) -> int:
    """The first position whose KV is read when the token at position ``computed`` is."""
    if isinstance(spec, SlidingWindowSpec):
        return max(0, computed - spec.sliding_window + 1)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return computed // spec.attention_chunk_size * spec.attention_chunk_size
    return 0


@dataclass(frozen=True)
class Share:
    """The tokens of a worker under decode context parallelism: every ``ranks``-th run of ``run``, from ``rank`` on."""

    rank: int = 0
    ranks: int = 1
    run: int = 1

    def block_tokens(self, spec: KVCacheSpec) -> int:
        """Tokens that a block of the engine's table covers, on all workers together."""
        return spec.block_size * (self.ranks if spec.dcp_sharded else 1)

    def places(self, spec: KVCacheSpec, table: Sequence[int], start: int, count: int) -> tuple[Array, Array, Array]:
        """Of ``count`` positions from ``start`` on: which are kept here, and the block and slot of each of those."""
        positions = np.arange(start, start + count)
        ranks = self.ranks if spec.dcp_sharded else 1
        blocks, inside = np.divmod(positions, spec.block_size * ranks)
        runs, at = np.divmod(inside, self.run)
        mine = np.flatnonzero(runs % ranks == (self.rank if ranks > 1 else 0))
        return mine, np.asarray(table, np.int64)[blocks[mine]], (runs // ranks * self.run + at)[mine]


@dataclass
class Layer:
    """One layer's pages. Of an attention layer as [blocks, heads, tokens, words], else as [blocks, words].

    A ``draft`` layer is one of EAGLE's: what it keeps for a position depends on the token after it, too.
    """

    name: str
    spec: KVCacheSpec
    pages: Array
    raw: Array  # [blocks, bytes of a page], with what it is padded by
    key: Array
    draft: bool

    def expected(self, digests: Array) -> Array:
        words: Array = (digests[:, None] ^ self.key) * _MIX
        words ^= words >> np.uint64(29)
        words *= _ODD
        words ^= words >> np.uint64(32)
        return words


@dataclass
class Memory:
    """One worker's KV cache: an allocation that groups of layers overlay, as vLLM lays it out."""

    config: KVCacheConfig
    tensors: dict[str, torch.Tensor]
    groups: list[list[Layer]]
    buffer: Array
    share: Share = Share()
    _attention: list[Layer] = field(init=False)

    def __post_init__(self) -> None:
        self._attention = [layer for group in self.groups for layer in group if not isinstance(layer.spec, MambaSpec)]
        for layer in self._layers:
            layer.raw[0] = NULL_FILL

    @property
    def _layers(self) -> list[Layer]:
        return [layer for group in self.groups for layer in group]

    def poison(self, blocks: Sequence[int], noise: np.random.Generator) -> None:
        """Make whatever ``blocks`` held worthless."""
        for layer in self._layers:
            layer.raw[blocks] = noise.integers(0, 256, (len(blocks), layer.raw.shape[1]), np.uint8)

    def zero(self, blocks: Sequence[int]) -> None:
        """As the engine zeroes blocks: pages of attention layers only."""
        for layer in self._attention:
            layer.raw[blocks] = 0

    def copy(self, source: int, target: int) -> None:
        for layer in self._layers:
            layer.raw[target] = layer.raw[source].copy()

    def check_null(self, when: str) -> None:
        for layer in self._layers:
            if (layer.raw[0] != NULL_FILL).any():
                raise WrongBytes(f"the null block was written {when}, in layer {layer.name}")

    # --- attention ----------------------------------------------------------------------------------------------

    def write(self, group: int, table: Sequence[int], start: int, digests: Array, draft: bool = False) -> None:
        """Keep KV of all layers of ``group`` that are (not) ``draft`` layers, from position ``start`` on."""
        if not len(digests):
            return
        mine, blocks, slots = self.share.places(self.groups[group][0].spec, table, start, len(digests))
        assert 0 not in blocks, f"the engine would write to the null block: {list(table)}, from token {start}"
        for layer in self.groups[group]:
            if layer.draft == draft:
                layer.pages[blocks, :, slots] = layer.expected(digests[mine]).reshape(len(mine), *_shape(layer))

    def scribble(self, group: int, table: Sequence[int], start: int, count: int, noise: np.random.Generator) -> None:
        """Write nonsense to draft layers from position ``start`` on, as far as there are blocks."""
        count = min(count, len(table) * self.share.block_tokens(self.groups[group][0].spec) - start)
        for layer in self.groups[group]:
            if count > 0 and layer.draft:
                mine, blocks, slots = self.share.places(layer.spec, table, start, count)
                shape = (len(mine), *_shape(layer))
                layer.pages[blocks, :, slots] = noise.integers(0, 1 << 63, shape, np.uint64)

    def check(
        self, group: int, table: Sequence[int], first: int, end: int, digests: Array, what: str, draft: bool = False
    ) -> None:
        """Positions [first, end) hold what was computed for them, in all layers that are (not) ``draft`` layers.

        A draft layer's last position of a block depends on a token behind the block, which the block's hash does not
        tell: where two requests went on differently, vLLM itself takes the one for the other.
        """
        if end <= first:
            return
        mine, blocks, slots = self.share.places(self.groups[group][0].spec, table, first, end - first)
        positions = first + mine
        for layer in self.groups[group]:
            if layer.draft != draft or not len(mine):
                continue
            found = layer.pages[blocks, :, slots].reshape(len(mine), -1)
            known = positions + draft < len(digests)
            wrong = np.zeros(len(mine), np.bool_)
            wrong[known] = (found[known] != layer.expected(digests[positions[known] + draft])).any(axis=1)
            if draft:
                size = self.share.block_tokens(layer.spec)
                wrong[positions % size == size - 1] = False
            if wrong.any():
                raise WrongBytes(
                    f"{what}: group {group} ({type(layer.spec).__name__}), layer {layer.name}: wrong bytes for tokens "
                    f"{_ranges(positions[wrong])} of those needed, [{first}, {end}); blocks "
                    f"{sorted(set(blocks[wrong].tolist()))}, table {list(table)}"
                )

    # --- recurrent state ----------------------------------------------------------------------------------------

    def write_state(self, group: int, block: int, digest: np.uint64) -> None:
        assert block != 0, "the engine would write a state to the null block"
        for layer in self.groups[group]:
            layer.pages[block] = layer.expected(np.array([digest]))[0]

    def copy_state(self, group: int, source: int, target: int) -> None:
        assert target != 0, "the engine would copy a state to the null block"
        for layer in self.groups[group]:
            layer.pages[target] = layer.pages[source]

    def check_state(self, group: int, block: int, computed: int, digests: Array, what: str) -> None:
        """``block`` holds the state after the first ``computed`` tokens."""
        for layer in self.groups[group]:
            if (layer.pages[block] == layer.expected(digests[computed - 1 : computed])[0]).all():
                continue
            fitting = [
                at + 1
                for at in range(len(digests))
                if (layer.pages[block] == layer.expected(digests[at : at + 1])[0]).all()
            ]
            raise WrongBytes(
                f"{what}: group {group} (MambaSpec), layer {layer.name}: block {block} does not hold the state after "
                f"{computed} tokens, but {f'that after {fitting}' if fitting else 'none of this request'}"
            )


def _shape(layer: Layer) -> tuple[int, int]:
    return layer.pages.shape[1], layer.pages.shape[3]


def _ranges(positions: Array) -> str:
    parts = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return ", ".join(f"{part[0]}-{part[-1]}" for part in parts)


def allocate(config: KVCacheConfig, layout: KVCacheLayout, rank: int, kind: Kind, drafts: set[str]) -> Memory:
    """A worker's memory. MLA keeps the same on all tensor-parallel ranks, and so do ranks with the same heads.

    Which tokens are a rank's is read off vLLM's ``parallel_state``: in groups that are taken with the prefill-parallel
    rank as the fastest.
    """
    prefill, tensor = divmod(rank, kind.ranks)
    share = Share((tensor * kind.prefill_ranks + prefill) % kind.token_ranks, kind.token_ranks, kind.run)
    size = max(tensor.size for tensor in config.kv_cache_tensors)
    raw = torch.zeros(size, dtype=torch.int8)
    specs = {}
    for group in config.kv_cache_groups:
        each = group.kv_cache_spec
        for name in group.layer_names:
            specs[name] = each.kv_cache_specs[name] if isinstance(each, UniformTypeKVCacheSpecs) else each
    views: dict[str, torch.Tensor] = {}
    found: dict[str, Layer] = {}
    for place in config.kv_cache_tensors:
        spec = specs[place.layers[0]]
        pages = create_kv_cache_views(raw, spec, config.num_blocks, layout, place)
        for at, (name, view) in enumerate(zip(place.layers, pages, strict=True)):
            views[name] = view
            start = place.offset + at * place.layer_stride
            whole = np.lib.stride_tricks.as_strided(
                raw.numpy().view(np.uint8)[start:], (config.num_blocks, spec.page_size_bytes), (place.block_stride, 1)
            )
            heads = _shards(spec, kind)
            words = _words(view)
            if isinstance(spec, MambaSpec):
                words = words.reshape(config.num_blocks, -1)
            assert np.shares_memory(words, whole)
            count = words.shape[-1] * (1 if isinstance(spec, MambaSpec) else words.shape[1])
            seed = [*name.encode(), tensor * heads // kind.ranks, heads, spec.block_size]
            key = np.random.default_rng(seed).integers(0, 1 << 63, count, np.uint64)
            found[name] = Layer(name, spec, words, whole, key, name in drafts)
    groups = [[found[name] for name in group.layer_names] for group in config.kv_cache_groups]
    return Memory(config, views, groups, raw.numpy(), share)


def _shards(spec: KVCacheSpec, kind: Kind) -> int:
    """Into how many parts the tensor-parallel ranks split a layer, those of its tokens aside."""
    if type(spec) is MLAAttentionSpec:
        return 1
    return kind.ranks if kind.kv_heads is None or isinstance(spec, MambaSpec) else kind.kv_heads


def _words(view: torch.Tensor) -> Array:
    """``view`` in words of eight bytes, sharing its memory."""
    return view.view(torch.uint8).numpy().view(np.uint64)
