"""Where a paged KV cache keeps its pages, in plain numbers."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerRun:
    """``layers`` equally spaced layers: page of block b, layer l at ``address + b * block_stride + l * layer_stride``.

    All in bytes; a page is one contiguous piece of ``page`` bytes. ``at`` is where the run starts in an object's shard.
    """

    address: int
    layers: int
    layer_stride: int
    block_stride: int
    page: int
    at: int


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """One rank's part of a cache group of ``blocks`` blocks; ``device`` is torch's name of where it lives."""

    runs: tuple[LayerRun, ...]
    blocks: int
    device: str

    @property
    def shard_bytes(self) -> int:
        return sum(run.layers * run.page for run in self.runs)


def fold(pages: Sequence[tuple[int, int, int]], blocks: int, device: str) -> PagedLayout:
    """The layout of layers given in engine order as (address of block 0, block stride, page), folded into runs."""
    runs: list[LayerRun] = []
    at = 0
    for address, block_stride, page in pages:
        last = runs[-1] if runs else None
        if last is not None and (last.block_stride, last.page) == (block_stride, page):
            step = address - (last.address + (last.layers - 1) * last.layer_stride)
            if step > 0 and (last.layers == 1 or step == last.layer_stride):
                runs[-1] = LayerRun(last.address, last.layers + 1, step, block_stride, page, last.at)
                at += page
                continue
        runs.append(LayerRun(address, 1, page, block_stride, page, at))
        at += page
    return PagedLayout(tuple(runs), blocks, device)
