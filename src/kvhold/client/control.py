"""The scheduler half's side of the protocol: questions, credits and commits.

Nothing here waits, except for an answer that the caller brings a budget for. A manager that is slow is asked on and on;
one that does not run is not asked until it does.
"""

import logging
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvhold import protocol as wire
from kvhold.client.attacher import Attacher
from kvhold.client.budget import Budget
from kvhold.client.channel import Channel
from kvhold.threads import ENGINE, belongs_to

log = logging.getLogger(__name__)

KeysBySpace = tuple[tuple[int, bytes], ...]
"""(space, keys one after the other), for each space."""
SILENT_SECONDS = 0.25
"""A manager that was told something and has not made a turn for so long does not run."""
MOST_UNSENT = 4 << 20
"""Bytes of what was told that a manager may leave unread and still be asked something."""
MAX_BATCH = 256
"""Slots named in one message."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a space is about: see :class:`kvhold.protocol.Open`. ``shards`` are padded bytes by rank."""

    namespace: bytes
    group: int
    key_bytes: int
    shards: tuple[int, ...]
    label: str = ""
    chain: bool = False
    private: bool = False


def padded(shard: int) -> int:
    """``shard`` bytes as the protocol wants them."""
    return -(-shard // wire.SHARD_ALIGN) * wire.SHARD_ALIGN


@dataclass(frozen=True, slots=True)
class QuestionId:
    """A question: which request's (``op``), with which inputs (``revision``), asked in which session and when."""

    op: int
    revision: int
    attachment: int
    since: float


@dataclass(slots=True)
class _Asked:
    """What is known of an operation that holds something or may: its latest revision."""

    id: QuestionId
    answer: wire.Answer | None = None
    tiers: tuple[bytes, ...] | None = None  # the answer to a look
    looks: bool = False  # and holds nothing
    waiting: bool = False  # for a disk, says the manager
    elsewhere: bool = False  # it asks stores of other machines, which is not known to take longer
    hurried: bool = False  # it was asked for what is there
    forgone: bool = False  # what it leases is not wanted any more

    @property
    def answered(self) -> bool:
        return self.answer is not None or self.tiers is not None


@dataclass(slots=True)
class Slots:
    """Granted arena slots: parallel rows, offsets and epochs."""

    rows: "array[int]" = field(default_factory=lambda: array("I"))
    offsets: "array[int]" = field(default_factory=lambda: array("Q"))
    epochs: "array[int]" = field(default_factory=lambda: array("Q"))

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, count: int) -> "Slots":
        """Remove and return the last ``count`` slots."""
        keep = len(self.rows) - count
        taken = Slots(self.rows[keep:], self.offsets[keep:], self.epochs[keep:])
        del self.rows[keep:], self.offsets[keep:], self.epochs[keep:]
        return taken

    def between(self, start: int, end: int) -> "Slots":
        return Slots(self.rows[start:end], self.offsets[start:end], self.epochs[start:end])


class Watcher(Protocol):
    """Who is told of the spaces that are opened to be watched."""

    def stored(self, space: int, keys: Sequence[bytes]) -> None:
        """Of a commit, these can be found now."""

    def removed(self, space: int, keys: Sequence[bytes]) -> None:
        """These cannot be found any more, whoever stored them."""


