"""Forgetting: objects that must not be found again, here or by a manager after this one, or that nobody wants.

What is purged or quarantined is forgotten in every backing as well, by a tombstone or what the backing has for that.
Who still holds bytes keeps them. What gives way for want of room is another matter: see ``eviction``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvhold.core import events as ev
from kvhold.core.asking import Asking
from kvhold.core.backing import Mark, Name
from kvhold.core.common import Common
from kvhold.core.events import Effect
from kvhold.core.history import Kind
from kvhold.core.indexes import Index
from kvhold.core.sessions import Phase
from kvhold.core.turns import Work


@dataclass(slots=True, eq=False)
class _Purge:
    """A purge under way: whose it is (0 is nobody's any more), what it takes, and what it has taken so far.

    It takes what backings began to keep before their ``marks``. What is in DRAM alone it takes from slots with an
    epoch before ``epoch``, of which, unless ``unused`` is None, the stamp is at most that.
    """

    session: int
    namespace: bytes
    epoch: int
    unused: int | None
    marks: dict[int, Mark]
    objects: int = 0
    bytes: int = 0
    tombstones: set[int] = field(default_factory=set)  # I/Os that it waits for
    failed: bool = False
    scanned: bool = False


class Forgetting:
    def __init__(self, common: Common, asking: Asking) -> None:
        self._common = common
        self._asking = asking
        self._catalogue = common.catalogue
        self._backings = common.backings
        self._purges: list[_Purge] = []

    @property
    def purges(self) -> int:
        """Purges under way."""
        return len(self._purges)

    # --- purges -------------------------------------------------------------------------------------------------

    def purge(self, event: ev.Purge) -> Work:
        """Forget what is stored now; what is granted while this runs stays."""
        catalogue, then = self._catalogue, self._common.now - event.older
        unused = catalogue.recency.clock.at(then) if event.older else None
        marks = self._marks(then)
        self._common.heard.clear()
        purge = _Purge(event.session, event.namespace, catalogue.next_epoch, unused, marks)
        effects = [
            effect for number, one in self._backings.all.items() for effect in one.purge(event.namespace, marks[number])
        ]
        purge.tombstones.update(effect.io for effect in effects if isinstance(effect, ev.Forget))
        self._purges.append(purge)
        for rows in self._all_rows():
            yield effects + self._purge_rows(purge, rows)
            effects = []
        purge.scanned = True
        yield effects + self._end_purges()

    def _purge_rows(self, purge: _Purge, rows: range) -> list[Effect]:
        """Forget those of ``rows`` that the purge takes."""
        catalogue, names = self._catalogue, list[Name]()
        for row in rows:
            index = catalogue.indexes[catalogue.owner[row]] if catalogue.key[row] else None
            if index is None or purge.namespace not in (b"", index.namespace.name):
                continue
            recorded, later = self._recorded(row, purge.marks)
            # When something in DRAM was stored is only known of its record: else its last use counts.
            kept = recorded or later
            unused = purge.unused is None or (not kept and catalogue.stamp[row] <= purge.unused)
            if recorded or (catalogue.epoch[row] < purge.epoch and unused):
                name = self._remove(row, Kind.PURGED, "purged")
                if later:  # written after this purge has begun
                    names.append(name)
                purge.objects += 1
                purge.bytes += index.size
        effects = self._outlast(names)
        purge.tombstones.update(effect.io for effect in effects if isinstance(effect, ev.Forget))
        return effects

    def _all_rows(self) -> Iterator[range]:
        """A slice's rows at a time; all of them anew if an object was given another row meanwhile."""
        catalogue, moves = self._catalogue, -1
        while moves != catalogue.moves:
            moves, end = catalogue.moves, len(catalogue.state)
            for start in range(0, end, ev.MAX_BATCH):
                yield range(start, min(start + ev.MAX_BATCH, end))

    def done(self, event: ev.Done) -> list[Effect]:
        """An I/O has ended, for which a purge may have waited."""
        for purge in self._purges:
            if event.io in purge.tombstones:
                purge.tombstones.remove(event.io)
                purge.failed |= bool(event.failed)
        return self._end_purges()

    def left(self, session: int) -> None:
        """The session is gone: its purges go on, and nobody is told."""
        for purge in self._purges:
            if purge.session == session:
                purge.session = 0

    def _end_purges(self) -> list[Effect]:
        over = [purge for purge in self._purges if purge.scanned and not purge.tombstones]
        self._purges = [purge for purge in self._purges if purge not in over]
        return [ev.Purged(one.session, not one.failed, one.objects, one.bytes) for one in over if one.session]

    # --- quarantine ---------------------------------------------------------------------------------------------

    def restore_failed(self, event: ev.RestoreFailed) -> Work:
        """What a failed restore leased is not found any more, and a later store of it is taken again."""
        attachment = self._common.speaker(event.session)
        operation = attachment.operations.get(event.op) if attachment is not None else None
        if operation is None or operation.phase not in (Phase.ANSWERED, Phase.STARTED):
            return
        last, marks = self._catalogue.next_epoch, self._marks(self._common.now)
        for part in list(operation.parts):
            rows = part.leased
            for start in range(0, len(rows), ev.MAX_BATCH):
                yield self._quarantine(part.index, rows[start : start + ev.MAX_BATCH], last, marks)

    def _quarantine(self, index: Index, rows: Sequence[int], last: int, marks: dict[int, Mark]) -> list[Effect]:
        """Forget those of ``rows`` that are still what they were before epoch ``last`` and ``marks``."""
        catalogue, names = self._catalogue, list[Name]()
        for row in rows:
            # It may have been released meanwhile, and the row be another object's.
            same = catalogue.epoch[row] < last or self._recorded(row, marks)[0]
            if same and catalogue.key[row] and catalogue.owner[row] == index.id:
                self._asking.not_to_be_had(index, catalogue.key[row])
                names.append(self._remove(row, Kind.QUARANTINED, "quarantined"))
        return self._outlast(names)

    # --- what nobody wants --------------------------------------------------------------------------------------

    def unused(self, index: Index) -> Work:
        """Give up what is stored in a space that nobody has open, unless somebody opens it again."""
        while not index.users and (keys := index.some(ev.MAX_BATCH)):
            for key in keys:
                row = index.get(key)
                assert row is not None
                self._remove(row, Kind.EVICTED, "forgotten")
            yield []

    # --- one object, and what outlasts it -----------------------------------------------------------------------

    def _remove(self, row: int, kind: Kind, counter: str) -> Name:
        """Forget one object; the name that it had."""
        catalogue = self._catalogue
        index = catalogue.indexes[catalogue.owner[row]]
        name = index.namespace.name, index.group, catalogue.key[row]
        catalogue.note(kind, row)
        catalogue.remove(row)
        self._common.counters[counter] += 1
        return name

    def _outlast(self, names: Sequence[Name]) -> list[Effect]:
        """Make the loss of some objects outlast the manager."""
        backings = self._backings.all.values() if names else ()
        return [effect for backing in backings for effect in backing.forget(names)]

    def _marks(self, then: int) -> dict[int, Mark]:
        """What was begun to be kept by ``then`` lies before these, by backing."""
        return {number: backing.mark(then) for number, backing in self._backings.all.items()}

    def _recorded(self, row: int, marks: dict[int, Mark]) -> tuple[bool, bool]:
        """Whether backings have an object from before ``marks``; and whether from after, or are writing it."""
        known = [one.recorded_before(row, marks.get(number)) for number, one in self._backings.all.items()]
        return True in known, False in known
