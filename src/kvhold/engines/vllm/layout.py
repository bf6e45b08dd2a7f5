"""Reads a worker's paged KV cache out of the tensors that vLLM registers."""

from collections.abc import Mapping

import torch

from kvhold.copy.layout import PagedLayout, fold
from kvhold.engines.vllm.groups import Unsupported

_MOST_PIECES = 256
"""Pieces of one layer's block, beyond which copying would take longer than computing."""


def read_layout(caches: Mapping[str, torch.Tensor], layers: list[str], blocks: int) -> PagedLayout:
    """The layout of ``layers`` in engine order; without pages if there are none on this rank.

    Tensors have the logical shape [blocks * kernel blocks per block, heads, states, content], in any physical order.

    Raises Unsupported when a layer has no tensor, or a block of it lies in too many pieces.
    """
    missing = [name for name in layers if name not in caches]
    if missing or not caches:
        raise Unsupported(f"kvhold: the engine registered no KV cache for {', '.join(missing) or 'any layer'}")
    pages = [piece for name in layers for piece in _pieces(name, caches[name], blocks)]
    return fold(pages, blocks, str(next(iter(caches.values())).device))


def _pieces(name: str, tensor: torch.Tensor, blocks: int) -> list[tuple[int, int, int]]:
    """(address in block 0, bytes from block to block, bytes) of each contiguous piece of one layer's blocks.

    Most layouts have one piece. There are more where heads or kernel blocks of other layers lie in between.
    """
    if tensor.shape[0] % blocks:
        raise Unsupported(f"kvhold: layer {name} has {tensor.shape[0]} pages for {blocks} blocks; use another layout")
    block = tensor[: tensor.shape[0] // blocks]
    size = 1
    apart: list[tuple[int, int]] = []
    # In whatever order of dimensions: what is contiguous has as stride the size of all that is inside of it.
    for stride, length in sorted(zip(block.stride(), block.shape, strict=True)):
        if length > 1 and (apart or stride != size):
            apart.append((stride, length))
        else:
            size *= length
    starts = [0]
    for stride, length in apart:
        starts = [start + number * stride for number in range(length) for start in starts]
    if len(starts) > _MOST_PIECES:
        raise Unsupported(
            f"kvhold: a block of layer {name} lies in {len(starts)} pieces (shape {tuple(block.shape)}, strides "
            f"{block.stride()}); set VLLM_KV_CACHE_LAYOUT to a layer-compact layout such as LBHNC"
        )
    item = tensor.element_size()
    stride = tensor.stride(0) * block.shape[0] * item
    return [(tensor.data_ptr() + start * item, stride, size * item) for start in starts]
