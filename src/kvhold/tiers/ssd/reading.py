"""Reads for one thread: neighbours in one call, payloads straight into the arena, each checked before it counts."""

import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvhold.core.log.events import Read, Stored
from kvhold.core.log.segments import HEADER
from kvhold.tiers.ssd.check import Identity, Place, check_head, check_payload
from kvhold.tiers.ssd.counters import Counters
from kvhold.tiers.ssd.files import IOV_MAX, MEDIA_ERRORS, blocks, read_all
from kvhold.tiers.ssd.format import RecordHead
from kvhold.tiers.ssd.handles import Handles
from kvhold.tiers.ssd.survey import Log

_AT_ONCE: Final = IOV_MAX // 2


class Outcome(NamedTuple):
    """How an I/O has ended: what :class:`~kvhold.core.events.Done` says of it."""

    failed: tuple[int, ...]
    kept: bool
    ages: tuple[int, ...]


class Reader:
    """For one thread. ``trouble`` is told of what the disk refuses; nothing is raised for it."""

    def __init__(
        self,
        opened: Log,
        handles: Handles,
        arena: memoryview,
        counters: Counters,
        trouble: Callable[[OSError], None],
    ) -> None:
        self._log = opened
        self._handles = handles
        self._arena = arena
        self._counters = counters
        self._trouble = trouble
        self._heads = blocks(_AT_ONCE * HEADER)

    def read(self, effect: Read) -> Outcome:
        """Fill the objects' slots. OSError: none was read."""
        objects = effect.objects
        for stored in objects:
            if stored.offset < 0 or stored.offset + sum(stored.shards) > len(self._arena):
                raise ValueError(f"{sum(stored.shards)} bytes at {stored.offset} are not in the arena")
        failed: dict[int, bool] = {}
        ages = [0] * len(objects)
        with self._handles.use(effect.segment, write=False) as handle:
            for run in _runs(objects):
                failed |= self._read_run(handle, effect, run, ages)
        return Outcome(tuple(sorted(failed)), bool(failed) and all(failed.values()), tuple(ages))

    def _read_run(self, handle: int, effect: Read, run: list[int], ages: list[int]) -> dict[int, bool]:
        """What failed of ``run``, and whether it is kept; the others' ``ages`` are filled in."""
        objects = [effect.objects[index] for index in run]
        try:
            got = self._fill(handle, objects)
        except OSError as error:
            self._trouble(error)
            if len(run) == 1:
                return {run[0]: is_kept(error)}
            # One bad sector must not cost the neighbours.
            return dict(bad for index in run for bad in self._read_run(handle, effect, [index], ages).items())
        began, now = time.perf_counter(), time.time_ns()
        failed: dict[int, bool] = {}
        for position, (index, stored) in enumerate(zip(run, objects, strict=True)):
            head = self._good(effect, stored, position, got - (stored.at - objects[0].at))
            if head is None:
                failed[index] = False
            else:
                ages[index] = max(0, now - head.created)
        self._counters.checksum_seconds += time.perf_counter() - began
        return failed

    def _fill(self, handle: int, objects: Sequence[Stored]) -> int:
        buffers: list[memoryview] = []
        for position, stored in enumerate(objects):
            buffers.append(self._heads[position * HEADER : (position + 1) * HEADER])
            if length := sum(stored.shards):
                buffers.append(self._arena[stored.offset : stored.offset + length])
        began = time.perf_counter()
        try:
            got = read_all(self._log.files, handle, buffers, objects[0].at)
        finally:
            self._counters.read_seconds += time.perf_counter() - began
        self._counters.reads += 1
        self._counters.read_bytes += got
        return got

    def _good(self, effect: Read, stored: Stored, position: int, got: int) -> RecordHead | None:
        """The header of what is right."""
        length = sum(stored.shards)
        head_or_reason: RecordHead | str = "truncated"
        if got >= HEADER + length:
            place = Place(self._log.id, self._log.numbers[effect.segment], effect.seq, stored.at)
            wanted = Identity(stored.namespace, stored.group, stored.key, stored.shards)
            head_or_reason = check_head(self._heads[position * HEADER : (position + 1) * HEADER], place, wanted)
            if isinstance(head_or_reason, RecordHead):
                payload = self._arena[stored.offset : stored.offset + length]
                head_or_reason = check_payload(head_or_reason, payload) or head_or_reason
        if isinstance(head_or_reason, RecordHead):
            return head_or_reason
        self._counters.rejected[head_or_reason] += 1
        return None


def is_kept(error: OSError) -> bool:
    """Whether what could not be read may be as it was: not after what a disk or filesystem says of bad sectors."""
    return error.errno not in MEDIA_ERRORS


def _runs(objects: Sequence[Stored]) -> list[list[int]]:
    """Positions of ``objects``, grouped so that those of a group lie one directly behind the other."""
    runs: list[list[int]] = []
    end = -1
    for index in sorted(range(len(objects)), key=lambda index: objects[index].at):
        stored = objects[index]
        if stored.at == end and len(runs[-1]) < _AT_ONCE:
            runs[-1].append(index)
        else:
            runs.append([index])
        end = stored.at + HEADER + sum(stored.shards)
    return runs
