"""What must be equal for two engines to share an object: everything that gives its bytes their meaning."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import cache as cache_module
from vllm.logger import init_logger
from vllm.version import __version__ as vllm_version

from kvhold.copy.layout import PagedLayout
from kvhold.copy.processor import cpu_kernels
from kvhold.engines.common.groups import Group
from kvhold.engines.common.identity import LAYOUT_VERSION, PRIVATE, named_weights, weights_in
from kvhold.engines.common.models import model_folder, plain_config, positions
from kvhold.engines.common.weights import processor_digest

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = init_logger(__name__)

_OF_MEDIA = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_backend",
    "mm_encoder_attn_dtype",
    "video_pruning_rate",
    "video_pruning_method",
)
"""Options that decide what an image or a video becomes, of which its hash in a block's key says nothing."""
_FROM_FOLDER = ("auto", "hf", "safetensors", "fastsafetensors", "mistral", "pt", "npcache")
"""Load formats whose weights are the model folder's. Others may take them from an address or a server."""
_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculative decoding that guess without a model."""


def describe(
    config: "VllmConfig",
    cache: "KVCacheConfig",
    groups: Sequence[Group],
    layouts: Sequence[PagedLayout],
    shards: Sequence[tuple[int, int, int]],
    weights_id: str | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What makes KV incompatible, as plain data: equal on all ranks of an engine; and on those of a pipeline stage.

    ``shards`` says of each shard of an object which heads and tokens it has. ``weights_id`` is the operator's word on
    all weights, if there is one.
    """
    model, kv, parallel = config.model_config, config.cache_config, config.parallel_config
    layers = config.compilation_config.static_forward_context
    common = {
        "kvhold_layout": LAYOUT_VERSION,
        "engine": f"vllm {vllm_version}",
        "weights": _weights(model, config, weights_id),
        "model_config": plain_config(model.hf_config.to_dict()),
        "dtype": str(model.dtype),
        "quantization": [repr(model.quantization), repr(model.quantization_config)],
        "hf_overrides": repr(model.hf_overrides),
        "implementation": [repr(model.model_impl), repr(model.model_class_overrides), repr(model.code_revision)],
        "processor": _processor(config),
        "positions": positions(model.hf_text_config.to_dict(), model.max_model_len),
        "drafter": _drafter(config, weights_id),
        "kv_layout": repr(cache.kv_cache_layout),
        "kv_dtype": _kv_dtypes(config),
        "mamba": [str(getattr(kv, name, "")) for name in ("mamba_cache_dtype", "mamba_ssm_cache_dtype")],
        "block_size": kv.block_size,
        "hash_block_size": repr(cache.hash_block_size),
        "parallel": [
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.decode_context_parallel_size,
            repr(getattr(parallel, "cp_kv_cache_interleave_size", None)),
            list(shards),
        ],
        "device": [torch.device(layouts[0].device).type, cpu_kernels() if layouts[0].device == "cpu" else ""],
    }
    stage = {
        "groups": [
            {
                "index": group.index,
                "spec": repr(cache.kv_cache_groups[group.index].kv_cache_spec),
                "layers": [
                    [name, *_layer(layers.get(name))] for name in cache.kv_cache_groups[group.index].layer_names
                ],
                "pages": [run.page for run in layout.runs for _ in range(run.layers)],
            }
            for group, layout in zip(groups, layouts, strict=True)
        ]
    }
    return common, stage


def _processor(config: "VllmConfig") -> list[str]:
    """All that :data:`_OF_MEDIA` and the model's own files say of images and videos."""
    media = config.model_config.multimodal_config
    described = [repr(getattr(media, name, None)) for name in _OF_MEDIA]
    if media is None:
        return described
    if media.mm_processor_cache_gb == 0 and not config.cache_config.enable_prefix_caching:
        log.warning(
            "kvhold: with enable_prefix_caching=False and mm_processor_cache_gb=0 vLLM numbers images instead of "
            "telling them apart; this engine shares its KV cache with no other and starts cold. Change one of the two"
        )
        return [*described, PRIVATE]
    folder = _folder(config.model_config)
    return [*described, processor_digest(folder).hex() if folder is not None else ""]


def keeps_drafts(config: "VllmConfig") -> bool:
    """Whether a model makes guesses that are checked, and has KV of its own."""
    return config.speculative_config is not None and config.speculative_config.method not in _WITHOUT_KV


def _drafter(config: "VllmConfig", weights_id: str | None) -> list[str]:
    """The model whose guesses are checked, where its KV is kept with the target's."""
    speculative = config.speculative_config
    if speculative is None or not keeps_drafts(config):
        return []
    model = speculative.draft_model_config
    if model is None:
        return [str(speculative.method)]
    described = json.dumps(plain_config(model.hf_config.to_dict()), sort_keys=True)
    return [str(speculative.method), _weights(model, config, weights_id), described]


def is_private(identity: dict[str, Any]) -> bool:
    """Whether the engine must not share, because something about it cannot be identified."""
    return PRIVATE in (identity["weights"], *identity["drafter"], *identity["processor"])


def _weights(model: "ModelConfig", config: "VllmConfig", weights_id: str | None) -> str:
    return weights_identity(model, config.load_config.load_format, weights_id, config.load_config.download_dir)


def weights_identity(
    model: "ModelConfig", load_format: object, named: str | None, download_dir: str | None = None
) -> str:
    """A string that differs for other weights. Weights that cannot be identified are shared with nobody.

    Those that the operator has ``named`` are not looked at.
    """
    if named is not None:
        return named_weights(named)
    kind = str(getattr(load_format, "value", load_format))
    if kind == "dummy":
        return "dummy"  # vLLM makes them from a fixed seed and the model's configuration
    folder = (
        model_folder(model.model, model.revision, download_dir)
        if kind in _FROM_FOLDER and not model.model_weights
        else None
    )
    found = weights_in(folder)
    if found == PRIVATE:
        log.warning(
            "kvhold: the weights of %s (load format %s) cannot be identified; this engine shares its KV cache with "
            "no other and starts cold. Give a local folder or a downloaded revision",
            model.model,
            kind,
        )
    return found


def _folder(model: "ModelConfig") -> Path | None:
    """Where a model's files are."""
    return model_folder(model.model, model.revision)


def _layer(layer: Any) -> list[str]:
    """How one attention layer keeps its KV: the backend and what it was told."""
    backend = getattr(layer, "attn_backend", None)
    return [
        backend.get_name() if backend is not None else "none",
        str(getattr(layer, "kv_cache_dtype", "")),
        str(getattr(layer, "isa", "")),
    ]


def _kv_dtypes(config: "VllmConfig") -> list[str]:
    """How KV is stored. What a platform's own type means is said by the class that was registered for it."""
    name = config.cache_config.cache_dtype
    handler = None
    if hasattr(cache_module, "get_kv_cache_dtype_handler"):  # from vLLM 0.33 on
        handler = cache_module.get_kv_cache_dtype_handler(name)
    kind = f"{type(handler).__module__}.{type(handler).__qualname__}" if handler is not None else ""
    return [name, kind, str(getattr(config.attention_config, "indexer_kv_dtype", ""))]
