"""What this connector serves, and the refusals for all else. Both halves ask, so that neither can be surprised."""

from typing import TYPE_CHECKING

from kvhold.engines.vllm.groups import Unsupported, kept_groups

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

SUPPORTED = ((0, 32), (0, 34))
"""vLLM versions from the first, below the second."""


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
    hosts = config.parallel_config.nnodes
    if hosts > 1:
        raise Unsupported(f"kvhold: nnodes={hosts} is not supported yet; set it to 1 or run without kvhold")
    if getattr(config, "num_hash_lookahead_tokens", 0):  # from vLLM 0.33 on, and there not beside a connector
        raise Unsupported(
            "kvhold: block hashes that cover tokens after their block are not supported; set "
            '"disable_lookahead_block_hashes": true in the speculative_config'
        )
    kept_groups(config, cache)
