"""The scheduler half's side of the protocol: questions, credits and commits, none of which ever waits for long.

All of it runs on the engine's scheduler thread. Waiting is taken out of one budget per engine step, and a manager that
left a question unanswered past its deadline is not asked again until it says anything at all.
"""

import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from kvhold import protocol as wire
from kvhold.client.channel import Channel
from kvhold.client.keeper import Keeper

MAX_BATCH = 512
"""Slots named in one message."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a space is about: see :class:`kvhold.protocol.Open`. ``shards`` are padded bytes by rank."""

    namespace: bytes
    group: int
    key_bytes: int
    shards: tuple[int, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each rank's shard starts in an object."""
        return tuple(accumulate(self.shards, initial=0))[:-1]


def padded(shard: int) -> int:
    """``shard`` bytes as the protocol wants them."""
    return -(-shard // wire.SHARD_ALIGN) * wire.SHARD_ALIGN


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

    def part(self, start: int, end: int) -> "Slots":
        return Slots(self.rows[start:end], self.offsets[start:end], self.epochs[start:end])


class Control:
    """One scheduler half's session, whichever it is at the moment.

    :attr:`attachment` is 0 while plans must not be made, and otherwise a number that is new for every attachment;
    what was granted, leased or asked under another number is void.
    """

    def __init__(self, keeper: Keeper, step_seconds: float, answer_seconds: float) -> None:
        self.attachment = 0
        self.incarnation = 0
        self.waited = 0.0  # seconds, in all
        self.exhausted = 0  # waits that used up a step's budget
        self.credit: dict[int, Slots] = {}
        self._keeper = keeper
        self._channel: Channel | None = None
        self._step_seconds = step_seconds
        self._left = step_seconds
        self._answer_seconds = answer_seconds
        self._attachments = 0
        self._next_op = 1
        self._asked: dict[int, float] = {}
        self._answers: dict[int, wire.Answer] = {}
        self._silent = False

    # --- the session --------------------------------------------------------------------------------------------

    def new_step(self) -> None:
        """A new engine step has begun: its waiting budget is whole. Only here is another session taken up, so that
        all of one step's plans are made against one manager."""
        self._left = self._step_seconds
        channel = self._keeper.channel
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
            self._silent = False
            self._handle(channel, message)
        if channel.lost:
            self._reset()

    def _reset(self) -> None:
        self.attachment = 0
        self.credit.clear()
        self._asked.clear()
        self._answers.clear()
        self._silent = False

    def _handle(self, channel: Channel, message: wire.ManagerMessage) -> None:
        match message:
            case wire.Answer():
                if message.op in self._asked:
                    self._answers[message.op] = message
            case wire.Grant(space, rows, offsets, epochs):
                slots = self.credit.get(space)
                if slots is None:  # the space was closed meanwhile
                    channel.send(wire.Return(rows, epochs))
                else:
                    slots.rows.frombytes(rows)
                    slots.offsets.frombytes(offsets)
                    slots.epochs.frombytes(epochs)
            case wire.Ready():
                self._attachments += 1
                self.attachment = self._attachments
                self.incarnation = channel.welcome.incarnation
            case wire.Refused():
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
        self._send(wire.Open(space, geometry.namespace, geometry.group, geometry.key_bytes, geometry.shards, slots))

    def close(self, space: int) -> None:
        """Stop speaking of ``space``. Slots that were taken may still be committed or returned."""
        slots = self.credit.pop(space, None)
        if slots is not None:
            self._send(wire.Close(space))
            self.give_back(slots)

    @property
    def silent(self) -> bool:
        """Whether the manager owes an answer past its deadline and has said nothing since."""
        return self._silent

    def ask(self, space: int, skip: int, keys: bytes) -> int:
        """Ask for a chain; the operation to wait for and to release."""
        op = self._next_op
        self._next_op += 1
        self._asked[op] = time.monotonic()
        self._send(wire.Query(op, space, skip, keys))
        return op

    def answer(self, op: int, patient: bool = True) -> wire.Answer | None:
        """The answer to ``op``, waited for within what is left of the step's budget; None if it is not here yet."""
        if op not in self._answers:
            self.pump()
        if patient and not self._silent:
            self._wait_for(op)
        found = self._answers.pop(op, None)
        if found is not None:
            del self._asked[op]
        return found

    def _wait_for(self, op: int) -> None:
        while op not in self._answers and op in self._asked and self._left > 0:
            begun = time.monotonic()
            self.pump(self._left)
            spent = time.monotonic() - begun
            self._left -= spent
            self.waited += spent
            self.exhausted += self._left <= 0

    def overdue(self, op: int) -> bool:
        """Whether ``op`` will not be waited for any longer: it is too old, or the session it was asked in is over."""
        asked = self._asked.get(op)
        if asked is None:
            return True
        if time.monotonic() - asked < self._answer_seconds and not self._silent:
            return False
        self._silent = True
        return True

    def release(self, ops: Iterable[int]) -> None:
        """Give up questions and leases. A later answer to one of them is dropped."""
        ops = tuple(ops)
        for op in ops:
            self._asked.pop(op, None)
            self._answers.pop(op, None)
        if ops:
            self._send(wire.Release(ops))

    # --- publishing ---------------------------------------------------------------------------------------------

    def commit(self, space: int, parent: bytes, keys: Sequence[bytes], slots: Slots, shards: tuple[int, ...]) -> None:
        """The slots hold ``keys``, which follow ``parent`` and each other in a chain."""
        for start in range(0, len(keys), MAX_BATCH):
            part, some = slots.part(start, start + MAX_BATCH), keys[start : start + MAX_BATCH]
            before = keys[start - 1] if start else parent
            self._send(wire.Commit(space, before, b"".join(some), part.rows.tobytes(), part.epochs.tobytes(), shards))

    def give_back(self, slots: Slots) -> None:
        """Return slots that nobody writes to."""
        for start in range(0, len(slots), MAX_BATCH):
            part = slots.part(start, start + MAX_BATCH)
            self._send(wire.Return(part.rows.tobytes(), part.epochs.tobytes()))

    def bye(self) -> None:
        """End the session: nothing of this half is in use any more."""
        if self._channel is not None:
            self._channel.bye()
        self._reset()
