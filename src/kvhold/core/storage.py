"""Between the catalogue and the logs: what is read, what is written, when a segment is given up.

Every I/O has a number, is answered exactly once, and until then holds its rows by a lease and its bytes in the budget.
Reads are in the order in which they were asked for; those that nobody waits for any more are not begun. There is one
write at a time per log: what failed is written again to the same place, so that records are without gaps.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvhold.core import events as ev
from kvhold.core.arena import align
from kvhold.core.catalogue import Index
from kvhold.core.common import Common, Timer, Work
from kvhold.core.events import Effect
from kvhold.core.rows import State
from kvhold.core.segments import HEADER, Log, Segment, pack, table_bytes, unpack
from kvhold.core.story import Kind, fingerprint

READ_BATCH = 8 << 20
"""Bytes of one read: enough for a device, little enough that what waits for it is not held up."""
ERRORS = 3
"""Failures one after the other that take a log out of service for a while."""
REWRITE_SHARE = 0.1
"""Bytes that may be written again, when their segment is given up, for each byte that is written for the first time.

Without a bound, objects in DRAM that fill the log would push each other out of it for ever, with nothing new to keep.
"""
_WRITE_SHARE = 8
"""At most this part of the arena is being written to logs at once."""
_GHOSTS = 1 << 16


@dataclass(slots=True)
class _Dirty:
    """A row that is to be written, if its slot is still the same."""

    row: int
    epoch: int
    parent: bytes
    depth: int
    number: int  # in the order of queueing
    retried: bool = False
    again: bool = False  # it was in the log before


@dataclass(slots=True, eq=False)
class _Io:
    number: int
    device: "Device"
    segment: Segment | None = None
    rows: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    dirty: list[_Dirty] = field(default_factory=list)
    bytes: int = 0
    kind: str = ""
    cancelled: bool = False


@dataclass(slots=True, eq=False)
class _Flush:
    """Somebody waits until, of each device, what was queued up to a number is written and synced."""

    session: int
    waits: dict[int, int]
    ios: set[int] = field(default_factory=set)
    failed: bool = False


@dataclass(slots=True)
class Device:
    """A log and how it does. After a segment could not be had, old ones are reused before new ones for a while."""

    log: Log
    ready: bool = False
    queue: deque[_Dirty] = field(default_factory=deque)
    queued: int = 0  # ever
    writing: bool = False
    reclaiming: bool = False
    full_until: int = 0
    rewrite: float = 0.0  # bytes that may be written again
    next_write: int = 0  # not before then
    read_errors: int = 0
    write_errors: int = 0
    reads_again: int = 0  # not read before then
    reads: Timer[_Io] = field(default_factory=Timer)
    purged: list[tuple[bytes, int]] = field(default_factory=list)  # (namespace, up to seq) while records are recovered


class Storage:
    """``arrived(rows)`` is told of (row, whether it can be read now) and says what follows from it."""

    def __init__(self, common: Common, arrived: Callable[[Sequence[tuple[int, bool]]], list[Effect]]) -> None:
        self.devices: dict[int, Device] = {}
        self.read_bytes = 0  # under way
        self.write_bytes = 0
        self._common = common
        self._arrived = arrived
        self._queued: dict[int, None] = {}  # rows to be read, in order
        self._ios: dict[int, _Io] = {}
        self._reading: dict[int, _Io] = {}
        self._writing: set[int] = set()
        self._flushes: list[_Flush] = []
        self._next_io = 1
        self._ghosts = array("Q", bytes(8 * _GHOSTS))

    @property
    def pending(self) -> int:
        """I/Os that are not answered."""
        return len(self._ios)

    @property
    def queued_writes(self) -> int:
        return sum(len(device.queue) for device in self.devices.values())

    @property
    def writing(self) -> bool:
        """Whether anything is still to be written that can be."""
        return any(d.writing or (d.queue and d.ready and d.write_errors < ERRORS) for d in self.devices.values())

    # --- logs come ----------------------------------------------------------------------------------------------

    def opened(self, event: ev.LogOpened) -> None:
        log = self._common.catalogue.logs[event.log] = Log(event.log, event.segments, event.segment_bytes)
        log.seq = event.newest_seq
        self.devices[event.log] = Device(log)

    def found(self, event: ev.Segments) -> None:
        log = self.devices[event.log].log
        for number, seq, age in event.lives:
            log.adopt(number, seq, self._common.now - age)

    def recovered(self, event: ev.Recovered) -> None:
        """Records of one segment; of two of the same object the one of the younger segment counts."""
        catalogue, limits = self._common.catalogue, self._common.limits
        device = self.devices[event.log]
        log = device.log
        segment = log.segments[event.segment]
        geometry: tuple[bytes, int, int, tuple[int, ...]] | None = None  # of the record before: most are alike
        index: Index | None = None
        purged = False
        for namespace, group, key, shards, at in event.records:
            if (namespace, group, len(key), shards) != geometry:
                geometry = namespace, group, len(key), shards
                size = align(sum(map(align, shards)))
                purged = any(name in (b"", namespace) and segment.seq <= seq for name, seq in device.purged)
                index = None if purged else catalogue.index(*geometry, size)
            if index is None:
                self._common.counters["recovered_foreign"] += not purged
                continue
            row = index.get(key)
            place = pack(log.number, segment.number, at)
            if row is None:
                if catalogue.objects >= limits.max_objects:
                    self._common.counters["recovered_over"] += 1
                    catalogue.drop_index_if_idle(index)
                    geometry = None
                    continue
                row = catalogue.recover(index, key, place)
            elif not catalogue.place[row]:
                catalogue.place[row] = place
            else:
                _, other, _ = catalogue.segment_of(row)
                if catalogue.state[row] == State.LOADING or other.seq > segment.seq:
                    continue
                catalogue.leave_log(row)
                catalogue.place[row] = place
            segment.live += HEADER + size
            segment.rows.append(row)
            segment.tables[index.id] = table_bytes(len(shards))
            self._common.counters["recovered"] += 1

    def ready(self, event: ev.LogReady) -> None:
        device = self.devices[event.log]
        device.ready = True
        device.purged.clear()

    # --- reads --------------------------------------------------------------------------------------------------

    def readable(self, row: int) -> bool:
        """Whether it makes sense to wait for a COLD row."""
        number, segment, _ = unpack(self._common.catalogue.place[row])
        return not self.devices[number].log.segments[segment].closing

    def in_service(self, row: int) -> bool:
        device = self.devices[unpack(self._common.catalogue.place[row])[0]]
        now, oldest = self._common.now, device.reads.oldest
        hung = oldest is not None and now - oldest > self._common.limits.answer_ns
        return not hung and now >= device.reads_again

    def read(self, row: int) -> None:
        """Read a row that is LOADING, when its turn comes."""
        _, segment, _ = self._common.catalogue.segment_of(row)
        segment.readers += 1
        self._queued[row] = None
        self._common.story.note(
            Kind.LOADING,
            fingerprint(self._common.catalogue.key[row]),
            self._common.catalogue.owner[row],
            row,
            self._common.catalogue.place[row],
        )

    def unwanted(self, rows: Sequence[int]) -> list[Effect]:
        """Of these rows, what nobody but its own read holds need not be read."""
        catalogue, effects = self._common.catalogue, list[Effect]()
        for row in rows if self._queued or self._reading else ():
            if catalogue.leases[row] != 1:
                continue
            if row in self._queued and catalogue.state[row] == State.LOADING:
                del self._queued[row]
                catalogue.segment_of(row)[1].readers -= 1
                catalogue.unfill(row)
            elif (io := self._reading.get(row)) and not io.cancelled and all(catalogue.leases[r] == 1 for r in io.rows):
                io.cancelled = True
                effects.append(ev.Cancel(io.number, io.device.log.number))
        return effects

    def _pump_reads(self) -> list[Effect]:
        common, catalogue = self._common, self._common.catalogue
        effects: list[Effect] = []
        while self._queued and self.read_bytes < common.limits.read_bytes:
            rows: list[int] = []
            target: tuple[Log, Segment] | None = None
            objects: list[ev.Stored] = []
            size = 0
            for row in self._queued:
                if catalogue.state[row] != State.LOADING or size >= READ_BATCH or len(rows) >= ev.MAX_BATCH:
                    break
                log, segment, at = catalogue.segment_of(row)
                if target is None:
                    target = log, segment
                elif target[1] is not segment:
                    break
                rows.append(row)
                objects.append(self._stored(row, at))
                size += catalogue.size[row]
            if target is None:  # the first one was purged while it waited
                row = next(iter(self._queued))
                effects += self._give_up_read(row)
                continue
            for row in rows:
                del self._queued[row]
            device = self.devices[target[0].number]
            io = self._new_io(device, "read", target[1], rows, size)
            self.read_bytes += size
            device.reads.begin(io, common.now)
            self._reading.update(dict.fromkeys(rows, io))
            effects.append(ev.Read(io.number, target[0].number, target[1].number, target[1].seq, tuple(objects)))
        return effects

    def _give_up_read(self, row: int) -> list[Effect]:
        """A DOOMED row need not be read. Its segment's count went with its place: see :meth:`removed`."""
        del self._queued[row]
        effects = self._arrived([(row, False)])
        self._common.catalogue.release([row])
        return effects

    def removing(self, row: int) -> None:
        """An object is about to be removed: if it waits for its read, its segment need not wait for that."""
        if row in self._queued and self._common.catalogue.state[row] == State.LOADING:
            self._common.catalogue.segment_of(row)[1].readers -= 1

    # --- writes -------------------------------------------------------------------------------------------------

    def write(self, row: int, parent: bytes, depth: int) -> None:
        """Write a resident object when its turn comes, if it is still there then."""
        if not self.devices:
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
        number = sorted(self.devices)[mark % len(self.devices)]
        device = self.devices[number]
        if len(device.queue) >= limits.write_queue:
            counters["write_dropped_queue"] += 1
            return
        self._queue(device, row, parent, depth)

    def _queue(self, device: Device, row: int, parent: bytes, depth: int, again: bool = False) -> None:
        device.queued += 1
        device.queue.append(_Dirty(row, self._common.catalogue.epoch[row], parent, depth, device.queued, again=again))

    def touched(self, rows: Sequence[int], start: int, end: int) -> None:
        """Objects ``start`` to ``end`` of the chain ``rows`` were found; that may make them worth writing."""
        catalogue = self._common.catalogue
        if not self.devices or not self._common.limits.second_touch:
            return
        for depth in range(start, end):
            row = rows[depth]
            if State.RESIDENT <= catalogue.state[row] <= State.LEASED and not catalogue.place[row]:
                self.write(row, catalogue.key[rows[depth - 1]] if depth else b"", depth)

    def _pump_writes(self, device: Device) -> list[Effect]:
        common, log = self._common, device.log
        if not device.ready or device.writing or not device.queue or common.now < device.next_write:
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
            io = self._new_io(device, "seal", segment, [], 0)
            effects.append(ev.Seal(io.number, log.number, segment.number, segment.seq, segment.end))
        half_full = log.open is None or log.open.end * 2 > log.segment_bytes
        if half_full and log.next is None and log.erasing is None:
            effects += self._prepare(device)
        return effects

    def _batch(self, device: Device, segment: Segment) -> _Io | None:
        """What is written next, its rows leased; None when the segment has no room for it."""
        common, catalogue, log = self._common, self._common.catalogue, device.log
        batch = _Io(0, device, segment, kind="write")
        there = set[int]()  # an object that was stored twice is in the queue twice
        # They are leased meanwhile.
        most = min(common.limits.write_batch, common.arena.total // _WRITE_SHARE - self.write_bytes)
        while device.queue and batch.bytes < most and len(batch.rows) < ev.MAX_BATCH:
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

    def _write(self, device: Device, segment: Segment, batch: _Io) -> Effect:
        common = self._common
        batch.number = self._number(batch)
        device.writing = True
        self._writing.update(batch.rows)
        self.write_bytes += batch.bytes
        if common.limits.write_rate:
            pause = batch.bytes * 1_000_000_000 // common.limits.write_rate
            device.next_write = max(common.now, device.next_write) + pause
        objects = tuple(
            self._stored(row, at, dirty.parent, dirty.depth)
            for row, at, dirty in zip(batch.rows, batch.places, batch.dirty, strict=True)
        )
        return ev.Write(batch.number, device.log.number, segment.number, segment.seq, objects)

    def _stored(self, row: int, at: int, parent: bytes = b"", depth: int = 0) -> ev.Stored:
        catalogue = self._common.catalogue
        index = catalogue.indexes[catalogue.owner[row]]
        name, key = index.namespace.name, catalogue.key[row]
        return ev.Stored(name, index.group, key, parent, depth, index.shards, catalogue.offset[row], at)

    # --- segments -----------------------------------------------------------------------------------------------

    def _prepare(self, device: Device) -> list[Effect]:
        """Get a segment ready to be opened: a free one, or else the oldest that nothing is read from."""
        log = device.log
        if device.reclaiming:
            return []  # its segment is the next one
        if log.free:
            return [self._erase(device, log.begin(log.free.popleft(), self._common.now))]
        if log.fresh and (self._common.now >= device.full_until or not log.sealed):
            return [self._erase(device, log.begin(log.fresh.popleft(), self._common.now))]
        segment = log.to_reclaim()
        if segment is None:
            return []
        log.sealed.remove(segment)
        segment.closing = device.reclaiming = True
        return self._common.start(self._reclaim(device, segment))

    def _erase(self, device: Device, segment: Segment) -> Effect:
        device.log.erasing = segment
        io = self._new_io(device, "reuse", segment, [], 0)
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
                self._common.story.note(
                    Kind.RECLAIMED, fingerprint(catalogue.key[row]), catalogue.owner[row], row, segment.number
                )
                if catalogue.state[row] == State.COLD:
                    catalogue.remove(row)
                else:
                    catalogue.leave_log(row)
                    if device.rewrite >= HEADER + catalogue.size[row]:
                        device.rewrite -= HEADER + catalogue.size[row]
                        self._queue(device, row, b"", 0, again=True)
                        self._common.counters["rewritten"] += 1
            yield []
        device.reclaiming = False
        log.retire(segment)
        log.free.remove(segment.number)
        yield [self._erase(device, log.begin(segment.number, self._common.now))]

    # --- ends ---------------------------------------------------------------------------------------------------

    def forget(self, names: Sequence[tuple[bytes, int, bytes]]) -> list[Effect]:
        """Make the loss of some objects outlast the manager."""
        return [self._forget(device, device.log.position, names, None) for device in self.devices.values()]

    def purge(self, namespace: bytes, positions: dict[int, tuple[int, int]]) -> list[Effect]:
        """Make a purge of what was recorded before ``positions`` outlast the manager."""
        effects: list[Effect] = []
        for number, device in self.devices.items():
            position = positions[number]
            if not device.ready:
                device.purged.append((namespace, position[0]))
            effects.append(self._forget(device, position, (), namespace))
        return effects

    def _forget(
        self,
        device: Device,
        position: tuple[int, int],
        names: Sequence[tuple[bytes, int, bytes]],
        namespace: bytes | None,
    ) -> Effect:
        io = self._new_io(device, "forget", None, [], 0)
        return ev.Forget(io.number, device.log.number, *position, tuple(names), namespace)

    def positions(self, then: int) -> dict[int, tuple[int, int]]:
        """What lies in segments that were begun by ``then`` lies before these, by log."""
        return {number: device.log.position_at(then) for number, device in self.devices.items()}

    def flush(self, session: int) -> list[Effect]:
        """Have what is queued now written and synced; the session is told when it is."""
        self._flushes.append(_Flush(session, {number: device.queued for number, device in self.devices.items()}))
        return self._end_flushes()

    def _sync(self, device: Device) -> list[Effect]:
        """Sync a log for those for whom everything is written there."""
        if device.writing or not device.ready:
            return []
        number, first = device.log.number, device.queue[0].number if device.queue else device.queued + 1
        ripe = [flush for flush in self._flushes if flush.waits.get(number, first) < first]
        if not ripe:
            return []
        io = self._new_io(device, "sync", None, [], 0)
        for flush in ripe:
            del flush.waits[number]
            flush.ios.add(io.number)
        return [ev.Sync(io.number, number)]

    def _end_flushes(self) -> list[Effect]:
        over = [flush for flush in self._flushes if not flush.waits and not flush.ios]
        self._flushes = [flush for flush in self._flushes if flush not in over]
        return [ev.Flushed(flush.session, not flush.failed) for flush in over]

    def recorded_before(self, row: int, positions: dict[int, tuple[int, int]]) -> bool | None:
        """Whether an object's record lies before ``positions``; None if it has none, nor is one being written."""
        if row in self._writing:
            return False
        if not self._common.catalogue.place[row]:
            return None
        log, segment, at = self._common.catalogue.segment_of(row)
        return (segment.seq, at) < positions.get(log.number, (0, 0))

    def done(self, event: ev.Done) -> list[Effect]:
        """Exactly one answer to an I/O; any other is counted and ignored."""
        io = self._ios.pop(event.io, None)
        if io is None:
            self._common.counters["stale_io"] += 1
            return []
        failed = set(event.failed)
        match io.kind:
            case "read":
                return self._read_done(io, failed)
            case "write":
                self._write_done(io, failed)
            case "reuse":
                self._reuse_done(io, bool(failed))
            case "seal":
                assert io.segment is not None
                io.segment.readers -= 1
            case "sync":
                for flush in self._flushes:
                    if event.io in flush.ios:
                        flush.ios.remove(event.io)
                        flush.failed |= bool(failed)
        if failed:
            self._common.counters[f"{io.kind}_failed"] += 1
        return self._end_flushes()

    def _read_done(self, io: _Io, failed: set[int]) -> list[Effect]:
        catalogue, device, counters = self._common.catalogue, io.device, self._common.counters
        assert io.segment is not None
        device.reads.end(io)
        self.read_bytes -= io.bytes
        io.segment.readers -= len(io.rows)
        arrived: list[tuple[int, bool]] = []
        lost: list[tuple[bytes, int, bytes]] = []
        for position, row in enumerate(io.rows):
            del self._reading[row]
            doomed = catalogue.state[row] != State.LOADING
            if position not in failed:
                counters["read_objects"] += 1
                arrived.append((row, not doomed))
                if not doomed:
                    catalogue.note(Kind.LOADED, row)
                catalogue.loaded(row)
            elif io.cancelled and not doomed:
                if catalogue.leases[row] == 1:
                    catalogue.unfill(row)
                else:
                    self.read(row)
            else:
                counters["read_failed"] += 1
                if not doomed:
                    index = catalogue.indexes[catalogue.owner[row]]
                    lost.append((index.namespace.name, index.group, catalogue.key[row]))
                    catalogue.note(Kind.NOT_LOADED, row)
                arrived.append((row, False))
                catalogue.spoiled(row)
        if not io.cancelled:
            device.read_errors = device.read_errors + 1 if len(failed) == len(io.rows) else 0
            if device.read_errors >= ERRORS:
                device.reads_again = self._common.now + self._common.limits.retry_ns
        return self._arrived(arrived) + (self.forget(lost) if lost else [])

    def _write_done(self, io: _Io, failed: set[int]) -> None:
        catalogue, device, counters, segment = self._common.catalogue, io.device, self._common.counters, io.segment
        assert segment is not None
        device.writing = False
        self._writing.difference_update(io.rows)
        self.write_bytes -= io.bytes
        good = min(failed, default=len(io.rows))
        for position, row in enumerate(io.rows):
            index = catalogue.indexes[catalogue.owner[row]]
            if position < good:
                place = pack(device.log.number, segment.number, io.places[position])
                self._common.story.note(Kind.WRITTEN, fingerprint(catalogue.key[row]), index.id, row, place)
                counters["write_objects"] += 1
                if not io.dirty[position].again:
                    device.rewrite += (HEADER + index.size) * REWRITE_SHARE
                catalogue.written(row, place)
            else:
                catalogue.note(Kind.NOT_WRITTEN, row)
                catalogue.release([row])
        device.rewrite = min(device.rewrite, device.log.segment_bytes)
        if good == len(io.rows):
            device.write_errors = 0
            return
        device.log.rewind(segment, io.places[good], len(io.rows) - good)
        again = [dirty for dirty in io.dirty[good:] if not dirty.retried]
        counters["write_dropped_errors"] += len(io.rows) - good - len(again)
        for dirty in reversed(again):
            dirty.retried = True
            device.queue.appendleft(dirty)
        self._write_error(device)

    def _reuse_done(self, io: _Io, failed: bool) -> None:
        log, segment = io.device.log, io.segment
        assert segment is not None
        log.erasing = None
        if failed:
            io.device.full_until = self._common.now + self._common.limits.retry_ns
            log.retire(segment, failed=True)
            self._write_error(io.device)
        else:
            io.device.write_errors = 0
            log.next = segment

    def _write_error(self, device: Device) -> None:
        device.write_errors += 1
        if device.write_errors >= ERRORS:
            device.next_write = self._common.now + self._common.limits.retry_ns

    # --- always -------------------------------------------------------------------------------------------------

    def pump(self) -> list[Effect]:
        """What may be begun now: reads before writes."""
        effects = self._pump_reads() if self._queued else []
        for device in self.devices.values():
            if self._flushes:
                effects += self._sync(device)  # before the next write: a flush must not wait for what comes after it
            if device.queue:
                effects += self._pump_writes(device)
        return effects

    @property
    def next_deadline(self) -> int | None:
        """When :meth:`pump` may be able to do more than now, for want of nothing but time."""
        waiting = [d.next_write for d in self.devices.values() if d.queue and not d.writing and d.ready]
        return min((at for at in waiting if at > self._common.now), default=None)

    def _new_io(self, device: Device, kind: str, segment: Segment | None, rows: list[int], size: int) -> _Io:
        io = _Io(0, device, segment, rows, bytes=size, kind=kind)
        io.number = self._number(io)
        return io

    def _number(self, io: _Io) -> int:
        number, self._next_io = self._next_io, self._next_io + 1
        self._ios[number] = io
        return number
