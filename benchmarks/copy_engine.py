"""Restored and published bytes per second, against a plain copy of the same bytes, in turns.

    ./dev run python benchmarks/copy_engine.py

The KV cache has the shape of the named model's on the CPU: layers outermost, one page per layer and block. Two plain
copies are the measure: one of all bytes at once, for which the C library bypasses the cache, and one page by page,
which is what scattered pages allow.
"""

import ctypes
import mmap
import random
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
from figures import in_turns, median, ratios, spread

from kvhold.copy.host import HostCopier
from kvhold.copy.layout import fold

SHAPES = {  # layers, bytes of a page
    "SmolLM2-135M, 32 tokens": (30, 3 * 32 * 2 * 64 * 2),
    "Llama-3.1-8B, 16 tokens": (32, 8 * 16 * 2 * 128 * 2),
    "Llama-3.1-8B, 128 tokens": (32, 8 * 128 * 2 * 128 * 2),
}
BYTES = 256 << 20
ROUNDS = 15
GOAL = 0.8


def main() -> None:
    for name, (layers, page) in SHAPES.items():
        blocks = max(4, BYTES // (layers * page))
        cache = np.random.default_rng(0).integers(0, 255, blocks * layers * page, dtype=np.uint8)
        start = cache.ctypes.data
        layout = fold([(start + layer * blocks * page, page, page) for layer in range(layers)], blocks, "cpu")
        copier = HostCopier([layout])
        arena = _arena(blocks * layout.shard_bytes)
        order = random.Random(0).sample(range(blocks), blocks)
        offsets = [index * layout.shard_bytes for index in range(blocks)]
        plain = np.empty_like(cache)
        whole = np.frombuffer((ctypes.c_ubyte * arena.size).from_address(arena.address), dtype=np.uint8)
        size = blocks * layout.shard_bytes

        def timed(action: Any, size: int = size) -> float:
            begun = time.perf_counter()
            action()
            return size / (time.perf_counter() - begun) / 2**30

        def publish(copier: Any = copier, arena: Any = arena, order: Any = order, offsets: Any = offsets) -> None:
            assert copier.begin_publish(arena, 0, order, offsets).error is None

        def restore(copier: Any = copier, arena: Any = arena, order: Any = order, offsets: Any = offsets) -> None:
            job = copier.begin_restore(arena, [(0, order, offsets)])
            while not job.ended:
                copier.advance()

        def copy(plain: Any = plain, whole: Any = whole) -> None:
            np.copyto(plain, whole[: plain.size])

        def copy_pages(plain: Any = plain, arena: Any = arena, page: int = page) -> None:
            source, target = arena.address, plain.ctypes.data
            for at in range(0, plain.size, page):
                ctypes.memmove(target + at, source + at, page)

        for warm in (publish, restore, copy, copy_pages):
            warm()
        measured = in_turns(
            ROUNDS,
            publish=lambda: timed(publish),
            restore=lambda: timed(restore),
            copy=lambda: timed(copy),
            pages=lambda: timed(copy_pages),
        )
        print(f"{name}: {layers} layers x {page} bytes, {blocks} blocks; plain copy {spread(measured['copy'])} GiB/s")
        for kind in ("restore", "publish"):
            against = ratios(measured[kind], measured["copy"])
            verdict = f"goal {GOAL}, {'met' if median(against) >= GOAL else 'missed'}"
            paged = spread(ratios(measured[kind], measured["pages"]))
            print(
                f"  {kind}: {spread(measured[kind])} GiB/s, of one copy {spread(against)} ({verdict}), of pages {paged}"
            )
        copier.close()


def _arena(size: int) -> Any:
    memory = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(address, 0, size)
    return SimpleNamespace(size=size, address=address, memory=memory)


if __name__ == "__main__":
    main()
