"""Which backings an object is written to, and in which order it is looked for there: the one policy about that."""

from array import array
from collections.abc import Sequence

from kvhold.core.common import Common
from kvhold.core.events import Reason
from kvhold.core.history import fingerprint
from kvhold.core.rows import State

_GHOSTS = 1 << 16


class Placement:
    """Each object has one home among the backings that give places, by its key: a restart finds it in the same one.

    All that find objects by their name get it as well, and are read only where the home does not have it or is out of
    service.
    """

    def __init__(self, common: Common) -> None:
        self._common = common
        self._backings = common.backings.all
        self._ghosts = array("Q", bytes(8 * _GHOSTS))

    def stored(self, row: int, parent: bytes, depth: int) -> None:
        """An object that follows ``parent`` was stored: have it written when its turn comes, if it is worth that."""
        if not self._backings:
            return
        mark = fingerprint(self._common.catalogue.key[row])
        if self._common.limits.second_touch:
            again = self._ghosts[mark % _GHOSTS] == mark
            self._ghosts[mark % _GHOSTS] = 0 if again else mark
            if not again:
                self._common.counters["write_first_touch"] += 1
                return
        homes = sorted(number for number, backing in self._backings.items() if not backing.bit)
        if homes:
            self._backings[homes[mark % len(homes)]].stored(row, parent, depth)
        if len(homes) < len(self._backings):
            for backing in self._backings.values():
                if backing.bit:
                    backing.stored(row, parent, depth)

    def touched(self, rows: Sequence[int], start: int, end: int) -> None:
        """Objects ``start`` to ``end`` of the chain ``rows`` were found; that may make them worth writing."""
        if self._backings and (self._common.limits.second_touch or self._common.backings.asked):
            key = self._common.catalogue.key
            for depth in range(start, end):
                self.touched_one(rows[depth], key[rows[depth - 1]] if depth else b"", depth)

    def touched_one(self, row: int, parent: bytes, depth: int) -> None:
        """An object that follows ``parent`` was found."""
        catalogue, asked = self._common.catalogue, self._common.backings.asked
        if not State.RESIDENT <= catalogue.state[row] <= State.LEASED:
            return
        if self._backings and self._common.limits.second_touch and not catalogue.kept(row):
            self.stored(row, parent, depth)
        for one in asked.values():
            one.touched(row, parent, depth)

    def source(self, row: int, tried: int = 0) -> tuple[int, Reason]:
        """The place to read an object from, but for backings whose numbers are bits of ``tried``; or 0, and why not."""
        reason = Reason.NOT_STORED
        for place in self._common.catalogue.places(row):
            backing = self._common.backings.of(place)
            if tried >> backing.number & 1:
                continue
            short = backing.worth(row)
            if not short:
                return place, short
            reason = short if reason is Reason.NOT_STORED else reason
        return 0, reason
