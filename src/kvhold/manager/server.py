"""The manager's loop: what clients say in, core events through, effects out. One thread touches the core."""

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from kvhold.core import Core
from kvhold.core import events as ev
from kvhold.core.eviction import POLICIES
from kvhold.core.turns import Work
from kvhold.manager.audit import Auditor
from kvhold.manager.config import ManagerConfig
from kvhold.manager.listener import Listener
from kvhold.manager.memory import ArenaMemory
from kvhold.manager.poller import Poller
from kvhold.manager.priority import prefer_this_thread
from kvhold.manager.proof import UnknownPeer, peer_pidfd
from kvhold.manager.report import report, tell_spaces
from kvhold.manager.sessions import Sessions
from kvhold.manager.store import Store
from kvhold.manager.stores import Stores

log = logging.getLogger(__name__)

TURN_SECONDS = 0.0005
"""About how long clients are listened to in one turn of the loop, and about how long their work goes on."""

STORE_SECONDS = 3.0
"""How long a manager that ends goes on writing, and then again waits for what is under way at a disk."""

LOOK_SECONDS = 1.0
"""How often a manager looks whether its socket is still there: whoever cleans up or logs out may remove it."""
CALLS = 16
"""Calls from other threads in one turn of the loop."""

T = TypeVar("T")


