"""The CUDA copy engine against a cache on a device. Skipped without one."""

import mmap
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def arena() -> Any:
    import os

    from kvhold.client.arena import ArenaMapping

    size = 64 << 20
    descriptor = os.memfd_create("test-arena")
    os.ftruncate(descriptor, size)
    mapping = ArenaMapping(descriptor, size, 1)
    os.close(descriptor)
    assert mmap.PAGESIZE == 4096
    return mapping


@pytest.mark.parametrize("outermost", ["layers", "blocks"])
def test_there_and_back(arena: Any, outermost: str) -> None:
    from kvhold.copy.cuda import CudaCopier
    from kvhold.copy.layout import fold

    layers, blocks, page = 4, 200, 16384
    cache = torch.randint(0, 255, (layers * blocks * page,), dtype=torch.uint8, device="cuda")
    start = cache.data_ptr()
    if outermost == "layers":
        pages = [(start + layer * blocks * page, page, page) for layer in range(layers)]
        view = cache.view(layers, blocks, page).transpose(0, 1)
    else:
        pages = [(start + layer * page, layers * page, page) for layer in range(layers)]
        view = cache.view(blocks, layers, page)
    layout = fold(pages, blocks, str(cache.device))
    copier = CudaCopier([layout])
    copier.register(arena)
    try:
        order = torch.randperm(blocks)[:150].tolist()
        offsets = [index * layout.shard_bytes for index in range(150)]
        original = view[order].clone()
        job = copier.begin_publish(arena, 0, order, offsets)
        assert job.wait(30)
        assert job.error is None
        cache.zero_()
        job = copier.begin_restore(arena, [(0, order, offsets)])
        assert job.wait(30)
        assert job.error is None
        torch.cuda.synchronize()
        assert torch.equal(view[order], original)
        others = [block for block in range(blocks) if block not in set(order)]
        assert not view[others].any()
    finally:
        copier.close()
        copier.unregister(arena)
        arena.close()


def test_a_publish_reads_what_the_current_stream_has_written_before(arena: Any) -> None:
    from kvhold.copy.cuda import CudaCopier
    from kvhold.copy.layout import fold

    blocks, page = 64, 1 << 18
    cache = torch.zeros(blocks * page, dtype=torch.uint8, device="cuda")
    copier = CudaCopier([fold([(cache.data_ptr(), page, page)], blocks, str(cache.device))])
    copier.register(arena)
    try:
        busy = torch.randn(4096, 4096, device="cuda")
        for _ in range(20):
            busy = busy @ busy.T / 4096
        cache.fill_(7)
        job = copier.begin_publish(arena, 0, list(range(blocks)), [block * page for block in range(blocks)])
        assert job.wait(60)
        assert job.error is None
        import ctypes

        assert ctypes.string_at(arena.address, blocks * page) == b"\x07" * (blocks * page)
    finally:
        copier.close()
        copier.unregister(arena)
        arena.close()
