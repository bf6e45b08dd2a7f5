"""Between the catalogue and the logs: what was found there at the start, what ends an I/O, what outlasts a restart.

Every I/O has a number, is answered exactly once, and until then holds its rows by a lease and its bytes in the budget.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvhold.core import events as ev
from kvhold.core.arena import slot_bytes
from kvhold.core.catalogue import Index
from kvhold.core.common import Common
from kvhold.core.devices import ERRORS, Device, Devices
from kvhold.core.events import Effect
from kvhold.core.reads import Reads
from kvhold.core.rows import State
from kvhold.core.segments import HEADER, Log, pack, table_bytes
from kvhold.core.writes import Writes


@dataclass(slots=True, eq=False)
class _Flush:
    """Somebody waits until, of each device, what was queued up to a number is written and synced."""

    session: int
    waits: dict[int, int]
    ios: set[int] = field(default_factory=set)
    failed: bool = False


class Storage:
    """``arrived(rows)`` is told of (row, whether it can be read now) and says what follows from it."""

    def __init__(self, common: Common, arrived: Callable[[Sequence[tuple[int, bool]]], list[Effect]]) -> None:
        self._all = Devices(common.catalogue)
        self.devices, self.ios = self._all.devices, self._all.ios
        self.reads = Reads(common, self._all, arrived)
        self.writes = Writes(common, self._all)
        self._common = common
        self._flushes: list[_Flush] = []

    @property
    def pending(self) -> int:
        """I/Os that are not answered."""
        return len(self.ios)

    @property
    def queued_writes(self) -> int:
        return sum(len(device.queue) for device in self.devices.values())

    @property
    def writing(self) -> bool:
        """Whether anything is still to be written that can be: objects, or word of what was forgotten."""
        waits = any(d.writing or (d.queue and d.ready and d.write_errors < ERRORS) for d in self.devices.values())
        return waits or any(io.kind == "forget" for io in self.ios.values())

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
            if not key or (namespace, group, key) in device.lost:
                continue
            if (namespace, group, len(key), shards) != geometry:
                geometry = namespace, group, len(key), shards
                size = slot_bytes(shards)
                purged = any(name in (b"", namespace) and segment.seq <= seq for name, seq in device.purged)
                crowded = len(catalogue.indexes) >= limits.known_spaces and catalogue.find(namespace, group) is None
                if crowded and not purged:
                    self._common.counters["recovered_over"] += 1
                    geometry = None
                    continue
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
                catalogue.enter_log(row, place)
            else:
                _, other, _ = catalogue.segment_of(row)
                if catalogue.state[row] == State.LOADING or other.seq > segment.seq:
                    continue
                catalogue.leave_log(row)
                catalogue.enter_log(row, place)
            segment.live += HEADER + size
            segment.rows.append(row)
            segment.tables[index.id] = table_bytes(len(shards))
            self._common.counters["recovered"] += 1

    def ready(self, event: ev.LogReady) -> None:
        device = self.devices[event.log]
        device.ready = True
        device.purged.clear()
        device.lost.clear()

    # --- ends ---------------------------------------------------------------------------------------------------

    def forget(self, names: Sequence[tuple[bytes, int, bytes]]) -> list[Effect]:
        """Make the loss of some objects outlast the manager."""
        for device in self.devices.values():
            if not device.ready:
                device.lost.update(names)
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
        io = self._all.new_io(device, "forget", None, [], 0)
        return ev.Forget(io.number, device.log.number, *position, tuple(names), namespace)

    def positions(self, then: int) -> dict[int, tuple[int, int]]:
        """What lies in segments that were begun by ``then`` lies before these, by log."""
        return {number: device.log.position_at(then) for number, device in self.devices.items()}

    def flush(self, session: int) -> list[Effect]:
        """Have what is queued now written and synced; the session is told when it is."""
        self._flushes.append(_Flush(session, {number: device.queued for number, device in self.devices.items()}))
        return self._end_flushes()

    def forget_flushes(self, session: int) -> None:
        """The session is gone: what it wants written is written all the same, and nobody is told."""
        self._flushes = [flush for flush in self._flushes if flush.session != session]

    def _sync(self, device: Device) -> list[Effect]:
        """Sync a log for those for whom everything is written there."""
        if device.writing or not device.ready:
            return []
        number, first = device.log.number, device.queue[0].number if device.queue else device.queued + 1
        ripe = [flush for flush in self._flushes if flush.waits.get(number, first) < first]
        if not ripe:
            return []
        io = self._all.new_io(device, "sync", None, [], 0)
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
        if row in self.writes.rows:
            return False
        if not self._common.catalogue.place[row]:
            return None
        log, segment, at = self._common.catalogue.segment_of(row)
        return (segment.seq, at) < positions.get(log.number, (0, 0))

    def done(self, event: ev.Done) -> list[Effect]:
        """Exactly one answer to an I/O; any other is counted and ignored."""
        io = self.ios.pop(event.io, None)
        if io is None:
            self._common.counters["stale_io"] += 1
            return []
        failed = set(event.failed)
        match io.kind:
            case "read":
                effects, lost = self.reads.done(io, failed, event.kept)
                return effects + ([self._forget(io.device, io.device.log.position, lost, None)] if lost else [])
            case "write":
                self.writes.written(io, failed)
            case "reuse":
                self.writes.begun(io, bool(failed))
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

    # --- always -------------------------------------------------------------------------------------------------

    def pump(self) -> list[Effect]:
        """What may be begun now: reads before writes."""
        effects = self.reads.pump() if self.reads.queued else []
        for device in self.devices.values():
            if self._flushes:
                effects += self._sync(device)  # before the next write: a flush must not wait for what comes after it
            if device.queue:
                effects += self.writes.pump(device)
        return effects

    @property
    def next_deadline(self) -> int | None:
        """When :meth:`pump` may be able to do more than now, for want of nothing but time."""
        waiting = [self.writes.not_before(d) for d in self.devices.values() if d.queue and not d.writing and d.ready]
        return min((at for at in waiting if at > self._common.now), default=None)
