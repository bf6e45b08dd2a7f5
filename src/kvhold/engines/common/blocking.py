"""The blocking face: any thread of an engine finds, restores and publishes, and waits no longer than it says.

For engines that have threads to wait in, and no steps. One process is both halves of an engine instance of one rank.

Which thread uses what:

* :class:`~kvhold.client.control.Control`, the spaces and the numbers of plans belong to whoever holds the lock. It is
  held for moments: never across a wait, a copy, a read from a disk or the mapping of an arena.
* The scheduler half's attacher thread reads what the manager says, and wakes who waits for it. So credits are returned
  when they are asked back and leases are known to have ended, whatever the engine does.
* The worker half's attacher thread maps arenas and takes old ones away, when the copies that may use them have ended.
* Copies run on the engine's threads.

Whatever happens to the manager, what cannot be had in time is a miss: nothing raises for it.
"""

import math
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from kvhold import protocol as wire
from kvhold.client.arena import ArenaMapping
from kvhold.client.attacher import Attacher, Half
from kvhold.client.channel import Channel
from kvhold.client.control import MAX_BATCH, SILENT_SECONDS, Control, Geometry, QuestionId, Slots, padded
from kvhold.engines.common.buffers import Buffer, copy_in, copy_out, moves
from kvhold.engines.common.mappings import Mappings

_FIRST_ATTACH_SECONDS = 10.0
"""How long a start waits for each half's first session."""
_LAST_COPY_SECONDS = 30.0
"""How long an end waits for copies that were begun; they need nobody but this process."""
_LOOK_SECONDS = 0.02
"""Who waits looks so often whether the manager still runs."""

