"""What nobody has here: asked for in the chain's order, and read from elsewhere into slots that are leased with it."""

from collections.abc import Generator, Sequence
from enum import Enum, auto

from kvhold.core import events as ev
from kvhold.core.budgets import Budgets
from kvhold.core.common import Common, split
from kvhold.core.events import Effect, Reason
from kvhold.core.history import Kind
from kvhold.core.indexes import Index
from kvhold.core.operations import Operations
from kvhold.core.sessions import Operation, Part, Phase, Search

Keys = Sequence[tuple[Index, bytes]]
"""(index, keys one after the other), or one key, each."""


class Outcome(Enum):
    """What became of asking for more."""

    NOTHING = auto()  # there are no more keys to ask for, or the operation is over
    IN_VAIN = auto()  # nothing could be asked, or there is an answer already
    WAITS = auto()  # the operation is ASKING, and goes on when it is answered


class Fetching:
    def __init__(self, common: Common, operations: Operations, budgets: Budgets) -> None:
        self.asking = operations.storage.asking
        self._common = common
        self._operations = operations
        self._budgets = budgets
        self._reading = operations.storage.reading

    # --- asking -------------------------------------------------------------------------------------------------

    def ask(self, operation: Operation, parts: Keys) -> Generator[list[Effect], None, Outcome]:
        """Ask for the next keys that nobody has here, as far as that can be."""
        search = operation.search
        assert search is not None
        keys = yield from self._unknown(search, parts)
        if not keys or operation.ended:
            return Outcome.NOTHING
        search.asked += len(keys)
        wanted = [(index, key) for index, key in keys if index.get(key) is None]
        effects: list[Effect] = self.asking.ask(operation, wanted)
        if not operation.asks:
            search.late |= any(self.asking.unknown(index, key) for index, key in wanted)
            return Outcome.IN_VAIN
        operation.phase = Phase.ASKING
        if not search.told and not operation.looks:
            search.told = True
            self._operations.note(operation, Kind.WAITING, 0)
            effects.append(ev.Waiting(operation.session, operation.id, operation.revision, 0))
        yield effects
        return Outcome.WAITS

    def _unknown(self, search: Search, parts: Keys) -> Generator[list[Effect], None, list[tuple[Index, bytes]]]:
        """The next batch of keys to ask for, with which the search goes on."""
        limits, found = self._common.limits, list[tuple[Index, bytes]]()
        most = min(limits.ask_batch, limits.ask_keys - search.asked)
        while search.part < len(parts) and len(found) < most:
            if (yield from self._look_through(search, *parts[search.part], found, most)):
                search.part, search.start, search.reached = search.part + 1, 0, 0
        return found

    def _look_through(
        self, search: Search, index: Index, keys: bytes, found: list[tuple[Index, bytes]], most: int
    ) -> Generator[list[Effect], None, bool]:
        """Add to what was ``found`` from one part. Whether it has no more: a gap ends what is a chain."""
        width, asked, begun = index.key_bytes, search.reached, len(found)
        whole = index.chain or not isinstance(search.event, ev.Lookup)
        end = len(keys) if self.asking.worth(index) else 0
        for start in range(search.start * width, end, ev.MAX_BATCH * width):
            for at, key in enumerate(split(keys[start : start + ev.MAX_BATCH * width], width), start // width):
                if index.get(key) is not None or self.asking.where(index, key) is not None:
                    continue
                if at < asked or not self.asking.unknown(index, key):
                    if whole:
                        return True
                    continue
                if len(found) == most:
                    return False
                if len(found) == begun:
                    search.start = at  # from here on it is looked again before the next batch
                found.append((index, key))
                search.reached = at + 1
            yield []
        return True

    # --- fetching -----------------------------------------------------------------------------------------------

    def fetch(self, operation: Operation, part: Part, key: bytes) -> Reason:
        """Have the next key of ``part``, which nobody has here, read from elsewhere; or why that cannot be."""
        index, catalogue = part.index, self._common.catalogue
        backing = self.asking.where(index, key)
        if backing is None:
            return Reason.NOT_STORED
        if self._budgets.room(operation.attachment) < index.size:
            return Reason.BUDGET
        parent = part.rows[-1] if part.rows and index.chain and not operation.exact else None
        row = self._common.eviction.fetch(index, key, parent)
        if row is None:
            return Reason.BUDGET
        self._reading.fetch(row, backing)
        catalogue.lease([row])
        self._budgets.charge(operation, index.size)
        self._operations.wait_for(operation, row)
        operation.offsets.append(catalogue.offset[row])
        part.rows.append(row)
        return Reason.NONE
