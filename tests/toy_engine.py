"""A toy engine on kvhold: a paged cache in numpy, a model that anybody can check, and threads that serve requests.

``docs/new-engine.md`` walks through it.
"""

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvhold.client.attacher import Attacher, Half
from kvhold.client.control import Geometry
from kvhold.engines.common.blocking import Blocking
from kvhold.engines.common.buffers import Buffer
from kvhold.engines.common.identity import Hashing, digest, namespace

BLOCK = 4  # tokens
LAYERS, WIDTH = 3, 64
HASHING = Hashing("sha256 of all tokens", "", 32, False)
Attach = Callable[[Half], Attacher]


class Model:
    """Its KV of a token depends on all tokens before it, and its answer on all KV: a wrong byte is a wrong answer."""

    def __init__(self, seed: str = "toy") -> None:
        self.identity = digest({"model": seed, "layers": LAYERS, "width": WIDTH, "block": BLOCK})
        self._seed = seed

    def prefix(self, tokens: Sequence[int]) -> bytes:
        return hashlib.sha256(repr((self._seed, list(tokens))).encode()).digest()

    def kv(self, tokens: Sequence[int]) -> "np.ndarray[Any, Any]":
        """That of the last of ``tokens``: a row of bytes for each layer."""
        row = hashlib.shake_128(self.prefix(tokens)).digest(LAYERS * WIDTH)
        return np.frombuffer(row, np.uint8).reshape(LAYERS, WIDTH)

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        """Of each full block a key, which stands for all tokens up to its end."""
        return [self.prefix(tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)]

    def expected(self, tokens: Sequence[int]) -> bytes:
        """The answer without any cache."""
        return self.answer(np.stack([self.kv(tokens[: at + 1]) for at in range(len(tokens))]))

    @staticmethod
    def answer(kv: "np.ndarray[Any, Any]") -> bytes:
        return hashlib.sha256(kv.tobytes()).digest()


class PagedCache:
    """``pages[block, layer]`` is a page: the KV of a block's tokens in a layer."""

    def __init__(self, blocks: int) -> None:
        self.pages = np.zeros((blocks, LAYERS, BLOCK, WIDTH), np.uint8)
        self._free = list(range(blocks))
        self._freed = threading.Condition()

    @property
    def object_bytes(self) -> int:
        return self.pages[0].nbytes

    @property
    def free(self) -> int:
        return len(self._free)

    def buffer(self, block: int) -> Buffer:
        """Where a block is: here in one piece, as its layers follow each other."""
        return [(self.pages[block].ctypes.data, self.object_bytes)]

    @contextmanager
    def blocks(self, tokens: int) -> Iterator[list[int]]:
        """Blocks for so many tokens, waited for; they are free again when the caller is done."""
        count = -(-tokens // BLOCK)
        with self._freed:
            assert self._freed.wait_for(lambda: len(self._free) >= count, 60)
            taken = [self._free.pop() for _ in range(count)]
        try:
            yield taken
        finally:
            with self._freed:
                self._free += taken
                self._freed.notify_all()

    def compute(self, model: Model, tokens: Sequence[int], start: int, blocks: Sequence[int]) -> None:
        """Fill the KV of ``tokens`` from ``start`` on."""
        for at in range(start, len(tokens)):
            self.pages[blocks[at // BLOCK], :, at % BLOCK] = model.kv(tokens[: at + 1])

    def answer(self, tokens: int, blocks: Sequence[int]) -> bytes:
        rows = [self.pages[blocks[at // BLOCK], :, at % BLOCK] for at in range(tokens)]
        return Model.answer(np.stack(rows))


class PoolEngine:
    """An engine without steps: each request is served by a thread, which may wait for kvhold."""

    def __init__(self, name: str, attach: Attach, model: Model, blocks: int = 256, threads: int = 4) -> None:
        self.model = model
        self.cache = PagedCache(blocks)
        self.restored = 0  # tokens
        self.kvhold = Blocking(name, f"toy {name}", attach)
        name_of_all = namespace((model.identity,), HASHING, b"")
        geometry = Geometry(name_of_all, 0, HASHING.key_bytes, (self.cache.object_bytes,), "toy", chain=True)
        self.space = self.kvhold.open(geometry, slots=blocks)
        self._pool = ThreadPoolExecutor(threads)

    def submit(self, tokens: Sequence[int]) -> "Future[bytes]":
        return self._pool.submit(self.serve, tokens)

    def serve(self, tokens: Sequence[int]) -> bytes:
        """The answer to a prompt."""
        keys = self.model.keys(tokens)
        with self.cache.blocks(len(tokens)) as blocks:
            buffers = [self.cache.buffer(block) for block in blocks[: len(keys)]]
            hit = self.kvhold.find(self.space, keys, seconds=0.2)
            restored = self.kvhold.restore(hit, buffers)
            self.cache.compute(self.model, tokens, restored * BLOCK, blocks)
            self.kvhold.publish(self.space, keys, buffers[restored:], seconds=0.5, skip=restored)
            self.restored += restored * BLOCK
            return self.cache.answer(len(tokens), blocks)

    def close(self) -> None:
        self._pool.shutdown()
        self.kvhold.close()
