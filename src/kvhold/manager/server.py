"""The manager's loop: sockets and processes in, core events through, effects out. One thread touches the core."""

import logging
import os
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import msgspec

from kvhold import protocol as wire
from kvhold.core import Core
from kvhold.core import events as ev
from kvhold.manager.config import ManagerConfig
from kvhold.manager.connection import Connection, Stage
from kvhold.manager.limits import change_limits, changes_document, limits_document, object_bytes
from kvhold.manager.listener import Listener
from kvhold.manager.memory import ArenaMemory
from kvhold.manager.proof import UnknownPeer, is_dead, peer_pidfd
from kvhold.manager.report import report
from kvhold.manager.ssd import Latecomer
from kvhold.manager.store import Store
from kvhold.manager.translate import MAY_SAY, event_of, message_of

log = logging.getLogger(__name__)

HELLO_SECONDS = 5.0
"""A client that has not introduced itself by then is let go."""
MAX_CLIENTS = 256

STORE_SECONDS = 3.0
"""How long a manager that ends goes on writing, and then again waits for what is under way at a disk."""
DISK_SECONDS = 30.0
"""How long a purge or a flush may take; then whoever asked for it is told that the disks do not do it."""
DRAIN_READS = 8
"""Reads of one client before a deadline may pass; more wait for the next turn of the loop."""

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
        self.core = Core(self.memory.page, self.memory.bytes, config.limits)
        self.stores = dict(enumerate(stores, 1))
        self.latecomers: list[Latecomer] = []
        # The first engine's first request finds somewhere to publish.
        self.core.handle(ev.Populated(1), time.monotonic_ns())
        self.incarnation = secrets.randbits(62) + 1
        self.connections: dict[int, Connection] = {}
        self.started = time.monotonic()
        self._tokens: dict[int, int] = {}  # token -> connection of a scheduler or worker session
        self._selector = selectors.DefaultSelector()
        self._next_id = 1
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._recovering = threading.BoundedSemaphore(RECOVERING)
        self._waiting: dict[int, float] = {}  # by session that asked for what disks must do, until when
        self._wake_read, self.wake_descriptor = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stopping = False
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
        self._selector.register(self.listener.socket, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._woken)
        populating = threading.Thread(target=self._populate, name="kvhold-populate", daemon=True)
        populating.start()
        for number, store in self.stores.items():
            store.start(number, self._from_store)
        try:
            while not self._stopping:
                if self.config.starter_fd is not None and not self._starter and not self._engines():
                    log.info("the last engine is gone; so is this manager")
                    break
                for key, mask in self._selector.select(self._patience()):
                    key.data(mask)
                if self.core.has_work:
                    self._apply(self.core.step())
                self._tick()
                self._end_waiting()
                self._expire()
        finally:
            self._stopping = True
            self._no_more.set()
            self.listener.close()
            for connection in self.connections.values():
                connection.close()
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

    def _patience(self) -> float | None:
        if self.core.has_work:
            return 0
        waiting = [c.deadline for c in self.connections.values() if c.stage in (Stage.PREAMBLE, Stage.HELLO)]
        if (deadline := self.core.next_deadline) is not None:
            waiting.append(deadline / 1e9)
        waiting += self._waiting.values()
        return max(0.0, min(waiting) - time.monotonic()) if waiting else None

    def _handle(self, event: ev.Event) -> None:
        self._apply(self.core.handle(event, time.monotonic_ns()))

    def _from_store(self, event: ev.Event) -> None:
        """From a store's thread: what a log found, or that an I/O ended. Waits while too much that was found waits.

        That a log was opened is told on the loop's own: from then on the core knows it, and it takes every purge.
        """
        if isinstance(event, ev.LogOpened):
            self._handle(event)
        elif not isinstance(event, ev.Recovered):
            self._calls.put(lambda: self._handle(event))
        else:

            def recovered() -> None:
                self._recovering.release()
                self._handle(event)

            self._recovering.acquire()
            self._calls.put(recovered)
        self._wake()

    def _tick(self) -> None:
        """Let deadlines pass, but first take in all that was said before: it may have said that a restore began."""
        deadline, now = self.core.next_deadline, time.monotonic_ns()
        if deadline is None or deadline > now:
            return
        for connection in list(self.connections.values()):
            for _ in range(DRAIN_READS):
                if connection.stage is not Stage.SESSION or not self._read(connection):
                    break
            else:
                return  # it says more than can be taken in now; the deadline comes again at once
        self._apply(self.core.handle(ev.Tick(), now))

    def _expire(self) -> None:
        now = time.monotonic()
        for connection in list(self.connections.values()):
            if connection.stage in (Stage.PREAMBLE, Stage.HELLO) and connection.deadline <= now:
                self._refuse(connection, f"no introduction within {HELLO_SECONDS:g} s")

    def _engines(self) -> bool:
        return any(c.stage is Stage.SESSION and c.role != "admin" for c in self.connections.values())

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
            self._selector.register(descriptor, selectors.EVENT_READ, self._starter_left)
        return watched

    def _starter_left(self, _: int) -> None:
        for descriptor in self._starter:
            self._selector.unregister(descriptor)
            os.close(descriptor)
        self._starter = set()

    # --- connections --------------------------------------------------------------------------------------------

    def _accept(self, _: int) -> None:
        try:
            sock, _address = self.listener.socket.accept()
        except OSError as error:
            log.warning("cannot accept: %s", error)
            return
        sock.setblocking(False)
        try:
            if len(self.connections) >= MAX_CLIENTS:
                raise UnknownPeer(f"{MAX_CLIENTS} clients are here already")
            pid, pidfd = peer_pidfd(sock)
        except UnknownPeer as error:
            log.warning("client refused: %s", error)
            try:
                sock.send(wire.frame(wire.Refused(str(error))))
            except OSError:
                pass
            sock.close()
            return
        connection = Connection(self._next_id, sock, pid, pidfd, time.monotonic() + HELLO_SECONDS)
        self._next_id += 1
        self.connections[connection.id] = connection
        self._selector.register(sock, selectors.EVENT_READ, lambda mask: self._ready(connection, mask))
        self._selector.register(pidfd, selectors.EVENT_READ, lambda _: self._died(connection))

    def _ready(self, connection: Connection, mask: int) -> None:
        # One poll may name a connection that an earlier event of the same poll has closed.
        if mask & selectors.EVENT_WRITE:
            self._flush(connection)
        if mask & selectors.EVENT_READ and connection.stage is not Stage.CLOSED:
            self._read(connection)

    def _read(self, connection: Connection) -> bool:
        """Handle what one read brings; whether there may be more."""
        try:
            bodies, more = connection.receive()
            if bodies is None:
                self._drop(connection)
                return False
            for body in bodies:
                if connection.stage is Stage.CLOSED:
                    return False
                self._message(connection, _decode(body))
            return more
        except wire.ProtocolError as error:
            self._refuse(connection, str(error))
            return False

    def _flush(self, connection: Connection) -> None:
        if connection.stage is Stage.CLOSED:
            return
        events = selectors.EVENT_READ if connection.flush() else selectors.EVENT_READ | selectors.EVENT_WRITE
        key = self._selector.get_key(connection.sock)
        if key.events != events:
            self._selector.modify(connection.sock, events, key.data)

    def _send(self, connection: Connection, message: wire.ManagerMessage, descriptor: int | None = None) -> None:
        if connection.stage is Stage.CLOSED:
            return
        try:
            connection.send(message, descriptor)
        except wire.ProtocolError as error:
            log.warning("%s let go: %s", connection, error)
            self._drop(connection)
            return
        self._flush(connection)

    def _refuse(self, connection: Connection, reason: str) -> None:
        log.warning("%s refused: %s", connection, reason)
        self._send(connection, wire.Refused(reason))
        self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        """Close a connection. What its process may still touch stays until that process is proved dead."""
        if connection.stage is Stage.CLOSED:
            return
        self._selector.unregister(connection.sock)
        connection.close_socket()
        if connection.id not in self.core.sessions:
            self._forget(connection)
            return
        if connection.said_bye:
            how = ev.Gone.SAID
        elif is_dead(connection.pidfd):
            how = ev.Gone.DEAD
        else:
            how = ev.Gone.UNKNOWN
        log.info("%s left%s", connection, "" if how is ev.Gone.SAID else f" ({how})")
        effects = self.core.handle(ev.Left(connection.id, how), time.monotonic_ns())
        if connection.id not in self.core.sessions:
            self._forget(connection)
        self._apply(effects)

    def _died(self, connection: Connection) -> None:
        if connection.id not in self.connections:
            return
        if connection.stage is not Stage.CLOSED:
            self._read(connection)
        if connection.stage is not Stage.CLOSED:
            self._drop(connection)
        if connection.id in self.connections:
            log.info("%s is dead", connection)
            effects = self.core.handle(ev.Left(connection.id, ev.Gone.DEAD), time.monotonic_ns())
            self._forget(connection)
            self._apply(effects)

    def _forget(self, connection: Connection) -> None:
        del self.connections[connection.id]
        self._tokens = {token: id for token, id in self._tokens.items() if id != connection.id}
        self._selector.unregister(connection.pidfd)
        os.close(connection.pidfd)

    # --- messages and effects -----------------------------------------------------------------------------------

    def _message(self, connection: Connection, message: wire.ClientMessage) -> None:
        if not isinstance(message, MAY_SAY[connection.role]):
            raise wire.ProtocolError(f"a {connection.role or 'new'} session does not say {type(message).__name__}")
        match message:
            case wire.Hello():
                self._hello(connection, message)
            case wire.Bye():
                connection.said_bye = True
                self._drop(connection)
            case wire.Retire(token):
                self._retire(token)
            case wire.Status():
                self._send(connection, wire.StatusReply(msgspec.json.encode(report(self))))
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
                    log.info("limits changed: %s", changes)
                    self._handle(ev.Configure(changed))
                self._send(connection, wire.Configured(msgspec.json.encode(limits_document(changed))))
            case _:
                self._handle(event_of(connection.id, message))

    def _hello(self, connection: Connection, hello: wire.Hello) -> None:
        if not 0 < hello.world <= 1024 or not 0 <= hello.rank < hello.world or len(hello.instance) > 256:
            raise wire.ProtocolError(f"rank {hello.rank} of {hello.world} in instance {hello.instance[:64]!r}")
        if len(hello.report) > wire.MAX_REPORT:
            raise wire.ProtocolError(f"a report of {len(hello.report)} bytes, more than {wire.MAX_REPORT}")
        connection.role, connection.instance, connection.rank = hello.role, hello.instance, hello.rank
        connection.engine, connection.step = hello.engine[:256], hello.step
        connection.report = hello.report
        connection.since = time.time()
        connection.stage = Stage.SESSION
        if hello.role == "admin":
            self._send(connection, wire.Welcome(self.incarnation, 0, self.memory.bytes))
            return
        joined = ev.Joined(connection.id, ev.Role(hello.role), hello.instance, hello.rank, hello.world)
        self._handle(joined)

    def _retire(self, token: int) -> None:
        retired = self.connections.get(self._tokens.get(token, 0))
        if retired is not None and retired.stage is Stage.CLOSED:
            effects = self.core.handle(ev.Left(retired.id, ev.Gone.SAID), time.monotonic_ns())
            self._forget(retired)
            self._apply(effects)

    def _end_waiting(self) -> None:
        """Whoever asked for what a disk does not do is told so, not kept waiting."""
        for session, deadline in list(self._waiting.items()):
            if deadline <= time.monotonic():
                self._ended(session, None)

    def _ended(self, session: int, answer: wire.Purged | wire.Flushed | None) -> None:
        """Answer who waits for disks; None: they failed or take too long."""
        connection = self.connections.get(session)
        if self._waiting.pop(session, None) is None or connection is None:
            return
        if answer is not None:
            self._send(connection, answer)
        else:
            self._refuse(connection, NOT_ON_DISK)

    def _welcome(self, connection: Connection) -> None:
        token = secrets.randbits(62) + 1
        self._tokens[token] = connection.id
        log.info("%s attached: %s", connection, connection.engine or "no name given")
        descriptor = self.memory.fd if connection.role == "worker" else None
        self._send(connection, wire.Welcome(self.incarnation, token, self.memory.bytes), descriptor)

    def _apply(self, effects: list[ev.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ev.ToLog):
                self.stores[effect.log].submit(effect)
                continue
            connection = self.connections.get(effect.session)
            if connection is None:
                continue
            match effect:
                case ev.Accept():
                    self._welcome(connection)
                case ev.Refuse():
                    self._refuse(connection, effect.reason)
                case ev.Part():
                    log.info("%s parts: %s", connection, effect.reason)
                    self._drop(connection)
                case ev.Ready():
                    log.info("instance %s is served", connection.instance)
                    workers = [self.connections[one] for one in effect.workers if one in self.connections]
                    self._send(connection, wire.Ready(tuple(worker.report for worker in workers)))
                    for worker in workers:
                        self._send(worker, wire.Settled(connection.step))
                case ev.Stalled(_, op, seconds):
                    name = f"{connection.id}/{op}"
                    log.warning("%s: restore of operation %s takes longer than %d s", connection, name, seconds)
                case ev.Purged(session, durable, objects, size):
                    if durable and self.latecomers and self._waiting.pop(session, None) is not None:
                        self._refuse(connection, _not_reached(self.latecomers))
                    self._ended(session, wire.Purged(objects, size) if durable else None)
                case ev.Flushed(session, durable):
                    told = wire.Flushed(self.core.objects, self.core.catalogue.in_logs, len(self.stores))
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


def _decode(body: bytes) -> wire.ClientMessage:
    try:
        return wire.FROM_CLIENT.decode(body)
    except msgspec.DecodeError as error:
        raise wire.ProtocolError(f"malformed message: {error}") from None
