"""What each client's session says and is told: what it may begin when, its words as events, effects as its answers."""

import logging
import secrets
import time
from collections.abc import Callable, Generator
from typing import Any

import msgspec

from kvhold import protocol as wire
from kvhold.core import Core
from kvhold.core import events as ev
from kvhold.core.turns import Work
from kvhold.manager.clients import Clients
from kvhold.manager.connection import Connection, Stage
from kvhold.manager.heartbeat import Heartbeat
from kvhold.manager.limits import change_limits, changes_document, limits_document, object_bytes
from kvhold.manager.listener import Listener
from kvhold.manager.memory import ArenaMemory
from kvhold.manager.poller import Poller
from kvhold.manager.stores import Stores
from kvhold.manager.times import Times
from kvhold.manager.translate import ANSWERS, LATER, MAY_SAY, QUESTIONS, event_of, message_of

log = logging.getLogger(__name__)

UNFINISHED = 64
"""Pieces of work of one client; until one is finished, nothing more that it says is handled."""
TAKEN_BYTES = 4 << 20
"""Bytes of what one client has said, of which anything is unfinished; with more, all has to be finished first."""
UNSENT_BYTES = 256 << 10
"""Bytes that wait for one client to read; until it has, its questions wait."""
PURGES = 4
"""Purges under way; further ones wait."""

DISK_SECONDS = 30.0
"""How long a purge or a flush may take; then whoever asked for it is told that the disks do not do it."""

NOT_ON_DISK = (
    "not every SSD has taken it: after a restart what was purged may be found again, and what was stored may be "
    "missing; see the manager's log, ask again once the SSD works, or stop the manager and remove its directory"
)


Report = Callable[[bytes], Generator[list[ev.Effect], None, dict[str, Any]]]
"""Makes, in slices, what ``kvhold status`` tells of all namespaces, or of one."""


class Sessions:
    """The service behind :class:`Clients`. ``apply`` carries out effects, those for sessions by :meth:`tell`."""

    def __init__(
        self,
        core: Core,
        memory: ArenaMemory,
        stores: Stores,
        poller: Poller,
        listener: Listener,
        apply: Callable[[list[ev.Effect]], None],
        report: Report,
    ) -> None:
        self.clients = Clients(poller, listener, self)
        self.heartbeat = Heartbeat()
        self.times = Times()
        self.incarnation = secrets.randbits(62) + 1
        self._core = core
        self._memory = memory
        self._stores = stores
        self._apply = apply
        self._report = report
        self._tokens: dict[int, int] = {}  # token -> connection of a scheduler or worker session
        self._waiting: dict[int, float] = {}  # by session that asked for what disks must do, until when

    @property
    def deadline(self) -> float | None:
        """When :meth:`expire` has something to do."""
        ends = [*self._waiting.values()]
        if self.clients.deadline is not None:
            ends.append(self.clients.deadline)
        return min(ends, default=None)

    @property
    def engines(self) -> bool:
        """Whether an engine is connected."""
        return any(c.stage is Stage.SESSION and c.role != "admin" for c in self.clients.connections.values())

    def _handle(self, event: ev.Event) -> None:
        self._apply(self._core.handle(event, time.monotonic_ns()))

    # --- what they say ------------------------------------------------------------------------------------------

    def ready(self, connection: Connection, message: wire.ClientMessage) -> bool:
        """Whether ``message`` can be begun now: its sender's work, and what waits for it to read, is bounded."""
        unfinished = self._core.unfinished(connection.id)
        if not unfinished:
            connection.taken = 0
        return not (
            connection.owed
            or unfinished >= UNFINISHED
            or (unfinished and connection.taken + connection.size > TAKEN_BYTES)
            or (connection.unsent > UNSENT_BYTES and isinstance(message, QUESTIONS))
            or (self._core.purges >= PURGES and isinstance(message, wire.Purge))
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
        if connection.id in self._core.sessions:
            what = "is dead" if connection.lost else "left" if how is ev.Gone.SAID else f"left ({how})"
            log.info("%s %s", connection, what)
            connection.lost = True
        self._waiting.pop(connection.id, None)
        effects = self._core.handle(ev.Left(connection.id, how), time.monotonic_ns())
        if connection.id not in self._core.sessions:
            self._forget(connection)
        self._apply(effects)

    def _forget(self, connection: Connection) -> None:
        self.clients.forget(connection)
        self._tokens = {token: id for token, id in self._tokens.items() if id != connection.id}

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
                self._apply(self._core.common.start(self._tell(connection, namespace), connection.id, question=True))
            case wire.Purge(namespace, older):
                if not 0 <= older < 1e9:
                    raise wire.ProtocolError(f"a purge of what is older than {older} s")
                log.info("purge of %s%s", namespace.hex() or "everything", f" older than {older:g} s" if older else "")
                self._stores.purging()
                self._waiting[connection.id] = time.monotonic() + DISK_SECONDS
                self._handle(ev.Purge(namespace, int(older * 1e9), connection.id))
            case wire.Flush():
                self._waiting[connection.id] = time.monotonic() + DISK_SECONDS
                self._handle(ev.Flush(connection.id))
            case wire.Explain(key, op, of):
                self._handle(ev.Explain(connection.id, key, op, of))
            case wire.Configure(limits, quotas):
                present, sizes = self._core.common.limits, object_bytes(self._core.catalogue)
                changed = change_limits(present, limits, quotas, self._memory.bytes, sizes)
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
            self._send(connection, wire.Welcome(self.incarnation, 0, self._memory.bytes))
            return
        joined = ev.Joined(connection.id, ev.Role(hello.role), hello.instance, hello.rank, hello.world)
        self._handle(joined)

    def _retire(self, token: int) -> None:
        retired = self.clients.connections.get(self._tokens.get(token, 0))
        if retired is not None and retired.stage is Stage.CLOSED:
            retired.said_bye = True
            self.left(retired, dead=False)

    def expire(self) -> None:
        """Whoever asked for what a disk does not do is told so, not kept waiting; who says nothing is let go."""
        for session, deadline in list(self._waiting.items()):
            if deadline <= time.monotonic():
                self._ended(session, None)
        self.clients.expire()

    # --- what they are told -------------------------------------------------------------------------------------

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
        descriptor = self._memory.fd if connection.role == "worker" else self.heartbeat.fd
        self._send(connection, wire.Welcome(self.incarnation, token, self._memory.bytes), descriptor)

    def tell(self, effect: ev.ToSession) -> None:
        """Carry out what concerns a session."""
        connection = self.clients.connections.get(effect.session)
        if connection is None:
            return
        match effect:
            case ev.Accept():
                self._welcome(connection)
            case ev.Refuse():
                self.clients.refuse(connection, effect.reason)
            case ev.Detach():
                log.info("%s must attach again: %s", connection, effect.reason)
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
                not_reached = self._stores.not_reached()
                if durable and not_reached and self._waiting.pop(session, None) is not None:
                    self.clients.refuse(connection, not_reached)
                self._ended(session, wire.Purged(objects, size) if durable else None)
            case ev.Flushed(session, durable):
                told = wire.Flushed(self._core.objects, self._core.storage.kept())
                self._ended(session, told if durable else None)
            case _:
                if isinstance(effect, ev.Opened) and effect.note:
                    log.warning("%s: nothing can be kept: %s", connection, effect.note)
                self._send(connection, message_of(effect))
