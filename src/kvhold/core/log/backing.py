"""A log as the core sees it: where its records are, what reads and tombstones it wants, what ends them."""

from collections.abc import Iterable, Sequence

from kvhold.core import events as ev
from kvhold.core.backing import READ_BATCH, Io, Mark, Name
from kvhold.core.common import Common
from kvhold.core.events import Effect, Reason
from kvhold.core.log.device import ERRORS, Device, LogIo
from kvhold.core.log.events import Forget, LogOpened, LogReady, Read, Recovered, Segments, Sync
from kvhold.core.log.recovery import found, recovered
from kvhold.core.log.segments import HEADER, Log, Segment, unpack
from kvhold.core.log.writes import Writes, record_of


class LogBacking:
    """A :class:`~kvhold.core.backing.Backing`. A segment with readers, on their way or expected, is not given up."""

    kind = "log"
    bit = 0

    def __init__(self, common: Common, event: LogOpened) -> None:
        self.number = event.backing
        self.objects = 0
        log = Log(event.backing, event.segments, event.segment_bytes)
        log.seq = event.newest_seq
        self.device = Device(log)
        self.writes = Writes(common, self.device, self)
        self._common = common
        self._catalogue = common.catalogue
        self._log = log

    def told(self, event: ev.FromBacking) -> None:
        match event:
            case Segments():
                found(self._common, self.device, event)
            case Recovered():
                recovered(self._common, self.device, event)
            case LogReady():
                self.device.ready = True
                self.device.purged.clear()
                self.device.lost.clear()

    # --- what is there ------------------------------------------------------------------------------------------

    def entered(self, row: int, place: int) -> None:
        self.objects += 1
        self._segment(place).live += HEADER + self._catalogue.size[row]

    def left(self, row: int, place: int) -> None:
        self.objects -= 1
        self._segment(place).live -= HEADER + self._catalogue.size[row]
        self.dismiss(row)

    def moved(self, row: int, again: int) -> None:
        rows = self._segment(self._catalogue.place[again]).rows
        rows[rows.index(row)] = again  # in its place: the last ones may be of a write that fails

    def where(self, place: int) -> str:
        return "log {}, segment {}, byte {}".format(*unpack(place))

    def _segment(self, place: int) -> Segment:
        return self._log.segments[unpack(place)[1]]

    # --- reading ------------------------------------------------------------------------------------------------

    def worth(self, row: int) -> Reason:
        now, device = self._common.now, self.device
        if self._segment(self._catalogue.place[row]).closing:
            return Reason.NOT_STORED
        if now < device.reads_again or device.hangs_since(now, self._common.limits.hung_ns) is not None:
            return Reason.OUT_OF_SERVICE
        return Reason.NONE

    def expect(self, row: int) -> None:
        segment = self.device.expected[row] = self._segment(self._catalogue.place[row])
        segment.readers += 1

    def dismiss(self, row: int) -> None:
        segment = self.device.expected.pop(row, None)
        if segment is not None:
            segment.readers -= 1

    def read(self, io: int, rows: Iterable[int]) -> Read:
        place, size, device = self._catalogue.place, self._catalogue.size, self.device
        segment: Segment | None = None
        taken: list[int] = []
        length = 0
        for row in rows:
            its = device.expected[row]
            if segment is None:
                segment = its
            elif its is not segment or length >= READ_BATCH or len(taken) >= ev.MAX_BATCH:
                break
            taken.append(row)
            length += size[row]
        assert segment is not None
        for row in taken:
            del device.expected[row]
        device.reading[io] = segment
        device.reads.begin(io, self._common.now)
        objects = tuple(record_of(self._catalogue, row, unpack(place[row])[2]) for row in taken)
        return Read(io, self.number, objects, segment.number, segment.seq)

    def read_ended(self, io: Io, good: bool | None) -> None:
        device, now = self.device, self._common.now
        device.reads.end(io.number)
        device.reading.pop(io.number).readers -= len(io.rows)
        if good is not None:
            device.read_ended(good, now)
            if device.read_errors >= ERRORS:
                device.reads_again = now + self._common.limits.retry_ns

    # --- writing ------------------------------------------------------------------------------------------------

    def stored(self, row: int, parent: bytes, depth: int) -> None:
        self.writes.stored(row, parent, depth)

    def ended(self, io: Io, failed: set[int]) -> None:
        assert isinstance(io, LogIo)
        match io.kind:
            case "write":
                self.writes.written(io, failed)
            case "reuse":
                self.writes.begun(io, bool(failed))
            case "seal":
                assert io.segment is not None
                io.segment.readers -= 1
            case "sync":
                self._common.backings.flushed += [(flush, bool(failed)) for flush in io.flushes]

    def pump(self) -> list[Effect]:
        effects: list[Effect] = []
        if self.device.flushes:
            effects += self._sync()  # before the next write: a flush must not wait for what comes after it
        if self.device.queue:
            effects += self.writes.pump()
        return effects

    @property
    def next_deadline(self) -> int | None:
        device = self.device
        if not device.queue or device.writing or not device.ready:
            return None
        at = self.writes.not_before()
        return at if at > self._common.now else None

    @property
    def queued_writes(self) -> int:
        return len(self.device.queue)

    @property
    def busy(self) -> bool:
        device = self.device
        return device.writing or bool(device.queue and device.ready and device.write_errors < ERRORS)

    def flush(self, flush: int) -> None:
        self.device.flushes[flush] = self.device.queued

    def unflush(self, flush: int) -> None:
        self.device.flushes.pop(flush, None)

    def _sync(self) -> list[Effect]:
        """Sync for those flushes for which everything is written here."""
        device = self.device
        if device.writing or not device.ready:
            return []
        first = device.queue[0].number if device.queue else device.queued + 1
        ripe = [flush for flush, last in device.flushes.items() if last < first]
        if not ripe:
            return []
        for flush in ripe:
            del device.flushes[flush]
        return [Sync(self._common.backings.begin(LogIo(0, self, "sync", flushes=ripe)), self.number)]

    # --- forgetting ---------------------------------------------------------------------------------------------

    def mark(self, then: int) -> Mark:
        return self._log.position_at(then)

    def recorded_before(self, row: int, mark: Mark | None) -> bool | None:
        if row in self.device.rows:
            return False
        place = self._catalogue.place[row]
        number, segment, at = unpack(place)
        if not place or number != self.number:
            return None
        return (self._log.segments[segment].seq, at) < (mark or (0, 0))

    def forget(self, names: Sequence[Name]) -> list[Effect]:
        if not self.device.ready:
            self.device.lost.update(names)
        return [self._forget(self._log.position, tuple(names), None)]

    def purge(self, namespace: bytes, mark: Mark) -> list[Effect]:
        if not self.device.ready:
            self.device.purged.append((namespace, mark[0]))
        return [self._forget(mark, (), namespace)]

    def _forget(self, mark: Mark, names: tuple[Name, ...], namespace: bytes | None) -> Effect:
        io = self._common.backings.begin(LogIo(0, self, "forget"))
        return Forget(io, self.number, names, namespace, *mark)

    # --- words --------------------------------------------------------------------------------------------------

    def report(self, now: int) -> dict[str, object]:
        device, log = self.device, self._log
        out = device.out_of_use(now, self._common.limits.hung_ns)
        oldest = min((segment.born for segment in log.sealed if segment.live), default=None)
        return {
            "segments": len(log.segments) + len(log.free) + len(log.fresh),
            "segment_bytes": log.segment_bytes,
            "live_bytes": log.live,
            "queued_writes": len(device.queue),
            "ready": device.ready,
            "out_of_use": {way: {"why": why, "seconds": _seconds(since, now)} for way, (why, since) in out.items()},
            "oldest_seconds": None if oldest is None else _seconds(oldest, now),
        }


def _seconds(since: int, now: int) -> float:
    return max(0, now - since) / 1e9
