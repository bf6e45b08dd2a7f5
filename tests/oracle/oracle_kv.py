"""What a KV cache must hold, and the memory that holds it.

Nothing is computed: the bytes of a token's KV are a function of all tokens up to it, of the layer and of the rank, so
whoever knows a request's tokens can check every byte that a model would read.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
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
        blocks, slots = _places(table, start, len(digests), self.groups[group][0].spec.block_size)
        assert 0 not in blocks, f"the engine would write to the null block: {list(table)}, from token {start}"
        for layer in self.groups[group]:
            if layer.draft == draft:
                layer.pages[blocks, :, slots] = layer.expected(digests).reshape(len(digests), *_shape(layer))

    def scribble(self, group: int, table: Sequence[int], start: int, count: int, noise: np.random.Generator) -> None:
        """Write nonsense to draft layers from position ``start`` on, as far as there are blocks."""
        count = min(count, len(table) * self.groups[group][0].spec.block_size - start)
        for layer in self.groups[group]:
            if count > 0 and layer.draft:
                blocks, slots = _places(table, start, count, layer.spec.block_size)
                shape = (count, *_shape(layer))
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
        blocks, slots = _places(table, first, end - first, self.groups[group][0].spec.block_size)
        for layer in self.groups[group]:
            if layer.draft != draft:
                continue
            found = layer.pages[blocks, :, slots].reshape(end - first, -1)
            behind = min(end + draft, len(digests))
            wrong = np.zeros(end - first, np.bool_)
            count = behind - first - draft
            wrong[:count] = (found[:count] != layer.expected(digests[first + draft : behind])).any(axis=1)
            if draft:
                wrong[slots == layer.spec.block_size - 1] = False
            if wrong.any():
                positions = first + np.flatnonzero(wrong)
                raise WrongBytes(
                    f"{what}: group {group} ({type(layer.spec).__name__}), layer {layer.name}: wrong bytes for tokens "
                    f"{_ranges(positions)} of those needed, [{first}, {end}); blocks "
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


def _places(table: Sequence[int], start: int, count: int, block_size: int) -> tuple[Array, Array]:
    positions = np.arange(start, start + count)
    return np.asarray(table, np.int64)[positions // block_size], positions % block_size


def _shape(layer: Layer) -> tuple[int, int]:
    return layer.pages.shape[1], layer.pages.shape[3]


def _ranges(positions: Array) -> str:
    parts = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return ", ".join(f"{part[0]}-{part[-1]}" for part in parts)


def allocate(config: KVCacheConfig, layout: KVCacheLayout, rank: int, world: int, drafts: set[str]) -> Memory:
    """A worker's memory. MLA keeps the same on all ranks."""
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
            replicated = type(spec).__name__ == "MLAAttentionSpec"
            words = _words(view)
            if isinstance(spec, MambaSpec):
                words = words.reshape(config.num_blocks, -1)
            assert np.shares_memory(words, whole)
            count = words.shape[-1] * (1 if isinstance(spec, MambaSpec) else words.shape[1])
            seed = [*name.encode(), 0 if replicated else rank, 1 if replicated else world, spec.block_size]
            key = np.random.default_rng(seed).integers(0, 1 << 63, count, np.uint64)
            found[name] = Layer(name, spec, words, whole, key, name in drafts)
    groups = [[found[name] for name in group.layer_names] for group in config.kv_cache_groups]
    return Memory(config, views, groups, raw.numpy())


def _words(view: torch.Tensor) -> Array:
    """``view`` in words of eight bytes, sharing its memory."""
    return view.view(torch.uint8).numpy().view(np.uint64)
