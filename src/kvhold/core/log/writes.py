"""Writes to one log, behind what is stored: batched, one at a time; and which segments they go to."""

from kvhold.core import events as ev
from kvhold.core.backing import Backing
from kvhold.core.catalogue import Catalogue
from kvhold.core.common import Common
from kvhold.core.events import Effect
from kvhold.core.history import Kind
from kvhold.core.log.device import ERRORS, Device, Dirty, LogIo
from kvhold.core.log.events import Reuse, Seal, Stored, Write
from kvhold.core.log.segments import HEADER, Segment, pack, table_bytes
from kvhold.core.rows import State
from kvhold.core.turns import MANAGER, Work

REWRITE_SHARE = 0.1
"""Bytes that may be written again, when their segment is given up, for each byte that is written for the first time.

Without a bound, objects in DRAM that fill the log would push each other out of it for ever, with nothing new to keep.
"""
_SHARE = 8
"""At most this part of the arena is being written to logs at once."""


def record_of(catalogue: Catalogue, row: int, at: int, parent: bytes = b"", depth: int = 0, age: int = 0) -> Stored:
    """A row and its record ``at`` a byte of its segment, as an I/O needs them."""
    index = catalogue.indexes[catalogue.owner[row]]
    name, key = index.namespace.name, catalogue.key[row]
    return Stored(name, index.group, key, parent, depth, index.shards, catalogue.offset[row], age, at)


