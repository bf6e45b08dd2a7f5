"""Copies between a paged KV cache and an arena: every byte at its place, and no other byte touched."""

import ctypes
import random
from types import SimpleNamespace
from typing import Any

import pytest

np = pytest.importorskip("numpy")

from kvhold.copy.host import HostCopier  # noqa: E402
from kvhold.copy.layout import LayerRun, PagedLayout, fold  # noqa: E402


def arena_of(size: int) -> Any:
    memory = np.zeros(size, dtype=np.uint8)
    return SimpleNamespace(size=size, address=memory.ctypes.data, memory=memory)


def cache(layout: str, layers: int, blocks: int, page: int) -> tuple[Any, list[tuple[int, int, int]]]:
    """Random bytes, and each layer's (address of block 0, block stride, page)."""
    gap = 24  # between pages, as alignment may leave it
    memory = np.random.default_rng(1).integers(0, 255, layers * blocks * (page + gap), dtype=np.uint8)
    start, stride = memory.ctypes.data, page + gap
    if layout == "layers outermost":
        return memory, [(start + layer * blocks * stride, stride, page) for layer in range(layers)]
    return memory, [(start + layer * stride, layers * stride, page) for layer in range(layers)]


def page_bytes(pages: list[tuple[int, int, int]], layer: int, block: int) -> bytes:
    address, stride, page = pages[layer]
    return ctypes.string_at(address + block * stride, page)


@pytest.mark.parametrize("layout", ["layers outermost", "blocks outermost"])
@pytest.mark.parametrize("page", [8, 4096, 1001])
def test_there_and_back(layout: str, page: int) -> None:
    layers, blocks = 3, 7
    memory, pages = cache(layout, layers, blocks, page)
    folded = fold(pages, blocks, "cpu")
    assert len(folded.runs) == 1
    assert folded.shard_bytes == layers * page
    copier, arena = HostCopier([folded]), arena_of(blocks * 8192 * 4)
    offsets = [index * 8192 * 4 for index in range(blocks)]
    order = random.Random(0).sample(range(blocks), 4)
    before = memory.copy()
    job = copier.begin_publish(arena, 0, order, offsets[:4])
    assert job.ended
    assert job.error is None
    assert job.size == 4 * folded.shard_bytes
    for offset, block in zip(offsets, order, strict=False):
        object_ = arena.memory[offset : offset + folded.shard_bytes].tobytes()
        assert object_ == b"".join(page_bytes(pages, layer, block) for layer in range(layers))
        assert not arena.memory[offset + folded.shard_bytes : offset + 8192 * 4].any()
    assert (memory == before).all()

    # into other blocks: those get the bytes, the rest of the cache keeps its own
    target = [block for block in range(blocks) if block not in order][:3]
    expected = {(layer, block): page_bytes(pages, layer, block) for layer in range(layers) for block in range(blocks)}
    job = copier.begin_restore(arena, [(0, target, offsets[:3])])
    assert not job.ended
    copier.advance()
    assert job.ended
    assert job.error is None
    for block, source in zip(target, order, strict=False):
        for layer in range(layers):
            expected[layer, block] = expected[layer, source]
    assert expected == {key: page_bytes(pages, *key) for key in expected}
    touched = np.zeros(memory.size, dtype=bool)
    for address, stride, size in pages:
        for block in target:
            at = address - memory.ctypes.data + block * stride
            touched[at : at + size] = True
    assert (memory == before)[~touched].all()
    copier.close()


def test_layers_of_different_pages_fold_into_runs_in_engine_order() -> None:
    layout = fold([(1000, 64, 64), (5000, 64, 64), (9000, 64, 64), (20000, 32, 32), (30000, 64, 64)], 4, "cpu")
    assert layout.runs == (
        LayerRun(1000, 3, 4000, 64, 64, 0),
        LayerRun(20000, 1, 32, 32, 32, 192),
        LayerRun(30000, 1, 64, 64, 64, 224),
    )
    assert layout.shard_bytes == 288


def test_a_copy_that_fails_ends_with_its_reason() -> None:
    memory, pages = cache("layers outermost", 2, 3, 64)
    copier = HostCopier([fold(pages, 3, "cpu")])
    arena = arena_of(4096)
    assert "IndexError" in str(copier.begin_publish(arena, 0, [99], [0]).error)
    job = copier.begin_restore(arena, [(0, [1, 0], [0, 4095])])  # the second is beyond the arena's end
    copier.advance()
    assert job.error is not None
    assert job.done == 1
    assert copier.begin_publish(arena, 0, [0], [0]).error is None
    copier.close()
    assert memory.size


def test_no_copy_engine_for_an_unknown_device() -> None:
    from kvhold.copy.engine import make_copier

    with pytest.raises(ValueError, match="'tpu:0'"):
        make_copier([PagedLayout((), 1, "tpu:0")])


def test_restores_advance_in_order_by_what_a_step_may_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, pages = cache("layers outermost", 2, 6, 64)
    copier = HostCopier([fold(pages[:1], 6, "cpu"), fold(pages, 6, "cpu")])
    arena = arena_of(1 << 16)
    arena.memory[:] = 7
    monkeypatch.setattr("kvhold.copy.host.STEP_BYTES", 3 * 128)
    first = copier.begin_restore(arena, [(1, [0, 1, 2], [0, 128, 256]), (0, [3], [384])])
    second = copier.begin_restore(arena, [(1, [3, 4, 5, 0], [0, 128, 256, 384])])
    ended = []
    for _ in range(3):
        copier.advance()
        ended.append((first.ended, second.ended))
    assert ended == [(False, False), (True, False), (True, True)]
    assert all(page_bytes(pages, layer, block) == b"\x07" * 64 for layer in range(2) for block in range(6))
    assert memory.size


def test_a_cache_whose_memory_moved() -> None:
    """What was begun before it went has failed; what is begun afterwards goes to the new place."""
    old, old_pages = cache("blocks outermost", 2, 3, 64)
    _new, new_pages = cache("layers outermost", 2, 3, 64)
    before = old.copy()
    copier, arena = HostCopier([fold(old_pages, 3, "cpu")]), arena_of(4096)
    assert copier.begin_publish(arena, 0, [1], [0]).error is None
    waiting = copier.begin_restore(arena, [(0, [2], [0])])
    copier.unbind()
    assert waiting.error is not None
    copier.bind([fold(new_pages, 3, "cpu")])
    restored = copier.begin_restore(arena, [(0, [0], [0])])
    copier.advance()
    assert restored.ended
    assert restored.error is None
    assert [page_bytes(new_pages, layer, 0) for layer in range(2)] == [
        page_bytes(old_pages, layer, 1) for layer in range(2)
    ]
    assert (old == before).all()
