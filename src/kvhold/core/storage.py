"""All backings together: what each is told, what ends an I/O, what outlasts a restart.

Every I/O has a number, is answered exactly once, and until then holds its rows by a lease and its bytes in the budget.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvhold.core import events as ev
from kvhold.core.asking import Asking
from kvhold.core.backing import Backing, Io
from kvhold.core.common import Common
from kvhold.core.events import Effect
from kvhold.core.log.backing import LogBacking
from kvhold.core.log.events import LogOpened
from kvhold.core.placement import Placement
from kvhold.core.reading import Reading
from kvhold.core.remote.backing import RemoteBacking
from kvhold.core.remote.events import RemoteOpened
from kvhold.core.sessions import Operation

KINDS: Final[dict[type[ev.BackingOpened], Callable[[Common, Any], Backing]]] = {
    LogOpened: LogBacking,
    RemoteOpened: RemoteBacking,
}
"""What each kind of backing begins as, by the word that there is one."""


@dataclass(slots=True)
class _Flush:
    """A session waits until so many backings have made durable what was queued there."""

    session: int
    waits: int
    failed: bool = False


class Storage:
    """``arrived(rows)`` is told of (row, whether it can be read now) and says what follows from it."""

    def __init__(self, common: Common, arrived: Callable[[Sequence[tuple[int, bool]]], list[Effect]]) -> None:
        self.backings, self.ios = common.backings.all, common.backings.ios
        self.placement = Placement(common)
        self.asking = Asking(common)
        self.reading = Reading(common, self.placement, self.asking, arrived)
        self._common = common
        self._flushes: dict[int, _Flush] = {}
        self._next_flush = 1

    @property
    def pending(self) -> int:
        """I/Os that are not answered."""
        return len(self.ios)

    @property
    def queued_writes(self) -> int:
        return sum(backing.queued_writes for backing in self.backings.values())

    def kept(self) -> dict[str, tuple[int, int]]:
        """By kind: how many backings there are, and how many objects they have."""
        kept: dict[str, tuple[int, int]] = {}
        for backing in self.backings.values():
            number, objects = kept.get(backing.kind, (0, 0))
            kept[backing.kind] = number + 1, objects + backing.objects
        return kept

    @property
    def writing(self) -> bool:
        """Whether anything is still to be written here that can be: objects, or word of what was forgotten."""
        asked = self._common.backings.asked
        waits = any(backing.busy for number, backing in self.backings.items() if number not in asked)
        return waits or any(io.kind == "forget" and io.backing.number not in asked for io in self.ios.values())

    def told(self, event: ev.FromBacking) -> None:
        """Word of one kind of backing: that there is one, or what it found."""
        if isinstance(event, ev.BackingOpened):
            self._common.backings.add(KINDS[type(event)](self._common, event))
        else:
            self.backings[event.backing].told(event)

    # --- ends ---------------------------------------------------------------------------------------------------

    def done(self, event: ev.Done) -> list[Effect]:
        """Exactly one answer to an I/O; any other is counted and ignored."""
        io = self._ended(event.io, asked=False)
        if io is None:
            return []
        failed = set(event.failed)
        if io.kind == "read":
            return self.reading.done(io, failed, event)
        io.backing.ended(io, failed)
        if failed:
            self._common.counters[f"{io.kind}_failed"] += 1
        return self._flushed()

    def found(self, event: ev.Found) -> list[Operation]:
        """The same to an ask; the operations that can go on now."""
        io = self._ended(event.io, asked=True)
        return self.asking.found(io, event) if io is not None else []

    def _ended(self, number: int, asked: bool) -> Io | None:
        io = self.ios.get(number)
        if io is None or (io.kind == "ask") is not asked:
            self._common.counters["stale_io"] += 1
            return None
        return self.ios.pop(number)

    # --- flushes ------------------------------------------------------------------------------------------------

    def flush(self, session: int) -> list[Effect]:
        """Have what is queued now written and made durable; the session is told when it is."""
        number, self._next_flush = self._next_flush, self._next_flush + 1
        keeping = [one for at, one in self.backings.items() if at not in self._common.backings.asked]
        self._flushes[number] = _Flush(session, len(keeping))
        for backing in keeping:
            backing.flush(number)
        return self._flushed()

    def forget_flushes(self, session: int) -> None:
        """The session is gone: what it wants written is written all the same, and nobody is told."""
        for number in [number for number, flush in self._flushes.items() if flush.session == session]:
            del self._flushes[number]
            for backing in self.backings.values():
                backing.unflush(number)

    def _flushed(self) -> list[Effect]:
        """Tell those whose backings are all done."""
        for number, failed in self._common.backings.flushed:
            if (flush := self._flushes.get(number)) is not None:
                flush.waits -= 1
                flush.failed |= failed
        self._common.backings.flushed.clear()
        over = [number for number, flush in self._flushes.items() if not flush.waits]
        flushes = [self._flushes.pop(number) for number in over]
        return [ev.Flushed(flush.session, not flush.failed) for flush in flushes]

    # --- always -------------------------------------------------------------------------------------------------

    def pump(self) -> list[Effect]:
        """What may be begun now: reads before writes."""
        effects = self.reading.pump() if self.reading.queued else []
        for backing in self.backings.values():
            effects += backing.pump()
        return effects + self._flushed() if self._common.backings.flushed else effects

    @property
    def next_deadline(self) -> int | None:
        """When :meth:`pump` may be able to do more than now, for want of nothing but time."""
        ends = [one.next_deadline for one in self.backings.values()]
        return min((at for at in (*ends, self.asking.next_deadline) if at is not None), default=None)
