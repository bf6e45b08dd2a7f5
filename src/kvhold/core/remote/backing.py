"""A remote store as the core sees it: what it is to be given, what is being fetched, and whether it is of use now."""

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvhold.core import events as ev
from kvhold.core.backing import PLACE_BITS, READ_BATCH, Io, Mark, Name
from kvhold.core.common import Common, Timer
from kvhold.core.events import Effect, Reason
from kvhold.core.remote.events import RemoteOpened, Serves
from kvhold.core.rows import State

PUTS: Final = 4
"""Puts under way at once: the store's latency must not be what bounds them."""
_SHARE: Final = 8
"""At most this part of the arena is leased by puts."""
_LOOKS: Final = 4 * ev.MAX_BATCH
"""Rows that are looked at for one put: most of what waited may be gone."""


@dataclass(slots=True)
class _Queued:
    """A row to be put, if its slot is still the same."""

    row: int
    epoch: int
    parent: bytes
    depth: int


class RemoteBacking:
    """An :class:`~kvhold.core.backing.Asked`. While it does not serve, what it was to be given is dropped.

    That it has an object is only believed when it said so, and for ``limits.proved_ns``: the next touch after that, and
    the first one of what it did not take, offers the object again.
    """

    kind = "remote"

    def __init__(self, common: Common, event: RemoteOpened) -> None:
        self.number = event.backing
        self.bit = 1 << sum(bool(one.bit) for one in common.backings.all.values())
        self.objects = 0
        self.usable = False
        self.dropped = 0  # objects that were to be put, and were not
        self.expected: set[int] = set()
        self.queue: deque[_Queued] = deque()
        self.writing: dict[int, int] = {}  # by row, the number of its put among all
        self.putting = 0  # bytes
        self._read_only = event.read_only
        self._begun = 1  # puts, and one: the mark of now lies above that of a past time also before the first
        self._puts: set[int] = set()
        self._offered = array("q")  # by row: when it was offered, or said to be there
        self._reads: Timer[int] = Timer()
        self._late: set[int] = set()  # rows of reads that nobody should wait for any more
        self._paid_at = 0  # when the rate allows the next put
        self._common = common
        self._catalogue = common.catalogue

    def told(self, event: ev.FromBacking) -> None:
        assert isinstance(event, Serves)
        self.usable = event.serves
        if not self.usable:
            self.dropped += len(self.queue)
            self.queue.clear()

    # --- what is there ------------------------------------------------------------------------------------------

    def entered(self, row: int, place: int) -> None:
        self.objects += 1
        self._note_offer(row, self._common.now)

    def left(self, row: int, place: int) -> None:
        self.objects -= 1
        self.dismiss(row)

    def moved(self, row: int, again: int) -> None:
        self._note_offer(again, self._common.now)

    def where(self, place: int) -> str:
        return "the remote store"

    # --- asking -------------------------------------------------------------------------------------------------

    def ask(self, io: int, names: Sequence[Name]) -> ev.Ask:
        return ev.Ask(io, self.number, tuple(names))

    def ask_ended(self, io: Io, failed: bool) -> None:
        pass

    # --- reading ------------------------------------------------------------------------------------------------

    def worth(self, row: int) -> Reason:
        if row in self._late:
            return Reason.REMOTE_LATE
        return Reason.NONE if self.usable else Reason.REMOTE_DOWN

    def expect(self, row: int) -> None:
        self.expected.add(row)

    def dismiss(self, row: int) -> None:
        self.expected.discard(row)

    def read(self, io: int, rows: Iterable[int]) -> ev.Read:
        taken, length = list[int](), 0
        for row in rows:
            if taken and (length >= READ_BATCH or len(taken) >= ev.MAX_BATCH):
                break
            taken.append(row)
            length += self._catalogue.size[row]
        self.expected.difference_update(taken)
        self._reads.begin(io, self._common.now)
        return ev.Read(io, self.number, tuple(self._named(row, b"", 0, 0) for row in taken))

    def read_ended(self, io: Io, good: bool | None) -> None:
        self._reads.end(io.number)
        self._late.difference_update(io.rows)

    def too_late(self) -> Sequence[int]:
        """Rows for which somebody may have waited for long enough, each once: they stay held until their read ends."""
        read = self._reads.overdue(self._common.now - self._common.limits.get_ns)
        rows = self._common.backings.ios[read].rows if read is not None else []
        self._late.update(rows)
        return rows

    def _reading(self) -> list[Io]:
        return [io for io in self._common.backings.ios.values() if io.backing is self and io.kind == "read"]

    def _named(self, row: int, parent: bytes, depth: int, age: int) -> ev.Stored:
        catalogue = self._catalogue
        index = catalogue.indexes[catalogue.owner[row]]
        name, key = index.namespace.name, catalogue.key[row]
        return ev.Stored(name, index.group, key, parent, depth, index.shards, catalogue.offset[row], age)

    # --- putting ------------------------------------------------------------------------------------------------

    def stored(self, row: int, parent: bytes, depth: int) -> None:
        if self._read_only or self._catalogue.indexes[self._catalogue.owner[row]].private:
            return
        if not self.usable or len(self.queue) >= self._common.limits.write_queue:
            self.dropped += 1
            self._note_offer(row, -self._common.limits.proved_ns)  # so the next touch offers it
            return
        self._note_offer(row, self._common.now)
        self.queue.append(_Queued(row, self._catalogue.epoch[row], parent, depth))

    def touched(self, row: int, parent: bytes, depth: int) -> None:
        """An object in DRAM was found: offer it, if it is long ago that it was, or that the store said it has it."""
        if self.usable and self._common.now - self._offered_at(row) >= self._common.limits.proved_ns:
            self.stored(row, parent, depth)

    def _offered_at(self, row: int) -> int:
        if row >= len(self._offered):
            missing = len(self._catalogue.state) - len(self._offered)
            self._offered.extend([-self._common.limits.proved_ns] * missing)
        return self._offered[row]

    def _note_offer(self, row: int, then: int) -> None:
        self._offered_at(row)
        self._offered[row] = then

    def ended(self, io: Io, failed: set[int]) -> None:
        if io.kind != "write":
            return
        self._puts.discard(io.number)
        self.putting -= io.bytes
        for position, row in enumerate(io.rows):
            self.writing.pop(row)
            if position in failed:
                self.dropped += 1
                self._catalogue.release([row])
            else:
                self._catalogue.written(row, self.number << PLACE_BITS | 1)

    def pump(self) -> list[Effect]:
        effects: list[Effect] = []
        while self.queue and len(self._puts) < PUTS and self._common.now >= self._paid_at:
            if (effect := self._put()) is None:
                break
            effects.append(effect)
        return effects

    def _put(self) -> Effect | None:
        """The first of what waits, its rows leased; None if enough is leased, or little of it is there any more."""
        catalogue, now, rate = self._catalogue, self._common.now, self._common.limits.put_rate
        most = min(READ_BATCH, self._common.arena.total // _SHARE - self.putting)
        io, objects = Io(0, self, "write"), list[ev.Stored]()
        for _ in range(min(_LOOKS, len(self.queue))):
            one = self.queue[0]
            row = one.row
            alive = catalogue.epoch[row] == one.epoch and State.RESIDENT <= catalogue.state[row] <= State.LEASED
            if alive and row not in self.writing:
                if io.bytes >= most or len(io.rows) >= ev.MAX_BATCH:
                    break
                catalogue.lease([row])
                self.writing[row] = self._begun + 1
                io.rows.append(row)
                io.bytes += catalogue.size[row]
                objects.append(self._named(row, one.parent, one.depth, max(0, now - catalogue.born[row])))
            self.queue.popleft()
        if not io.rows:
            return None
        self._begun += 1
        self.putting += io.bytes
        self._paid_at = now + io.bytes * 1_000_000_000 // rate if rate else now
        number = self._common.backings.begin(io)
        self._puts.add(number)
        return ev.Write(number, self.number, tuple(objects))

    @property
    def next_deadline(self) -> int | None:
        oldest = self._reads.oldest
        ends = [] if oldest is None else [oldest + self._common.limits.get_ns]
        if self.queue and len(self._puts) < PUTS and self._paid_at > self._common.now:
            ends.append(self._paid_at)
        return min(ends, default=None)

    @property
    def queued_writes(self) -> int:
        return len(self.queue)

    @property
    def busy(self) -> bool:
        return bool(self.queue or self._puts)

    def flush(self, flush: int) -> None:
        """Nobody asks this of a store that owes nobody anything: it may forget what it was given."""
        self._common.backings.flushed.append((flush, True))

    def unflush(self, flush: int) -> None:
        pass

    # --- forgetting ---------------------------------------------------------------------------------------------

    def mark(self, then: int) -> Mark:
        """Nothing is known of when the store got what it has; but what it is given now comes after a purge of all."""
        return (self._begun, 0) if then >= self._common.now else (0, 0)

    def recorded_before(self, row: int, mark: Mark | None) -> bool | None:
        before = mark[0] if mark is not None else 0
        if row in self.writing:
            return self.writing[row] <= before
        return before > 0 if self._catalogue.there[row] & self.bit else None

    def forget(self, names: Sequence[Name]) -> list[Effect]:
        return [self._forget(tuple(names), None)]

    def purge(self, namespace: bytes, mark: Mark) -> list[Effect]:
        return [self._forget((), namespace)] if mark[0] else []

    def _forget(self, names: tuple[Name, ...], namespace: bytes | None) -> Effect:
        return ev.Forget(self._common.backings.begin(Io(0, self, "forget")), self.number, names, namespace)

    # --- words --------------------------------------------------------------------------------------------------

    def report(self, now: int) -> dict[str, object]:
        return {
            "serves": self.usable,
            "read_only": self._read_only,
            "objects": self.objects,
            "queued_writes": len(self.queue),
            "putting_bytes": self.putting,
            "fetching": sum(len(io.rows) for io in self._reading()),
            "dropped_writes": self.dropped,
        }
