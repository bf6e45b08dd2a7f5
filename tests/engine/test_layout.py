"""Every byte of a block and no other is copied, in whatever order the engine keeps its dimensions."""

import ctypes
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvhold.copy.host import HostCopier
from kvhold.engines.vllm.groups import Unsupported
from kvhold.engines.vllm.layout import read_layout

BLOCKS, HEADS, STATES, CONTENT = 5, 2, 4, 8


def interleaved(order: str, layers: int = 3, kernel_blocks: int = 1) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Layers of one allocation with its dimensions in ``order``, as registered: [blocks, heads, states, content].

    L: layer, B: block, H: head, N: state (token), C: content.
    """
    sizes = {"L": layers, "B": BLOCKS * kernel_blocks, "H": HEADS, "N": STATES, "C": CONTENT}
    memory = torch.randint(0, 255, [sizes[name] for name in order], dtype=torch.uint8)
    logical = memory.permute(*(order.index(name) for name in "LBHNC"))
    return memory, {str(layer): logical[layer] for layer in range(layers)}


def there_and_back(memory: torch.Tensor, caches: dict[str, torch.Tensor], names: Sequence[str], blocks: int) -> None:
    layout = read_layout(caches, list(names), blocks)
    rng = random.Random(0)
    chosen = rng.sample(range(blocks), 3)
    kernel_blocks = next(iter(caches.values())).shape[0] // blocks
    size = sum(caches[name][:kernel_blocks].numel() for name in names)
    assert layout.shard_bytes == size
    buffer = ctypes.create_string_buffer(8192 * blocks)
    arena: Any = SimpleNamespace(address=ctypes.addressof(buffer), size=len(buffer))
    copier = HostCopier([layout])
    offsets = [block * 8192 for block in chosen]
    assert copier.begin_publish(arena, 0, chosen, offsets).error is None
    before = memory.clone()
    for name in names:
        for block in chosen:
            caches[name][block * kernel_blocks : (block + 1) * kernel_blocks] = 0
    assert not torch.equal(memory, before)
    job = copier.begin_restore(arena, [(0, chosen, offsets)])
    copier.advance()
    assert job.error is None
    assert torch.equal(memory, before), "what was restored, or something else, is not what it was"


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC", "LHBNC"])
@pytest.mark.parametrize("kernel_blocks", [1, 3])
def test_every_order_of_dimensions(order: str, kernel_blocks: int) -> None:
    memory, caches = interleaved(order, kernel_blocks=kernel_blocks)
    there_and_back(memory, caches, ["0", "1", "2"], BLOCKS)
    there_and_back(memory, caches, ["2", "0"], BLOCKS)  # a group with some of the layers


def test_states_in_padded_pages() -> None:
    """vLLM registers recurrent states as raw bytes, in pages as large as those of the attention layers."""
    memory = torch.randint(0, 255, (BLOCKS * 100,), dtype=torch.uint8)
    view = memory.as_strided((BLOCKS, 1, 1, 72), (100, 72, 72, 1))
    there_and_back(memory, {"state": view}, ["state"], BLOCKS)


def test_a_rank_without_layers_of_a_group_keeps_nothing() -> None:
    _, caches = interleaved("LBHNC")
    assert read_layout(caches, [], BLOCKS).shard_bytes == 0


def test_what_cannot_be_read_is_refused() -> None:
    _, caches = interleaved("LBHNC")
    with pytest.raises(Unsupported, match="no KV cache for missing"):
        read_layout(caches, ["missing"], BLOCKS)
    with pytest.raises(Unsupported, match="5 pages for 4 blocks"):
        read_layout(caches, ["0"], 4)
    scattered = torch.zeros(BLOCKS, 400, 2, dtype=torch.uint8).transpose(0, 2)[..., :]
    with pytest.raises(Unsupported, match="400 pieces"):
        read_layout({"0": scattered.permute(2, 0, 1)[:, :1]}, ["0"], BLOCKS)
