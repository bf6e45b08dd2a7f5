"""The manager's end of the process that speaks to a store: it hands over calls, and kills what takes too long.

Whatever is submitted is answered exactly once. The slots of a call are answered for when the process has said that it
is done with them, or is proved dead: never because time has passed.
"""

import logging
import os
import select
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Lock, Thread
from typing import Final

from kvhold.core.events import Ask, Cancel, Done, Forget, Found, Read, Stored, Write
from kvhold.core.remote.events import Serves
from kvhold.tiers.remote import messages as ms
from kvhold.tiers.remote.breaker import Breaker
from kvhold.tiers.remote.child import MOVERS, READY
from kvhold.tiers.remote.floors import Floors
from kvhold.tiers.remote.jobs import Effect, Hidden, Job
from kvhold.tiers.remote.process import Child
from kvhold.tiers.remote.record import Wrong
from kvhold.tiers.remote.url import RemoteConfig

log = logging.getLogger(__name__)

LATE: Final = {"exists": 1.0, "get": 1.0, "put": 5.0}
"""Seconds after which a call counts as one that has failed."""
DEADLINE: Final = {"exists": 3.0, "get": 3.0, "put": 5.0, "remove": 60.0, "probe": 10.0, "start": 20.0}
"""Seconds after which the process is killed. What only removes has no slots, and may have a whole namespace to do."""
WRITERS: Final = MOVERS - 1
"""Puts under way at once: a get never waits for all of them."""
QUEUED: Final = 1024
"""Effects that wait; what comes then fails at once."""
OWED: Final = 256
"""Effects that say what to forget, kept until a store that was out of service can be told."""
_AGAIN: Final = 10.0
"""Seconds until a store that serves is told again what it failed to forget."""
_WEIGHT: Final = 0.2
WRONG: Final = tuple(kind.value for kind in Wrong)
COUNTED: Final = ("asked", "found", "got", "missed", "put", "refused", "dropped", "late", "failed", "not_removed")


@dataclass(slots=True)
class _UnderWay:
    kind: str
    began: float
    job: Job | None = None
    first: int = 0
    end: int = 0
    positions: tuple[int, ...] = ()