class Writes:
    def __init__(self, common: Common, device: Device, backing: Backing) -> None:
        self._common = common
        self._device = device
        self._backing = backing

    def stored(self, row: int, parent: bytes, depth: int) -> None:
        """Write an object when its turn comes, unless too much waits."""
        if len(self._device.queue) >= self._common.limits.write_queue:
            self._common.counters["write_dropped_queue"] += 1
        elif self._common.catalogue.logged[row]:
            self._again(row, parent, depth)
        else:
            self._queue(row, parent, depth)

    def _again(self, row: int, parent: bytes, depth: int) -> None:
        """Write once more what was in the log already, as far as there is a budget for that."""
        size = HEADER + self._common.catalogue.size[row]
        if self._device.rewrite >= size:
            self._device.rewrite -= size
            self._queue(row, parent, depth, again=True)
            self._common.counters["rewritten"] += 1

    def _queue(self, row: int, parent: bytes, depth: int, again: bool = False) -> None:
        device = self._device
        device.queued += 1
        device.queue.append(Dirty(row, self._common.catalogue.epoch[row], parent, depth, device.queued, again=again))

    def not_before(self) -> int:
        """When the log may be written: after errors not for a while, and else as the rate allows that holds now."""
        device, rate = self._device, self._common.limits.write_rate
        return max(device.paused_until, device.wrote_at + device.wrote * 1_000_000_000 // rate if rate else 0)

    def pump(self) -> list[Effect]:
        common, device, log = self._common, self._device, self._device.log
        if not device.ready or device.writing or not device.queue or common.now < self.not_before():
            return []
        effects: list[Effect] = []
        while device.queue:
            if log.open is None:
                if log.next is None:
                    break
                log.open, log.next = log.next, None
            batch = self._batch(log.open)
            if batch is not None:
                if batch.rows:
                    effects.append(self._write(log.open, batch))
                break
            segment, log.open = log.open, None
            segment.readers += 1
            log.sealed.append(segment)
            io = common.backings.begin(LogIo(0, self._backing, "seal", segment=segment))
            effects.append(Seal(io, log.number, segment.number, segment.seq, segment.end))
        half_full = log.open is None or log.open.end * 2 > log.segment_bytes
        if half_full and log.next is None and log.erasing is None:
            effects += self._prepare()
        return effects

    def _batch(self, segment: Segment) -> LogIo | None:
        """What is written next, its rows leased; None when the segment has no room for it."""
        common, catalogue, device, log = self._common, self._common.catalogue, self._device, self._device.log
        batch = LogIo(0, self._backing, "write", segment=segment)
        there = set[int]()  # an object that was stored twice is in the queue twice
        # They are leased meanwhile; and a disk that hangs must not take the others' part.
        most = min(common.limits.write_batch, common.arena.total // _SHARE // len(common.backings.all))
        looked = 0
        while device.queue and batch.bytes < most and len(batch.rows) < ev.MAX_BATCH:
            looked += 1
            if looked > 4 * ev.MAX_BATCH:  # most of what waited is gone
                common.turns.add(iter([[]]), MANAGER, False)  # and the rest is looked at in the next slice
                break
            dirty = device.queue[0]
            row = dirty.row
            alive = catalogue.epoch[row] == dirty.epoch and State.RESIDENT <= catalogue.state[row] <= State.LEASED
            if not alive or catalogue.place[row] or row in there:
                common.counters["write_gone"] += not alive
                device.queue.popleft()
                continue
            index = catalogue.indexes[catalogue.owner[row]]
            length, tables = HEADER + index.size, table_bytes(len(index.shards))
            if not log.fits(length, tables):
                common.counters["write_too_large"] += 1
                device.queue.popleft()
                continue
            if not log.room(segment, length, index.id, tables):
                return batch if batch.rows else None
            device.queue.popleft()
            at = log.append(row, length, index.id, tables)
            batch.rows.append(row)
            there.add(row)
            batch.places.append(at)
            batch.dirty.append(dirty)
            batch.bytes += length
            catalogue.lease([row])
        return batch

    def _write(self, segment: Segment, batch: LogIo) -> Effect:
        common, catalogue, device = self._common, self._common.catalogue, self._device
        device.writing = True
        device.rows.update(batch.rows)
        device.wrote_at, device.wrote = common.now, batch.bytes
        objects: tuple[Stored, ...] = tuple(
            record_of(catalogue, row, at, dirty.parent, dirty.depth, max(0, common.now - catalogue.born[row]))
            for row, at, dirty in zip(batch.rows, batch.places, batch.dirty, strict=True)
        )
        return Write(common.backings.begin(batch), device.log.number, objects, segment.number, segment.seq)

    # --- segments -----------------------------------------------------------------------------------------------

    def _prepare(self) -> list[Effect]:
        """Get a segment ready to be opened: a free one, or else the oldest that nothing is read from."""
        device, log = self._device, self._device.log
        if device.reclaiming:
            return []  # its segment is the next one
        device.fresh = False
        if log.free:
            return [self._erase(log.begin(log.free.popleft(), self._common.now))]
        if log.fresh and (self._common.now >= device.full_until or not log.sealed):
            device.fresh = True
            return [self._erase(log.begin(log.fresh.popleft(), self._common.now))]
        segment = log.to_reclaim()
        if segment is None:
            return []
        log.sealed.remove(segment)
        segment.closing = device.reclaiming = True
        return self._common.start(self._reclaim(segment))

    def _erase(self, segment: Segment) -> Effect:
        log = self._device.log
        log.erasing = segment
        io = self._common.backings.begin(LogIo(0, self._backing, "reuse", segment=segment))
        return Reuse(io, log.number, segment.number, segment.seq)

    def _reclaim(self, segment: Segment) -> Work:
        """Forget the records of a segment. What is in DRAM stays there and is written again."""
        catalogue, log = self._common.catalogue, self._device.log
        here = pack(log.number, segment.number, 0) >> 28
        for start in range(0, len(segment.rows), ev.MAX_BATCH):
            for row in segment.rows[start : start + ev.MAX_BATCH]:
                if not catalogue.place[row] or catalogue.place[row] >> 28 != here:
                    continue
                self._common.counters["reclaimed"] += 1
                catalogue.note(Kind.RECLAIMED, row, catalogue.place[row])
                cold = catalogue.state[row] == State.COLD
                if cold and not catalogue.there[row] & catalogue.backings.keeping:
                    catalogue.remove(row)
                    continue
                catalogue.withdraw(row, catalogue.place[row])
                if not cold:
                    self._again(row, b"", 0)
            yield []
        self._device.reclaiming = False
        log.retire(segment)
        log.free.remove(segment.number)
        yield [self._erase(log.begin(segment.number, self._common.now))]

    # --- ends ---------------------------------------------------------------------------------------------------

    def written(self, io: LogIo, failed: set[int]) -> None:
        catalogue, device, counters = self._common.catalogue, self._device, self._common.counters
        segment = io.segment
        assert segment is not None
        device.writing = False
        device.rows.difference_update(io.rows)
        good = min(failed, default=len(io.rows))
        for position, row in enumerate(io.rows):
            index = catalogue.indexes[catalogue.owner[row]]
            if position < good:
                place = pack(device.log.number, segment.number, io.places[position])
                if not io.dirty[position].again:
                    device.rewrite += (HEADER + index.size) * REWRITE_SHARE
                catalogue.written(row, place)
            else:
                catalogue.note(Kind.NOT_WRITTEN, row)
                catalogue.release([row])
        device.rewrite = min(device.rewrite, device.log.segment_bytes)
        if good == len(io.rows):
            device.write_ended(True, self._common.now)
            return
        device.log.rewind(segment, io.places[good], len(io.rows) - good)
        again = [dirty for dirty in io.dirty[good:] if not dirty.retried]
        counters["write_dropped_errors"] += len(io.rows) - good - len(again)
        for dirty in reversed(again):
            dirty.retried = True
            device.queue.appendleft(dirty)
        self._write_error()

    def begun(self, io: LogIo, failed: bool) -> None:
        device, log, segment = self._device, self._device.log, io.segment
        assert segment is not None
        log.erasing = None
        if failed:
            device.full_until = self._common.now + self._common.limits.retry_ns
            log.retire(segment, failed=True)
            self._write_error()
            if not device.fresh:
                # It was there before: this is not for want of room, and giving up further ones would not help.
                device.paused_until = self._common.now + self._common.limits.retry_ns
        else:
            device.write_ended(True, self._common.now)
            log.next = segment

    def _write_error(self) -> None:
        device = self._device
        device.write_ended(False, self._common.now)
        if device.write_errors >= ERRORS:
            device.paused_until = self._common.now + self._common.limits.retry_ns