_LOOKS = 3
"""How often who wants some objects looks which are there, if others make room of them between a look and the lease."""
_GONE = "gone"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Space:
    """Objects of one kind: ``size`` bytes each, under ``key_bytes`` long keys. Made by :meth:`Blocking.open`."""

    number: int
    size: int
    geometry: Geometry
    slots: int

    def some(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """As many of ``keys`` as one question may name."""
        return keys[: wire.most_keys(self.geometry.key_bytes)]

    def packed(self, keys: Sequence[bytes]) -> bytes:
        """Raises ValueError for a key of another length."""
        packed = b"".join(keys)
        if any(len(key) != self.geometry.key_bytes for key in keys):
            raise ValueError(f"keys of this space have {self.geometry.key_bytes} bytes")
        return packed


@dataclass(frozen=True, slots=True)
class Hit:
    """``count`` objects, from ``skip`` on, that are leased to be restored; ``reason`` says why it is not all.

    The lease ends when it is restored or released, or by itself: a hit can be restored for half a minute, and the
    manager keeps the objects for twice as long.
    """

    space: Space
    count: int
    reason: str
    id: QuestionId | None = None
    offsets: "array[int]" = field(default_factory=lambda: array("Q"), repr=False)


@dataclass(frozen=True, slots=True)
class _Plan:
    """A copy that may be made: its number, and the arena it is about."""

    number: int
    arena: ArenaMapping
    slots: Slots = field(default_factory=Slots)


class _Scheduler:
    """What the attacher tells the scheduler half."""

    def __init__(self, face: "Blocking") -> None:
        self._face = face
        self._old: deque[int] = deque(maxlen=64)  # tokens of sessions

    def hello(self) -> wire.Hello:
        # The attacher has taken the old session away before it asks: nothing more is planned on that.
        return wire.Hello("scheduler", self._face.instance, 0, 1, self._face.label, self._face.parted())

    def attached(self, channel: Channel) -> None:
        for token in self._old:  # all of them: the word may have been lost with the session that carried it
            channel.send(wire.Retire(token))
        self._old.append(channel.welcome.token)

    def readable(self, channel: Channel) -> None:
        self._face.told()

    def tick(self, channel: Channel) -> bool:
        return self._face.unsaid(channel)


class Blocking:
    """An engine's way to a manager, for threads that may wait. It attaches in the background, again and again.

    ``instance`` is the engine's id, which nobody else may have; a person recognises it by ``label``. ``attach`` makes
    the attacher of a half, which reads on its own thread. What has to be read from an SSD is waited for
    ``read_seconds`` long.

    ``counts`` are objects: ``looked_for = seen + unseen_<reason>``; ``asked = found + missed_<reason>``, and of the
    found ones those ``restored``, and those ``void`` because the lease was over;
    ``offered = present + published + unpublished_<reason>``.
    """

    def __init__(
        self, instance: str, label: str, attach: Callable[[Half], Attacher], read_seconds: float = 2.0
    ) -> None:
        self.instance = instance
        self.label = label
        self.counts: Counter[str] = Counter()
        self._lock = threading.Condition()  # notified when the manager has said something, and when a copy has ended
        self._closed = False
        self._spaces: dict[int, Space] = {}
        self._next_space = 1
        self._attachment = 0  # in which the spaces are open
        self._planned = 0  # the number of the last plan
        self._plans: set[int] = set()  # whose copies may run
        self._restoring: set[QuestionId] = set()  # what they read under a lease
        self._mappings = Mappings(wire.Hello("worker", instance, 0, 1, label), self)
        self._worker = attach(self._mappings)
        self._scheduler = attach(_Scheduler(self))
        self._control = Control(self._scheduler, read_seconds, SILENT_SECONDS)
        self._worker.start(_FIRST_ATTACH_SECONDS)
        self._scheduler.start(_FIRST_ATTACH_SECONDS)

    # --- for the attachers, on their threads ----------------------------------------------------------------------

    def told(self) -> None:
        """The manager has said something, or is gone."""
        with self._lock:
            self._take_up()
            self._lock.notify_all()

    def unsaid(self, channel: Channel) -> bool:
        """Send what the socket did not take before, whoever asks next; whether there is more of it."""
        with self._lock:
            channel.flush()
            return not channel.drained and not channel.lost

    def parted(self) -> int:
        """The number of the last plan that may have been made in a session that is over."""
        with self._lock:
            self.told()
            return self._planned

    def register(self, arena: ArenaMapping) -> None:
        """Nothing to prepare: host memory is copied as it is."""

    def unregister(self, arena: ArenaMapping) -> None:
        """Nothing was prepared."""

    def ended(self, plan: int) -> bool:
        """Whether no copy of a plan up to this one runs."""
        with self._lock:
            return all(running > plan for running in self._plans)

    # --- spaces -------------------------------------------------------------------------------------------------

    def open(self, geometry: Geometry, slots: int) -> Space:
        """Speak of ``geometry``, which has one shard, from now on; up to ``slots`` objects are published at a time.

        Raises ValueError for what no manager takes, and for one space more than a session may have.
        """
        (size,) = geometry.shards
        geometry = replace(geometry, shards=(padded(size),))
        fault = wire.space_fault(geometry.namespace, geometry.group, geometry.key_bytes, geometry.shards, slots)
        if fault:
            raise ValueError(f"a space cannot have {fault}")
        with self._lock:
            if len(self._spaces) >= wire.MAX_SPACES:
                raise ValueError(f"{len(self._spaces)} spaces are open already; close one of them first")
            space = self._spaces[self._next_space] = Space(self._next_space, size, geometry, slots)
            self._next_space += 1
            if self._attachment and self._attachment == self._control.attachment:
                self._control.open(space.number, geometry, slots)
            return space

    def close_space(self, space: Space) -> None:
        """Speak of ``space`` no more. Hits that it gave are void, and copies that are under way are not published."""
        with self._lock:
            if self._spaces.pop(space.number, None) is not None:
                self._control.close(space.number)
            self._lock.notify_all()

    # --- the session --------------------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether a manager serves this instance now."""
        with self._lock:
            self._take_up()
            return bool(self._control.attachment)

    def wait(self, seconds: float) -> bool:
        """Wait for a manager that serves this instance; whether there is one."""
        end = time.monotonic() + seconds
        with self._lock:
            while not self._closed and not self.attached and (left := end - time.monotonic()) > 0:
                self._lock.wait(min(left, _LOOK_SECONDS))
            return self.attached

    def close(self) -> None:
        """Who waits has a miss at once; copies that run are waited for. What does not end stays mapped, and leased."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._lock.notify_all()
            end = time.monotonic() + _LAST_COPY_SECONDS
            while self._plans and (left := end - time.monotonic()) > 0:
                self._lock.wait(left)
            idle = not self._plans
        self._scheduler.write_out()
        self._scheduler.stop(self._bye)
        self._worker.stop(self._worker_bye if idle else _nothing)
        if idle:
            self._mappings.close()

    def _bye(self) -> None:
        with self._lock:
            self._control.bye()

    def _worker_bye(self) -> None:
        if (channel := self._worker.channel) is not None:
            channel.bye()

    def _take_up(self) -> None:
        """Go on with the session of this moment, and open in it what is spoken of."""
        control = self._control
        control.take_up()
        if control.attachment and control.attachment != self._attachment and not self._closed:
            self._attachment = control.attachment
            for space in self._spaces.values():
                control.open(space.number, space.geometry, space.slots)

    def _nudge(self) -> None:
        """Have the attacher's thread send what the socket did not take: perhaps nobody asks again for long."""
        if (channel := self._scheduler.channel) is not None and not channel.drained:
            self._scheduler.wake()

    def _hindrance(self, space: Space) -> str:
        """Why nothing can be asked now; empty if it can."""
        if self._closed or space.number not in self._spaces:
            return "closed"
        self._take_up()
        if not self._control.attachment:
            return "detached"
        return "deadline" if self._control.silent else ""

    def _await(
        self,
        space: Space,
        question: QuestionId,
        seconds: float,
        take: Callable[[QuestionId], T | None],
        end: float = math.inf,
    ) -> T | None:
        """What ``take`` has of the answer to ``question``; None, and the question is given up, once that is overdue.

        Whatever is read from an SSD, it is at ``end`` of the monotonic clock.
        """
        control = self._control
        while (found := take(question)) is None:
            left = min(control.left(question, seconds), end - time.monotonic())
            if self._closed or space.number not in self._spaces or left <= 0:
                control.release((question,))
                self._nudge()
                break
            self._lock.wait(min(left, _LOOK_SECONDS))
        return found

    # --- finding and restoring ----------------------------------------------------------------------------------

    def look(self, space: Space, keys: Sequence[bytes], seconds: float) -> bytes:
        """The :class:`~kvhold.protocol.Tier` of each key, as a byte. Nothing is leased.

        Waits at most ``seconds``; what is not known by then is nowhere.
        """
        keys = space.some(keys)
        packed = space.packed(keys)
        with self._lock:
            question, tiers, reason = self._look(space, packed, seconds)
            if question is not None:
                self._control.release((question,))
            there = len(tiers) - tiers.count(0)
            self._count("looked_for", len(tiers))
            self._count("seen", there)
            self._count(f"unseen_{reason or 'not_stored'}", len(tiers) - there)
        return tiers

    def _look(self, space: Space, packed: bytes, seconds: float) -> tuple[QuestionId | None, bytes, str]:
        """The question, if it was answered; of each key its tier; and why nothing is known of them if so."""
        nowhere = bytes(len(packed) // space.geometry.key_bytes)
        if reason := self._hindrance(space):
            return None, nowhere, reason
        question = self._control.look(((space.number, packed),))
        tiers = self._await(space, question, seconds, self._control.residency)
        if tiers is None:
            return None, nowhere, self._hindrance(space) or "deadline"
        # Of a space that could not be opened nothing is known.
        return question, tiers[0] or nowhere, ""

    def pick(
        self, space: Space, keys: Sequence[bytes], seconds: float, most: float = math.inf
    ) -> tuple[Hit, list[int]]:
        """Lease those of ``keys`` that are there, whatever is missing between them; and their positions in ``keys``.

        For objects of which each is of use by itself. It waits as :meth:`find` does, and ``most`` seconds in all.
        """
        keys = space.some(keys)
        packed, now = space.packed(keys), time.monotonic()
        with self._lock:
            for _ in range(_LOOKS):
                hit, at = self._pick(space, packed, now + seconds, now + most)
                if hit.reason != _GONE:
                    break
            else:
                hit = replace(hit, reason="not_stored")
            self._count("asked", len(keys))
            self._count("found", hit.count)
            self._count(f"missed_{hit.reason or 'not_stored'}", len(keys) - hit.count)
            return hit, at

    def _pick(self, space: Space, packed: bytes, end: float, last: float) -> tuple[Hit, list[int]]:
        """What one look says to be there, leased; nothing, and ``_GONE``, if that is not there any more."""
        size = space.geometry.key_bytes
        question, tiers, reason = self._look(space, packed, max(0.0, end - time.monotonic()))
        if question is None:
            return Hit(space, 0, reason), []
        at = [position for position, tier in enumerate(tiers) if tier]
        if not at:
            self._control.release((question,))
            return Hit(space, 0, "not_stored"), []
        wanted = b"".join(packed[position * size : (position + 1) * size] for position in at)
        question = self._control.prepare(question, ((space.number, wanted),), ())
        hit = self._leased(space, question, max(0.0, end - time.monotonic()), last)
        if hit.count == len(at):
            return hit, at
        self._control.release((question,))
        return Hit(space, 0, _GONE if hit.reason in ("", "not_stored") else hit.reason), []

    def find(self, space: Space, keys: Sequence[bytes], seconds: float, skip: int = 0) -> Hit:
        """Lease as many of ``keys`` as there are, from ``skip`` on up to the first that is missing.

        ``keys`` are a chain from its beginning; those before ``skip`` the engine has, and they count as used. Waits at
        most ``seconds`` for the answer. Where something has to be read from an SSD, it waits ``read_seconds`` for that
        and as long as before for the word on what has come by then. Raises ValueError for a negative ``skip``.
        """
        if skip < 0:
            raise ValueError(f"skip is {skip}; it is how many keys come before the first that is wanted, 0 or more")
        keys = space.some(keys)
        packed, wanted = space.packed(keys), max(0, len(keys) - skip)
        with self._lock:
            hit = self._find(space, packed, skip, seconds) if wanted else Hit(space, 0, "")
            self._count("asked", wanted)
            self._count("found", hit.count)
            self._count(f"missed_{hit.reason or 'not_stored'}", wanted - hit.count)
            return hit

    def _find(self, space: Space, packed: bytes, skip: int, seconds: float) -> Hit:
        if reason := self._hindrance(space):
            return Hit(space, 0, reason)
        return self._leased(space, self._control.ask(space.number, skip, packed), seconds)

    def _leased(self, space: Space, question: QuestionId, seconds: float, last: float = math.inf) -> Hit:
        """What the answer to ``question`` leases."""
        answer = self._await(space, question, seconds, self._control.answer, last)
        if answer is None:
            return Hit(space, 0, self._hindrance(space) or "deadline")
        offsets = array("Q")
        offsets.frombytes(answer.offsets)
        return Hit(space, len(offsets), answer.reason, question, offsets)

    def restore(self, hit: Hit, buffers: Sequence[Buffer]) -> int:
        """Copy ``hit`` into ``buffers``, one for each of its objects; its lease ends then.

        How many were copied: all, or none if the hit cannot be had any more, or another thread restores it. Waits for
        nothing but the copy. Raises ValueError for buffers that do not fit; the hit may be restored then, or released.
        """
        made = moves(buffers[: hit.count], hit.offsets, hit.space.size)
        question = hit.id
        if question is None or not made:
            return 0
        with self._lock:
            if question in self._restoring:
                return 0  # whoever restores it first ends its lease
            plan = self._begin(hit.space)
            if plan is None or not self._control.start(question):
                self._end(plan)
                self._void(question, hit.count)
                return 0
            self._restoring.add(question)
        copied = 0
        try:
            copy_out(plan.arena.address, made)
            copied = hit.count
        finally:
            with self._lock:
                self._end(plan)
                self._restoring.discard(question)
                self._count("restored", copied)
                self._void(question, hit.count - copied)
        return copied

    def release(self, hit: Hit) -> None:
        """Give a hit up that is not to be restored. While it is being restored nothing happens: its end does that."""
        if hit.id is not None:
            with self._lock:
                if hit.id not in self._restoring:
                    self._control.release((hit.id,))
                    self._nudge()

    def _void(self, question: QuestionId, count: int) -> None:
        self._control.release((question,))
        self._nudge()
        self._count("void", count)

    def _count(self, name: str, objects: int) -> None:
        if objects:
            self.counts[name] += objects

    def _begin(self, space: Space, slots: Slots | None = None) -> _Plan | None:
        """A plan to copy in the session of this moment; None if there is none, or the space is closed."""
        if self._closed or space.number not in self._spaces or not self._control.attachment:
            return None
        arena = self._mappings.arena(self._control.incarnation)
        if arena is None:
            return None
        self._planned += 1
        self._plans.add(self._planned)
        return _Plan(self._planned, arena, slots or Slots())

    def _end(self, plan: _Plan | None) -> None:
        if plan is not None:
            self._plans.discard(plan.number)
            self._lock.notify_all()

    # --- publishing ---------------------------------------------------------------------------------------------

    def publish(
        self,
        space: Space,
        keys: Sequence[bytes],
        buffers: Sequence[Buffer],
        seconds: float,
        skip: int = 0,
        depth: int = 0,
    ) -> list[bool]:
        """Store ``keys`` from ``skip`` on, whose objects are in ``buffers``: of each, whether the manager has it.

        Of what was copied that means that it was handed over; a manager that ends at once, or has no room for one
        more object, may yet drop it.

        ``keys`` are a chain from its beginning, as in :meth:`find`, or from ``depth`` on, if a message takes no more.
        What is there already is not copied; it counts as used, and so does what comes before it. Waits at most
        ``seconds`` for what is there and for room, beside the copies. Buffers may change when it returns. Raises
        ValueError for buffers that do not fit.
        """
        end = time.monotonic() + seconds
        stored = [False] * len(buffers)
        keys = space.some(keys)
        packed, offered = space.packed(keys), len(keys) - skip
        if offered > len(buffers) or skip < 0:
            raise ValueError(f"{len(buffers)} buffers for {offered} keys")
        moves(buffers, [0] * len(buffers), space.size)  # whether they fit
        with self._lock:
            attachment, present, reason = self._present(space, packed, skip, seconds)
        missing = [at for at in range(offered) if not present[at]] if not reason else []
        for at in range(offered):
            stored[at] = bool(present[at])
        while missing:
            with self._lock:
                plan, reason = self._take(space, attachment, len(missing), end)
            if plan is None:
                break
            part, missing = missing[: len(plan.slots)], missing[len(plan.slots) :]
            copied = False
            try:
                made = moves([buffers[at] for at in part], plan.slots.offsets, space.size)
                copy_in(plan.arena.address, made)
                copied = True
            finally:
                with self._lock:
                    done = [skip + at for at in part] if copied else []
                    kept = self._conclude(space, keys, plan, attachment, depth, done)
            for at in part:
                stored[at] = kept
            if not kept:
                reason = "closed" if space.number not in self._spaces else "detached"
                break
        with self._lock:
            self._count("offered", len(stored))
            self._count("present", sum(map(bool, present)))
            self._count("published", sum(stored) - sum(map(bool, present)))
            self._count(f"unpublished_{reason or 'too_many'}", len(stored) - sum(stored))
        return stored

    def _present(self, space: Space, packed: bytes, skip: int, seconds: float) -> tuple[int, bytes, str]:
        """The session, of each key from ``skip`` on whether it is there, and why nothing can be stored if so."""
        size = space.geometry.key_bytes
        nowhere = bytes(max(0, len(packed) // size - skip))
        if reason := self._hindrance(space) or ("too_large" if space.number in self._control.notes else ""):
            return 0, nowhere, reason
        control = self._control
        attachment, before = control.attachment, 1 if skip else 0
        question, there, reason = self._look(space, packed[(skip - before) * size :], seconds)
        if question is None or control.attachment != attachment:
            return 0, nowhere, reason or "detached"
        there = there.replace(bytes([wire.Tier.ELSEWHERE]), b"\0")  # what others have is not stored here
        control.use(question, ((space.number, packed),) if any(there) else ())
        if before and not there[0] and space.geometry.chain:
            return 0, nowhere, "unreachable"
        return attachment, there[before:], ""

    def _take(self, space: Space, attachment: int, most: int, end: float) -> tuple[_Plan | None, str]:
        """Slots to copy at most ``most`` objects to, waited for until ``end``; or why there are none."""
        while True:
            if reason := self._hindrance(space):
                return None, reason
            if self._control.attachment != attachment:
                return None, "detached"
            if credit := self._control.credit[space.number]:
                slots = credit.take(min(len(credit), most, MAX_BATCH))
                plan = self._begin(space, slots)
                if plan is None:
                    self._control.give_back(space.number, slots)
                return plan, "detached" if plan is None else ""
            if (left := end - time.monotonic()) <= 0:
                return None, "no_room"
            self._lock.wait(min(left, _LOOK_SECONDS))

    def _conclude(
        self, space: Space, keys: Sequence[bytes], plan: _Plan, attachment: int, depth: int, copied: list[int]
    ) -> bool:
        """The copy of ``plan`` has ended: publish what was ``copied``, whose positions in ``keys`` these are."""
        self._end(plan)
        self._take_up()
        if self._control.attachment != attachment:
            return False
        if not copied or space.number not in self._spaces:
            self._control.give_back(space.number, plan.slots)
            return False
        self._control.commit(space.number, b"", depth, keys, plan.slots, space.geometry.shards, copied)
        self._nudge()
        return True


def _nothing() -> None:
    pass
