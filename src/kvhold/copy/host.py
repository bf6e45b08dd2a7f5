"""Copies between a KV cache in host memory and the arena.

One numpy copy moves one block of a run of layers: a strided read against a contiguous write, or the other way round.
All copies run on the engine's thread, at the end of a step. A thread of its own would have to win Python's lock from a
busy engine for every block, which takes longer than the copy; and a restore, in pieces of a few milliseconds, delays
the others' next step far less than the prefill that it saves.
"""

import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvhold.client.arena import ArenaMapping
from kvhold.copy.job import GroupCopy, Job
from kvhold.copy.layout import LayerRun, PagedLayout

STEP_BYTES = 64 << 20
"""What restores copy in one engine step, all requests together: some ten milliseconds."""

_Array = np.ndarray[Any, Any]
_Buffer = ctypes.Array[ctypes.c_ubyte]


@dataclass(slots=True)
class _Restore:
    job: Job
    arena: ArenaMapping
    copies: Sequence[tuple[int, int, int]]
    """(group, block, offset)."""


class HostCopier:
    """Copies blocks of the groups in ``layouts``, on one thread. Restores end in the order in which they were begun."""

    def __init__(self, layouts: Sequence[PagedLayout]) -> None:
        self._sizes = [layout.shard_bytes for layout in layouts]
        self._pages: list[list[tuple[LayerRun, _Array]]] = []
        self._waiting: deque[_Restore] = deque()
        self.bind(layouts)

    def unbind(self) -> None:
        """Forget the pages. Restores that were not copied in time have failed."""
        while self._waiting:
            self._waiting.popleft().job.end("the engine has taken its KV cache away")
        self._pages = []

    def bind(self, layouts: Sequence[PagedLayout]) -> None:
        """Copy from and to the pages of ``layouts``."""
        self._pages = [[(run, _view(run, layout.blocks)) for run in layout.runs] for layout in layouts]

    def register(self, arena: ArenaMapping) -> None:
        """Nothing to prepare: host memory is copied as it is."""

    def unregister(self, arena: ArenaMapping) -> None:
        """Nothing was prepared."""

    def begin_publish(self, arena: ArenaMapping, group: int, blocks: Sequence[int], offsets: Sequence[int]) -> Job:
        """Copy ``blocks[i]`` of a group to ``arena`` at byte ``offsets[i]``. The job has ended when this returns."""
        job = Job(len(blocks) * self._sizes[group])
        try:
            for run, pages in self._pages[group]:
                buffer, kind, shape = _buffer(arena), pages.dtype, pages.shape[1:]
                for block, offset in zip(blocks, offsets, strict=True):
                    np.copyto(np.ndarray(shape, kind, buffer, offset + run.at), pages[block])
        except Exception as error:  # noqa: BLE001 - a failed copy is an unpublished block, never an engine error
            job.end(f"{type(error).__name__}: {error}")
        else:
            job.end()
        return job

    def begin_restore(self, arena: ArenaMapping, copies: Sequence[GroupCopy]) -> Job:
        """Copy ``arena`` to the blocks of ``copies``, in :meth:`advance`."""
        objects = [
            (group, block, offset)
            for group, blocks, offsets in copies
            for block, offset in zip(blocks, offsets, strict=True)
        ]
        restore = _Restore(Job(sum(self._sizes[group] for group, _, _ in objects)), arena, objects)
        self._waiting.append(restore)
        return restore.job

    def advance(self) -> None:
        """Copy what one step may copy of the restores that were begun."""
        left = STEP_BYTES
        while self._waiting and left > 0:
            restore = self._waiting[0]
            job, buffer = restore.job, _buffer(restore.arena)
            try:
                while job.done < len(restore.copies) and left > 0:
                    group, block, offset = restore.copies[job.done]
                    self.restore(buffer, group, block, offset)
                    job.done += 1
                    left -= self._sizes[group]
            except Exception as error:  # noqa: BLE001 - a failed copy is a recomputed block, never an engine error
                self._waiting.popleft()
                job.end(f"{type(error).__name__}: {error}")
                continue
            if job.done == len(restore.copies):
                self._waiting.popleft()
                job.end()

    def restore(self, arena: _Buffer, group: int, block: int, offset: int) -> None:
        """Copy one object now."""
        for run, pages in self._pages[group]:
            np.copyto(pages[block], np.ndarray(pages.shape[1:], pages.dtype, arena, offset + run.at))

    def close(self) -> None:
        """Nothing runs beyond a call."""


def _view(run: LayerRun, blocks: int) -> _Array:
    """All pages of a run as [blocks, layers, words of a page]."""
    kind: np.dtype[Any] = np.dtype(np.uint64) if run.page % 8 == 0 and run.address % 8 == 0 else np.dtype(np.uint8)
    span = (blocks - 1) * run.block_stride + (run.layers - 1) * run.layer_stride + run.page
    buffer = (ctypes.c_ubyte * span).from_address(run.address)
    strides = (run.block_stride, run.layer_stride, kind.itemsize)
    return np.ndarray((blocks, run.layers, run.page // kind.itemsize), kind, buffer, strides=strides)


def _buffer(arena: ArenaMapping) -> _Buffer:
    return (ctypes.c_ubyte * arena.size).from_address(arena.address)
