"""SGLang's real host pools, small and without an engine."""

from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _mha_host_inputs
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host import HostKVCache
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

PAGE, PAGES = 4, 40
LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def _common(layout: str) -> dict[str, Any]:
    return {"host_to_device_ratio": 2.0, "host_size": 0, "page_size": PAGE, "layout": layout, "pin_memory": False}


def keys_and_values(layout: str) -> HostKVCache:
    """Of full attention, and of a window: SGLang has one class for both."""
    device = MHATokenToKVPool(PAGE * PAGES, PAGE, torch.float16, 2, 8, 3, "cpu", False)
    kind, info, options = _mha_host_inputs(device)
    return kind(info, **options | _common(layout))


def latent(layout: str) -> HostKVCache:
    device = MLATokenToKVPool(PAGE * PAGES, PAGE, torch.float16, 16, 8, 3, "cpu", False)
    return MLATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        device_capacity_tokens=device.size,
        start_layer=device.start_layer,
        end_layer=device.end_layer,
        target_layer_num=device.layer_num,
        override_kv_cache_dim=device.kv_cache_dim,
        **_common(layout),
    )


def states(layout: str) -> HostKVCache:
    """Recurrent states, of one token each."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(2, PAGES, 4, 4), conv=(torch.zeros(2, PAGES, 3, 5, dtype=torch.float16),)
    )
    return MambaPoolHost(info, 2.0, 0, device_capacity=PAGES, pin_memory=False, layout=layout)


def places(pool: HostKVCache, pages: list[int]) -> torch.Tensor:
    """The places of the tokens of ``pages``."""
    return torch.cat(
        [torch.arange(pool.page_size) + page * pool.page_size for page in pages] or [torch.zeros(0)]
    ).long()


def fill(pool: HostKVCache, page: int, seed: int) -> None:
    """Give a page bytes that nothing else has."""
    flat = pool.get_dummy_flat_data_page()
    raw = torch.randint(0, 120, (flat.numel() * flat.element_size(),), dtype=torch.uint8, generator=_random(seed))
    pool.set_from_flat_data_page(page * pool.page_size, raw.view(flat.dtype).reshape(flat.shape))


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def content(pool: HostKVCache, page: int) -> bytes:
    return bytes(pool.get_data_page(page * pool.page_size, flat=True).contiguous().view(torch.uint8).numpy())
