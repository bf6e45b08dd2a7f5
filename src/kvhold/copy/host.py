"""Copies between a KV cache in host memory and the arena.

One numpy copy moves one block of a run of layers: a strided read against a contiguous write, or the other way round,
with the GIL released. A restore runs in a thread of its own, beside the forward pass; a publish runs at once, so that
no source block has to be held beyond the step.
"""

import ctypes
import queue
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvhold.client.arena import ArenaMapping
from kvhold.copy.job import Job
from kvhold.copy.layout import LayerRun, PagedLayout

_Array = np.ndarray[Any, Any]


class HostCopier:
    """Copies blocks of ``layout``. One thread may begin copies; restores end in the order in which they were begun."""

    def __init__(self, layout: PagedLayout) -> None:
        self._size = layout.shard_bytes
        self._pages = [(run, _view(run, layout.blocks)) for run in layout.runs]
        self._queue: queue.SimpleQueue[tuple[Job, ArenaMapping, Sequence[int], Sequence[int]] | None]
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._restore_all, name="kvhold-restore", daemon=True)
        self._thread.start()

    def register(self, arena: ArenaMapping) -> None:
        """Nothing to prepare: host memory is copied as it is."""

    def unregister(self, arena: ArenaMapping) -> None:
        """Nothing was prepared."""

    def begin_publish(self, arena: ArenaMapping, blocks: Sequence[int], offsets: Sequence[int]) -> Job:
        """Copy ``blocks[i]`` to ``arena`` at byte ``offsets[i]``. The job has ended when this returns."""
        job = Job(len(blocks) * self._size)
        try:
            for run, pages in self._pages:
                buffer, kind, shape = _buffer(arena), pages.dtype, pages.shape[1:]
                for block, offset in zip(blocks, offsets, strict=True):
                    np.copyto(np.ndarray(shape, kind, buffer, offset + run.at), pages[block])
        except Exception as error:  # noqa: BLE001 - a failed copy is an unpublished block, never an engine error
            job.end(f"{type(error).__name__}: {error}")
        else:
            job.end()
        return job

    def begin_restore(self, arena: ArenaMapping, blocks: Sequence[int], offsets: Sequence[int]) -> Job:
        """Copy ``arena`` at byte ``offsets[i]`` to ``blocks[i]``, later."""
        job = Job(len(blocks) * self._size)
        self._queue.put((job, arena, blocks, offsets))
        return job

    def _restore_all(self) -> None:
        while (task := self._queue.get()) is not None:
            job, arena, blocks, offsets = task
            try:
                self.restore(arena, blocks, offsets)
            except Exception as error:  # noqa: BLE001 - a failed copy is a recomputed block, never an engine error
                job.end(f"{type(error).__name__}: {error}")
            else:
                job.end()

    def restore(self, arena: ArenaMapping, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        """Copy now, on this thread."""
        for run, pages in self._pages:
            buffer, kind, shape = _buffer(arena), pages.dtype, pages.shape[1:]
            for block, offset in zip(blocks, offsets, strict=True):
                np.copyto(pages[block], np.ndarray(shape, kind, buffer, offset + run.at))

    def close(self) -> None:
        """End the thread after what was begun."""
        self._queue.put(None)
        self._thread.join()


def _view(run: LayerRun, blocks: int) -> _Array:
    """All pages of a run as [blocks, layers, words of a page]."""
    kind: np.dtype[Any] = np.dtype(np.uint64) if run.page % 8 == 0 and run.address % 8 == 0 else np.dtype(np.uint8)
    span = (blocks - 1) * run.block_stride + (run.layers - 1) * run.layer_stride + run.page
    buffer = (ctypes.c_ubyte * span).from_address(run.address)
    strides = (run.block_stride, run.layer_stride, kind.itemsize)
    return np.ndarray((blocks, run.layers, run.page // kind.itemsize), kind, buffer, strides=strides)


def _buffer(arena: ArenaMapping) -> ctypes.Array[ctypes.c_ubyte]:
    return (ctypes.c_ubyte * arena.size).from_address(arena.address)
