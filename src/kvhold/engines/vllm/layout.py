"""Reads a worker's paged KV cache out of the tensors that vLLM registers."""

from collections.abc import Mapping

import torch

from kvhold.copy.layout import PagedLayout, fold
from kvhold.engines.vllm.support import Unsupported


def read_layout(caches: Mapping[str, torch.Tensor], layers: list[str], blocks: int) -> PagedLayout:
    """The layout of ``layers`` in engine order.

    Tensors have the logical shape [blocks * kernel blocks per block, heads, states, content], in any physical order.

    Raises Unsupported when a layer has no tensor, or a block of it is not one contiguous piece of memory.
    """
    missing = [name for name in layers if name not in caches]
    if missing or not layers:
        raise Unsupported(f"kvhold: the engine registered no KV cache for {', '.join(missing) or 'any layer'}")
    pages = [_pages(name, caches[name], blocks) for name in layers]
    return fold(pages, blocks, str(caches[layers[0]].device))


def _pages(name: str, tensor: torch.Tensor, blocks: int) -> tuple[int, int, int]:
    """(address of block 0, bytes from block to block, bytes of a block) of one layer."""
    if tensor.shape[0] % blocks:
        raise Unsupported(f"kvhold: layer {name} has {tensor.shape[0]} pages for {blocks} blocks; use another layout")
    block = tensor[: tensor.shape[0] // blocks]
    # One piece of memory in whatever order of dimensions: each stride is the size of all that is inside of it.
    size = 1
    for stride, length in sorted(zip(block.stride(), block.shape, strict=True)):
        if length > 1 and stride != size:
            raise Unsupported(
                f"kvhold: a block of layer {name} is not contiguous (shape {tuple(block.shape)}, strides "
                f"{block.stride()}); set VLLM_KV_CACHE_LAYOUT to a layer-compact layout such as LBHNC"
            )
        size *= length
    item = tensor.element_size()
    return tensor.data_ptr(), tensor.stride(0) * block.shape[0] * item, size * item
