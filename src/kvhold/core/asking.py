"""Keys that nobody has here: which backings have them. They are asked in batches, and once for all who want to know.

Nothing is asked for what is private: nobody else can have stored it. Without a backing that is asked nothing happens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvhold.core import events as ev
from kvhold.core.backing import Asked, Io
from kvhold.core.common import Common, Timer
from kvhold.core.events import Effect, Reason
from kvhold.core.heard import ABSENT, NOT_GOT, THERE, UNKNOWN
from kvhold.core.history import fingerprint
from kvhold.core.indexes import Index
from kvhold.core.sessions import Operation

_SPREAD: Final = 0x9E3779B97F4A7C15
"""Odd, so that no two spaces of a backing are the same to it."""
_MARKS: Final = (1 << 64) - 1


def mark_of(backing: int, index: Index, key: bytes) -> int:
    """What stands for a key of ``index`` in one backing."""
    return (fingerprint(key) ^ (index.id << 8 | backing) * _SPREAD) & _MARKS


@dataclass(slots=True, eq=False)
class Ask:
    """One that is not answered: what it is about, who waits for it, and how often all was forgotten before it."""

    backing: Asked
    marks: list[int]
    waiting: dict[Operation, None]
    cleared: int


class Asking:
    """``asks`` are those that are not answered, by the number of their I/O."""

    def __init__(self, common: Common) -> None:
        self.asks: dict[int, Ask] = {}
        self.heard = common.heard
        self._common = common
        self._asked = common.backings.asked
        self._under_way: dict[int, int] = {}  # by mark, the ask that has it
        self._begun: Timer[Operation] = Timer()

    def worth(self, index: Index) -> bool:
        """Whether anybody could have what is not here."""
        return bool(self._asked) and not index.private and any(one.usable for one in self._asked.values())

    def why_not(self, index: Index) -> Reason:
        """Why what nobody has here, or is known to have, cannot be had."""
        nobody = not self._asked or index.private
        return Reason.NOT_STORED if nobody or self.worth(index) else Reason.REMOTE_DOWN

    def where(self, index: Index, key: bytes) -> int | None:
        """The number of a backing that has said that it has ``key``."""
        heard, now = self.heard, self._common.now
        for number, one in self._asked.items():
            if heard.of(mark_of(number, index, key), now) == THERE and one.usable:
                return number
        return None

    def unknown(self, index: Index, key: bytes) -> bool:
        """Whether there is a backing that could be asked for ``key`` and has not said lately whether it has it."""
        heard, now = self.heard, self._common.now
        asked = self._asked.items()
        return any(one.usable and heard.of(mark_of(number, index, key), now) == UNKNOWN for number, one in asked)

    # --- asking -------------------------------------------------------------------------------------------------

    def ask(self, operation: Operation, keys: Sequence[tuple[Index, bytes]]) -> list[Effect]:
        """Ask for these, but for what is being asked for already; the operation waits for all of it.

        It waits for nothing if nothing can be asked now.
        """
        effects: list[Effect] = []
        for number, one in self._asked.items():
            if not one.usable:
                continue
            new: list[tuple[Index, bytes]] = []
            for index, key in keys:
                if self.heard.of(mark := mark_of(number, index, key), self._common.now) != UNKNOWN:
                    continue
                if (io := self._under_way.get(mark)) is not None:
                    self._wait(operation, io)
                else:
                    new.append((index, key))
            if new and sum(ask.backing is one for ask in self.asks.values()) < self._common.limits.asks:
                effects.append(self._begin(operation, number, one, new))
        if operation.asks:
            self._begun.begin(operation, self._common.now)
        return effects

    def _begin(self, operation: Operation, number: int, one: Asked, keys: Sequence[tuple[Index, bytes]]) -> ev.Ask:
        named = {mark_of(number, index, key): (index.namespace.name, index.group, key) for index, key in keys}
        io = self._common.backings.begin(Io(0, one, "ask"))
        self.asks[io] = Ask(one, list(named), {}, self.heard.cleared)
        self._under_way.update(dict.fromkeys(named, io))
        self._wait(operation, io)
        return one.ask(io, list(named.values()))

    def _wait(self, operation: Operation, io: int) -> None:
        operation.asks.add(io)
        self.asks[io].waiting[operation] = None

    # --- answers ------------------------------------------------------------------------------------------------

    def found(self, io: Io, event: ev.Found) -> list[Operation]:
        """Remember what was heard, however late. The operations that wait for nothing more."""
        ask, limits, now = self.asks.pop(io.number), self._common.limits, self._common.now
        ask.backing.ask_ended(io, event.failed)
        there = set(event.there)
        for at, mark in enumerate(ask.marks):
            del self._under_way[mark]
            if not event.failed and ask.cleared == self.heard.cleared:
                word, lasts = (THERE, limits.there_ns) if at in there else (ABSENT, limits.absent_ns)
                self.heard.note(mark, word, now, lasts, limits.heard)
        return list(self._ready(ask, io.number))

    def _ready(self, ask: Ask, number: int) -> Iterator[Operation]:
        for operation in ask.waiting:
            operation.asks.discard(number)
            if not operation.asks:
                self._begun.end(operation)
                yield operation

    def not_got(self, backing: int, index: Index, key: bytes) -> None:
        """It did not come from there, or what came was wrong."""
        limits, mark = self._common.limits, mark_of(backing, index, key)
        self.heard.note(mark, NOT_GOT, self._common.now, limits.not_got_ns, limits.heard)

    def not_to_be_had(self, index: Index, key: bytes) -> None:
        """The same of all of them: what was restored of it failed."""
        for number in self._asked:
            self.not_got(number, index, key)

    # --- ends ---------------------------------------------------------------------------------------------------

    def leave(self, operation: Operation) -> None:
        """The operation waits no more; what it asked for is heard all the same."""
        self._begun.end(operation)
        for io in operation.asks:
            del self.asks[io].waiting[operation]
        operation.asks.clear()

    def overdue(self) -> Operation | None:
        """An operation that has waited for too long: it does not any more."""
        operation = self._begun.overdue(self._common.now - self._common.limits.ask_ns)
        if operation is not None:
            self.leave(operation)
        return operation

    @property
    def next_deadline(self) -> int | None:
        begun = self._begun.oldest
        return None if begun is None else begun + self._common.limits.ask_ns
