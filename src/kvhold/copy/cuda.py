"""Copies between a KV cache on a CUDA device and the arena.

The arena is pinned in place, so the device reads and writes it directly. Copies run on two streams of their own, one
for each direction, behind an event of the stream that the engine computes on: a publish reads what the step has
written, and a restore never overwrites a block that an earlier step still reads. One batched gather (or scatter) on
the device and one transfer per block: pages are small, and transfers of a few KiB waste the bus.
"""

import ctypes
import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import torch

from kvhold.client.arena import ArenaMapping
from kvhold.copy.job import GroupCopy, Job
from kvhold.copy.layout import LayerRun, PagedLayout

_PIN_CHUNK = 256 << 20
_STAGE_BLOCKS = 64
"""Blocks gathered at once: bounds the device memory that a copy takes."""


class CudaCopier:
    """Copies blocks of the groups in ``layouts``. One thread may begin copies; one of its own sees them end."""

    def __init__(self, layouts: Sequence[PagedLayout]) -> None:
        self._device = torch.device(layouts[0].device)
        self._sizes = [layout.shard_bytes for layout in layouts]
        self._pages: list[list[tuple[LayerRun, torch.Tensor]]] = []
        self.bind(layouts)
        self._publishing = torch.cuda.Stream(self._device)
        self._restoring = torch.cuda.Stream(self._device)
        self._pinned: dict[int, torch.Tensor] = {}
        self._begun: SimpleQueue[tuple[Job, torch.cuda.Event, Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._end_jobs, name="kvhold-copies", daemon=True)
        self._thread.start()

    def unbind(self) -> None:
        """Forget the pages, after all copies that were submitted."""
        self._publishing.synchronize()
        self._restoring.synchronize()
        self._pages = []

    def bind(self, layouts: Sequence[PagedLayout]) -> None:
        """Copy from and to the pages of ``layouts``."""
        self._pages = [[(run, _view(run, layout.blocks, self._device)) for run in layout.runs] for layout in layouts]

    def register(self, arena: ArenaMapping) -> None:
        """Pin the arena. Raises RuntimeError when the driver refuses."""
        torch.cuda.set_device(self._device)
        runtime = torch.cuda.cudart()
        for at in range(0, arena.size, _PIN_CHUNK):
            error = runtime.cudaHostRegister(arena.address + at, min(_PIN_CHUNK, arena.size - at), 0)
            if int(error) != 0:
                for done in range(0, at, _PIN_CHUNK):
                    runtime.cudaHostUnregister(arena.address + done)
                raise RuntimeError(f"pinning the arena failed after {at} bytes: CUDA error {int(error)}")
        buffer = (ctypes.c_ubyte * arena.size).from_address(arena.address)
        self._pinned[arena.address] = torch.frombuffer(buffer, dtype=torch.uint8)

    def unregister(self, arena: ArenaMapping) -> None:
        if self._pinned.pop(arena.address, None) is not None:
            runtime = torch.cuda.cudart()
            for at in range(0, arena.size, _PIN_CHUNK):
                runtime.cudaHostUnregister(arena.address + at)

    def begin_publish(self, arena: ArenaMapping, group: int, blocks: Sequence[int], offsets: Sequence[int]) -> Job:
        return self._begin(self._publishing, self._gather, arena, [(group, blocks, offsets)])

    def begin_restore(self, arena: ArenaMapping, copies: Sequence[GroupCopy]) -> Job:
        return self._begin(self._restoring, self._scatter, arena, copies)

    def advance(self) -> None:
        """Nothing to do: the device copies by itself."""

    def close(self) -> None:
        self._begun.put(None)
        self._thread.join()

    def _begin(self, stream: torch.cuda.Stream, move: Any, arena: ArenaMapping, copies: Sequence[GroupCopy]) -> Job:
        job = Job(sum(len(blocks) * self._sizes[group] for group, blocks, _ in copies))
        keep: list[torch.Tensor] = []
        try:
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                for group, blocks, offsets in copies:
                    indices = torch.tensor(blocks, dtype=torch.int64).pin_memory().to(self._device, non_blocking=True)
                    keep.append(indices)
                    for start in range(0, len(blocks), _STAGE_BLOCKS):
                        end = start + _STAGE_BLOCKS
                        move(self._pinned[arena.address], group, indices[start:end], offsets[start:end])
                event = torch.cuda.Event()
                event.record(stream)
        except Exception as error:  # noqa: BLE001 - a failed copy is a miss, never an engine error
            stream.synchronize()  # what was submitted before the failure still reads and writes
            job.end(f"{type(error).__name__}: {error}")
            return job
        self._begun.put((job, event, keep))
        return job

    def _gather(self, host: torch.Tensor, group: int, blocks: torch.Tensor, offsets: Sequence[int]) -> None:
        for run, pages in self._pages[group]:
            staged = pages.index_select(0, blocks)
            for index, offset in enumerate(offsets):
                host[offset + run.at : offset + run.at + run.layers * run.page].copy_(
                    staged[index].reshape(-1), non_blocking=True
                )

    def _scatter(self, host: torch.Tensor, group: int, blocks: torch.Tensor, offsets: Sequence[int]) -> None:
        for run, pages in self._pages[group]:
            staged = torch.empty((len(offsets), *pages.shape[1:]), dtype=torch.uint8, device=self._device)
            for index, offset in enumerate(offsets):
                staged[index].reshape(-1).copy_(
                    host[offset + run.at : offset + run.at + run.layers * run.page], non_blocking=True
                )
            pages.index_copy_(0, blocks, staged)

    def _end_jobs(self) -> None:
        torch.cuda.set_device(self._device)
        while (begun := self._begun.get()) is not None:
            job, event, _ = begun
            try:
                while not event.query():
                    time.sleep(0.0002)
            except RuntimeError as error:
                job.end(str(error))
            else:
                job.end()


def _view(run: LayerRun, blocks: int, device: torch.device) -> torch.Tensor:
    """All pages of a run as bytes [blocks, layers, page]."""
    span = (blocks - 1) * run.block_stride + (run.layers - 1) * run.layer_stride + run.page

    class Pages:
        __cuda_array_interface__ = {  # noqa: RUF012 - the interface's name and form
            "shape": (span,),
            "typestr": "|u1",
            "data": (run.address, False),
            "version": 3,
        }

    flat = torch.as_tensor(Pages(), device=device)
    return flat.as_strided((blocks, run.layers, run.page), (run.block_stride, run.layer_stride, 1))
