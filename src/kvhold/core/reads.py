"""Reads from logs: in the order in which they were asked for, shared, and not begun for nobody."""

from collections.abc import Callable, Sequence

from kvhold.core import events as ev
from kvhold.core.common import Common
from kvhold.core.devices import ERRORS, Devices, Io
from kvhold.core.events import Effect
from kvhold.core.rows import State
from kvhold.core.segments import Log, Segment, unpack
from kvhold.core.story import Kind

READ_BATCH = 8 << 20
"""Bytes of one read: enough for a device, little enough that what waits for it is not held up."""

Name = tuple[bytes, int, bytes]


class Reads:
    """``arrived(rows)`` is told of (row, whether it can be read now) and says what follows from it."""

    def __init__(
        self,
        common: Common,
        devices: Devices,
        arrived: Callable[[Sequence[tuple[int, bool]]], list[Effect]],
    ) -> None:
        self.bytes = 0  # under way
        self.queued: dict[int, None] = {}  # rows to be read, in order
        self._common = common
        self._devices = devices
        self._arrived = arrived
        self._reading: dict[int, Io] = {}

    def readable(self, row: int) -> bool:
        """Whether it makes sense to wait for a COLD row."""
        number, segment, _ = unpack(self._common.catalogue.place[row])
        return not self._devices.devices[number].log.segments[segment].closing

    def in_service(self, row: int) -> bool:
        device = self._devices.devices[unpack(self._common.catalogue.place[row])[0]]
        now, patience = self._common.now, self._common.limits.hung_ns
        return device.hangs_since(now, patience) is None and now >= device.reads_again

    def read(self, row: int) -> None:
        """Read a row that is LOADING, when its turn comes."""
        _, segment, _ = self._common.catalogue.segment_of(row)
        segment.readers += 1
        self.queued[row] = None
        self._common.catalogue.note(Kind.LOADING, row, self._common.catalogue.place[row])

    def unwanted(self, rows: Sequence[int]) -> list[Effect]:
        """Of these rows, what nobody but its own read holds need not be read."""
        catalogue, effects = self._common.catalogue, list[Effect]()
        for row in rows if self.queued or self._reading else ():
            if catalogue.leases[row] != 1:
                continue
            if row in self.queued and catalogue.state[row] == State.LOADING:
                del self.queued[row]
                catalogue.segment_of(row)[1].readers -= 1
                catalogue.unfill(row)
            elif (io := self._reading.get(row)) and not io.cancelled and all(catalogue.leases[r] == 1 for r in io.rows):
                io.cancelled = True
                effects.append(ev.Cancel(io.number, io.device.log.number))
        return effects

    def pump(self) -> list[Effect]:
        common, catalogue = self._common, self._common.catalogue
        effects: list[Effect] = []
        while self.queued and self.bytes < common.limits.read_bytes:
            rows: list[int] = []
            target: tuple[Log, Segment] | None = None
            objects: list[ev.Stored] = []
            size = 0
            for row in self.queued:
                if catalogue.state[row] != State.LOADING or size >= READ_BATCH or len(rows) >= ev.MAX_BATCH:
                    break
                log, segment, at = catalogue.segment_of(row)
                if target is None:
                    target = log, segment
                elif target[1] is not segment:
                    break
                rows.append(row)
                objects.append(self._devices.stored(row, at))
                size += catalogue.size[row]
            if target is None:  # the first one was purged while it waited
                row = next(iter(self.queued))
                effects += self._give_up_read(row)
                continue
            for row in rows:
                del self.queued[row]
            device = self._devices.devices[target[0].number]
            io = self._devices.new_io(device, "read", target[1], rows, size)
            self.bytes += size
            device.reads.begin(io, common.now)
            self._reading.update(dict.fromkeys(rows, io))
            effects.append(ev.Read(io.number, target[0].number, target[1].number, target[1].seq, tuple(objects)))
        return effects

    def _give_up_read(self, row: int) -> list[Effect]:
        """A DOOMED row need not be read. Its segment's count went with its place: see :meth:`removed`."""
        del self.queued[row]
        effects = self._arrived([(row, False)])
        self._common.catalogue.release([row])
        return effects

    def removing(self, row: int) -> None:
        """An object is about to be removed: if it waits for its read, its segment need not wait for that."""
        if row in self.queued and self._common.catalogue.state[row] == State.LOADING:
            self._common.catalogue.segment_of(row)[1].readers -= 1

    def done(self, io: Io, failed: set[int], kept: bool) -> tuple[list[Effect], list[Name]]:
        """What follows from a read, and the names of objects that are lost. What failed may be ``kept`` in the log."""
        catalogue, device, counters = self._common.catalogue, io.device, self._common.counters
        assert io.segment is not None
        device.reads.end(io)
        self.bytes -= io.bytes
        io.segment.readers -= len(io.rows)
        arrived: list[tuple[int, bool]] = []
        lost: list[Name] = []
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
                if kept and not doomed:
                    self._keep(row)
                    arrived.append((row, False))
                    continue
                if not doomed:
                    index = catalogue.indexes[catalogue.owner[row]]
                    lost.append((index.namespace.name, index.group, catalogue.key[row]))
                    catalogue.note(Kind.NOT_LOADED, row)
                arrived.append((row, False))
                catalogue.spoiled(row)
        if not io.cancelled:
            device.read_ended(len(failed) < len(io.rows), self._common.now)
            if device.read_errors >= ERRORS:
                device.reads_again = self._common.now + self._common.limits.retry_ns
        return self._arrived(arrived), lost

    def _keep(self, row: int) -> None:
        """A record could not be looked at: what waited for it is answered, and it is as it was before."""
        catalogue = self._common.catalogue
        catalogue.note(Kind.NOT_LOADED, row)
        rows = catalogue.segment_of(row)[1].rows
        rows[rows.index(row)] = catalogue.unread(row)  # in its place: the last ones may be of a write that fails
