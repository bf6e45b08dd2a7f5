"""A second kind of backing: a dictionary that finds objects by their name, slow, and forgetting as it likes.

It is what a store of another machine will be to the core, in as few words as possible, so that nothing in the core
comes to rely on a log.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvhold.core import events as ev
from kvhold.core.backing import PLACE_BITS, Io, Mark, Name
from kvhold.core.common import Common, Timer
from kvhold.core.events import Effect, Reason
from kvhold.core.rows import State
from kvhold.core.storage import KINDS


@dataclass(slots=True, frozen=True)
class StoreOpened(ev.BackingOpened):
    """A store is there. What it has is not said."""


@dataclass(slots=True)
class Waiting:
    """A row that is to be written, if its slot is still the same."""

    row: int
    epoch: int
    parent: bytes
    depth: int
    number: int


class StoreBacking:
    """Reads of one call at a time as they are asked for; one write at a time; no age of anything is known."""

    kind = "store"

    def __init__(self, common: Common, event: StoreOpened) -> None:
        self.number = event.backing
        self.bit = 1 << sum(bool(one.bit) for one in common.backings.all.values())
        self.queue: deque[Waiting] = deque()
        self.writing: dict[int, int] = {}  # by row, in which write
        self.reads: Timer[int] = Timer()
        self.expected: set[int] = set()
        self.flushes: dict[int, int] = {}
        self.objects = 0
        self._queued = 0
        self._begun = 1  # the mark of now lies above that of a past time also before the first write
        self._common = common
        self._catalogue = common.catalogue

    def told(self, event: ev.FromBacking) -> None:
        raise AssertionError(event)

    # --- what is there

    def entered(self, row: int, place: int) -> None:
        self.objects += 1

    def left(self, row: int, place: int) -> None:
        self.objects -= 1
        self.dismiss(row)

    def moved(self, row: int, again: int) -> None:
        pass

    def where(self, place: int) -> str:
        return f"store {place >> PLACE_BITS}"

    # --- reading

    def worth(self, row: int) -> Reason:
        oldest = self.reads.oldest
        hangs = oldest is not None and self._common.now - oldest > self._common.limits.hung_ns
        return Reason.OUT_OF_SERVICE if hangs else Reason.NONE

    def expect(self, row: int) -> None:
        self.expected.add(row)

    def dismiss(self, row: int) -> None:
        self.expected.discard(row)

    def read(self, io: int, rows: Iterable[int]) -> ev.Read:
        taken = [row for row, _ in zip(rows, range(ev.MAX_BATCH), strict=False)]
        assert self.expected.issuperset(taken)
        self.expected.difference_update(taken)
        self.reads.begin(io, self._common.now)
        return ev.Read(io, self.number, tuple(self._named(row) for row in taken))

    def read_ended(self, io: Io, good: bool | None) -> None:
        self.reads.end(io.number)

    def _named(self, row: int, parent: bytes = b"", depth: int = 0) -> ev.Stored:
        catalogue = self._catalogue
        index = catalogue.indexes[catalogue.owner[row]]
        name, key = index.namespace.name, catalogue.key[row]
        return ev.Stored(name, index.group, key, parent, depth, index.shards, catalogue.offset[row], 0)

    # --- writing

    def stored(self, row: int, parent: bytes, depth: int) -> None:
        if len(self.queue) < self._common.limits.write_queue:
            self._queued += 1
            self.queue.append(Waiting(row, self._catalogue.epoch[row], parent, depth, self._queued))

    def ended(self, io: Io, failed: set[int]) -> None:
        if io.kind == "write":
            for position, row in enumerate(io.rows):
                if position in failed:
                    self._catalogue.release([row])
                else:
                    self._catalogue.written(row, self.number << PLACE_BITS | 1)
            self.writing.clear()

    def pump(self) -> list[Effect]:
        effects: list[Effect] = []
        if not self.writing and self.queue:
            effects = self._write()
        if not self.writing:
            first = self.queue[0].number if self.queue else self._queued + 1
            for flush in [flush for flush, last in self.flushes.items() if last < first]:
                del self.flushes[flush]
                self._common.backings.flushed.append((flush, False))
        return effects

    def _write(self) -> list[Effect]:
        catalogue, common = self._catalogue, self._common
        io = Io(0, self, "write")
        objects: list[ev.Stored] = []
        while self.queue and len(objects) < ev.MAX_BATCH and io.bytes < min(common.limits.write_batch, 3 * 4096):
            one = self.queue.popleft()
            row = one.row
            alive = catalogue.epoch[row] == one.epoch and State.RESIDENT <= catalogue.state[row] <= State.LEASED
            if alive and not catalogue.there[row] & self.bit and row not in io.rows:
                catalogue.lease([row])
                io.rows.append(row)
                io.bytes += catalogue.size[row]
                objects.append(self._named(row, one.parent, one.depth))
        if not objects:
            return []
        self._begun += 1
        self.writing.update(dict.fromkeys(io.rows, self._begun))
        return [ev.Write(common.backings.begin(io), self.number, tuple(objects))]

    @property
    def next_deadline(self) -> int | None:
        return None

    @property
    def queued_writes(self) -> int:
        return len(self.queue)

    @property
    def busy(self) -> bool:
        return bool(self.writing or self.queue)

    def flush(self, flush: int) -> None:
        self.flushes[flush] = self._queued

    def unflush(self, flush: int) -> None:
        self.flushes.pop(flush, None)

    # --- forgetting: whatever was handed over before is covered, also what is being written

    def mark(self, then: int) -> Mark:
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

    def report(self, now: int) -> dict[str, object]:
        return {"objects": self.objects, "queued_writes": len(self.queue)}


KINDS[StoreOpened] = StoreBacking
