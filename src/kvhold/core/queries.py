"""Questions and what they hold: match, lease, wait for reads, answer; and every way in which that can end.

An operation is one request's question, a revision one set of its inputs. It is answered once. What it leased is given
up by its owner's word, by a newer revision, with its owner's death, or, as long as no restore was declared started,
by time.
"""

from array import array
from collections.abc import Sequence

from kvhold.core import events as ev
from kvhold.core.catalogue import Index
from kvhold.core.common import Common, Timer, split
from kvhold.core.events import Effect, Reason
from kvhold.core.rows import State
from kvhold.core.sessions import Attachment, Operation, Part, Phase
from kvhold.core.storage import Storage
from kvhold.core.story import Kind, block_of, fingerprint
from kvhold.core.turns import Work

_REASONS = list(Reason)
_DUE = 4
"""Operations that end by one tick: an answer may be long."""


class Queries:
    def __init__(self, common: Common) -> None:
        self.storage = Storage(common, self._arrived)
        self.answering = 0
        self.ahead = 0  # bytes held ahead of need
        self._common = common
        self._catalogue = common.catalogue
        self._waiters: dict[int, dict[Operation, int]] = {}  # by row that is LOADING: how often each names it
        self._answers: Timer[Operation] = Timer()
        self._leases: Timer[Operation] = Timer()
        self._unheard: Timer[Operation] = Timer()  # whose lease is over, were it known what its owner has said
        self._restores: Timer[Operation] = Timer()

    # --- asking -------------------------------------------------------------------------------------------------

    def query(self, event: ev.Query) -> Work:
        """Match the chain in slices, leasing as it goes; answer; then mark it as used just now, its end first."""
        opened = self._open(event, exact=False)
        if not isinstance(opened, Operation):
            yield opened
            return
        operation, former = opened, None
        space = operation.attachment.spaces[event.space]
        width, index = space.index.key_bytes, space.index
        part = Part(index, event.skip)
        keys, reason = event.keys, Reason.NONE
        if event.extend:
            former = operation.attachment.operations.get(event.op)
            if former is None or former.exact or former.parts[0].index is not index:
                former = None  # it was answered with nothing, or is no chain of this space
                keys, reason = b"", Reason.NOT_STORED
            elif former.reason:
                keys, reason = b"", former.reason
            elif former.phase is Phase.MATCHING:
                matched = len(former.parts[0].rows) - (former.asked - len(former.keys) // width)
                keys = former.keys[matched * width :] + keys
        replaced = self._replace(operation, [part], former)
        known = len(part.rows)
        operation.keys, operation.reason = keys, reason
        operation.lacked = former.lacked if former is not None else None
        part.asked = known + len(keys) // width
        self._count_keys(operation, part.asked)
        if replaced is not None:
            yield replaced
        self._note(operation, Kind.ASKED, operation.asked)
        for start in range(known, operation.asked, ev.MAX_BATCH):
            if operation.phase is Phase.OVER or operation.attachment.broken:
                return  # who ended it ends its leases
            found: list[int] = []
            maps, first = index.maps, start - known  # they may be others in the next slice
            try:
                for key in split(keys[first * width : (first + ev.MAX_BATCH) * width], width):
                    found.append(maps[key[-1]][key])
            except KeyError:
                reason = Reason.NOT_STORED
                position = start + len(found)
                self._missing(operation, key, position)
            ahead = max(0, part.skip - start)
            held, short = self._hold(operation, part, found[ahead:])
            part.rows += found[: ahead + held]
            reason = short or reason
            if reason:
                at = (len(part.rows) - known) * width
                operation.lacked = _name(index, len(part.rows), keys[at : at + width])
            if reason or start + ev.MAX_BATCH >= operation.asked:
                break
            yield []
        if operation.phase is Phase.OVER or operation.attachment.broken:
            return
        operation.keys = b""
        rows = part.rows
        yield self._matched(operation, reason)
        for end in range(len(rows), 0, -ev.MAX_BATCH):
            start = max(0, end - ev.MAX_BATCH)
            self._catalogue.touch(rows[start:end], index)
            self.storage.writes.touched(rows, start, end)
            if start:
                yield []

    def prepare(self, event: ev.Prepare) -> Work:
        """Lease exactly these objects, part by part; the first that cannot be had ends it. What is used is marked last.

        So it is more recent than what was asked for, which follows it in its chain.
        """
        opened = self._open(event, exact=True)
        if not isinstance(opened, Operation):
            yield opened
            return
        operation = opened
        spaces = operation.attachment.spaces
        work = [(spaces[number].index, keys) for number, keys in event.parts]
        used = [(spaces[number].index, keys) for number, keys in event.used]
        replaced = self._replace(operation, [], None)
        if replaced is not None:
            yield replaced
        self._count_keys(operation, sum(len(keys) // index.key_bytes for index, keys in work))
        self._note(operation, Kind.ASKED, operation.asked)
        demand = sum(len(keys) // index.key_bytes * index.size for index, keys in work)
        reason = self._too_large(operation, demand)
        for index, keys in work:
            part = Part(index, asked=len(keys) // index.key_bytes)
            operation.parts.append(part)
            for start in range(0, len(keys), ev.MAX_BATCH * index.key_bytes):
                if reason or operation.phase is Phase.OVER or operation.attachment.broken:
                    break
                batch = split(keys[start : start + ev.MAX_BATCH * index.key_bytes], index.key_bytes)
                found = [row for key in batch if (row := index.get(key)) is not None]
                if len(found) == len(batch):
                    held, reason = self._hold(operation, part, found)
                    part.rows += found[:held]
                else:
                    reason = Reason.NOT_STORED
                    held = next(at for at, key in enumerate(batch) if index.get(key) is None)
                    self._missing(operation, batch[held], start // index.key_bytes + held)
                if reason and reason is not Reason.BUDGET:  # which is of all of them
                    operation.lacked = _name(index, start // index.key_bytes + held, batch[held])
                yield []
        if operation.phase is Phase.OVER or operation.attachment.broken:
            return
        parts = [(part.rows, part.index) for part in operation.parts]
        yield self._matched(operation, reason)
        for rows, index in parts:
            for end in range(len(rows), 0, -ev.MAX_BATCH):
                start = max(0, end - ev.MAX_BATCH)
                self._catalogue.touch(rows[start:end], index)
                self.storage.writes.touched(rows, start, end)
                yield []
        for index, keys in used:
            yield from self._mark(index, keys)

    def _mark(self, index: Index, keys: bytes) -> Work:
        """Those of a chain's keys that are stored were used just now, its end first."""
        width, catalogue, writes = index.key_bytes, self._catalogue, self.storage.writes
        for end in range(len(keys) // width, 0, -ev.MAX_BATCH):
            start = max(0, end - ev.MAX_BATCH)
            before = max(0, start - 1)
            named = split(keys[before * width : end * width], width)
            found = [(at, row) for at in range(start, end) if (row := index.get(named[at - before])) is not None]
            catalogue.touch([row for _, row in found], index)
            for at, row in found:
                writes.touched_one(row, named[at - before - 1] if at else b"", at)
            yield []

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
        self._common.story.note(Kind.CUT, mark, event.session, event.op, where)
        self._common.story.note(Kind.CUT_SHORT, event.op, event.session, where, mark)
        return []

    def lookup(self, event: ev.Lookup) -> Work:
        """Where the keys are. Changes nothing."""
        attachment = self._common.speaker(event.session)
        if attachment is not None and (wrong := self._nonsense(attachment, event.op, event.parts)):
            yield [ev.Refuse(event.session, wrong)]
            return
        tiers: list[bytes] = []
        for number, keys in event.parts:
            space = attachment.spaces.get(number) if attachment is not None and attachment.ready else None
            if space is None:
                tiers.append(b"")
                continue
            index, state, here = space.index, self._catalogue.state, bytearray()
            for start in range(0, len(keys), ev.MAX_BATCH * index.key_bytes):
                for key in split(keys[start : start + ev.MAX_BATCH * index.key_bytes], index.key_bytes):
                    row = index.get(key)
                    here.append(0 if row is None else 1 if state[row] <= State.LEASED else 2)
                yield []
            tiers.append(bytes(here))
        yield [ev.Residency(event.session, event.op, tuple(tiers))]

    def _open(self, event: ev.Query | ev.Prepare, exact: bool) -> Operation | list[Effect]:
        """A new operation for an event that makes sense and is within budget; else what to say to it."""
        common, limits = self._common, self._common.limits
        attachment = common.speaker(event.session)
        parts = ((event.space, event.keys),) if isinstance(event, ev.Query) else event.parts
        extends = isinstance(event, ev.Query) and event.extend
        every = parts if isinstance(event, ev.Query) else (*event.parts, *event.used)
        common.counters["queries"] += 1
        if attachment is None or not attachment.ready:
            return [ev.Answer(event.session, event.op, event.revision, 0, b"", Reason.DETACHED)]
        if wrong := self._nonsense(attachment, event.op, every):
            return [ev.Refuse(event.session, wrong)]
        former = attachment.operations.get(event.op)
        if former is not None and former.revision >= event.revision:
            common.counters["stale"] += 1
            return []
        if former is not None and former.phase is Phase.STARTED:
            return [ev.Refuse(event.session, f"operation {event.op} is being restored and cannot be asked anew")]
        if any(number not in attachment.spaces for number, _ in every):
            answer = ev.Answer(event.session, event.op, event.revision, 0, b"", Reason.DETACHED)
            return [*(self._end(former, Kind.SUPERSEDED) if former else []), *self._common.departed(), answer]
        replaced, pending = former is not None, former is not None and former.phase < Phase.ANSWERED
        crowded = attachment.answering - pending >= limits.queries or self.answering - pending >= limits.all_queries
        asked = sum(len(keys) // attachment.spaces[number].index.key_bytes for number, keys in parts)
        named = attachment.asked + asked - (former.asked if former is not None and not extends else 0)
        if crowded or len(attachment.operations) - replaced >= limits.operations or named > limits.keys:
            for number, keys in parts:
                index = attachment.spaces[number].index
                index.asked += len(keys) // index.key_bytes
            common.counters["keys_asked"] += asked
            common.counters["keys_budget"] += asked
            answer = ev.Answer(event.session, event.op, event.revision, 0, b"", Reason.BUDGET)
            return [*(self._end(former, Kind.SUPERSEDED) if former else []), *self._common.departed(), answer]
        return Operation(attachment, event.session, event.op, event.revision, exact, event.ahead)

    @staticmethod
    def _count_keys(operation: Operation, keys: int) -> None:
        """The operation names so many keys, from now until it is over."""
        operation.asked = keys
        operation.attachment.asked += keys

    @staticmethod
    def _nonsense(attachment: Attachment, op: int, parts: Sequence[tuple[int, bytes]]) -> str:
        """What is wrong with keys that cannot be meant; nothing is said of spaces that are not open."""
        asked = 0
        for number, keys in parts:
            space = attachment.spaces.get(number)
            count, torn = divmod(len(keys), space.index.key_bytes) if space is not None else (0, 0)
            asked += count
            if torn:
                return f"operation {op}: keys are torn"
        return f"operation {op} names {asked} keys, more than {ev.MAX_QUERY_KEYS}" if asked > ev.MAX_QUERY_KEYS else ""

    def _replace(self, operation: Operation, parts: list[Part], extended: Operation | None) -> list[Effect] | None:
        """Take the place of a former revision, if any, after leasing what it matched if that is extended."""
        attachment = operation.attachment
        former = attachment.operations.get(operation.id)
        attachment.answering += 1
        self.answering += 1
        operation.parts = parts
        if extended is not None:
            # Its leases go over as they are, however many; what this one skips goes with the former.
            part, old = parts[0], extended.parts[0]
            part.skip = max(part.skip, old.skip)
            part.rows, old.rows = old.rows, old.rows[: part.skip]
            leased, skipped = part.leased, part.skip - old.skip
            operation.offsets = extended.offsets[skipped : skipped + len(leased)]
            for row in leased if extended.missing else ():
                if (waiting := self._waiters.get(row)) is not None:
                    waiting.pop(extended, None)
                    self._wait_for(operation, row)
            operation.spoiled |= extended.spoiled
            charged = extended.charged
            self._charge(extended, -charged)
            self._charge(operation, min(charged, len(leased) * part.index.size))
        attachment.operations[operation.id] = operation
        return self._end(former, Kind.SUPERSEDED) if former is not None else None

    def _hold(self, operation: Operation, part: Part, rows: Sequence[int]) -> tuple[int, Reason]:
        """Lease ``rows``, and have those read that are in a log alone, as far as that goes from the first on.

        Who brings bytes under lease pays for them; what somebody holds already costs nothing.
        """
        size, room, reason = part.index.size, self._room(operation), Reason.NONE
        if len(rows) * size > room and (count := self._affordable(rows, size, room)) < len(rows):
            rows, reason = rows[:count], Reason.BUDGET
            if operation.exact:
                return 0, reason  # nothing is read for what cannot be had whole
        if not self._catalogue.cold and not self._catalogue.bytes[State.LOADING]:
            cost = self._catalogue.lease(rows)
        else:
            rows, short, cost = self._hold_cold(operation, rows)
            reason = short or reason
        self._charge(operation, cost)
        offset = self._catalogue.offset
        operation.offsets.extend([offset[row] for row in rows])
        return len(rows), reason

    def _hold_cold(self, operation: Operation, rows: Sequence[int]) -> tuple[Sequence[int], Reason, int]:
        """The same where some may have to be read: those that are held now, why not the others, and the bytes."""
        catalogue, storage, state = self._catalogue, self.storage, self._catalogue.state
        reason = Reason.NONE
        for position, row in enumerate(rows):
            if state[row] == State.LOADING and not storage.reads.in_service(row):  # its read hangs
                rows, reason = rows[:position], Reason.OUT_OF_SERVICE
                break
        warm = [position for position, row in enumerate(rows) if state[row] != State.COLD]
        cost = catalogue.lease([rows[position] for position in warm])  # before room is made for the others
        for position in sorted(set(range(len(rows))).difference(warm)) if len(warm) < len(rows) else ():
            row, short = rows[position], Reason.NONE
            if state[row] == State.COLD:
                if not storage.reads.readable(row):
                    short = Reason.NOT_STORED
                elif not storage.reads.in_service(row):
                    short = Reason.OUT_OF_SERVICE
                elif not catalogue.fill(row):
                    short = Reason.BUDGET
                else:
                    storage.reads.read(row)
                    cost += catalogue.size[row]
            if short:
                reason = short
                catalogue.release([rows[later] for later in warm if later > position])
                rows = rows[:position]
                cost = min(cost, sum(catalogue.size[row] for row in rows))
                break
            catalogue.lease([row])
        for row in rows:
            if state[row] == State.LOADING:
                self._wait_for(operation, row)
        return rows, reason, cost

    def _wait_for(self, operation: Operation, row: int) -> None:
        waiting = self._waiters.setdefault(row, {})
        waiting[operation] = waiting.get(operation, 0) + 1
        operation.missing += 1
        operation.read.append(row)

    def _wait_no_more(self, operation: Operation, row: int) -> None:
        waiting = self._waiters.get(row, {})
        waiting.pop(operation, None)
        if not waiting:  # when it is waited for again, the row may be another object's
            self._waiters.pop(row, None)

    # --- budgets ------------------------------------------------------------------------------------------------

    def _charge(self, operation: Operation, size: int) -> None:
        operation.charged += size
        operation.attachment.prepared += size
        if operation.ahead:
            operation.attachment.ahead += size
            self.ahead += size

    def _room(self, operation: Operation) -> int:
        """Bytes that this operation may bring under lease beyond what is, by all budgets."""
        limits, total, states = self._common.limits, self._common.arena.total, self._catalogue.bytes
        held = states[State.LEASED] + states[State.DOOMED] + states[State.LOADING]
        all_may, own_may = limits.prepared_share * total, limits.engine_share * total
        room = min(int(all_may) - held, int(own_may) - operation.attachment.prepared)
        if operation.ahead:
            share = limits.speculative_share
            room = min(room, int(share * all_may) - self.ahead, int(share * own_may) - operation.attachment.ahead)
        return room

    def _affordable(self, rows: Sequence[int], size: int, room: int) -> int:
        """How many leading ones of ``rows`` may be held for ``room`` bytes beyond what is held by anybody."""
        state = self._catalogue.state
        for position, row in enumerate(rows):
            if state[row] in (State.RESIDENT, State.COLD):
                room -= size
                if room < 0:
                    return position
        return len(rows)

    def _too_large(self, operation: Operation, demand: int) -> Reason:
        """Why so many bytes can never be had all at once."""
        limits, total = self._common.limits, self._common.arena.total
        share = limits.speculative_share if operation.ahead else 1.0
        if demand > share * min(limits.engine_share, limits.prepared_share) * total:
            return Reason.TOO_LARGE
        return Reason.NONE

    # --- answers ------------------------------------------------------------------------------------------------

    def _matched(self, operation: Operation, reason: Reason) -> list[Effect]:
        """All that can be had is leased or on its way."""
        operation.reason = reason
        if operation.missing and not (operation.exact and reason):
            operation.phase = Phase.WAITING
            self._answers.begin(operation, self._common.now)
            self._note(operation, Kind.WAITING, operation.missing)
            return [ev.Waiting(operation.session, operation.id, operation.revision, operation.missing)]
        return self._conclude(operation, reason)

    def _arrived(self, rows: Sequence[tuple[int, bool]]) -> list[Effect]:
        ready: list[Operation] = []
        for row, good in rows:
            for operation, times in self._waiters.pop(row, {}).items():
                operation.missing -= times
                if not good:
                    operation.spoiled.add(row)
                if not operation.missing and operation.phase is Phase.WAITING:
                    ready.append(operation)
        return self._common.start(self._conclude_all(ready)) if ready else []

    def _conclude_all(self, operations: list[Operation]) -> Work:
        """One a slice: an answer may be long."""
        for operation in operations:
            if operation.phase is Phase.WAITING and not operation.missing:
                yield self._conclude(operation, operation.reason)

    def _conclude(self, operation: Operation, reason: Reason) -> list[Effect]:
        """Answer with what is there now, and let go of the rest."""
        attachment, counters = operation.attachment, self._common.counters
        self._answers.end(operation)
        if attachment.broken:
            return []  # who owned it may not be told any more; its leases end with the last of its sessions
        cut = self._cut(operation)
        if cut is not None:
            reason = Reason.READ_FAILED if operation.spoiled else reason or Reason.DEADLINE
            operation.lacked = self._awaited(operation, cut)
        whole = operation.exact and bool(reason or cut is not None)
        part = operation.parts[0] if operation.parts else None
        skip = part.skip if part is not None else 0
        departed, effects = self._common.departed(), list[Effect]()
        if whole:
            resident = 0
        elif operation.exact:
            resident = operation.asked
        else:
            assert part is not None
            resident = len(part.rows) if cut is None else cut
            if cut is not None:
                tail = Part(part.index, 0, part.rows[max(cut, part.skip) :])
                part.rows = part.rows[:cut]
                self._charge(operation, min(0, len(part.leased) * part.index.size - operation.charged))
                effects += self._let_go(operation, [tail])
        operation.phase = Phase.ANSWERED
        attachment.answering -= 1
        self.answering -= 1
        operation.reason = reason
        counters["keys_asked"] += operation.asked
        counters["keys_resident"] += resident
        read, positions = set(operation.read), array("I")
        for one in operation.parts:
            one.index.asked += one.asked
            if resident:
                one.index.found += len(one.rows)
                from_logs = sum(row in read for row in one.rows) if read else 0
                one.index.read += from_logs
                counters["keys_read"] += from_logs
        if read and resident:
            leased = (row for one in operation.parts for row in one.leased)
            positions.extend(at for at, row in enumerate(leased) if row in read)
        if reason:
            counters[f"keys_{reason}"] += operation.asked - resident
            self._note(operation, Kind.MISSED, _REASONS.index(reason))
            if operation.lacked is not None:
                self._common.story.note(Kind.LACKED, operation.id, operation.session, *operation.lacked)
        self._note(operation, Kind.ANSWERED, resident)
        offsets = operation.offsets[: 0 if whole else len(operation.offsets) if cut is None else max(0, cut - skip)]
        name = operation.session, operation.id, operation.revision
        if offsets:
            self._leases.begin(operation, self._common.now)
        else:
            effects += self._end(operation, None)
        return [*departed, ev.Answer(*name, resident, offsets.tobytes(), reason, positions.tobytes()), *effects]

    def _cut(self, operation: Operation) -> int | None:
        """The first position of a chain (of an exact question: 0) that did not or will not come; None if all did."""
        if not operation.missing and not operation.spoiled:
            return None
        waiters, spoiled = self._waiters, operation.spoiled
        for part in operation.parts:
            for position in range(part.skip, len(part.rows)):
                row = part.rows[position]
                if row in spoiled or operation in waiters.get(row, ()):
                    return position
        return None

    def _awaited(self, operation: Operation, cut: int) -> tuple[int, int] | None:
        """What names the key at ``cut`` that did not come; None where it is not known any more, or of which part."""
        if operation.exact or operation.spoiled:
            return None
        part = operation.parts[0]
        key = self._catalogue.key[part.rows[cut]]
        return _name(part.index, cut, key) if key else None

    # --- ends ---------------------------------------------------------------------------------------------------

    def hurry(self, event: ev.Hurry) -> Work:
        """One a slice: an answer may be long."""
        yield []
        attachment = self._common.speaker(event.session)
        operation = attachment.operations.get(event.op) if attachment is not None else None
        if operation is not None and operation.revision == event.revision and operation.phase is Phase.WAITING:
            yield self._conclude(operation, operation.reason)

    def release(self, event: ev.Release) -> Work:
        session = self._common.sessions.get(event.session)
        if session is None or not session.decides:
            return
        effects: list[Effect] = []
        cost = 0
        for op, revision in event.ops:
            operation = session.attachment.operations.get(op)
            cost += 1
            if operation is not None and operation.revision == revision:
                cost += min(operation.asked, ev.MAX_BATCH)
                effects += self._end(operation, Kind.RELEASED)
            elif operation is not None:
                self._common.counters["stale"] += 1
            if cost >= ev.MAX_BATCH:
                yield effects
                effects, cost = [], 0
        if effects:
            yield effects

    def started(self, event: ev.Started) -> None:
        attachment = self._common.speaker(event.session)
        for op in event.ops if attachment is not None else ():
            operation = attachment.operations.get(op) if attachment is not None else None
            if operation is None or operation.phase is not Phase.ANSWERED:
                self._common.counters["stale"] += 1
                continue
            operation.phase = Phase.STARTED
            self._note(operation, Kind.STARTED, 0)
            self._leases.end(operation)
            self._unheard.end(operation)
            self._restores.begin(operation, self._common.now)

    def spoiled(self, event: ev.Spoiled) -> Work:
        """What a failed restore leased is not found any more, and a later store of it is taken again."""
        attachment = self._common.speaker(event.session)
        operation = attachment.operations.get(event.op) if attachment is not None else None
        if operation is None or operation.phase not in (Phase.ANSWERED, Phase.STARTED):
            return
        catalogue = self._catalogue
        last, positions = catalogue.next_epoch, self.storage.positions(self._common.now)
        for part in list(operation.parts):
            rows = part.leased
            for start in range(0, len(rows), ev.MAX_BATCH):
                names: list[tuple[bytes, int, bytes]] = []
                for row in rows[start : start + ev.MAX_BATCH]:
                    # It may have been released meanwhile, and the row be another object's.
                    same = catalogue.epoch[row] < last or self.storage.recorded_before(row, positions)
                    if same and catalogue.key[row] and catalogue.owner[row] == part.index.id:
                        names.append((part.index.namespace.name, part.index.group, catalogue.key[row]))
                        catalogue.note(Kind.QUARANTINED, row)
                        self.storage.reads.removing(row)
                        catalogue.remove(row)
                        self._common.counters["quarantined"] += 1
                yield self.storage.forget(names) if names else []

    def tick(self, event: ev.Tick) -> list[Effect]:
        """What its time has come for, as far as that is not much; the next deadline is in the past, if it is more."""
        limits, now = self._common.limits, self._common.now
        effects: list[Effect] = []
        for _ in range(_DUE):
            if operation := self._answers.overdue(now - limits.answer_ns):
                effects += self._conclude(operation, operation.reason)
            elif operation := self._due_lease():
                if operation.session in event.behind:
                    self._unheard.begin(operation, now)
                elif not operation.attachment.broken:
                    self._common.counters["expired"] += 1
                    effects.append(ev.Expired(operation.session, operation.id, operation.revision))
                    effects += self._end(operation, Kind.EXPIRED)
            elif operation := self._restores.overdue(now - limits.stall_ns):
                self._common.counters["stalled"] += 1
                seconds = limits.stall_ns // 1_000_000_000
                self._note(operation, Kind.STALLED, seconds)
                effects.append(ev.Stalled(operation.session, operation.id, seconds))
            else:
                break
        return effects

    def _due_lease(self) -> Operation | None:
        limits, now = self._common.limits, self._common.now
        return self._leases.overdue(now - limits.lease_ns) or self._unheard.overdue(now - limits.hear_ns)

    @property
    def next_deadline(self) -> int | None:
        limits = self._common.limits
        ends = [
            (self._answers.oldest, limits.answer_ns),
            (self._leases.oldest, limits.lease_ns),
            (self._unheard.oldest, limits.hear_ns),
            (self._restores.oldest, limits.stall_ns),
        ]
        return min((begun + after for begun, after in ends if begun is not None), default=None)

    def settle(self, attachment: Attachment) -> Work:
        """All of the attachment's owners are gone for certain."""
        for operation in list(attachment.operations.values()):
            yield self._end(operation, None)

    def _end(self, operation: Operation, kind: Kind | None) -> list[Effect]:
        """The operation is over; its leases go slice by slice."""
        attachment = operation.attachment
        if operation.phase in (Phase.MATCHING, Phase.WAITING):
            attachment.answering -= 1
            self.answering -= 1
        if kind is not None:
            self._note(operation, kind, 0)
        operation.phase = Phase.OVER
        operation.keys = b""
        if attachment.operations.get(operation.id) is operation:
            del attachment.operations[operation.id]
        attachment.asked -= operation.asked
        for timer in (self._answers, self._leases, self._unheard, self._restores):
            timer.end(operation)
        self._charge(operation, -operation.charged)
        parts, operation.parts = operation.parts, []
        return self._let_go(operation, parts)

    def _let_go(self, operation: Operation, parts: Sequence[Part]) -> list[Effect]:
        """Release what the operation leased of ``parts``: at once if that is not much, else slice by slice."""
        work = self._letting_go(operation, parts)
        if sum(len(part.rows) - part.skip for part in parts) <= ev.MAX_BATCH:
            return [effect for effects in work for effect in effects]
        return self._common.start(work, operation.session)

    def _letting_go(self, operation: Operation, parts: Sequence[Part]) -> Work:
        for part in parts:
            rows = part.leased
            for start in range(0, len(rows), ev.MAX_BATCH):
                batch = rows[start : start + ev.MAX_BATCH]
                if self._waiters:
                    for row in batch:
                        self._wait_no_more(operation, row)
                self._catalogue.release(batch)
                yield self.storage.reads.unwanted(batch)

    def _missing(self, operation: Operation, key: bytes, position: int) -> None:
        self._common.story.note(Kind.MISSING, fingerprint(key), operation.session, operation.id, position)

    def _note(self, operation: Operation, kind: Kind, value: int) -> None:
        self._common.story.note(kind, operation.id, operation.session, operation.revision, value)


def _name(index: Index, position: int, key: bytes) -> tuple[int, int]:
    """A key that was asked for, as the story names it."""
    return block_of(index.group, position), fingerprint(key)