@belongs_to(ENGINE)
class Control:
    """One scheduler half's session, whichever it is at the moment. One thread at a time may use it.

    A question may wait for ``read_seconds`` while the manager reads from a disk. After ``silent_seconds`` without a
    turn of its loop a manager counts as one that does not run.

    :attr:`attachment` is 0 while plans must not be made, and otherwise a number that is new for every attachment;
    what was granted, leased or asked under another number is void.
    """

    def __init__(self, attacher: Attacher, read_seconds: float, silent_seconds: float = SILENT_SECONDS) -> None:
        self.attachment = 0
        self.incarnation = 0
        self.reports: tuple[bytes, ...] = ()  # of the workers of this attachment
        self.credit: dict[int, Slots] = {}
        self.notes: dict[int, str] = {}  # by space, why nothing can be stored there
        self.watcher: Watcher | None = None
        self._key_bytes: dict[int, int] = {}  # by space
        self._attacher = attacher
        self._channel: Channel | None = None
        self._read_seconds = read_seconds
        self._silent_seconds = silent_seconds
        self._attachments = 0
        self._next_op = 1
        self._asked: dict[int, _Asked] = {}
        self._granted: dict[int, int] = {}  # by space, slots that are neither committed nor returned
        self._told: float | None = None  # since when there is something that no turn of the manager has followed
        self._turns = 0  # of the manager, then

    # --- the session --------------------------------------------------------------------------------------------

    def take_up(self) -> None:
        """Go on with the session of this moment, and take in what was said. Only here is another one taken up, so that
        all that is planned between two calls is planned against one manager."""
        channel = self._attacher.channel
        if channel is not self._channel:
            self._reset()
            self._channel = channel
        self.pump()

    def pump(self, wait: float = 0.0) -> None:
        """Take in what the manager said, and notice the end of the session."""
        channel = self._channel
        if channel is None:
            return
        for message in channel.receive(wait):
            self._told = None
            self._handle(channel, message)
        if channel.lost:
            self._reset()

    def _reset(self) -> None:
        self.attachment = 0
        self.credit.clear()
        self.notes.clear()
        self._asked.clear()
        self._granted.clear()
        self._key_bytes.clear()
        self._told = None

    def _handle(self, channel: Channel, message: wire.ManagerMessage) -> None:
        match message:
            case wire.Answer(op, revision):
                if asked := self._latest(op, revision):
                    if asked.forgone and message.offsets:
                        self._send(wire.Release(((op, revision),)))
                        message.offsets = b""
                    asked.answer = message
            case wire.Residency(op, tiers):
                asked = self._asked.get(op)
                if asked is not None and asked.looks:
                    asked.tiers = tiers
            case wire.Waiting(op, revision, objects):
                if asked := self._latest(op, revision):
                    asked.waiting |= objects > 0
                    asked.elsewhere = True
                    if asked.forgone:
                        self.release((asked.id,))  # it shall not be read for nobody
            case wire.Expired(op, revision):
                if self._latest(op, revision):
                    del self._asked[op]  # it holds nothing any more
            case wire.Opened(space, _, note) if note and space in self.credit:
                self.notes[space] = note
            case wire.Recall(space, keep):
                slots = self.credit.get(space)
                if slots is not None and (surplus := min(len(slots), self._granted[space] - keep)) > 0:
                    self.give_back(space, slots.take(surplus))
            case wire.Grant(space, rows, offsets, epochs):
                slots = self.credit.get(space)
                if slots is None:  # the space was closed meanwhile
                    channel.send(wire.Return(rows, epochs))
                else:
                    slots.rows.frombytes(rows)
                    slots.offsets.frombytes(offsets)
                    slots.epochs.frombytes(epochs)
                    self._granted[space] += len(rows) // 4
            case wire.Added(space, keys) if self.watcher is not None and space in self._key_bytes:
                self.watcher.stored(space, _split(keys, self._key_bytes[space]))
            case wire.Removed(space, keys) if self.watcher is not None and space in self._key_bytes:
                self.watcher.removed(space, _split(keys, self._key_bytes[space]))
            case wire.Ready(reports):
                self.reports = reports
                self._attachments += 1
                self.attachment = self._attachments
                self.incarnation = channel.welcome.incarnation
            case wire.Refused(reason):
                log.warning("kvhold: the manager ended the session: %s", reason)
                channel.abandon()
            case _:
                pass

    def _send(self, message: wire.ClientMessage) -> None:
        if self._channel is not None and not self._channel.lost:
            self._channel.send(message)

    # --- spaces and questions -----------------------------------------------------------------------------------

    def open(self, space: int, geometry: Geometry, slots: int) -> None:
        """Speak of ``geometry`` as ``space`` from now on; up to ``slots`` credits will be granted."""
        self.credit[space] = Slots()
        self._granted[space] = 0
        self._key_bytes[space] = geometry.key_bytes
        watch = self.watcher is not None
        about = geometry.namespace, geometry.group, geometry.key_bytes, geometry.shards
        self._send(wire.Open(space, *about, slots, watch, geometry.label, geometry.chain, geometry.private))

    def close(self, space: int) -> None:
        """Stop speaking of ``space``. Slots that were taken may still be committed or returned."""
        slots = self.credit.pop(space, None)
        self.notes.pop(space, None)
        self._key_bytes.pop(space, None)
        if slots is not None:
            self._send(wire.Close(space))
            self.give_back(space, slots)
        self._granted.pop(space, None)

    @property
    def silent(self) -> bool:
        """Whether the manager does not run: it has not made a turn since it was told something, for too long.

        One that has left megabytes unread is no better. What makes it run ends it, for it has something to read.
        """
        if self._channel is None:
            return False
        if self._told is not None and self._channel.turns != self._turns:
            self._told = None
        stopped = self._told is not None and time.monotonic() - self._told >= self._silent_seconds
        return stopped or self._channel.unsent > MOST_UNSENT

    def _ask(self, question: wire.ClientMessage) -> None:
        if self._channel is not None and (self._told is None or self._channel.turns != self._turns):
            self._told, self._turns = time.monotonic(), self._channel.turns
        self._send(question)

    def ask(self, space: int, skip: int, keys: bytes, former: QuestionId | None = None) -> QuestionId:
        """Ask for a chain. What the same request asked before is void from now on, and what it leased is given up."""
        if former is not None and former.op in self._asked:
            question = QuestionId(former.op, former.revision + 1, self.attachment, time.monotonic())
            self._asked[question.op] = _Asked(question)
        else:
            question = self._new_operation()
        self._ask(wire.Query(question.op, question.revision, space, skip, keys))
        return question

    def _new_operation(self) -> QuestionId:
        question = QuestionId(self._next_op, 1, self.attachment, time.monotonic())
        self._next_op += 1
        self._asked[question.op] = _Asked(question)
        return question

    def look(self, keys: KeysBySpace, former: QuestionId | None = None) -> QuestionId:
        """Ask where (space, keys) are; nothing is leased. With ``former`` once more, as old as the question before."""
        question = self._new_operation()
        if former is not None:
            self._asked.pop(former.op, None)  # it was answered with nothing
            question = replace(question, since=former.since)
        self._asked[question.op] = _Asked(question, looks=True)
        self._ask(wire.Lookup(question.op, keys))
        return question

    def residency(self, question: QuestionId, budget: Budget | None = None) -> tuple[bytes, ...] | None:
        """By space a byte for each key, 0 for what is nowhere; waited for like :meth:`answer`."""
        asked = self._latest(question.op, question.revision)
        if asked is not None and not asked.answered:
            self._await(asked, budget)
        if asked is None or self._asked.get(question.op) is not asked:
            return None
        return asked.tiers

    def prepare(self, looked: QuestionId, keys: KeysBySpace, used: KeysBySpace) -> QuestionId:
        """Ask for exactly these keys, all or none, after the look ``looked``; ``used`` ones only count as used."""
        question = replace(looked, revision=looked.revision + 1)
        self._asked[question.op] = _Asked(question)
        self._ask(wire.Prepare(question.op, question.revision, keys, used=used))
        return question

    def use(self, looked: QuestionId, used: KeysBySpace) -> None:
        """Say that ``used`` are in use, after a look that led to nothing else."""
        self._asked.pop(looked.op, None)
        if used:
            self._send(wire.Prepare(looked.op, looked.revision + 1, (), used=used))

    def cut(self, question: QuestionId, space: int, key: bytes, block: int) -> None:
        """For whoever wants it explained: what was asked for ended where ``key``, at ``block``, is missing."""
        self._send(wire.Cut(question.op, space, key, block))

    def _latest(self, op: int, revision: int) -> _Asked | None:
        """The operation, if that is what it was asked last."""
        asked = self._asked.get(op)
        return asked if asked is not None and asked.id.revision == revision else None

    def answer(self, question: QuestionId, budget: Budget | None = None) -> wire.Answer | None:
        """The answer to a question; None if it is not here yet, nor comes within what is left of ``budget``, if any."""
        asked = self._latest(question.op, question.revision)
        if asked is not None and not asked.answered:
            self._await(asked, budget)
        if asked is None or asked.answer is None or self._asked.get(question.op) is not asked:
            return None
        if not asked.answer.offsets:
            del self._asked[question.op]  # it holds nothing: there is nothing to give up
        return asked.answer

    def _await(self, asked: _Asked, budget: Budget | None) -> None:
        self.pump()
        question = asked.id
        if asked.waiting and not asked.hurried and time.monotonic() - question.since >= self._read_seconds:
            asked.hurried = True
            self._send(wire.AnswerNow(question.op, question.revision))
        if budget is None or self.silent:
            return
        while not (asked.answered or asked.waiting or asked.elsewhere) and self._asked and budget.left > 0:
            budget.spend(self.pump)

    def left(self, question: QuestionId, patience: float) -> float:
        """Seconds for which an answer is still to be waited for, which is worth ``patience``; 0 if none can come."""
        asked = self._latest(question.op, question.revision)
        if asked is None or self.silent:
            return 0.0
        return question.since + patience + (self._read_seconds if asked.waiting else 0.0) - time.monotonic()

    def overdue(self, question: QuestionId, patience: float) -> bool:
        """Whether an answer will not be waited for any longer."""
        return self.left(question, patience) <= 0

    def forgo(self, question: QuestionId) -> None:
        """Restore nothing of what ``question`` asked for; its answer may still come, and what it leases is given up."""
        asked = self._latest(question.op, question.revision)
        if asked is not None and (asked.answered or asked.waiting or asked.elsewhere):
            self.release((question,))
        elif asked is not None:
            asked.forgone = True

    def reading(self, question: QuestionId) -> bool:
        """Whether the manager has said that it reads what was asked for from a disk."""
        asked = self._latest(question.op, question.revision)
        return asked is not None and asked.waiting

    def start(self, question: QuestionId) -> bool:
        """Declare that what ``question`` leased is about to be restored; False if it may not be any more."""
        asked = self._latest(question.op, question.revision)
        if asked is None or asked.answer is None or self._channel is None:
            return False
        self._send(wire.Started((question.op,)))
        return self._channel.drained and time.monotonic() - question.since < wire.RESTORE_WITHIN

    def restore_failed(self, question: QuestionId) -> None:
        """A restore of what ``question`` leased has failed: nobody else shall find it."""
        if self._latest(question.op, question.revision) is not None:
            self._send(wire.RestoreFailed(question.op))

    def release(self, questions: Iterable[QuestionId]) -> None:
        """Give up questions and leases. A later answer to one of them is dropped."""
        asked = [each for t in questions if (each := self._latest(t.op, t.revision)) is not None]
        for each in asked:
            del self._asked[each.id.op]
        ops = tuple((each.id.op, each.id.revision) for each in asked if not each.looks)
        for start in range(0, len(ops), wire.MAX_OPS):
            self._send(wire.Release(ops[start : start + wire.MAX_OPS]))

    # --- publishing ---------------------------------------------------------------------------------------------

    def commit(
        self,
        space: int,
        parent: bytes,
        depth: int,
        chain: Sequence[bytes],
        slots: Slots,
        shards: tuple[int, ...],
        at: Sequence[int] | None = None,
    ) -> None:
        """``slots[i]`` holds the key ``chain[at[i]]``, positions ascending; without ``at`` they hold all of the chain.

        The keys of ``chain`` follow ``parent`` and each other, the first at ``depth`` in it.
        """
        held = range(len(slots)) if at is None else at
        self._spend(space, len(slots))
        for start, end in _runs(held):
            first = held[start]
            some, keys = slots.between(start, end), b"".join(chain[first : first + end - start])
            before = chain[first - 1] if first else parent
            rows, epochs = some.rows.tobytes(), some.epochs.tobytes()
            self._send(wire.Commit(space, before, depth + first, keys, rows, epochs, shards))

    def _spend(self, space: int, count: int) -> None:
        if space in self._granted:
            self._granted[space] -= count

    def give_back(self, space: int, slots: Slots) -> None:
        """Return slots that nobody writes to."""
        self._spend(space, len(slots))
        for start in range(0, len(slots), MAX_BATCH):
            some = slots.between(start, start + MAX_BATCH)
            self._send(wire.Return(some.rows.tobytes(), some.epochs.tobytes()))

    def bye(self) -> None:
        """End the session: nothing of this half is in use any more."""
        if self._channel is not None:
            self._channel.bye()
        self._reset()


def _split(keys: bytes, size: int) -> list[bytes]:
    return [keys[at : at + size] for at in range(0, len(keys), size)]


def _runs(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where in ``positions``, from and to, neighbours follow each other: at most a batch of them at a time."""
    start = 0
    for end in range(1, len(positions) + 1):
        if end == len(positions) or positions[end] != positions[end - 1] + 1 or end - start == MAX_BATCH:
            yield start, end
            start = end
