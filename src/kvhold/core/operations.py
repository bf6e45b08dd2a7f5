"""Operations, what they hold, and every way in which they end: answer, release, expiry, the owner's death.

An operation is one request's question, a revision one set of its inputs. It is answered once. What it leased is given
up by its owner's word, by a newer revision, with its owner's death, or, as long as no restore was declared started,
by time.
"""

from array import array
from collections.abc import Sequence

from kvhold.core import events as ev
from kvhold.core.budgets import Budgets
from kvhold.core.common import Common, Timer
from kvhold.core.events import Effect, Reason
from kvhold.core.history import Kind, block_of, fingerprint
from kvhold.core.indexes import Index
from kvhold.core.sessions import Attachment, Operation, Part, Phase
from kvhold.core.storage import Storage
from kvhold.core.turns import Work

_REASONS = list(Reason)
_DUE = 4
"""Operations that end by one tick: an answer may be long."""


class Operations:
    def __init__(self, common: Common, budgets: Budgets) -> None:
        self.storage = Storage(common, self._arrived)
        self._common = common
        self._budgets = budgets
        self._catalogue = common.catalogue
        self._asking = self.storage.asking
        self._waiters: dict[int, dict[Operation, int]] = {}  # by row that is LOADING: how often each names it
        self._answers: Timer[Operation] = Timer()
        self._leases: Timer[Operation] = Timer()
        self._unheard: Timer[Operation] = Timer()  # whose lease is over, were it known what its owner has said
        self._restores: Timer[Operation] = Timer()

    def begin(self, operation: Operation, keys: int) -> list[Effect] | None:
        """So many keys are asked for, instead of a former revision: what follows from that one's end; None without."""
        attachment = operation.attachment
        former = attachment.operations.get(operation.id)
        self._budgets.asked(operation, keys)
        attachment.operations[operation.id] = operation
        return self.end(former, Kind.SUPERSEDED) if former is not None else None

    def note(self, operation: Operation, kind: Kind, value: int) -> None:
        """Remember what happened to an operation."""
        self._common.history.note(kind, operation.id, operation.session, operation.revision, value)

    # --- waiting ------------------------------------------------------------------------------------------------

    def wait_for(self, operation: Operation, row: int) -> None:
        """The operation names a row that is LOADING."""
        waiting = self._waiters.setdefault(row, {})
        waiting[operation] = waiting.get(operation, 0) + 1
        operation.missing += 1
        operation.read.append(row)

    def _wait_no_more(self, operation: Operation, row: int) -> None:
        waiting = self._waiters.get(row, {})
        waiting.pop(operation, None)
        if not waiting:  # when it is waited for again, the row may be another object's
            self._waiters.pop(row, None)

    def matched(self, operation: Operation, reason: Reason) -> list[Effect]:
        """All that can be had is leased or on its way; there is no more for this ``reason``."""
        operation.reason = reason
        if operation.missing and not (operation.exact and reason):
            operation.phase = Phase.WAITING
            self._answers.begin(operation, self._common.now)
            self.note(operation, Kind.WAITING, operation.missing)
            return [ev.Waiting(operation.session, operation.id, operation.revision, operation.missing)]
        return self._conclude(operation, reason)

    def _arrived(self, rows: Sequence[tuple[int, bool]]) -> list[Effect]:
        ready: list[Operation] = []
        for row, good in rows:
            for operation, times in self._waiters.pop(row, {}).items():
                operation.missing -= times
                if not good:
                    operation.failed.add(row)
                if not operation.missing and operation.phase is Phase.WAITING:
                    ready.append(operation)
        return self._common.start(self._conclude_all(ready)) if ready else []

    def _conclude_all(self, operations: list[Operation]) -> Work:
        """One a slice: an answer may be long."""
        for operation in operations:
            if operation.phase is Phase.WAITING and not operation.missing:
                yield self._conclude(operation, operation.reason)

    def wait_no_longer(self, rows: Sequence[int]) -> list[Effect]:
        """What somebody waits for may come too late: whoever does is answered with what is there now."""
        late = list(dict.fromkeys(operation for row in rows for operation in self._waiters.get(row, ())))
        return self._common.start(self._conclude_late(late)) if late else []

    def _conclude_late(self, operations: list[Operation]) -> Work:
        """One a slice: an answer may be long."""
        for operation in operations:
            if operation.phase is Phase.WAITING:
                yield self._conclude(operation, Reason.REMOTE_LATE)

    # --- answers ------------------------------------------------------------------------------------------------

    def _conclude(self, operation: Operation, reason: Reason) -> list[Effect]:
        """Answer with what is there now, and let go of the rest."""
        attachment = operation.attachment
        self._answers.end(operation)
        if operation.asks:
            self._asking.leave(operation)
        if attachment.broken:
            return []  # who owned it may not be told any more; its leases end with the last of its sessions
        cut = self._cut(operation)
        if cut is not None:
            reason = Reason.READ_FAILED if operation.failed else reason or Reason.DEADLINE
            operation.lacked = self._awaited(operation, cut)
        departed, effects = self._common.departed(), list[Effect]()
        if cut is not None and not operation.exact:
            effects += self._shorten(operation, cut)
        resident, offsets = operation.asked, operation.offsets
        if not operation.exact:
            resident = len(operation.parts[0].rows)
        elif reason:
            resident, offsets = 0, array("Q")
        operation.phase, operation.reason = Phase.ANSWERED, reason
        self._budgets.answered(attachment)
        read = self._account(operation, resident)
        if offsets:
            self._leases.begin(operation, self._common.now)
        else:
            effects += self.end(operation, None)
        name = operation.session, operation.id, operation.revision
        return [*departed, ev.Answer(*name, resident, offsets.tobytes(), reason, read.tobytes()), *effects]

    def _shorten(self, operation: Operation, cut: int) -> list[Effect]:
        """Let go of a chain from position ``cut`` on."""
        (part,) = operation.parts
        tail = Part(part.index, 0, part.rows[max(cut, part.skip) :])
        part.rows = part.rows[:cut]
        del operation.offsets[len(part.leased) :]
        self._budgets.charge(operation, min(0, len(part.leased) * part.index.size - operation.charged))
        return self._let_go(operation, [tail])

    def _account(self, operation: Operation, resident: int) -> "array[int]":
        """Count and remember an answer. Which of the leased had to be read, by position."""
        counters, reason = self._common.counters, operation.reason
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
            self.note(operation, Kind.MISSED, _REASONS.index(reason))
            if operation.lacked is not None:
                self._common.history.note(Kind.LACKED, operation.id, operation.session, *operation.lacked)
        self.note(operation, Kind.ANSWERED, resident)
        return positions

    def _cut(self, operation: Operation) -> int | None:
        """The first position of a chain (of an exact question: 0) that did not or will not come; None if all did."""
        if not operation.missing and not operation.failed:
            return None
        waiters, failed = self._waiters, operation.failed
        for part in operation.parts:
            for position in range(part.skip, len(part.rows)):
                row = part.rows[position]
                if row in failed or operation in waiters.get(row, ()):
                    return position
        return None

    def _awaited(self, operation: Operation, cut: int) -> tuple[int, int] | None:
        """What names the key at ``cut`` that did not come; None where it is not known any more, or of which part."""
        if operation.exact or operation.failed:
            return None
        part = operation.parts[0]
        key = self._catalogue.key[part.rows[cut]]
        return name_of(part.index, cut, key) if key else None

    # --- ends ---------------------------------------------------------------------------------------------------

    def answer_now(self, event: ev.AnswerNow) -> Work:
        """One a slice: an answer may be long."""
        yield []
        attachment = self._common.speaker(event.session)
        operation = attachment.operations.get(event.op) if attachment is not None else None
        if operation is None or operation.revision != event.revision:
            return
        if operation.phase is Phase.WAITING:
            yield self._conclude(operation, operation.reason)
        elif operation.phase is Phase.ASKING and not operation.looks:
            yield self._conclude(operation, Reason.REMOTE_LATE)

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
                effects += self.end(operation, Kind.RELEASED)
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
            self.note(operation, Kind.STARTED, 0)
            self._leases.end(operation)
            self._unheard.end(operation)
            self._restores.begin(operation, self._common.now)

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
                    effects += self.end(operation, Kind.EXPIRED)
            elif operation := self._restores.overdue(now - limits.stall_ns):
                self._common.counters["stalled"] += 1
                seconds = limits.stall_ns // 1_000_000_000
                self.note(operation, Kind.STALLED, seconds)
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
            yield self.end(operation, None)

    def end(self, operation: Operation, kind: Kind | None) -> list[Effect]:
        """The operation is over; its leases go slice by slice."""
        attachment = operation.attachment
        if operation.phase < Phase.ANSWERED:
            self._budgets.answered(attachment)
        if kind is not None:
            self.note(operation, kind, 0)
        operation.phase = Phase.OVER
        if attachment.operations.get(operation.id) is operation:
            del attachment.operations[operation.id]
        attachment.asked -= operation.asked
        for timer in (self._answers, self._leases, self._unheard, self._restores):
            timer.end(operation)
        if operation.asks:
            self._asking.leave(operation)
        self._budgets.charge(operation, -operation.charged)
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
                yield self.storage.reading.unwanted(batch)


def name_of(index: Index, position: int, key: bytes) -> tuple[int, int]:
    """A key that was asked for, as the history names it."""
    return block_of(index.group, position), fingerprint(key)
