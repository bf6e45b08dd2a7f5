"""Reads from backings: in the order in which they were asked for, and shared. What nobody waits for is not begun."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from kvhold.core import events as ev
from kvhold.core.asking import Asking
from kvhold.core.backing import PLACE_BITS, Backing, Io, Name
from kvhold.core.common import Common
from kvhold.core.events import Effect, Reason
from kvhold.core.history import Kind
from kvhold.core.indexes import Index
from kvhold.core.placement import Placement
from kvhold.core.rows import State


class Reading:
    """``arrived(rows)`` is told of (row, whether it can be read now) and says what follows from it."""

    def __init__(
        self,
        common: Common,
        placement: Placement,
        asking: Asking,
        arrived: Callable[[Sequence[tuple[int, bool]]], list[Effect]],
    ) -> None:
        self.bytes = 0  # under way
        self.queued: dict[int, int] = {}  # rows to be read and the place from which, in order
        self._common = common
        self._placement = placement
        self._asking = asking
        self._arrived = arrived
        self._reading: dict[int, Io] = {}
        self._tried: dict[
            int, int
        ] = {}  # by row that is LOADING, the numbers of backings that did not give it, as bits

    def worth(self, row: int) -> Reason:
        """Why nobody should wait for a row that is COLD or LOADING; NONE if it is to be had."""
        if self._common.catalogue.state[row] == State.LOADING:
            return self.source(row).worth(row)
        return self._placement.source(row)[1]

    def source(self, row: int) -> Backing:
        """Whence a LOADING row is being read, or will be."""
        io = self._reading.get(row)
        return io.backing if io is not None else self._common.backings.of(self.queued[row])

    def read(self, row: int) -> None:
        """Read a row that is LOADING, when its turn comes."""
        place, _ = self._placement.source(row)
        self._expect(row, place or self._common.catalogue.places(row)[0])

    def fetch(self, row: int, backing: int) -> None:
        """The same of one that nobody has here, from the backing that has said that it has it."""
        self._expect(row, _anywhere(backing))

    def _expect(self, row: int, place: int) -> None:
        self._common.backings.of(place).expect(row)
        self.queued[row] = place
        self._common.catalogue.note(Kind.LOADING, row, place)

    def unwanted(self, rows: Sequence[int]) -> list[Effect]:
        """Of these rows, what nobody but its own read holds need not be read."""
        catalogue, effects = self._common.catalogue, list[Effect]()
        for row in rows if self.queued or self._reading else ():
            if catalogue.leases[row] != 1:
                continue
            if row in self.queued and catalogue.state[row] == State.LOADING:
                self._common.backings.of(self.queued.pop(row)).dismiss(row)
                self._tried.pop(row, None)
                catalogue.unfill(row)
            elif (io := self._reading.get(row)) and not io.cancelled and all(catalogue.leases[r] == 1 for r in io.rows):
                io.cancelled = True
                effects.append(ev.Cancel(io.number, io.backing.number))
        return effects

    def pump(self) -> list[Effect]:
        common, catalogue = self._common, self._common.catalogue
        effects: list[Effect] = []
        while self.queued and self.bytes < common.limits.read_bytes:
            row, place = next(iter(self.queued.items()))
            if catalogue.state[row] != State.LOADING:  # it was removed while it waited
                del self.queued[row]
                self._tried.pop(row, None)
                effects += self._arrived([(row, False)])
                catalogue.release([row])
                continue
            backing = common.backings.of(place)
            if backing.worth(row) and (other := self._placement.source(row, self._tried.get(row, 0))[0]):
                backing.dismiss(row)  # it has gone out of service, and another has it as well
                self._expect(row, other)
                backing = common.backings.of(other)
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
        for row, place in self.queued.items():
            if self._common.backings.all[place >> PLACE_BITS] is not backing or state[row] != State.LOADING:
                return
            yield row

    def done(self, io: Io, failed: set[int], event: ev.Done) -> list[Effect]:
        """What follows from a read. What ``failed`` is lost, unless it is ``kept``: it may be as it was."""
        catalogue, counters, kept = self._common.catalogue, self._common.counters, event.kept
        self.bytes -= io.bytes
        io.backing.read_ended(io, None if io.cancelled else len(failed) < len(io.rows))
        arrived: list[tuple[int, bool]] = []
        lost: list[Name] = []
        fetched: list[tuple[Index, bytes]] = []
        for position, row in enumerate(io.rows):
            del self._reading[row]
            doomed = catalogue.state[row] != State.LOADING
            if position not in failed:
                counters["read_objects"] += 1
                arrived.append((row, not doomed))
                if not doomed:
                    catalogue.note(Kind.LOADED, row)
                    if catalogue.expected(row):
                        fetched.append((catalogue.indexes[catalogue.owner[row]], catalogue.key[row]))
                catalogue.loaded(row, _anywhere(io.backing.number), event.ages[position] if event.ages else None)
            elif io.cancelled and not doomed:
                if catalogue.leases[row] == 1:
                    catalogue.unfill(row)
                elif catalogue.expected(row):
                    self.fetch(row, io.backing.number)
                else:
                    self.read(row)
            else:
                counters["read_failed"] += 1
                stays = kept and not doomed
                if not doomed and catalogue.expected(row):
                    self._asking.not_got(io.backing.number, catalogue.indexes[catalogue.owner[row]], catalogue.key[row])
                    catalogue.note(Kind.NOT_LOADED, row)
                    stays = False
                elif not doomed:
                    if not kept:
                        index = catalogue.indexes[catalogue.owner[row]]
                        lost.append((index.namespace.name, index.group, catalogue.key[row]))
                        stays = self._has_another(row, io.backing)
                    if stays and self._from_another(row, io.backing):
                        continue
                    catalogue.note(Kind.NOT_LOADED, row)
                if stays:
                    catalogue.unread(row)
                    arrived.append((row, False))
                else:
                    arrived.append((row, False))
                    catalogue.read_failed(row)
            self._tried.pop(row, None)
        told = self._announce(fetched) if fetched else []
        return told + self._arrived(arrived) + (io.backing.forget(lost) if lost else [])

    def _announce(self, fetched: Sequence[tuple[Index, bytes]]) -> list[Effect]:
        """Tell who watches of what has come from elsewhere and can be found, a batch at most."""
        keys: dict[int, tuple[Index, list[bytes]]] = {}
        for index, key in fetched:
            if index.get(key) is not None:
                keys.setdefault(index.id, (index, []))[1].append(key)
        return self._common.departed() + [
            ev.Added(session, space, b"".join(found))
            for index, found in keys.values()
            for session, space in index.watchers
        ]

    def _has_another(self, row: int, backing: Backing) -> bool:
        """Whether another backing has a row that this one has lost; then only that one counts."""
        places = self._common.catalogue.places(row)
        here = [place for place in places if self._common.backings.of(place) is backing]
        if len(here) == len(places):
            return False
        for place in here:
            self._common.catalogue.withdraw(row, place)
        return True

    def _from_another(self, row: int, backing: Backing) -> bool:
        """Read a row that a backing did not give from one that was not tried, if there is any in service."""
        tried = self._tried[row] = self._tried.get(row, 0) | 1 << backing.number
        place, _ = self._placement.source(row, tried)
        if place:
            self._expect(row, place)
        return bool(place)


def _anywhere(backing: int) -> int:
    """The place of whatever is in a backing that finds objects by their name."""
    return backing << PLACE_BITS | 1
