"""The cache groups of a model: which are kept, how, and which kinds are refused by name."""

from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from kvhold.engines.common.groups import Group

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

_KEPT: dict[type[KVCacheSpec], str] = {
    FullAttentionSpec: "full attention",
    MLAAttentionSpec: "MLA",
    SlidingWindowSpec: "sliding-window attention",
    SlidingWindowMLASpec: "sliding-window MLA",
    ChunkedLocalAttentionSpec: "chunked local attention",
    MambaSpec: "Mamba",
}
"""Exact types: a subclass is another kind of cache until somebody has looked at it."""
_SCRATCH = (CircularBufferSpec, SlidingWindowMLASpec)
"""Kinds that the engine may declare not cacheable: it rebuilds them itself after any hit, its own or ours."""


class Unsupported(ValueError):
    """This engine cannot run with kvhold; the message says why and what to do."""


def kept_groups(config: "VllmConfig", cache: "KVCacheConfig") -> tuple[Group, ...]:
    """The groups that are kept, in engine order. Raises Unsupported, naming it, for a kind that is not served."""
    dcp = config.parallel_config.decode_context_parallel_size
    groups = []
    for index, group in enumerate(cache.kv_cache_groups):
        if not group.enable_kv_transfer:
            continue  # rebuilt by the engine from another group
        spec = next(iter(iter_layer_specs(group.kv_cache_spec)))
        kind = kind_of(group.kv_cache_spec)
        if not group.kv_cache_spec.prefix_cacheable:
            _check_scratch(group, kind)
            continue
        if isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "align":
            raise Unsupported(
                f"kvhold: states of Mamba layers in cache mode {spec.mamba_cache_mode!r} cannot be kept; set "
                "enable_prefix_caching=True, so that vLLM uses the mode 'align'"
            )
        groups.append(
            Group(
                index,
                kind,
                resolve_dcp_kv_block_size(group.kv_cache_spec, dcp),
                handed=isinstance(spec, MambaSpec),
                whole=isinstance(spec, FullAttentionSpec),
                window=spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0,
            )
        )
    if not groups:
        raise Unsupported("kvhold: the model has no KV cache that could be kept; run it without kvhold")
    return tuple(groups)


def _check_scratch(group: "KVCacheGroupSpec", kind: str) -> None:
    drafts = any(getattr(spec, "is_draft", False) for spec in iter_layer_specs(group.kv_cache_spec))
    if group.is_eagle_group or drafts:  # vLLM 0.33 flags only groups whose last block is dropped
        raise Unsupported(
            f"kvhold: the draft model's KV ({kind}) cannot be kept, and without it a restored prompt would spoil its "
            "guesses; use another speculative method or run without kvhold"
        )
    if not all(isinstance(spec, _SCRATCH) for spec in iter_layer_specs(group.kv_cache_spec)):
        raise Unsupported(f"kvhold: KV-cache groups of {kind} are not supported; run this model without kvhold")


def kind_of(spec: KVCacheSpec) -> str:
    """The kind of a cache group in a user's words. Raises Unsupported for one that is not known."""
    kinds = sorted({_kind(inner) for inner in iter_layer_specs(spec)})
    return " + ".join(kinds)


def _kind(spec: KVCacheSpec) -> str:
    if type(spec) is CircularBufferSpec:
        return "circular buffers"
    name = _KEPT.get(type(spec))
    if name is None:
        raise Unsupported(
            f"kvhold: KV caches of the kind {type(spec).__name__} are not supported; run this model without kvhold"
        )
    if isinstance(spec, FullAttentionSpec) and getattr(spec, "non_causal", False):
        raise Unsupported("kvhold: non-causal attention cannot be cached by prefix; run this model without kvhold")
    return name