class Server:
    """A manager of one arena on one socket. :meth:`run` ends after :meth:`stop`, or when an embedded one is alone."""

    def __init__(
        self, config: ManagerConfig, listener: Listener, memory: ArenaMemory, stores: Sequence[Store] = ()
    ) -> None:
        self.config = config
        self.listener = listener
        self.memory = memory
        self.core = Core(self.memory.page, self.memory.bytes, config.limits, POLICIES[config.eviction])
        self._poller = Poller()
        self.stores = Stores(self.core, stores, self._handle, self._call)
        self.sessions = Sessions(self.core, memory, self.stores, self._poller, listener, self._apply, self._report)
        self.clients = self.sessions.clients
        # The first engine's first request finds somewhere to publish.
        self.core.handle(ev.Populated(1), time.monotonic_ns())
        self.started = time.monotonic()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_read, self.wake_descriptor = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._look_at = 0.0
        self._auditor = Auditor(self.core) if config.audit else None
        self._forbidden = 0  # moves of which the log tells
        self._stopping = False
        self._slices = 0  # of the core's work, ever
        self._moved = False  # whether the last turn did anything
        self._no_more = threading.Event()
        self._starter = self._watch_starter()

    # --- from other threads -------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End :meth:`run`."""
        self._stopping = True
        self._wake()

    def ask(self, function: Callable[[], T]) -> Future[T]:
        """``function()`` run on the loop's thread, unless its future was cancelled before."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - handed to the caller
                future.set_exception(error)

        self._call(run)
        return future

    def ask_report(self) -> Future[dict[str, Any]]:
        """What ``kvhold status`` tells; it is made in slices, on the loop's thread."""
        future: Future[dict[str, Any]] = Future()

        def tell() -> Work:
            try:
                future.set_result((yield from self._report(b"")))
            except Exception as error:  # noqa: BLE001 - handed to the caller
                future.set_exception(error)

        def begin() -> None:
            if future.set_running_or_notify_cancel():
                self._apply(self.core.common.start(tell()))

        self._call(begin)
        return future

    def _call(self, function: Callable[[], None]) -> None:
        """Have the loop's thread run it."""
        self._calls.put(function)
        self._wake()

    def _wake(self) -> None:
        try:
            os.write(self.wake_descriptor, b"\0")
        except OSError:
            pass

    # --- the loop -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        self.clients.listen()
        self._poller.register(self._wake_read, self._woken)
        populating = threading.Thread(target=self._populate, name="kvhold-populate", daemon=True)
        populating.start()
        self.stores.start()
        if not prefer_this_thread():
            log.info("no leave to run at a higher priority (CAP_SYS_NICE): on busy cores, answers may be late")
        try:
            while not self._stopping:
                if self.config.starter_fd is not None and not self._starter and not self.sessions.engines:
                    log.info("the last engine is gone, so this manager ends")
                    break
                ready = self._poller.poll(self._patience())
                begun, done = time.monotonic(), (self.clients.handled, self._slices)
                for told, mask in ready:
                    told(mask)
                self.sessions.heartbeat.beat()
                self.clients.take(TURN_SECONDS)
                self._work()
                self._tick()
                self.sessions.expire()
                self._look()
                if self._auditor is not None:
                    self._auditor.turn()
                self._moved = bool(ready) or done != (self.clients.handled, self._slices)
                self.sessions.times.turns.observe(time.monotonic() - begun)
        finally:
            self._stopping = True
            self._no_more.set()
            self.listener.close()
            self.clients.close()
            populating.join(timeout=5)
            self._write_out()
            self.stores.close(STORE_SECONDS)

    def _write_out(self) -> None:
        """What waits for a disk is written before this process ends, if that goes quickly."""
        end = time.monotonic() + STORE_SECONDS
        while time.monotonic() < end and (self.core.has_work or self.core.storage.writing):
            if self.core.has_work:
                self._apply(self.core.step())
            else:
                self._handle(ev.Tick())
                try:
                    self._calls.get(timeout=0.02)()
                except queue.Empty:
                    pass

    def _patience(self) -> float:
        # Whoever is held has another turn after whatever may have made room for it, of which nothing else may tell.
        if self.core.has_work or self.clients.waiting or (self._moved and self.clients.held):
            return 0
        waiting = [self._look_at]
        if (ends := self.sessions.deadline) is not None:
            waiting.append(ends)
        if (deadline := self.core.next_deadline) is not None:
            waiting.append(deadline / 1e9)
        if self._auditor is not None:
            waiting.append(self._auditor.due)
        return max(0.0, min(waiting) - time.monotonic())

    def _work(self) -> None:
        """Go on with what is not finished, a slice for each in its turn, for a while."""
        end = time.monotonic() + TURN_SECONDS
        while self.core.has_work:
            self._apply(self.core.step())
            self._slices += 1
            if time.monotonic() >= end:
                break

    def _handle(self, event: ev.Event) -> None:
        self._apply(self.core.handle(event, time.monotonic_ns()))

    def _tick(self) -> None:
        """Let deadlines pass, but for those who have said more than was handled: it may be that a restore began."""
        deadline, now = self.core.next_deadline, time.monotonic_ns()
        if deadline is not None and deadline <= now:
            self._apply(self.core.handle(ev.Tick(self.clients.behind()), now))

    def _look(self) -> None:
        """Listen again where somebody has removed the socket, and tell of what the core has refused itself."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        if (forbidden := self.core.counters["forbidden_moves"]) != self._forbidden:
            times = forbidden - self._forbidden
            log.error("a change of a slot's state was against the rules and was not made, %d times", times)
            self._forbidden = forbidden
        if not self.listener.is_there() and (former := self.listener.put_back()) is not None:
            self._poller.unregister(former.fileno())
            former.close()
            self.clients.listen()

    def _woken(self, _: int) -> None:
        os.read(self._wake_read, 4096)
        for _ in range(CALLS):
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            call()
        self._wake()

    def _populate(self) -> None:
        def added(pages: int) -> None:
            self._call(lambda: self._handle(ev.Populated(pages)))

        begun = time.monotonic()
        self.memory.populate(added, self._no_more)
        if not self._no_more.is_set():
            log.info("arena populated in %.1f s", time.monotonic() - begun)

    def _watch_starter(self) -> set[int]:
        """Descriptors that become readable when the process that started an embedded manager lets go or is gone."""
        if self.config.starter_fd is None:
            return set()
        lifeline = socket.socket(fileno=self.config.starter_fd)
        try:
            _, pidfd = peer_pidfd(lifeline)  # its forks may hold the other end, too, and outlive it
        except UnknownPeer:
            return set()
        watched = {lifeline.detach(), pidfd}
        for descriptor in watched:
            self._poller.register(descriptor, self._starter_left)
        return watched

    def _starter_left(self, _: int) -> None:
        for descriptor in self._starter:
            self._poller.unregister(descriptor)
            os.close(descriptor)
        self._starter = set()

    # --- what comes out of the core ---------------------------------------------------------------------------

    def _apply(self, effects: list[ev.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ev.ToBacking):
                self.stores.submit(effect)
            else:
                self.sessions.tell(effect)

    def _report(self, namespace: bytes) -> Generator[list[ev.Effect], None, dict[str, Any]]:
        spaces: list[dict[str, Any]] = []
        yield from tell_spaces(self.core.catalogue, namespace, spaces)
        return report(self, spaces)
