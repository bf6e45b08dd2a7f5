"""Which blocks to publish, into which slots, and how long their source is held.

A block is published in the step that completes it, from the engine's own current block table. Until every rank's copy
has ended, whatever its outcome, the block is held by a reference in the engine's block pool, so that its request may
finish, be aborted or be preempted meanwhile. A hold never waits for the manager.
"""

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvhold.client.control import Control, Slots
from kvhold.engines.vllm.plans import CopyReport, Publish
from kvhold.engines.vllm.stats import KvHoldStats

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = init_logger(__name__)

STALL_SECONDS = 60
"""A copy that takes longer is reported."""
HOLD_SHARE = 2
"""At most one in so many of the engine's blocks is held for copies that outlive their step."""


@dataclass(slots=True)
class Source:
    """A request with blocks to publish; ``done`` leading ones are stored or on their way, None if not known yet."""

    request: "Request"
    done: int | None = None


@dataclass(slots=True)
class Batch:
    """Blocks of one chain on their way: ``keys[i]`` from ``blocks[i]`` into the i-th slot."""

    space: int
    attachment: int
    parent: bytes
    keys: list[bytes]
    slots: Slots
    blocks: list[int]
    depth: int
    since: float
    stalled: bool = False  # and reported
    ended: dict[int, int] = field(default_factory=dict)  # bytes per object by rank, of ranks whose copy has ended


class Publishing:
    """Publishing of one engine. ``resident`` says how many leading blocks of a request's prompt the manager has."""

    def __init__(
        self,
        control: Control,
        stats: KvHoldStats,
        block_tokens: int,
        decode: bool,
        resident: Callable[[str], int | None],
    ) -> None:
        self._control = control
        self._stats = stats
        self._block_tokens = block_tokens
        self._decode = decode
        self._resident = resident
        self._pool: BlockPool | None = None
        self._sources: dict[str, Source] = {}
        self._batches: dict[int, Batch] = {}
        self._under_way: set[bytes] = set()
        self._next_batch = 1

    def bind(self, pool: "BlockPool") -> None:
        self._pool = pool

    @property
    def holding(self) -> bool:
        """Whether blocks of the engine are held for copies that have not ended."""
        return bool(self._batches)

    def admit(self, request: "Request") -> None:
        """``request`` has been given blocks."""
        self._sources[request.request_id] = Source(request)

    def forget(self, request: str) -> None:
        self._sources.pop(request, None)

    def forget_all(self) -> None:
        """Publish no more blocks that were computed before now."""
        self._sources.clear()

    def plan(self, output: "SchedulerOutput", space: int, plans: list[Publish]) -> None:
        """Add to ``plans`` what the workers shall copy after this step's forward."""
        self._watch()
        scheduled = output.num_scheduled_tokens
        for name in [name for name in self._sources if name in scheduled]:
            source = self._sources[name]
            self._plan_one(source, scheduled[name], output, space, plans)
            if not self._decode and source.done is not None and source.done >= self._limit(source.request):
                del self._sources[name]

    def _watch(self) -> None:
        """Say so when a copy takes very long. Its blocks and slots stay: a time is no proof that nobody writes."""
        oldest = next(iter(self._batches.values()), None)
        if oldest is None or oldest.stalled or time.monotonic() - oldest.since < STALL_SECONDS:
            return
        oldest.stalled = True
        self._stats.add("publishes_stalled")
        text = "kvhold: publishing %d blocks takes longer than %d s; ended so far are ranks %s"
        log.warning(text, len(oldest.blocks), STALL_SECONDS, sorted(oldest.ended))

    def _limit(self, request: "Request") -> int:
        """Blocks of a request that may ever be published."""
        known = len(request.block_hashes)
        return known if self._decode else min(known, request.num_prompt_tokens // self._block_tokens)

    def _plan_one(
        self, source: Source, scheduled: int, output: "SchedulerOutput", space: int, plans: list[Publish]
    ) -> None:
        request = source.request
        if source.done is None:
            source.done = self._resident(request.request_id)
            if source.done is None:
                return
        ready = (request.num_computed_tokens + scheduled) // self._block_tokens
        end = min(self._limit(request), ready)
        if end <= source.done:
            return
        state = output.kv_connector_block_state
        tables = state.get_block_ids(request.request_id) if state is not None else None
        if tables is None:
            return
        table, hashes = tables[0], request.block_hashes
        end = min(end, len(table))
        while source.done < end:
            start = source.done
            while start < end and (hashes[start] in self._under_way or table[start] == 0):
                start += 1
            stop = start
            while stop < end and hashes[stop] not in self._under_way and table[stop] != 0:
                stop += 1
            taken = self._begin(space, start, stop, table, request, plans) if stop > start else 0
            source.done = start + taken
            if start + taken < stop:
                return

    def _begin(
        self, space: int, start: int, stop: int, table: list[int], request: "Request", plans: list[Publish]
    ) -> int:
        """Begin to publish blocks [start, stop) of a chain; how many there were slots and holds for."""
        pool, wanted = self._pool, stop - start
        if pool is None:
            return 0
        credit = self._control.credit.get(space)
        room = pool.num_gpu_blocks // HOLD_SHARE - sum(len(batch.blocks) for batch in self._batches.values())
        count = min(wanted, len(credit) if credit is not None else 0)
        self._stats.add("blocks_without_credit", wanted - count)
        if count > room:
            self._stats.add("blocks_over_hold_budget", count - max(0, room))
            count = max(0, room)
        if count == 0 or credit is None:
            return 0
        hashes = request.block_hashes
        blocks = table[start : start + count]
        keys = [bytes(key) for key in hashes[start : start + count]]
        parent = bytes(hashes[start - 1]) if start else b""
        batch = Batch(
            space, self._control.attachment, parent, keys, credit.take(count), blocks, start, time.monotonic()
        )
        pool.touch([pool.blocks[block] for block in blocks])
        self._batches[self._next_batch] = batch
        self._under_way.update(keys)
        plans.append(Publish(self._next_batch, blocks, array("Q", batch.slots.offsets)))
        self._stats.add("blocks_published", count)
        self._next_batch += 1
        return count

    def ended(self, report: CopyReport, expected: tuple[int, ...]) -> None:
        """Copies have ended on some ranks. Where on all: let go of their source, then tell the manager.

        Ranks may end in different steps; until the last one has, it still reads the source and writes the slots.
        """
        over: list[Batch] = []
        for number, ranks in report.ended.items():
            batch = self._batches.get(number)
            if batch is None:
                continue
            batch.ended.update(ranks)
            if len(batch.ended) == len(expected):
                self._let_go(number)
                over.append(batch)
        for batch in over:
            if batch.attachment != self._control.attachment:
                continue
            shards = tuple(batch.ended.get(rank, -1) for rank in range(len(expected)))
            if batch.space in self._control.credit and shards == expected:
                self._control.commit(batch.space, batch.parent, batch.depth, batch.keys, batch.slots, shards)
            else:
                self._control.give_back(batch.space, batch.slots)

    def _let_go(self, number: int) -> None:
        batch = self._batches.pop(number)
        self._under_way.difference_update(batch.keys)
        if self._pool is not None:
            self._pool.free_blocks([self._pool.blocks[block] for block in reversed(batch.blocks)])
