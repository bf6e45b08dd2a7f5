"""Writes to logs, behind what is stored: batched, one at a time per log; and which segments they go to."""

from array import array
from collections.abc import Sequence

from kvhold.core import events as ev
from kvhold.core.common import Common
from kvhold.core.devices import ERRORS, Device, Devices, Dirty, Io
from kvhold.core.events import Effect
from kvhold.core.rows import State
from kvhold.core.segments import HEADER, Segment, pack, table_bytes
from kvhold.core.story import Kind, fingerprint
from kvhold.core.turns import MANAGER, Work

REWRITE_SHARE = 0.1
"""Bytes that may be written again, when their segment is given up, for each byte that is written for the first time.

Without a bound, objects in DRAM that fill the log would push each other out of it for ever, with nothing new to keep.
"""
_SHARE = 8
"""At most this part of the arena is being written to logs at once."""
_GHOSTS = 1 << 16


class Writes:
    def __init__(self, common: Common, devices: Devices) -> None:
        self.bytes = 0  # under way
        self.rows: set[int] = set()  # being written
        self._common = common
        self._devices = devices
        self._ghosts = array("Q", bytes(8 * _GHOSTS))

    def write(self, row: int, parent: bytes, depth: int) -> None:
        """Write a resident object when its turn comes, if it is still there then."""
        if not self._devices.devices:
            return
        catalogue, limits, counters = self._common.catalogue, self._common.limits, self._common.counters
        key = catalogue.key[row]
        mark = fingerprint(key)
        if limits.second_touch:
            again = self._ghosts[mark % _GHOSTS] == mark
            self._ghosts[mark % _GHOSTS] = 0 if again else mark
            if not again:
                counters["write_first_touch"] += 1
                return
        number = sorted(self._devices.devices)[mark % len(self._devices.devices)]
        device = self._devices.devices[number]
        if len(device.queue) >= limits.write_queue:
            counters["write_dropped_queue"] += 1
        elif catalogue.logged[row]:
            self._again(device, row, parent, depth)
        else:
            self._queue(device, row, parent, depth)

    def _again(self, device: Device, row: int, parent: bytes, depth: int) -> None:
        """Write once more what was in the log already, as far as there is a budget for that."""
        size = HEADER + self._common.catalogue.size[row]
        if device.rewrite >= size:
            device.rewrite -= size
            self._queue(device, row, parent, depth, again=True)
            self._common.counters["rewritten"] += 1

    def _queue(self, device: Device, row: int, parent: bytes, depth: int, again: bool = False) -> None:
        device.queued += 1
        device.queue.append(Dirty(row, self._common.catalogue.epoch[row], parent, depth, device.queued, again=again))

    def touched(self, rows: Sequence[int], start: int, end: int) -> None:
        """Objects ``start`` to ``end`` of the chain ``rows`` were found; that may make them worth writing."""
        if self._devices.devices and self._common.limits.second_touch:
            key = self._common.catalogue.key
            for depth in range(start, end):
                self.touched_one(rows[depth], key[rows[depth - 1]] if depth else b"", depth)

    def touched_one(self, row: int, parent: bytes, depth: int) -> None:
        """An object that follows ``parent`` was found."""
        catalogue = self._common.catalogue
        if not self._devices.devices or not self._common.limits.second_touch:
            return
        if State.RESIDENT <= catalogue.state[row] <= State.LEASED and not catalogue.place[row]:
            self.write(row, parent, depth)

    def not_before(self, device: Device) -> int:
        """When a log may be written: after errors not for a while, and else as the rate allows that holds now."""
        rate = self._common.limits.write_rate
        return max(device.paused_until, device.wrote_at + device.wrote * 1_000_000_000 // rate if rate else 0)

    def pump(self, device: Device) -> list[Effect]:
        common, log = self._common, device.log
        if not device.ready or device.writing or not device.queue or common.now < self.not_before(device):
            return []
        effects: list[Effect] = []
        while device.queue:
            if log.open is None:
                if log.next is None:
                    break
                log.open, log.next = log.next, None
            batch = self._batch(device, log.open)
            if batch is not None:
                if batch.rows:
                    effects.append(self._write(device, log.open, batch))
                break
            segment, log.open = log.open, None
            segment.readers += 1
            log.sealed.append(segment)
            io = self._devices.new_io(device, "seal", segment, [], 0)
            effects.append(ev.Seal(io.number, log.number, segment.number, segment.seq, segment.end))
        half_full = log.open is None or log.open.end * 2 > log.segment_bytes
        if half_full and log.next is None and log.erasing is None:
            effects += self._prepare(device)
        return effects

    def _batch(self, device: Device, segment: Segment) -> Io | None:
        """What is written next, its rows leased; None when the segment has no room for it."""
        common, catalogue, log = self._common, self._common.catalogue, device.log
        batch = Io(0, device, segment, kind="write")
        there = set[int]()  # an object that was stored twice is in the queue twice
        # They are leased meanwhile; and a disk that hangs must not take the others' part.
        most = min(common.limits.write_batch, common.arena.total // _SHARE // len(self._devices.devices))
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

    def _write(self, device: Device, segment: Segment, batch: Io) -> Effect:
        common = self._common
        batch.number = self._devices.number(batch)
        device.writing = True
        self.rows.update(batch.rows)
        self.bytes += batch.bytes
        device.wrote_at, device.wrote = common.now, batch.bytes
        objects = tuple(
            self._devices.stored(row, at, dirty.parent, dirty.depth)
            for row, at, dirty in zip(batch.rows, batch.places, batch.dirty, strict=True)
        )
        return ev.Write(batch.number, device.log.number, segment.number, segment.seq, objects)

    # --- segments -----------------------------------------------------------------------------------------------

    def _prepare(self, device: Device) -> list[Effect]:
        """Get a segment ready to be opened: a free one, or else the oldest that nothing is read from."""
        log = device.log
        if device.reclaiming:
            return []  # its segment is the next one
        device.fresh = False
        if log.free:
            return [self._erase(device, log.begin(log.free.popleft(), self._common.now))]
        if log.fresh and (self._common.now >= device.full_until or not log.sealed):
            device.fresh = True
            return [self._erase(device, log.begin(log.fresh.popleft(), self._common.now))]
        segment = log.to_reclaim()
        if segment is None:
            return []
        log.sealed.remove(segment)
        segment.closing = device.reclaiming = True
        return self._common.start(self._reclaim(device, segment))

    def _erase(self, device: Device, segment: Segment) -> Effect:
        device.log.erasing = segment
        io = self._devices.new_io(device, "reuse", segment, [], 0)
        return ev.Reuse(io.number, device.log.number, segment.number, segment.seq)

    def _reclaim(self, device: Device, segment: Segment) -> Work:
        """Forget the records of a segment. What is in DRAM stays there and is written again."""
        catalogue, log = self._common.catalogue, device.log
        here = pack(log.number, segment.number, 0) >> 28
        for start in range(0, len(segment.rows), ev.MAX_BATCH):
            for row in segment.rows[start : start + ev.MAX_BATCH]:
                if not catalogue.place[row] or catalogue.place[row] >> 28 != here:
                    continue
                self._common.counters["reclaimed"] += 1
                catalogue.note(Kind.RECLAIMED, row, segment.number)
                if catalogue.state[row] == State.COLD:
                    catalogue.remove(row)
                else:
                    catalogue.leave_log(row)
                    self._again(device, row, b"", 0)
            yield []
        device.reclaiming = False
        log.retire(segment)
        log.free.remove(segment.number)
        yield [self._erase(device, log.begin(segment.number, self._common.now))]

    # --- ends ---------------------------------------------------------------------------------------------------

    def written(self, io: Io, failed: set[int]) -> None:
        catalogue, device, counters, segment = self._common.catalogue, io.device, self._common.counters, io.segment
        assert segment is not None
        device.writing = False
        self.rows.difference_update(io.rows)
        self.bytes -= io.bytes
        good = min(failed, default=len(io.rows))
        for position, row in enumerate(io.rows):
            index = catalogue.indexes[catalogue.owner[row]]
            if position < good:
                place = pack(device.log.number, segment.number, io.places[position])
                catalogue.note(Kind.WRITTEN, row, place)
                counters["write_objects"] += 1
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
        self._write_error(device)

    def begun(self, io: Io, failed: bool) -> None:
        log, segment = io.device.log, io.segment
        assert segment is not None
        log.erasing = None
        if failed:
            io.device.full_until = self._common.now + self._common.limits.retry_ns
            log.retire(segment, failed=True)
            self._write_error(io.device)
            if not io.device.fresh:
                # It was there before: this is not for want of room, and giving up further ones would not help.
                io.device.paused_until = self._common.now + self._common.limits.retry_ns
        else:
            io.device.write_ended(True, self._common.now)
            log.next = segment

    def _write_error(self, device: Device) -> None:
        device.write_ended(False, self._common.now)
        if device.write_errors >= ERRORS:
            device.paused_until = self._common.now + self._common.limits.retry_ns
