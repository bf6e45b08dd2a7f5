"""All backings together: what each is told, what ends an I/O, what outlasts a restart.

Every I/O has a number, is answered exactly once, and until then holds its rows by a lease and its bytes in the budget.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvhold.core import events as ev
from kvhold.core.backing import Backing
from kvhold.core.common import Common
from kvhold.core.events import Effect
from kvhold.core.log.backing import LogBacking
from kvhold.core.log.events import LogOpened
from kvhold.core.placement import Placement
from kvhold.core.reading import Reading

KINDS: Final[dict[type[ev.BackingOpened], Callable[[Common, Any], Backing]]] = {LogOpened: LogBacking}
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
        self.reading = Reading(common, self.placement, arrived)
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
        """Whether anything is still to be written that can be: objects, or word of what was forgotten."""
        waits = any(backing.busy for backing in self.backings.values())
        return waits or any(io.kind == "forget" for io in self.ios.values())

    def told(self, event: ev.FromBacking) -> None:
        """Word of one kind of backing: that there is one, or what it found."""
        if isinstance(event, ev.BackingOpened):
            self.backings[event.backing] = KINDS[type(event)](self._common, event)
        else:
            self.backings[event.backing].told(event)

    # --- ends ---------------------------------------------------------------------------------------------------

    def done(self, event: ev.Done) -> list[Effect]:
        """Exactly one answer to an I/O; any other is counted and ignored."""
        io = self.ios.pop(event.io, None)
        if io is None:
            self._common.counters["stale_io"] += 1
            return []
        failed = set(event.failed)
        if io.kind == "read":
            return self.reading.done(io, failed, event.kept)
        io.backing.ended(io, failed)
        if failed:
            self._common.counters[f"{io.kind}_failed"] += 1
        return self._flushed()

    # --- flushes ------------------------------------------------------------------------------------------------

    def flush(self, session: int) -> list[Effect]:
        """Have what is queued now written and made durable; the session is told when it is."""
        number, self._next_flush = self._next_flush, self._next_flush + 1
        self._flushes[number] = _Flush(session, len(self.backings))
        for backing in self.backings.values():
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
        return min((at for one in self.backings.values() if (at := one.next_deadline) is not None), default=None)
