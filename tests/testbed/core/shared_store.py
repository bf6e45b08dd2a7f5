"""A third kind of backing: a store that others fill as well, so that it is asked what it has.

It is a second backing (``second_backing``) that answers when it likes, forgets, and may say what is not so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from testbed.core.second_backing import StoreBacking, StoreOpened

from kvhold.core import events as ev
from kvhold.core.backing import Io, Name
from kvhold.core.common import Common, Timer
from kvhold.core.events import Reason
from kvhold.core.storage import KINDS


@dataclass(slots=True, frozen=True)
class SharedOpened(StoreOpened):
    """A shared store is there. What it has is not known."""


class SharedBacking(StoreBacking):
    """While a read or an ask takes too long it is not used."""

    kind = "shared"

    def __init__(self, common: Common, event: SharedOpened) -> None:
        super().__init__(common, event)
        self.asks: Timer[int] = Timer()

    @property
    def usable(self) -> bool:
        ends = [begun for begun in (self.asks.oldest, self.reads.oldest) if begun is not None]
        return not ends or self._common.now - min(ends) <= self._common.limits.hung_ns

    def worth(self, row: int) -> Reason:
        return Reason.NONE if self.usable else Reason.OUT_OF_SERVICE

    def ask(self, io: int, names: Sequence[Name]) -> ev.Ask:
        self.asks.begin(io, self._common.now)
        return ev.Ask(io, self.number, tuple(names))

    def ask_ended(self, io: Io, failed: bool) -> None:
        self.asks.end(io.number)


KINDS[SharedOpened] = SharedBacking
