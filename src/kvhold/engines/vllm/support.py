"""What this connector serves, and the refusals for all else. Both halves ask, so that neither can be surprised."""

from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, UniformTypeKVCacheSpecs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

SUPPORTED = ((0, 32), (0, 33))
"""vLLM versions from the first, below the second."""


class Unsupported(ValueError):
    """This engine cannot run with kvhold; the message says why and what to do."""


def check_version(version: str) -> None:
    """Raise Unsupported for a vLLM outside of the range this connector was written for."""
    try:
        number = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    except ValueError:
        number = (0, 0)
    if not SUPPORTED[0] <= number < SUPPORTED[1]:
        low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
        raise Unsupported(f"kvhold: vLLM {version} is not supported; install vllm>={low},<{high}")


def check_engine(config: "VllmConfig", cache: "KVCacheConfig") -> None:
    """Raise Unsupported, naming what it is, for a model or a topology that is not served yet."""
    parallel = config.parallel_config
    for name, size in (
        ("pipeline_parallel_size", parallel.pipeline_parallel_size),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size),
        ("prefill_context_parallel_size", parallel.prefill_context_parallel_size),
        ("nnodes", parallel.nnodes),
    ):
        if size > 1:
            raise Unsupported(f"kvhold: {name}={size} is not supported yet; set it to 1 or run without kvhold")
    speculative = config.speculative_config
    if speculative is not None and speculative.method not in ("ngram", "ngram_gpu", "suffix"):
        raise Unsupported(
            f"kvhold: speculative decoding with method {speculative.method!r} keeps KV of a draft model, which is not "
            "supported yet; use 'ngram' or run without kvhold"
        )
    groups = cache.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(kind_of(group.kv_cache_spec) for group in groups) or "none"
        raise Unsupported(
            f"kvhold: the model has {len(groups)} KV-cache groups ({kinds}); only one group of plain full attention "
            "is supported yet"
        )
    if (kind := kind_of(groups[0].kv_cache_spec)) != "full attention":
        raise Unsupported(f"kvhold: KV-cache groups of {kind} are not supported yet, only plain full attention is")


def kind_of(spec: KVCacheSpec) -> str:
    """The kind of a cache group in a user's words: ``full attention``, or the engine's name of anything else."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        kinds = sorted({kind_of(inner) for inner in spec.kv_cache_specs.values()})
        return kinds[0] if len(kinds) == 1 else "mixed layers: " + ", ".join(kinds)
    name = type(spec).__name__.removesuffix("Spec")
    if type(spec) is not FullAttentionSpec:
        return {"SlidingWindow": "sliding-window attention", "MLAAttention": "MLA"}.get(name, name)
    if spec.sliding_window is not None:
        return "sliding-window attention"
    if spec.attention_chunk_size is not None:
        return "chunked local attention"
    return "non-causal attention" if spec.non_causal else "full attention"
