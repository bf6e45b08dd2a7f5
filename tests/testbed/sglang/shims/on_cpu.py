"""Changes to SGLang's modules as they are imported: no pinned memory, and copies by indexing in place of kernels."""

import importlib.abc
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

_POOLS = "sglang.srt.mem_cache.pool_host"
_kept: list[Any] = []


def define_torchvision_operators() -> None:
    """Have the names that torchvision registers for, as its own operators do not load beside a CPU build of torch."""
    import torch

    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    text = Path(spec.origin).with_name("_meta_registrations.py").read_text()
    names = {*re.findall(r'register_meta\("(\w+)"', text), *re.findall(r"torchvision::(\w+)", text)}
    library = torch.library.Library("torchvision", "DEF")
    for name in sorted(names):
        library.define(f"{name}(Tensor x) -> Tensor")
    _kept.append(library)


def _unpinned(module: Any) -> None:
    module._cuda_host_register = lambda buffer, registration_granularity_bytes=None: None
    module._cuda_host_unregister = lambda buffer: None


def _pageable(module: Any) -> None:
    original = module.HostKVCache.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options | {"pin_memory": False})

    module.HostKVCache.__init__ = init


def _place(pool: Any, layer: int, tokens: Any) -> tuple[Any, ...]:
    """The index of some tokens of one layer in a host buffer."""
    match pool.layout:
        case "layer_first":
            return layer, tokens
        case "page_first":
            return tokens, layer
        case "page_first_direct":
            return tokens // pool.page_size, layer, tokens % pool.page_size
    raise NotImplementedError(pool.layout)


def _indices(*some: Any) -> list[Any]:
    return [each.cpu().long() for each in some]


def _copied_keys_and_values(module: Any) -> None:
    module._cuda_host_unregister = lambda buffer: None

    def backup(self: Any, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str) -> None:
        host, device = _indices(host_indices, device_indices)
        for buffer, layers in zip(self.kv_buffer, (self.device_k_buffers, self.device_v_buffers), strict=True):
            for layer, kept in enumerate(layers):
                rows = kept[device].reshape(len(device), self.head_num, self.head_dim)
                buffer[_place(self, layer, host)] = rows

    def load(
        self: Any,
        device_pool: Any,
        host_indices: Any,
        device_indices: Any,
        layer_id: int,
        io_backend: str,
        *,
        is_draft: bool = False,
    ) -> None:
        if not is_draft and not 0 <= layer_id < self.target_layer_num:
            return
        host, device = _indices(host_indices, device_indices)
        for buffer, layers in zip(self.kv_buffer, (self.device_k_buffers, self.device_v_buffers), strict=True):
            kept = layers[layer_id]
            kept[device] = buffer[_place(self, layer_id, host)].reshape((len(device), *kept.shape[1:]))

    module.MHATokenToKVPoolHost.backup_from_device_all_layer = backup
    module.MHATokenToKVPoolHost.load_to_device_per_layer = load


def _adapters_pageable(module: Any) -> None:
    """For what has ``torch`` to itself: memory that is asked for as pinned is not."""
    import torch

    class Pageable:
        def __getattr__(self, name: str) -> Any:
            found = getattr(torch, name)
            if name not in ("tensor", "empty", "zeros"):
                return found
            return lambda *args, **options: found(*args, **options | {"pin_memory": False})

    torch.Tensor.pin_memory = lambda self, *args, **options: self  # type: ignore[method-assign]
    module.torch = Pageable()


PATCHES: dict[str, Callable[[Any], None]] = {
    f"{_POOLS}.common": _unpinned,
    f"{_POOLS}.base": _pageable,
    f"{_POOLS}.mha": _copied_keys_and_values,
    "sglang.srt.lora.layers": _adapters_pageable,
    "sglang.srt.lora.backend.torch_backend": _adapters_pageable,
}
"""What is done to a module once it is loaded."""


class Patcher(importlib.abc.MetaPathFinder):
    def __init__(self, patches: dict[str, Callable[[Any], None]]) -> None:
        self._patches = patches
        self._looking = False

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name not in self._patches or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is None or spec.loader is None:
            return None
        load, patch = spec.loader.exec_module, self._patches[name]

        def exec_module(module: ModuleType) -> None:
            load(module)
            patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
