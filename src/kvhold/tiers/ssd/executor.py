"""The threads that carry out one directory's I/O: several that read, one that writes, one that syncs.

Whatever is submitted is answered exactly once, also when the disk fails, hangs or is given up. All threads are daemons:
a call that never returns costs its thread, and keeps nobody from ending.
"""

import errno
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import reduce
from threading import Condition, Thread
from typing import Final, TypeVar

from kvhold.core.events import Cancel
from kvhold.core.log.events import Forget, Read, Reuse, Seal, Sync, ToLog, Write
from kvhold.tiers.ssd.counters import Counters
from kvhold.tiers.ssd.handles import Handles
from kvhold.tiers.ssd.reading import Outcome, Reader, is_kept
from kvhold.tiers.ssd.survey import Log
from kvhold.tiers.ssd.writing import Writer

log = logging.getLogger(__name__)

J = TypeVar("J")
Job = Read | Write | Reuse | Seal | Sync | Forget
_SAY_AGAIN: Final = 10.0
"""Seconds between two log lines about the same kind of trouble."""


class Executor:
    """Carries out a log's effects on ``arena``, the whole mapped arena.

    Its threads call ``done(io, failed, kept, ages)``. ``failed`` are the positions of objects that failed: all of them
    for an I/O that was taken out of its queue, and (0,) for one without objects. ``kept`` says of a read that none of
    these was looked at: they may be as they were. ``ages`` are the nanoseconds since its objects were computed.
    """

    def __init__(
        self,
        opened: Log,
        arena: memoryview,
        done: Callable[[int, tuple[int, ...], bool, tuple[int, ...]], None],
        *,
        readers: int = 4,
        sync_seconds: float = 2.0,
    ) -> None:
        self.log = opened
        self._arena = arena
        self._done = done
        self._handles = Handles(opened)
        self._changed = Condition()
        self._reads: OrderedDict[int, Read] = OrderedDict()
        self._writes: OrderedDict[int, Write | Reuse | Seal | Sync | Forget] = OrderedDict()
        self._dropped: deque[Job] = deque()  # to be answered without being done
        self._seals: list[Seal | Sync] = []  # to be answered after the next sync
        self._running: dict[int, float] = {}  # io -> since when
        self._unsynced: set[int] = set()
        self._sync_seconds = sync_seconds
        self._sync_at = float("inf")
        self._closing = False
        self._writer_ended = False
        self._given_up = False
        self._said: dict[str, float] = {}
        self.last_error = ""
        """What was being done when a call failed last, and what the system said."""
        self._counters = [Counters() for _ in range(readers + 2)]  # one per thread that does I/O
        writer, syncer, *others = self._counters
        self._threads = [
            Thread(target=self._write_loop, args=(writer,), name="kvhold-ssd-write", daemon=True),
            Thread(target=self._sync_loop, args=(syncer,), name="kvhold-ssd-sync", daemon=True),
            Thread(target=self._drop_loop, name="kvhold-ssd-drop", daemon=True),
            *(Thread(target=self._read_loop, args=(each,), name="kvhold-ssd-read", daemon=True) for each in others),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, effect: ToLog) -> None:
        """Have ``effect`` carried out: reads in any order, all else in the order of submission. Never blocks.

        A cancel takes out a read that has not begun. Never a write, which would leave a gap.
        """
        with self._changed:
            if isinstance(effect, Cancel):
                read = self._reads.pop(effect.io, None)
                if read is not None:
                    self._dropped.append(read)
            elif self._closing:
                self._dropped.append(effect)
            elif isinstance(effect, Read):
                self._reads[effect.io] = effect
            else:
                self._writes[effect.io] = effect
            self._changed.notify_all()

    def sync(self) -> bool:
        """Make all writes that are done durable, now and in the caller's thread; whether that worked."""
        return not self._sync(Counters())

    def counters(self) -> Counters:
        """What was done so far."""
        return reduce(Counters.plus, self._counters)

    def in_flight(self) -> tuple[int, int, float]:
        """How many I/Os wait, how many are being carried out, and for how many seconds the oldest of those."""
        with self._changed:
            oldest = min(self._running.values(), default=None)
            waiting = len(self._reads) + len(self._writes)
            return waiting, len(self._running), 0.0 if oldest is None else time.monotonic() - oldest

    def close(self, seconds: float) -> bool:
        """Fail what waits, sync what is written, end; whether all threads ended within ``seconds``.

        If not, a call hangs. It is answered as failed should it ever return, and the log is to be kept open: its lock
        keeps others out until the process is gone. Tombstones that wait are written: nobody would say them again.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            self._closing = True
            self._sync_at = 0.0  # even if the writer hangs
            self._dropped += self._reads.values()
            self._reads.clear()
            for io in [io for io, job in self._writes.items() if not isinstance(job, Forget)]:
                self._dropped.append(self._writes.pop(io))
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            self._given_up = True
            return False
        self._handles.close()
        return True

    # --- threads ------------------------------------------------------------------------------------------------

    def _read_loop(self, counters: Counters) -> None:
        def trouble(error: OSError) -> None:
            self._trouble("read", error, counters)

        reader = Reader(self.log, self._handles, self._arena, counters, trouble)
        while (read := self._next(self._reads)) is not None:
            outcome = Outcome(everything(read), False, ())
            try:
                outcome = reader.read(read)
            except OSError as error:
                outcome = outcome._replace(kept=is_kept(error))
                self._trouble("read", error, counters)
            except Exception as error:  # noqa: BLE001 - a thread that dies would leave everything after unanswered
                self._trouble("read", error, counters)
            self._answer(read, outcome, counters)

    def _write_loop(self, counters: Counters) -> None:
        writer = Writer(self.log, self._handles, self._arena, counters)
        while (job := self._next(self._writes)) is not None:
            failed = everything(job)
            try:
                if isinstance(job, Write):
                    written, error = writer.write(job)
                    failed = tuple(range(written, len(job.objects)))
                    self._dirty(job.segment)
                    if error is not None:
                        self._trouble("write", error, counters)
                elif isinstance(job, Seal):
                    writer.seal(job)
                    self._dirty(job.segment, job)
                    continue  # the thread that syncs answers
                elif isinstance(job, Sync):
                    with self._changed:
                        self._seals.append(job)
                        self._changed.notify_all()
                    continue
                elif isinstance(job, Reuse):
                    writer.reuse(job)
                    failed = ()
                else:
                    writer.forget(job)
                    failed = ()
            except Exception as error:  # noqa: BLE001 - see above
                self._trouble(type(job).__name__.lower(), error, counters)
            self._answer(job, Outcome(failed, False, ()), counters)
        with self._changed:
            self._writer_ended = True
            self._changed.notify_all()

    def _sync_loop(self, counters: Counters) -> None:
        ending = False
        while not ending:
            with self._changed:
                while not self._seals and not self._writer_ended:
                    left = self._sync_at - time.monotonic()
                    if left <= 0:
                        break
                    self._changed.wait(min(left, 3600.0))
                ending = self._writer_ended
                seals, self._seals = self._seals, []
            bad = self._sync(counters)
            for job in seals:
                failed = bool(bad) if isinstance(job, Sync) else job.segment in bad
                self._answer(job, Outcome((0,) if failed else (), False, ()), counters)

    def _drop_loop(self) -> None:
        while True:
            with self._changed:
                while not self._dropped:
                    if self._closing:
                        return
                    self._changed.wait()
                job = self._dropped.popleft()
            self._answer(job, Outcome(everything(job), isinstance(job, Read), ()), None)

    def _next(self, queue: OrderedDict[int, J]) -> J | None:
        with self._changed:
            while not queue:
                if self._closing:
                    return None
                self._changed.wait()
            io, job = queue.popitem(last=False)
            self._running[io] = time.monotonic()
            return job

    def _dirty(self, segment: int, seal: Seal | None = None) -> None:
        with self._changed:
            self._unsynced.add(segment)
            if seal is not None:
                self._seals.append(seal)
            if seal is not None or self._sync_at == float("inf"):
                self._sync_at = min(self._sync_at, time.monotonic() + self._sync_seconds)
                self._changed.notify_all()

    def _sync(self, counters: Counters) -> set[int]:
        """The segments that could not be synced. They are tried again in time."""
        with self._changed:
            segments, self._unsynced = self._unsynced, set()
            self._sync_at = float("inf")
        bad = set()
        for segment in segments:
            began = time.perf_counter()
            try:
                with self._handles.use(segment, write=True) as handle:
                    self.log.files.fdatasync(handle)
            except OSError as error:
                bad.add(segment)
                counters.sync_failures += 1
                self._trouble("sync", error, counters)
            counters.sync_seconds += time.perf_counter() - began
            counters.syncs += 1
        for segment in bad:
            self._dirty(segment)
        return bad

    def _answer(self, job: Job, outcome: Outcome, counters: Counters | None) -> None:
        with self._changed:
            self._running.pop(job.io, None)
        if self._given_up:
            kept = isinstance(job, Read) and (outcome.kept or not outcome.failed)
            outcome = Outcome(everything(job), kept, ())
        if counters is not None:
            counters.failed_objects += len(outcome.failed)
        try:
            self._done(job.io, *outcome)
        except Exception:
            log.exception("ssd: %s: the answer to I/O %d was not taken", self.log.path, job.io)

    def _trouble(self, doing: str, error: Exception, counters: Counters) -> None:
        """Count it, and say it, but not for every object of a disk that is broken."""
        code = getattr(error, "errno", None)
        kind = errno.errorcode.get(code, str(code)) if isinstance(code, int) else type(error).__name__
        counters.errors[kind] += 1
        self.last_error = f"{doing}: {getattr(error, 'strerror', None) or error}"
        now = time.monotonic()
        if now - self._said.get(doing + kind, -_SAY_AGAIN) >= _SAY_AGAIN:
            self._said[doing + kind] = now
            log.warning("ssd: %s: %s failed: %s", self.log.path, doing, error)


def everything(job: Job) -> tuple[int, ...]:
    """What fails of ``job`` when all of it does."""
    return tuple(range(len(job.objects))) if isinstance(job, Read | Write) else (0,)