class RemoteExecutor:
    """Carries out effects on the arena of ``arena_bytes`` behind ``arena_fd``. ``tell`` is called by its own thread."""

    def __init__(
        self,
        config: RemoteConfig,
        arena_fd: int,
        arena_bytes: int,
        tell: Callable[[Done | Found | Serves], None],
        *,
        read_only: bool = False,
    ) -> None:
        self._config = config
        self._arena = (arena_fd, arena_bytes, read_only)
        self._tell = tell
        self._read_only = read_only
        self._lock = Lock()
        self._inbox: deque[Effect | Cancel] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._asks: OrderedDict[int, Job] = OrderedDict()
        self._reads: OrderedDict[int, Job] = OrderedDict()
        self._changes: deque[Job] = deque()  # writes and forgets, in their order
        self._forgets: deque[Forget] = deque()  # owed to a store that is out of service
        self._calls: dict[int, _UnderWay] = {}
        self._next_call = READY + 1
        self._child: Child | None = None
        self._hidden = Hidden()
        self._floors = Floors()
        self._breaker = Breaker(time.monotonic())
        self._told = False
        self._again = 0.0
        self._number = 0
        self._closing: float | None = None
        self._ended = Event()
        self._why = ""  # what a process is being killed for
        self._restarts = -1
        self._counts = Counter[str](dict.fromkeys(COUNTED, 0))
        self._wrong = Counter[str](dict.fromkeys(WRONG, 0))
        self._rates = {"get": 0.0, "put": 0.0}
        self._thread = Thread(target=self._run, name="kvhold-remote", daemon=True)

    def start(self, number: int) -> None:
        """Begin, as the backing of this number. It does not serve before the first probe has succeeded."""
        self._number = number
        self._thread.start()

    def submit(self, effect: Effect | Cancel) -> None:
        """Have ``effect`` carried out, or a read that has not begun taken out. Never waits."""
        with self._lock:
            if not self._ended.is_set():
                self._inbox.append(effect)
                os.eventfd_write(self._wake, 1)
                return
        self._take(effect)

    def close(self, seconds: float) -> bool:
        """Fail what waits, end the process; whether that was done within ``seconds``. What it leaves is a daemon."""
        with self._lock:
            if self._ended.is_set():
                return True
            self._closing = time.monotonic() + seconds / 2
            os.eventfd_write(self._wake, 1)
        return self._ended.wait(seconds)

    def report(self) -> dict[str, object]:
        """Plain data for status and metrics. ``since`` is in seconds ago, rates in bytes a second (0: not known)."""
        breaker, child = self._breaker, self._child
        return {
            "url": self._config.shown,
            "state": breaker.state,
            "since": time.monotonic() - breaker.since,
            "why": breaker.why,
            "read_only": self._read_only,
            "pid": 0 if child is None else child.pid,
            "restarts": max(0, self._restarts),
            "counts": {name: self._counts[name] for name in COUNTED},
            "wrong": {kind: self._wrong[kind] for kind in WRONG},
            "rates": dict(self._rates),
            "waiting": len(self._asks) + len(self._reads) + len(self._changes),
            "under_way": len(self._calls),
        }

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            while self._inbox:
                self._take(self._inbox.popleft())
            now = time.monotonic()
            self._enforce(now)
            self._keep_up(now)
            self._say_whether_it_serves()
            self._hand_over(now)
            if self._closing is not None and self._child is None and self._end_now():
                return
            self._wait(now)

    def _end_now(self) -> bool:
        with self._lock:
            if self._inbox:
                return False
            self._ended.set()
            os.close(self._wake)
            return True

    def _wait(self, now: float) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if (child := self._child) is not None:
            poll.register(child.pidfd, select.POLLIN)
            if not child.killed:
                poll.register(child.channel, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(self._timeout(now))}
        if self._wake in ready:
            os.eventfd_read(self._wake)
        if child is None:
            return
        if child.channel.fileno() in ready:
            self._listen(child)
        if child.pidfd in ready:
            self._listen(child)  # what it said last
            self._died(child)

    def _timeout(self, now: float) -> float:
        due = [call.began + DEADLINE[call.kind] for call in self._calls.values()] if self._child else []
        if self._breaker.probe_at is not None and (self._child is None or self._child.ready):
            due.append(self._breaker.probe_at)
        if self._closing is not None:
            due.append(self._closing)
        left = min(due, default=now + 60.0) - now
        # A process that takes nothing at present, or is being killed, is looked at again soon.
        return 1000.0 * min(60.0, max(0.01, left))

    def _listen(self, child: Child) -> None:
        try:
            while (answer := child.receive()) is not None:
                self._heard(child, answer)
        except EOFError:
            if not child.killed:
                self._kill(child, "its process ended")
        except ValueError as error:
            if not child.killed:
                self._kill(child, f"its process said what means nothing: {error}")

    def _kill(self, child: Child, why: str) -> None:
        self._why = why
        child.kill()

    def _enforce(self, now: float) -> None:
        """Kill a process that has had its time."""
        child = self._child
        if child is None or child.killed:
            return
        for call in self._calls.values():
            if now >= call.began + DEADLINE[call.kind]:
                self._kill(child, f"{call.kind} took longer than {DEADLINE[call.kind]:g} s")
                return
        if self._closing is not None and (now >= self._closing or not any(call.job for call in self._calls.values())):
            self._kill(child, "closed")

    def _keep_up(self, now: float) -> None:
        """Start a process, or have it probed, when that is due."""
        if self._told and self._forgets and now >= self._again:
            self._owe()
        if self._closing is not None or self._breaker.probe_at is None or now < self._breaker.probe_at:
            return
        if self._child is None:
            try:
                self._child = Child(self._config, *self._arena)
            except OSError as error:
                self._breaker.stop(now, f"its process could not be started: {error}")
                return
            self._restarts += 1
            self._calls[READY] = _UnderWay("start", time.monotonic())
            self._breaker.probing()
        elif self._child.ready and not self._child.killed:
            self._probe(now)

    def _probe(self, now: float) -> None:
        assert self._child is not None
        if any(call.kind in ("remove", "probe") for call in self._calls.values()):
            return  # its thread is busy; that ends, by an answer or a deadline
        if self._child.send(ms.Probe(self._next_call)):
            self._breaker.probing()
            self._begin(_UnderWay("probe", now))

    def _begin(self, call: _UnderWay) -> None:
        self._calls[self._next_call] = call
        self._next_call += 1

    def _died(self, child: Child) -> None:
        status = child.bury()
        self._child = None
        why = self._why or f"its process ended by itself, with status {status}"
        self._why = ""
        for call in self._calls.values():
            self._lost(call)
        self._calls.clear()
        self._breaker.stop(time.monotonic(), why)
        if self._closing is None:
            self._say(f"out of service: {why}")

    def _say_whether_it_serves(self) -> None:
        serves = self._breaker.serving and self._closing is None
        if serves != self._told:
            self._told = serves
            self._say_to_core(Serves(self._number, serves))
            if serves:
                self._say("serves")
                self._owe()
        if not serves:
            for job in (*self._asks.values(), *self._reads.values(), *self._changes):
                job.give_up()
            self._settle()

    def _owe(self) -> None:
        while self._forgets:
            self._changes.append(Job(self._forgets.popleft(), told=False))

    def _settle(self) -> None:
        """Take out what has nothing left to be begun. What is under way of it is answered when that ends."""
        for queue in (self._asks, self._reads):
            for io in [io for io, job in queue.items() if not job.left]:
                self._end(queue.pop(io))
        for job in [job for job in self._changes if not job.left]:
            self._changes.remove(job)
            self._end(job)

    # --- what comes from the core

    def _take(self, effect: Effect | Cancel) -> None:
        if isinstance(effect, Cancel):
            job = self._reads.pop(effect.io, None)
            if job is not None:
                job.give_up()
                self._end(job)
            return
        if isinstance(effect, Forget):
            if effect.namespace is not None:
                self._floors.purged(effect.namespace)
            self._hidden.add(effect)
        job = self._job(effect)
        full = len(self._asks) + len(self._reads) + len(self._changes) >= QUEUED
        if full or not self._told or self._closing is not None or (self._read_only and isinstance(effect, Forget)):
            job.give_up()
        if isinstance(effect, Ask):
            self._counts["asked"] += len(effect.names)
        if isinstance(effect, Write) and job.failed:
            self._counts["dropped"] += len(effect.objects)
        if job.ended:
            self._answer(job)
        elif isinstance(effect, Ask):
            self._asks[effect.io] = job
        elif isinstance(effect, Read):
            self._reads[effect.io] = job
        else:
            self._changes.append(job)

    def _job(self, effect: Effect) -> Job:
        if isinstance(effect, Write):
            now = self._floors.now()
            return Job(effect, tuple(max(0, now - each.age) for each in effect.objects))
        return Job(effect)

    # --- what goes to the process

    def _hand_over(self, now: float) -> None:
        child = self._child
        if child is None or not child.ready or child.killed or not self._told:
            return
        while self._asks and not self._running("exists") and self._next(child, self._asks, now, "exists"):
            pass
        while self._reads and self._running("get", "put") < MOVERS and self._next(child, self._reads, now, "get"):
            pass
        while self._changes:
            job = self._changes[0]
            if isinstance(job.effect, Forget):
                # What is being written could be there again after it.
                busy, kind = self._running("put", "remove", "probe") > 0, "remove"
            else:
                full = self._running("get", "put") >= MOVERS or self._running("put") >= WRITERS
                busy, kind = full or self._running("remove") > 0, "put"
            if busy or not self._send(child, job, now, kind):
                return
            if not job.left:
                self._changes.popleft()
                self._end(job)

    def _running(self, *kinds: str) -> int:
        return sum(call.kind in kinds for call in self._calls.values())

    def _next(self, child: Child, queue: OrderedDict[int, Job], now: float, kind: str) -> bool:
        job = next(iter(queue.values()))
        if not self._send(child, job, now, kind):
            return False
        if not job.left:
            del queue[job.effect.io]
            self._end(job)
        return True

    def _send(self, child: Child, job: Job, now: float, kind: str) -> bool:
        """Hand over the next part of a job; False if the process takes nothing at present."""
        first, end = job.left[0]
        effect = job.effect
        positions = tuple(range(first, end))
        call: ms.Call
        if isinstance(effect, Forget):
            call = ms.Remove(self._next_call, effect.names[first:end], effect.namespace if first == 0 else None)
        else:
            if not isinstance(effect, Write):
                positions = tuple(index for index in positions if _named(effect, index) not in self._hidden)
            if isinstance(effect, Ask):
                call = ms.Exists(self._next_call, tuple(effect.names[index] for index in positions))
            else:
                items = tuple(self._item(job, index) for index in positions)
                call = ms.Put(self._next_call, items) if isinstance(effect, Write) else ms.Get(self._next_call, items)
        if positions and not child.send(call):
            return False
        job.left.popleft()
        if isinstance(effect, Read):
            job.bad.update((index, False) for index in range(first, end) if index not in positions)
        if positions:
            job.under_way += 1
            self._begin(_UnderWay(kind, now, job, first, end, positions))
        return True

    def _item(self, job: Job, index: int) -> ms.Item:
        assert isinstance(job.effect, Read | Write)
        each: Stored = job.effect.objects[index]
        moment = job.created[index] if job.created else self._floors.of(each.namespace)
        return ms.Item(each.namespace, each.group, each.key, each.parent, each.depth, each.shards, each.offset, moment)

    # --- what comes from the process

    def _heard(self, child: Child, answer: ms.Answer) -> None:
        call = self._calls.get(answer.call)
        now = time.monotonic()
        if call is None:
            raise ValueError(f"it answers call {answer.call}, which is not open")
        named = max((*answer.good, *answer.unknown, *answer.refused), default=-1)
        if named >= len(call.positions) or (call.kind == "get" and len(answer.good) != len(answer.created)):
            raise ValueError(f"its answer to a {call.kind} does not fit what was asked")
        del self._calls[answer.call]
        if call.kind == "start":
            if answer.error:
                self._kill(child, answer.error)
            else:
                child.ready = True
                self._probe(now)
        elif call.kind == "probe":
            if answer.error:
                self._breaker.stop(now, answer.error, "refusing" if answer.refusing else "down")
            else:
                self._breaker.serves(now)
        else:
            self._call_ended(call, answer, now)

    def _call_ended(self, call: _UnderWay, answer: ms.Answer, now: float) -> None:
        took = now - call.began
        late = call.kind in LATE and took > LATE[call.kind]
        self._counts["late"] += late
        why = answer.error or (f"{call.kind} took {took:.1f} s" if late else "")
        self._breaker.ended(now, f"{call.kind}: {answer.error}" if answer.error else why)
        if answer.error:
            self._lost(call)
            return
        job = call.job
        assert job is not None
        job.under_way -= 1
        good = [call.positions[index] for index in answer.good]
        if isinstance(job.effect, Ask):
            self._counts["found"] += len(good)
            job.there += good
        elif isinstance(job.effect, Read):
            self._came(job, job.effect, call, answer, good)
        elif isinstance(job.effect, Write):
            self._counts["put"] += len(good)
            self._counts["refused"] += len(answer.refused)
            job.bad.update((index, False) for index in call.positions if index not in set(good))
        if answer.bytes and answer.seconds > 0 and call.kind in self._rates:
            rate, before = answer.bytes / answer.seconds, self._rates[call.kind]
            self._rates[call.kind] = before + _WEIGHT * (rate - before) if before else rate
        self._end(job)

    def _came(self, job: Job, effect: Read, call: _UnderWay, answer: ms.Answer, good: list[int]) -> None:
        unknown = {call.positions[index] for index in answer.unknown}
        for kind, count in answer.wrong.items():
            if kind in self._wrong:
                self._wrong[kind] += count
            elif kind == "not_removed":
                self._counts[kind] += count
        job.bad.update((index, index in unknown) for index in set(call.positions) - set(good))
        self._counts["missed"] += len(call.positions) - len(good) - len(unknown)
        now = self._floors.now()
        for index, created in zip(good, answer.created, strict=True):
            namespace = effect.objects[index].namespace
            self._floors.saw(namespace, created)
            if created < self._floors.of(namespace):  # purged since it was asked for
                self._wrong[Wrong.OLD.value] += 1
                job.bad[index] = False
            else:
                self._counts["got"] += 1
                job.ages[index] = max(0, now - created)

    def _lost(self, call: _UnderWay) -> None:
        """Nothing will be known of a call."""
        if call.job is not None:
            self._counts["failed"] += 1
            call.job.under_way -= 1
            call.job.lose(call.first, call.end)
            self._end(call.job)

    def _end(self, job: Job) -> None:
        if job.ended:
            self._answer(job)

    def _answer(self, job: Job) -> None:
        effect = job.effect
        if isinstance(effect, Forget):
            if job.failed and not self._read_only and len(self._forgets) < OWED and self._closing is None:
                self._forgets.append(effect)  # hidden until the store can be told
                self._again = time.monotonic() + _AGAIN
            elif not job.failed or self._read_only or effect.namespace is None:
                self._hidden.remove(effect)
        if job.told:
            self._say_to_core(job.answer())

    def _say_to_core(self, event: Done | Found | Serves) -> None:
        try:
            self._tell(event)
        except Exception:
            log.exception("remote: %s: %s was not taken", self._config.shown, event)

    def _say(self, what: str) -> None:
        log.log(logging.INFO if what == "serves" else logging.WARNING, "remote: %s: %s", self._config.shown, what)


def _named(effect: Ask | Read, index: int) -> ms.Name:
    if isinstance(effect, Ask):
        return effect.names[index]
    each = effect.objects[index]
    return each.namespace, each.group, each.key
