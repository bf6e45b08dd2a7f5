"""The manager's loop: what clients say in, core events through, effects out. One thread touches the core."""

import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from kvhold import protocol as wire
from kvhold.core import Core
from kvhold.core import events as ev
from kvhold.core.log import events as lev
from kvhold.core.turns import Work
from kvhold.manager.clients import Clients
from kvhold.manager.config import ManagerConfig
from kvhold.manager.connection import Connection, Stage
from kvhold.manager.limits import change_limits, changes_document, limits_document, object_bytes
from kvhold.manager.listener import Listener
from kvhold.manager.memory import ArenaMemory
from kvhold.manager.poller import Poller
from kvhold.manager.proof import UnknownPeer, peer_pidfd
from kvhold.manager.pulse import Pulse
from kvhold.manager.report import report, tell_spaces
from kvhold.manager.ssd import Latecomer
from kvhold.manager.store import Store
from kvhold.manager.times import Times
from kvhold.manager.translate import ANSWERS, LATER, MAY_SAY, QUESTIONS, event_of, message_of

log = logging.getLogger(__name__)

TURN_SECONDS = 0.0005
"""About how long clients are listened to in one turn of the loop, and about how long their work goes on."""
UNFINISHED = 64
"""Pieces of work of one client; until one is finished, nothing more that it says is handled."""
TAKEN_BYTES = 4 << 20
"""Bytes of what one client has said, of which anything is unfinished; with more, all has to be finished first."""
UNSENT_BYTES = 256 << 10
"""Bytes that wait for one client to read; until it has, its questions wait."""
PURGES = 4
"""Purges under way; further ones wait."""

STORE_SECONDS = 3.0
"""How long a manager that ends goes on writing, and then again waits for what is under way at a disk."""
DISK_SECONDS = 30.0
"""How long a purge or a flush may take; then whoever asked for it is told that the disks do not do it."""

LOOK_SECONDS = 1.0
"""How often a manager looks whether its socket is still there: whoever cleans up or logs out may remove it."""
CALLS = 16
"""Calls from other threads in one turn of the loop."""
RECOVERING = 32
"""Batches of recovered records that may wait for the loop."""

T = TypeVar("T")


NOT_ON_DISK = (
    "not every SSD has taken it: after a restart what was purged may be found again, and what was stored may be "
    "missing; see the manager's log, ask again once the SSD works, or stop the manager and remove its directory"
)


