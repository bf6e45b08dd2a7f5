"""What kvhold cannot serve in SGLang, said at the start: by name, with the remedy."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.pool_host import HostKVCache

_VERSION = "0.5.23"
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
"""Layouts of SGLang's host pool whose pages kvhold can address."""
_WRITTEN_BY_ALL = "mamba"
"""The pool that all ranks store also where they hold keys and values alike."""


def refuse(config: "HiCacheStorageConfig") -> None:
    """Raise ValueError for an engine that cannot be served."""
    from sglang.srt.runtime_context import get_server_args
    from sglang.version import __version__ as version

    from kvhold.engines.sglang.identity import effective
    from kvhold.engines.sglang.updates import hooked

    check_version(version)
    check(config, effective(get_server_args()))
    if not hooked():
        raise ValueError(
            "kvhold: SGLang has not loaded kvhold's plugin, without which a weight update would go unnoticed and old "
            "KV be served; install kvhold into SGLang's own environment (pip install 'kvhold[sglang]'), and if "
            "SGLANG_PLUGINS is set, add kvhold to it"
        )


def check_version(version: str) -> None:
    """Raise ValueError for an SGLang whose internals nobody has looked at."""
    if version != _VERSION and not version.startswith(f"{_VERSION}."):
        raise ValueError(
            f"kvhold: SGLang {version} is not supported; install sglang {_VERSION}, or a kvhold that supports {version}"
        )


def check(config: "HiCacheStorageConfig", options: Mapping[str, Any]) -> None:
    """Raise ValueError for the first thing in SGLang's arguments that cannot be served."""
    if not (config.extra_config or {}).get("interface_v1"):
        raise ValueError(
            "kvhold: 'interface_v1' is not set in --hicache-storage-backend-extra-config, so that SGLang would copy "
            'each page through Python; add "interface_v1": 1'
        )
    check_layout(str(options["hicache_mem_layout"]))
    if config.should_split_heads or config.tp_lcm_size:
        raise ValueError(
            f"kvhold: 'tp_lcm_size' has the value {config.tp_lcm_size!r}, which splits pages by heads; remove it from "
            "--hicache-storage-backend-extra-config"
        )
    if config.dcp_size > 1:
        raise ValueError(
            f"kvhold: --dcp-size has the value {config.dcp_size}; decode context parallelism is not supported. Give 1, "
            "or serve that model without kvhold"
        )
    mode = options["disaggregation_mode"]
    if mode != "null":
        raise ValueError(
            f"kvhold: --disaggregation-mode has the value {mode!r}; prefill and decode in different engines are not "
            "supported. Give 'null', or serve that engine without kvhold"
        )
    check_hosts(config, options)


def check_layout(layout: str) -> None:
    """Raise ValueError for a layout of the host pool whose pages kvhold cannot address."""
    if layout not in LAYOUTS:
        raise ValueError(
            f"kvhold: --hicache-mem-layout has the value {layout!r}, whose pages kvhold does not store; give one of "
            f"{', '.join(LAYOUTS)}"
        )


def check_hosts(config: "HiCacheStorageConfig", options: Mapping[str, Any]) -> None:
    """Raise ValueError where ranks on several hosts hold the same KV, of which one alone would write."""
    tp, pp, hosts = (int(options[name] or 1) for name in ("tp_size", "pp_size", "nnodes"))
    ranks_here = tp // max(1, hosts // pp)
    if config.is_mla_model and config.tp_size > ranks_here:
        raise ValueError(
            f"kvhold: --nnodes has the value {hosts}, so that ranks on several hosts hold the same KV, which one rank "
            "writes for its own host alone; give each host its own replica (--nnodes 1), spread layers over hosts "
            f"(--pp-size {hosts}), or attention (--attn-dp-size {hosts})"
        )


def refuse_pool(pool: "HostKVCache", name: str, config: "HiCacheStorageConfig") -> None:
    """Raise ValueError for a host pool whose pages have no addresses, are of another form, or are not all written."""
    from kvhold.engines.sglang.identity import held_alike

    if getattr(pool, "stores_page_envelope", False):
        raise ValueError(
            f"kvhold: the host pool {name!r} ({type(pool).__name__}) keeps the pages of several pools in one; start "
            "SGLang without --enable-unified-memory"
        )
    if hasattr(pool, "layout"):
        check_layout(str(pool.layout))
    if not _addresses(pool):
        raise ValueError(
            f"kvhold: the host pool {name!r} ({type(pool).__name__}) does not say where its pages are, so they cannot "
            "be stored; serve that model without kvhold"
        )
    if config.is_mla_model and config.tp_size > 1 and name != _WRITTEN_BY_ALL and not held_alike(pool, config):
        raise ValueError(
            f"kvhold: the pages of the host pool {name!r} ({type(pool).__name__}) are each rank's own, and SGLang has "
            "those of the first rank stored alone; give --tp-size 1, or a draft model with latent attention like the "
            "target's, or serve that model without kvhold"
        )


def _addresses(pool: "HostKVCache") -> bool:
    """Whether a page has addresses."""
    try:
        found = pool.get_page_buffer_meta(torch.arange(pool.page_size))
    except (AttributeError, NotImplementedError):
        return False
    return bool(found and found[0])
