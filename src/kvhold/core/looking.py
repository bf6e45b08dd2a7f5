"""Lookups: where keys are, which changes nothing here. What nobody has here is asked for elsewhere."""

from collections.abc import Sequence

from kvhold.core import events as ev
from kvhold.core.budgets import Budgets
from kvhold.core.common import Common, split
from kvhold.core.fetching import Fetching, Outcome
from kvhold.core.history import Kind
from kvhold.core.indexes import Index
from kvhold.core.operations import Operations
from kvhold.core.rows import TIERS
from kvhold.core.sessions import Attachment, Operation, Part, Search, nonsense
from kvhold.core.turns import Work


class Looking:
    def __init__(self, common: Common, operations: Operations, budgets: Budgets, fetching: Fetching) -> None:
        self._common = common
        self._catalogue = common.catalogue
        self._operations = operations
        self._budgets = budgets
        self._fetching = fetching

    def lookup(self, event: ev.Lookup) -> Work:
        """Ask as far as that is worth it, and answer."""
        attachment = self._common.speaker(event.session)
        if attachment is not None and (wrong := nonsense(attachment, event.op, event.parts)):
            yield [ev.Refuse(event.session, wrong)]
            return
        operation = self._open(attachment, event) if attachment is not None and attachment.ready else None
        if operation is None:
            former = attachment.operations.get(event.op) if attachment is not None else None
            if former is not None and former.looks:
                yield self._operations.end(former, Kind.SUPERSEDED)
            yield from self._answer(event, None)
            return
        replaced = self._operations.begin(operation, operation.asked)
        if replaced is not None:
            yield replaced
        yield from self.go_on(operation)

    def _open(self, attachment: Attachment, event: ev.Lookup) -> Operation | None:
        """An operation for a lookup for which others may be asked; None if it is answered with what is known here."""
        parts = [
            Part(space.index, asked=len(keys) // space.index.key_bytes)
            for number, keys in event.parts
            if (space := attachment.spaces.get(number)) is not None
        ]
        former = attachment.operations.get(event.op)
        if len(parts) < len(event.parts) or not any(self._fetching.asking.worth(part.index) for part in parts):
            return None
        if former is not None and not former.looks:
            return None
        asked = sum(part.asked for part in parts)
        if self._budgets.crowded(attachment, former, asked):
            return None
        return Operation(attachment, event.session, event.op, 0, False, parts, asked=asked, search=Search(event))

    def go_on(self, operation: Operation) -> Work:
        """Ask for the next keys, until there are none; then answer."""
        search = operation.search
        assert search is not None
        assert isinstance(search.event, ev.Lookup)
        while not operation.ended:
            named = zip(operation.parts, search.event.parts, strict=True)
            asked = yield from self._fetching.ask(operation, [(part.index, keys) for part, (_, keys) in named])
            if asked is Outcome.NOTHING:
                yield from self._answer(search.event, operation)
            if asked is not Outcome.IN_VAIN:
                return

    def _answer(self, event: ev.Lookup, operation: Operation | None) -> Work:
        attachment, tiers = self._common.speaker(event.session), list[bytes]()
        for number, keys in event.parts:
            space = attachment.spaces.get(number) if attachment is not None and attachment.ready else None
            if space is None:
                tiers.append(b"")
                continue
            index, here = space.index, bytearray()
            for start in range(0, len(keys), ev.MAX_BATCH * index.key_bytes):
                some = split(keys[start : start + ev.MAX_BATCH * index.key_bytes], index.key_bytes)
                self._add_tiers(index, some, here)
                if self._common.backings.asked:
                    self._look_elsewhere(index, some, start // index.key_bytes, here)
                yield []
            tiers.append(bytes(here))
        residency = ev.Residency(event.session, event.op, tuple(tiers))
        if operation is None:
            yield [residency]
        elif not operation.ended:
            yield [*self._common.departed(), residency, *self._operations.end(operation, None)]

    def _add_tiers(self, index: Index, keys: Sequence[bytes], tiers: bytearray) -> None:
        """Add to ``tiers`` where each of ``keys`` is here."""
        state = self._catalogue.state
        for key in keys:
            row = index.get(key)
            tiers.append(ev.Tier.NOWHERE if row is None else TIERS[state[row]])

    def _look_elsewhere(self, index: Index, keys: Sequence[bytes], first: int, tiers: bytearray) -> None:
        """Of ``keys``, the first of which is at ``first``, which nobody has here and somebody has elsewhere."""
        where, expected = self._fetching.asking.where, self._catalogue.expected
        for at, key in enumerate(keys, first):
            row = index.get(key)
            if (where(index, key) is not None) if row is None else expected(row):
                tiers[at] = ev.Tier.ELSEWHERE
