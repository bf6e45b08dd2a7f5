"""Questions: which of the keys that they name are there, and taking those that are under lease, slice by slice.

How a question ends, answered or not, is in ``operations``.
"""

from collections.abc import Generator, Sequence

from kvhold.core import events as ev
from kvhold.core.budgets import Budgets
from kvhold.core.common import Common, split
from kvhold.core.events import Effect, Reason
from kvhold.core.fetching import Fetching, Outcome
from kvhold.core.history import Kind, block_of, fingerprint
from kvhold.core.indexes import Index
from kvhold.core.operations import Operations, name_of
from kvhold.core.rows import State
from kvhold.core.sessions import Operation, Part, Phase, Search, nonsense
from kvhold.core.turns import Work

Matched = Generator[list[Effect], None, Reason | None]
"""Work in slices that ends with why there is no more; None if it goes on once others have answered."""


class Matching:
    def __init__(self, common: Common, operations: Operations, budgets: Budgets, fetching: Fetching) -> None:
        self._common = common
        self._catalogue = common.catalogue
        self._operations = operations
        self._budgets = budgets
        self._fetching = fetching
        self._storage = operations.storage

    # --- a chain's longest prefix -------------------------------------------------------------------------------

    def query(self, event: ev.Query) -> Work:
        """Match the chain in slices, leasing as it goes; answer; then mark it as used just now, its end first."""
        operation = self._open(event, ((event.space, event.keys),), ())
        if not isinstance(operation, Operation):
            yield operation
            return
        index = operation.attachment.spaces[event.space].index
        part = Part(index, event.skip, asked=len(event.keys) // index.key_bytes)
        operation.parts = [part]
        replaced = self._operations.begin(operation, part.asked)
        if replaced is not None:
            yield replaced
        self._operations.note(operation, Kind.ASKED, operation.asked)
        if self._fetching.asking.worth(index):
            operation.search = Search(event)
        yield from self._match(operation, part, event.keys)

    def go_on(self, operation: Operation) -> Work:
        """Match on with what was heard."""
        event = operation.search.event if operation.search is not None else None
        assert isinstance(event, ev.Query)
        if not operation.ended:
            yield from self._match(operation, operation.parts[0], event.keys)

    def _match(self, operation: Operation, part: Part, keys: bytes) -> Work:
        reason = yield from self._match_chain(operation, part, keys)
        if operation.ended or reason is None:
            return
        rows = part.rows
        yield self._operations.matched(operation, reason)
        yield from self._touch(rows, part.index)

    def _match_chain(self, operation: Operation, part: Part, keys: bytes) -> Matched:
        """Lease the leading keys, from ``part.skip`` on, as far as they are there and may be had."""
        reason, width = Reason.NONE, part.index.key_bytes
        while (start := len(part.rows)) < part.asked and not operation.ended:  # who ended it ends its leases
            batch = split(keys[start * width : (start + ev.MAX_BATCH) * width], width)
            reason = self._match_next(operation, part, batch, start)
            asked = (yield from self._ask(operation, part, keys)) if reason is Reason.NOT_STORED else Outcome.NOTHING
            if asked is Outcome.WAITS:
                return None
            if asked is Outcome.IN_VAIN:
                continue
            if reason:
                reason = self._lacks(operation, part, keys, reason)
            if reason or start + ev.MAX_BATCH >= part.asked:
                break
            yield []
        return reason

    def _match_next(self, operation: Operation, part: Part, batch: Sequence[bytes], start: int) -> Reason:
        """Lease what is there of a ``batch``, the first of which is at ``start``, up to what is not, and why."""
        found, skipped = part.index.leading(batch), max(0, part.skip - start)
        if operation.search is not None and skipped <= len(found) < len(batch):
            part.rows += found[:skipped]
            return self._take(operation, part, batch[skipped:])
        if len(found) < len(batch):
            self._missing(operation, batch[len(found)], start + len(found))
        held, reason = self._hold(operation, part, found[skipped:])
        part.rows += found[: skipped + held]
        return reason or (Reason.NOT_STORED if len(found) < len(batch) else Reason.NONE)

    def _ask(self, operation: Operation, part: Part, keys: bytes) -> Generator[list[Effect], None, Outcome]:
        """Ask others for what follows the keys that are there, unless that was done, or the engine has it itself."""
        search, start = operation.search, len(part.rows)
        if search is None or start < max(part.skip, search.reached):
            return Outcome.NOTHING
        search.start = start
        return (yield from self._fetching.ask(operation, [(part.index, keys)]))

    def _lacks(self, operation: Operation, part: Part, keys: bytes, reason: Reason) -> Reason:
        """Remember which key it was that cannot be had, and for what ``reason`` in the end."""
        position, width, search = len(part.rows), part.index.key_bytes, operation.search
        key = keys[position * width : (position + 1) * width]
        operation.lacked = name_of(part.index, position, key)
        if reason is Reason.NOT_STORED and search is not None and position >= part.skip:
            self._missing(operation, key, position)
            late = search.late and self._fetching.asking.unknown(part.index, key)
            return Reason.REMOTE_LATE if late else self._fetching.asking.why_not(part.index)
        return self._fetching.asking.why_not(part.index) if reason is Reason.NOT_STORED else reason

    # --- exactly these ------------------------------------------------------------------------------------------

    def prepare(self, event: ev.Prepare) -> Work:
        """Lease exactly these objects, part by part; the first that cannot be had ends it. What is used is marked last.

        So it is more recent than what was asked for, which follows it in its chain.
        """
        operation = self._open(event, event.parts, event.used)
        if not isinstance(operation, Operation):
            yield operation
            return
        spaces = operation.attachment.spaces
        work = [(spaces[number].index, keys) for number, keys in event.parts]
        used = [(spaces[number].index, keys) for number, keys in event.used]
        replaced = self._operations.begin(operation, sum(len(keys) // index.key_bytes for index, keys in work))
        if replaced is not None:
            yield replaced
        reason = yield from self._match_all(operation, work)
        if operation.ended:
            return
        parts = [(part.rows, part.index) for part in operation.parts]
        yield self._operations.matched(operation, reason)
        for rows, index in parts:
            yield from self._touch(rows, index)
            if rows:
                yield []
        for index, keys in used:
            yield from self._mark(index, keys)

    def _match_all(
        self, operation: Operation, work: Sequence[tuple[Index, bytes]]
    ) -> Generator[list[Effect], None, Reason]:
        """Lease all of these keys; after the first that cannot be had nothing more is leased."""
        self._operations.note(operation, Kind.ASKED, operation.asked)
        reason = self._budgets.too_large(sum(len(keys) // index.key_bytes * index.size for index, keys in work))
        for index, keys in work:
            part, width = Part(index, asked=len(keys) // index.key_bytes), index.key_bytes
            operation.parts.append(part)
            for start in range(0, part.asked, ev.MAX_BATCH):
                if reason or operation.ended:
                    break
                batch = split(keys[start * width : (start + ev.MAX_BATCH) * width], width)
                reason = self._match_batch(operation, part, batch, start)
                yield []
        return reason

    def _match_batch(self, operation: Operation, part: Part, batch: Sequence[bytes], start: int) -> Reason:
        """Lease these keys, the first of which is at ``start`` of its part."""
        found = part.index.leading(batch)
        held = len(found)
        if held == len(batch):
            held, reason = self._hold(operation, part, found)
            part.rows += found[:held]
        elif self._fetching.asking.worth(part.index):
            reason = self._take(operation, part, batch)
            held = len(part.rows) - start
            if reason is Reason.NOT_STORED:
                self._missing(operation, batch[held], start + held)
        else:
            reason = self._fetching.asking.why_not(part.index)
            self._missing(operation, batch[held], start + held)
        if reason and reason is not Reason.BUDGET:  # which is of all of them
            operation.lacked = name_of(part.index, start + held, batch[held])
        return reason

    # --- what changes nothing -----------------------------------------------------------------------------------

    def cut(self, event: ev.Cut) -> list[Effect]:
        """Leave word of it with the key and with the operation, which may be over: one that found nothing is."""
        attachment = self._common.speaker(event.session)
        space = attachment.spaces.get(event.space) if attachment is not None else None
        if space is None:
            return []
        index, mark = space.index, fingerprint(event.key)
        if len(event.key) != index.key_bytes:
            return [ev.Refuse(event.session, f"operation {event.op}: keys are torn")]
        where = block_of(index.group, event.position)
        self._common.history.note(Kind.CUT, mark, event.session, event.op, where)
        self._common.history.note(Kind.CUT_SHORT, event.op, event.session, where, mark)
        return []

    # --- before a question --------------------------------------------------------------------------------------

    def _open(
        self, event: ev.Query | ev.Prepare, asked: Sequence[tuple[int, bytes]], used: Sequence[tuple[int, bytes]]
    ) -> Operation | list[Effect]:
        """A new operation for an event that makes sense and is within budget; else what to say to it."""
        attachment, named = self._common.speaker(event.session), (*asked, *used)
        self._common.counters["queries"] += 1
        if attachment is None or not attachment.ready:
            return self._instead(event, None, Reason.DETACHED)
        if wrong := nonsense(attachment, event.op, named):
            return [ev.Refuse(event.session, wrong)]
        former = attachment.operations.get(event.op)
        if former is not None and former.revision >= event.revision:
            self._common.counters["stale"] += 1
            return []
        if former is not None and former.phase is Phase.STARTED:
            return [ev.Refuse(event.session, f"operation {event.op} is being restored and cannot be asked anew")]
        if any(number not in attachment.spaces for number, _ in named):
            return self._instead(event, former, Reason.DETACHED)
        counts = [(index := attachment.spaces[number].index, len(keys) // index.key_bytes) for number, keys in asked]
        keys = sum(count for _, count in counts)
        if self._budgets.crowded(attachment, former, keys):
            for index, count in counts:
                index.asked += count
            self._common.counters["keys_asked"] += keys
            self._common.counters["keys_budget"] += keys
            return self._instead(event, former, Reason.BUDGET)
        exact = isinstance(event, ev.Prepare)
        return Operation(attachment, event.session, event.op, event.revision, exact)

    def _instead(self, event: ev.Query | ev.Prepare, former: Operation | None, reason: Reason) -> list[Effect]:
        """The question is answered with nothing at once; a ``former`` revision of it is over all the same."""
        answer = ev.Answer(event.session, event.op, event.revision, 0, b"", reason)
        if former is None:
            return [*self._common.departed(), answer]
        return [*self._operations.end(former, Kind.SUPERSEDED), *self._common.departed(), answer]

    # --- taking under lease -------------------------------------------------------------------------------------

    def _take(self, operation: Operation, part: Part, keys: Sequence[bytes]) -> Reason:
        """Lease ``keys`` one after the other, and have those read that somebody has elsewhere: why not all of them."""
        taken = 0
        while taken < len(keys):
            found = part.index.leading(keys[taken:])
            held, short = self._hold(operation, part, found)
            part.rows += found[:held]
            taken += held
            if not short and taken < len(keys):
                short = self._fetching.fetch(operation, part, keys[taken])
                taken += 1
            if short:
                return short
        return Reason.NONE

    def _hold(self, operation: Operation, part: Part, rows: Sequence[int]) -> tuple[int, Reason]:
        """Lease ``rows``, and have those read that are in a backing alone, as far as that goes from the first on."""
        size, room, reason = part.index.size, self._budgets.room(operation.attachment), Reason.NONE
        if len(rows) * size > room and (count := self._budgets.affordable(rows, size, room)) < len(rows):
            rows, reason = rows[:count], Reason.BUDGET
            if operation.exact:
                return 0, reason  # nothing is read for what cannot be had whole
        if not self._catalogue.cold and not self._catalogue.bytes[State.LOADING]:
            held, cost = self._catalogue.lease(rows)
            if len(held) < len(rows):
                rows, reason = held, Reason.NOT_STORED
        else:
            rows, short, cost = self._hold_cold(operation, rows)
            reason = short or reason
        self._budgets.charge(operation, cost)
        offset = self._catalogue.offset
        operation.offsets.fromlist([offset[row] for row in rows])
        return len(rows), reason

    def _hold_cold(self, operation: Operation, rows: Sequence[int]) -> tuple[Sequence[int], Reason, int]:
        """The same where some may have to be read: those that are held now, why not the others, and the bytes."""
        catalogue, state, size = self._catalogue, self._catalogue.state, self._catalogue.size
        rows, reason = self._not_hanging(rows)
        warm = [position for position, row in enumerate(rows) if state[row] != State.COLD]
        held, cost = catalogue.lease([rows[position] for position in warm])  # before room is made for the others
        if len(held) < len(warm):
            rows, warm, reason = rows[: warm[len(held)]], warm[: len(held)], Reason.NOT_STORED
        for position in sorted(set(range(len(rows))).difference(warm)) if len(warm) < len(rows) else ():
            row = rows[position]
            if state[row] == State.COLD:  # and not LOADING, because it is named twice
                if short := self._load(row):
                    reason = short
                    catalogue.release([rows[later] for later in warm if later > position])
                    rows = rows[:position]
                    cost = min(cost, sum(size[row] for row in rows))
                    break
                cost += size[row]
            catalogue.lease([row])
        for row in rows:
            if state[row] == State.LOADING:
                self._operations.wait_for(operation, row)
        return rows, reason, cost

    def _not_hanging(self, rows: Sequence[int]) -> tuple[Sequence[int], Reason]:
        """The leading ``rows`` of which none waits for a read that hangs, and why not the others."""
        state, reading = self._catalogue.state, self._storage.reading
        for position, row in enumerate(rows):
            if state[row] == State.LOADING and (short := reading.worth(row)):
                return rows[:position], short
        return rows, Reason.NONE

    def _load(self, row: int) -> Reason:
        """Have a COLD row read, or say why that cannot be."""
        reading = self._storage.reading
        if short := reading.worth(row):
            return short
        if not self._common.eviction.fill(row):
            return Reason.BUDGET
        reading.read(row)
        return Reason.NONE

    # --- marking as used ----------------------------------------------------------------------------------------

    def _touch(self, rows: Sequence[int], index: Index) -> Work:
        """A chain was used just now, its end first."""
        for end in range(len(rows), 0, -ev.MAX_BATCH):
            start = max(0, end - ev.MAX_BATCH)
            self._catalogue.touch(rows[start:end], index)
            self._storage.placement.touched(rows, start, end)
            if start:
                yield []

    def _mark(self, index: Index, keys: bytes) -> Work:
        """Those of a chain's keys that are stored were used just now, its end first."""
        width, catalogue, placement = index.key_bytes, self._catalogue, self._storage.placement
        for end in range(len(keys) // width, 0, -ev.MAX_BATCH):
            start = max(0, end - ev.MAX_BATCH)
            before = max(0, start - 1)
            named = split(keys[before * width : end * width], width)
            found = [(at, row) for at in range(start, end) if (row := index.get(named[at - before])) is not None]
            catalogue.touch([row for _, row in found], index)
            for at, row in found:
                placement.touched_one(row, named[at - before - 1] if at else b"", at)
            yield []

    def _missing(self, operation: Operation, key: bytes, position: int) -> None:
        self._common.history.note(Kind.MISSING, fingerprint(key), operation.session, operation.id, position)