class Server:
    """A manager of one arena on one socket. :meth:`run` ends after :meth:`stop`, or when an embedded one is alone."""

    def __init__(
        self, config: ManagerConfig, listener: Listener, memory: ArenaMemory, stores: Sequence[Store] = ()
    ) -> None:
        self.config = config
        self.listener = listener
        self.memory = memory
        self.pulse = Pulse()
        self.core = Core(self.memory.page, self.memory.bytes, config.limits)
        self.stores = dict(enumerate(stores, 1))
        self.latecomers: list[Latecomer] = []
        # The first engine's first request finds somewhere to publish.
        self.core.handle(ev.Populated(1), time.monotonic_ns())
        self.incarnation = secrets.randbits(62) + 1
        self.started = time.monotonic()
        self.times = Times()
        self._tokens: dict[int, int] = {}  # token -> connection of a scheduler or worker session
        self._poller = Poller()
        self.clients = Clients(self._poller, listener, self)
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._recovering = threading.BoundedSemaphore(RECOVERING)
        self._waiting: dict[int, float] = {}  # by session that asked for what disks must do, until when
        self._wake_read, self.wake_descriptor = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._look_at = 0.0
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

        self._calls.put(run)
        self._wake()
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

        self._calls.put(begin)
        self._wake()
        return future

    def adopt(self, latecomer: Latecomer, store: Store) -> None:
        """Use a directory that could not be opened when this manager started."""

        def adopted() -> None:
            if self.core.counters["quarantined"] and not latecomer.forgone:
                latecomer.forgone = "it may hold objects of which a restore has failed"
            if latecomer.forgone:
                store.close(0)
                return
            log.info("ssd: %s is open now", latecomer.path)
            self.latecomers.remove(latecomer)
            number = max(self.stores, default=0) + 1
            self.stores[number] = store
            store.start(number, self._from_store)

        self._calls.put(adopted)
        self._wake()

    def _wake(self) -> None:
        try:
            os.write(self.wake_descriptor, b"\0")
        except OSError:
            pass

    # --- the loop -----------------------------------------------------------------------------------------------

    def wait_for(self, latecomers: Iterable[Latecomer]) -> None:
        """Have ``latecomers`` try on; from before :meth:`run`."""
        self.latecomers += latecomers
        for latecomer in self.latecomers:
            latecomer.start()

    def run(self) -> None:
        self.clients.listen()
        self._poller.register(self._wake_read, self._woken)
        populating = threading.Thread(target=self._populate, name="kvhold-populate", daemon=True)
        populating.start()
        for number, store in self.stores.items():
            store.start(number, self._from_store)
        try:
            while not self._stopping:
                if self.config.starter_fd is not None and not self._starter and not self._engines():
                    log.info("the last engine is gone; so is this manager")
                    break
                ready = self._poller.poll(self._patience())
                begun, done = time.monotonic(), (self.clients.handled, self._slices)
                for told, mask in ready:
                    told(mask)
                self.pulse.beat()
                self.clients.take(TURN_SECONDS)
                self._work()
                self._tick()
                self._end_waiting()
                self.clients.expire()
                self._look()
                self._moved = bool(ready) or done != (self.clients.handled, self._slices)
                self.times.turns.observe(time.monotonic() - begun)
        finally:
            self._stopping = True
            self._no_more.set()
            self.listener.close()
            self.clients.close()
            populating.join(timeout=5)
            self._write_out()
            for store in self.stores.values():
                store.close(STORE_SECONDS)

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
        waiting = [] if self.clients.deadline is None else [self.clients.deadline]
        if (deadline := self.core.next_deadline) is not None:
            waiting.append(deadline / 1e9)
        waiting += [*self._waiting.values(), self._look_at]
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

    def _from_store(self, event: ev.Event) -> None:
        """From a store's thread: what a log found, or that an I/O ended. Waits while too much that was found waits.

        That a log was opened is told on the loop's own: from then on the core knows it, and it takes every purge.
        """
        if isinstance(event, lev.LogOpened):
            self._handle(event)
        elif not isinstance(event, lev.Recovered):
            self._calls.put(lambda: self._handle(event))
        else:

            def recovered() -> None:
                self._recovering.release()
                self._handle(event)

            self._recovering.acquire()
            self._calls.put(recovered)
        self._wake()

    def _tick(self) -> None:
        """Let deadlines pass, but for those who have said more than was handled: it may be that a restore began."""
        deadline, now = self.core.next_deadline, time.monotonic_ns()
        if deadline is not None and deadline <= now:
            self._apply(self.core.handle(ev.Tick(self.clients.behind()), now))

    def _look(self) -> None:
        """Listen again where somebody has removed the socket."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        if not self.listener.is_there() and (former := self.listener.put_back()) is not None:
            self._poller.unregister(former.fileno())
            former.close()
            self.clients.listen()

    def _engines(self) -> bool:
        return any(c.stage is Stage.SESSION and c.role != "admin" for c in self.clients.connections.values())

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
            self._calls.put(lambda: self._handle(ev.Populated(pages)))
            self._wake()

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

    # --- clients ------------------------------------------------------------------------------------------------

    def ready(self, connection: Connection, message: wire.ClientMessage) -> bool:
        """Whether ``message`` can be begun now: its sender's work, and what waits for it to read, is bounded."""
        unfinished = self.core.unfinished(connection.id)
        if not unfinished:
            connection.taken = 0
        return not (
            connection.owed
            or unfinished >= UNFINISHED
            or (unfinished and connection.taken + connection.size > TAKEN_BYTES)
            or (connection.unsent > UNSENT_BYTES and isinstance(message, QUESTIONS))
            or (self.core.purges >= PURGES and isinstance(message, wire.Purge))
            or (isinstance(message, wire.Bye) and self._overtakes(connection))
        )

    def _overtakes(self, connection: Connection) -> bool:
        """Whether another half of the same instance has said something that is not handled yet.

        With the goodbye of one half the instance decides nothing any more, and the last commits of the other are lost.
        """
        return any(
            other.queued and other.instance == connection.instance and not isinstance(other.next, wire.Bye)
            for other in self.clients.connections.values()
            if other is not connection
        )

    def left(self, connection: Connection, dead: bool) -> None:
        """A connection was closed, or its process is known to be dead now."""
        how = ev.Gone.SAID if connection.said_bye else ev.Gone.DEAD if dead else ev.Gone.UNKNOWN
        if connection.id in self.core.sessions:
            what = "is dead" if connection.lost else "left" if how is ev.Gone.SAID else f"left ({how})"
            log.info("%s %s", connection, what)
            connection.lost = True
        self._waiting.pop(connection.id, None)
        effects = self.core.handle(ev.Left(connection.id, how), time.monotonic_ns())
        if connection.id not in self.core.sessions:
            self._forget(connection)
        self._apply(effects)

    def _forget(self, connection: Connection) -> None:
        self.clients.forget(connection)
        self._tokens = {token: id for token, id in self._tokens.items() if id != connection.id}

    # --- messages and effects -----------------------------------------------------------------------------------

    def said(self, connection: Connection, message: wire.ClientMessage) -> None:
        """Begin what a client says. Raises ProtocolError."""
        connection.taken += connection.size
        if not isinstance(message, MAY_SAY[connection.role]):
            raise wire.ProtocolError(f"a {connection.role or 'new'} session does not say {type(message).__name__}")
        connection.owed = isinstance(message, LATER)
        match message:
            case wire.Hello():
                self._hello(connection, message)
            case wire.Bye():
                connection.said_bye = True
                self.clients.drop(connection)
            case wire.Retire(token):
                self._retire(token)
            case wire.Status(namespace):
                self._apply(self.core.common.start(self._tell(connection, namespace), connection.id, question=True))
            case wire.Purge(namespace, older):
                if not 0 <= older < 1e9:
                    raise wire.ProtocolError(f"a purge of what is older than {older} s")
                log.info("purge of %s%s", namespace.hex() or "everything", f" older than {older:g} s" if older else "")
                for latecomer in self.latecomers:
                    latecomer.forgone = "it would bring back what was purged meanwhile"
                self._waiting[connection.id] = time.monotonic() + DISK_SECONDS
                self._handle(ev.Purge(namespace, int(older * 1e9), connection.id))
            case wire.Flush():
                self._waiting[connection.id] = time.monotonic() + DISK_SECONDS
                self._handle(ev.Flush(connection.id))
            case wire.Explain(key, op, of):
                self._handle(ev.Explain(connection.id, key, op, of))
            case wire.Configure(limits, quotas):
                present, sizes = self.core.common.limits, object_bytes(self.core.catalogue)
                changed = change_limits(present, limits, quotas, self.memory.bytes, sizes)
                if changes := changes_document(present, changed):
                    log.info("limits changed: %.2000s", changes)
                    self._handle(ev.Configure(changed))
                self._send(connection, wire.Configured(msgspec.json.encode(limits_document(changed))))
            case _:
                event = event_of(connection.id, message)
                self.times.asked(connection, message)
                self._handle(event)

    def _tell(self, connection: Connection, namespace: bytes) -> Work:
        said = yield from self._report(namespace)
        self._send(connection, wire.StatusReply(msgspec.json.encode(said)))

    def _report(self, namespace: bytes) -> Generator[list[ev.Effect], None, dict[str, Any]]:
        spaces: list[dict[str, Any]] = []
        yield from tell_spaces(self.core.catalogue, namespace, spaces)
        return report(self, spaces)

    def _hello(self, connection: Connection, hello: wire.Hello) -> None:
        if not 0 < hello.world <= 1024 or not 0 <= hello.rank < hello.world or len(hello.instance) > 256:
            raise wire.ProtocolError(f"rank {hello.rank} of {hello.world} in instance {hello.instance[:64]!r}")
        if len(hello.report) > wire.MAX_REPORT:
            raise wire.ProtocolError(f"a report of {len(hello.report)} bytes, more than {wire.MAX_REPORT}")
        connection.role, connection.instance, connection.rank = hello.role, hello.instance, hello.rank
        connection.engine, connection.step = hello.engine[:256], hello.step
        connection.report = hello.report
        connection.since = time.time()
        self.clients.introduced(connection)
        if hello.role == "admin":
            self._send(connection, wire.Welcome(self.incarnation, 0, self.memory.bytes))
            return
        joined = ev.Joined(connection.id, ev.Role(hello.role), hello.instance, hello.rank, hello.world)
        self._handle(joined)

    def _retire(self, token: int) -> None:
        retired = self.clients.connections.get(self._tokens.get(token, 0))
        if retired is not None and retired.stage is Stage.CLOSED:
            retired.said_bye = True
            self.left(retired, dead=False)

    def _end_waiting(self) -> None:
        """Whoever asked for what a disk does not do is told so, not kept waiting."""
        for session, deadline in list(self._waiting.items()):
            if deadline <= time.monotonic():
                self._ended(session, None)

    def _send(self, connection: Connection, message: wire.ManagerMessage, descriptor: int | None = None) -> None:
        if isinstance(message, ANSWERS):
            connection.owed = False
        self.times.told(connection, message)
        self.clients.send(connection, message, descriptor)

    def _ended(self, session: int, answer: wire.Purged | wire.Flushed | None) -> None:
        """Answer who waits for disks; None: they failed or take too long."""
        connection = self.clients.connections.get(session)
        if self._waiting.pop(session, None) is None or connection is None:
            return
        if answer is not None:
            self._send(connection, answer)
        else:
            self.clients.refuse(connection, NOT_ON_DISK)

    def _welcome(self, connection: Connection) -> None:
        token = secrets.randbits(62) + 1
        self._tokens[token] = connection.id
        log.info("%s attached: %s", connection, connection.engine or "no name given")
        descriptor = self.memory.fd if connection.role == "worker" else self.pulse.fd
        self._send(connection, wire.Welcome(self.incarnation, token, self.memory.bytes), descriptor)

    def _apply(self, effects: list[ev.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ev.ToBacking):
                self.stores[effect.backing].submit(effect)
                continue
            connection = self.clients.connections.get(effect.session)
            if connection is None:
                continue
            match effect:
                case ev.Accept():
                    self._welcome(connection)
                case ev.Refuse():
                    self.clients.refuse(connection, effect.reason)
                case ev.Part():
                    log.info("%s parts: %s", connection, effect.reason)
                    self.clients.drop(connection)
                case ev.Ready():
                    log.info("instance %s is served", connection.instance)
                    clients = self.clients.connections
                    workers = [clients[one] for one in effect.workers if one in clients]
                    self._send(connection, wire.Ready(tuple(worker.report for worker in workers)))
                    for worker in workers:
                        self._send(worker, wire.Settled(connection.step))
                case ev.Stalled(_, op, seconds):
                    name = f"{connection.id}/{op}"
                    log.warning("%s: restore of operation %s takes longer than %d s", connection, name, seconds)
                case ev.Purged(session, durable, objects, size):
                    if durable and self.latecomers and self._waiting.pop(session, None) is not None:
                        self.clients.refuse(connection, _not_reached(self.latecomers))
                    self._ended(session, wire.Purged(objects, size) if durable else None)
                case ev.Flushed(session, durable):
                    told = wire.Flushed(self.core.objects, self.core.catalogue.backed, len(self.stores))
                    self._ended(session, told if durable else None)
                case _:
                    if isinstance(effect, ev.Opened) and effect.note:
                        log.warning("%s: nothing can be kept: %s", connection, effect.note)
                    self._send(connection, message_of(effect))


def _not_reached(latecomers: Sequence[Latecomer]) -> str:
    paths = ", ".join(str(latecomer.path) for latecomer in latecomers)
    return (
        f"it is purged here, but not in {paths}, which this manager could not open: what that has is found again once "
        "a manager opens it; purge again then, or remove it"
    )
