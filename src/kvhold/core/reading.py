"""Reads from backings: in the order in which they were asked for, shared, and not begun for nobody."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from kvhold.core import events as ev
from kvhold.core.backing import Backing, Io, Name
from kvhold.core.common import Common
from kvhold.core.events import Effect, Reason
from kvhold.core.rows import State
from kvhold.core.story import Kind


class Reading:
    """``arrived(rows)`` is told of (row, whether it can be read now) and says what follows from it."""

    def __init__(self, common: Common, arrived: Callable[[Sequence[tuple[int, bool]]], list[Effect]]) -> None:
        self.bytes = 0  # under way
        self.queued: dict[int, Backing] = {}  # rows to be read and from where, in order
        self._common = common
        self._arrived = arrived
        self._reading: dict[int, Io] = {}

    def worth(self, row: int) -> Reason:
        """Why nobody should wait for a row that is COLD or LOADING; NONE if it is to be had."""
        return self._common.backings.of(self._common.catalogue.place[row]).worth(row)

    def read(self, row: int) -> None:
        """Read a row that is LOADING, when its turn comes."""
        place = self._common.catalogue.place[row]
        backing = self._common.backings.of(place)
        backing.expect(row)
        self.queued[row] = backing
        self._common.catalogue.note(Kind.LOADING, row, place)

    def unwanted(self, rows: Sequence[int]) -> list[Effect]:
        """Of these rows, what nobody but its own read holds need not be read."""
        catalogue, effects = self._common.catalogue, list[Effect]()
        for row in rows if self.queued or self._reading else ():
            if catalogue.leases[row] != 1:
                continue
            if row in self.queued and catalogue.state[row] == State.LOADING:
                self.queued.pop(row).dismiss(row)
                catalogue.unfill(row)
            elif (io := self._reading.get(row)) and not io.cancelled and all(catalogue.leases[r] == 1 for r in io.rows):
                io.cancelled = True
                effects.append(ev.Cancel(io.number, io.backing.number))
        return effects

    def pump(self) -> list[Effect]:
        common, catalogue = self._common, self._common.catalogue
        effects: list[Effect] = []
        while self.queued and self.bytes < common.limits.read_bytes:
            row, backing = next(iter(self.queued.items()))
            if catalogue.state[row] != State.LOADING:  # it was removed while it waited
                del self.queued[row]
                effects += self._arrived([(row, False)])
                catalogue.release([row])
                continue
            io = Io(0, backing, "read")
            effect = backing.read(common.backings.begin(io), self._next_of(backing))
            io.rows = list(islice(self.queued, len(effect.objects)))
            io.bytes = sum(catalogue.size[row] for row in io.rows)
            for row in io.rows:
                del self.queued[row]
            self.bytes += io.bytes
            self._reading.update(dict.fromkeys(io.rows, io))
            effects.append(effect)
        return effects

    def _next_of(self, backing: Backing) -> Iterator[int]:
        """The first rows of the queue, as long as they are to be read from the same backing."""
        state = self._common.catalogue.state
        for row, source in self.queued.items():
            if source is not backing or state[row] != State.LOADING:
                return
            yield row

    def done(self, io: Io, failed: set[int], kept: bool) -> list[Effect]:
        """What follows from a read. What failed is lost, unless it is ``kept``: it may be as it was."""
        catalogue, counters = self._common.catalogue, self._common.counters
        self.bytes -= io.bytes
        io.backing.read_ended(io, None if io.cancelled else len(failed) < len(io.rows))
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
                    catalogue.note(Kind.NOT_LOADED, row)
                    catalogue.unread(row)
                    arrived.append((row, False))
                    continue
                if not doomed:
                    index = catalogue.indexes[catalogue.owner[row]]
                    lost.append((index.namespace.name, index.group, catalogue.key[row]))
                    catalogue.note(Kind.NOT_LOADED, row)
                arrived.append((row, False))
                catalogue.spoiled(row)
        return self._arrived(arrived) + (io.backing.forget(lost) if lost else [])
