"""Everybody who is connected: who is let in, what of what they say is taken in when, and what they are told.

A client is read when all that it said before was handled. What was read is handled a message at a time, in turns: first
of those who had nothing to say for a while, then of the others, and of each only what :class:`Service` is ready for.
"""

import errno
import logging
import socket
import time
from collections import Counter, deque
from typing import Protocol

import msgspec

from kvhold import protocol as wire
from kvhold.host import is_dead
from kvhold.manager.connection import READ, Connection, Stage
from kvhold.manager.listener import Listener
from kvhold.manager.poller import HUNG_UP, WRITE, Poller
from kvhold.manager.poller import READ as READABLE
from kvhold.manager.proof import UnknownPeer, peer_pidfd
from kvhold.manager.translate import QUESTIONS

log = logging.getLogger(__name__)

HELLO_SECONDS = 5.0
"""A client that has not introduced itself by then is let go."""
MAX_CLIENTS = 256
"""Sessions of engines, those included that are lost and not proved dead."""
OPERATORS = 16
"""Sessions of operators, beside them."""
PROCESS_CLIENTS = 128
"""Sessions of one process."""
PROCESS_OPERATORS = 8
STRANGERS = 64
"""Clients that have not introduced themselves; with one more, the one that has been here longest is let go."""
ACCEPTS = 4
"""Clients that are let in at once."""
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
PAUSE_SECONDS = 1.0
"""How long nobody is let in after the descriptors have run out, unless somebody leaves."""

LARGE = 64 << 10
"""Bytes of a frame that count as much, while its rest is not here."""
FRAME_SECONDS = 60.0
"""Who has sent so much of one, and then nothing for so long, is let go."""
UNFINISHED_BYTES = 32 << 20
"""Of all such frames together; with more, who has sent nothing for longest is let go."""
UNREAD_BYTES = 48 << 20
"""Of answers and news that wait for all who do not read; with more, for whom most waits is let go."""


class Service(Protocol):
    """What is behind the clients."""

    def ready(self, connection: Connection, message: wire.ClientMessage) -> bool:
        """Whether this can be begun now, or else waits, and all that the client says after it."""

    def said(self, connection: Connection, message: wire.ClientMessage) -> None:
        """Raises ProtocolError for what makes no sense."""

    def left(self, connection: Connection, dead: bool) -> None:
        """It was closed, or it is known now that its process is ``dead``."""


class Clients:
    """``connections`` are all whose process may still touch something, by number; a closed one is among them."""

    def __init__(self, poller: Poller, listener: Listener, service: Service) -> None:
        self.connections: dict[int, Connection] = {}
        self._poller = poller
        self._listener = listener
        self._service = service
        self.handled = 0  # messages, ever
        self._next_id = 1
        self._processes: Counter[tuple[int, int]] = Counter()
        self._strangers: dict[int, Connection] = {}  # who have not introduced themselves, in the order they came
        self._torn: dict[int, Connection] = {}  # of whose frame much is here, but not its end
        self._fresh: deque[Connection] = deque()
        self._others: deque[Connection] = deque()
        self._held: list[Connection] = []  # for whose next message the service is not ready
        self._paused = 0.0  # until when nobody is let in

    # --- coming -------------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Let clients in from now on, on the listener's present socket."""
        self._poller.register(self._listener.socket.fileno(), self._accept)

    def _accept(self, _: int) -> None:
        for _ in range(ACCEPTS):
            try:
                sock, _address = self._listener.socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                log.warning("cannot accept: %s", error)
                if error.errno in NO_DESCRIPTORS:
                    self._paused = time.monotonic() + PAUSE_SECONDS
                    self._poller.modify(self._listener.socket.fileno(), 0)
                return
            sock.setblocking(False)
            self._let_in(sock)

    def _let_in(self, sock: socket.socket) -> None:
        try:
            pid, pidfd = peer_pidfd(sock)
        except UnknownPeer as error:
            self._turn_away(sock, str(error))
            return
        connection = Connection(self._next_id, sock, pid, pidfd, time.monotonic() + HELLO_SECONDS)
        if reason := self._crowded(connection):
            self._turn_away(sock, reason)
            connection.close()
            return
        self._next_id += 1
        self.connections[connection.id] = self._strangers[connection.id] = connection
        self._processes[connection.process] += 1
        connection.events = READABLE
        self._poller.register(sock.fileno(), lambda mask: self._ready(connection, mask))
        self._poller.register(pidfd, lambda _: self._died(connection))
        if len(self._strangers) > STRANGERS:
            self.refuse(next(iter(self._strangers.values())), "too many clients do not introduce themselves")

    def _turn_away(self, sock: socket.socket, reason: str) -> None:
        log.warning("client refused: %s", reason)
        try:
            sock.send(wire.frame(wire.Refused(reason)))
        except OSError:
            pass
        sock.close()

    def _crowded(self, connection: Connection) -> str:
        count = self._processes[connection.process]
        if count < PROCESS_CLIENTS:
            return ""
        mine = [one for one in self.connections.values() if one.process == connection.process]
        lost = sum(one.stage is Stage.CLOSED for one in mine)
        return f"process {connection.pid} has {count} sessions here already, {lost} of them lost; it has to end"

    def introduced(self, connection: Connection) -> None:
        """It has said who it is. Raises ProtocolError when there is no place for one more of its kind."""
        operator = connection.role == "admin"
        others = [one for one in self.connections.values() if one.role and one is not connection]
        same = [one for one in others if (one.role == "admin") is operator]
        if len(same) >= (OPERATORS if operator else MAX_CLIENTS):
            raise wire.ProtocolError(f"{len(same)} {'operators' if operator else 'clients'} are here already")
        if operator and sum(one.process == connection.process for one in same) >= PROCESS_OPERATORS:
            raise wire.ProtocolError(f"process {connection.pid} asks in {PROCESS_OPERATORS} sessions already")
        self._strangers.pop(connection.id, None)
        connection.stage = Stage.SESSION

    # --- listening ----------------------------------------------------------------------------------------------

    def _ready(self, connection: Connection, mask: int) -> None:
        # One poll may name a connection that an earlier event of the same poll has closed.
        if connection.stage is Stage.CLOSED:
            return
        if mask & HUNG_UP:
            connection.hung_up = True
            if connection.role in ("", "admin"):  # it only had questions
                self.drop(connection)
                return
        if mask & WRITE:
            connection.flush()
            self._watch(connection)
        if mask & (READABLE | HUNG_UP) and not connection.queued:
            self._read(connection)

    def _read(self, connection: Connection) -> None:
        try:
            connection.receive()
            self._line_up(connection)
        except wire.ProtocolError as error:
            self.refuse(connection, str(error))

    def _line_up(self, connection: Connection) -> None:
        """What was read of a connection waits for its turn, or is no whole frame yet."""
        if connection.stage is Stage.CLOSED:
            return  # by what it said
        if connection.speaks:
            self._torn.pop(connection.id, None)
            connection.queued = True
            self._fresh.append(connection)
        elif connection.ended:
            self.drop(connection)
        elif connection.held > LARGE:
            self._torn[connection.id] = connection
            if sum(one.held for one in self._torn.values()) > UNFINISHED_BYTES:
                still = min(self._torn.values(), key=lambda one: one.moved)
                self.refuse(still, f"the rest of a frame did not come, after {still.held} bytes")

    @property
    def waiting(self) -> bool:
        """Whether somebody may have a turn at once."""
        return bool(self._fresh or self._others)

    @property
    def held(self) -> bool:
        """Whether somebody waits until the service is ready for what it said."""
        return bool(self._held)

    def take(self, seconds: float) -> None:
        """Handle what clients have said, a message of each in its turn, for about so long."""
        self._others.extendleft(reversed(self._held))
        self._held.clear()
        if self._others:
            self._turn(self._others.popleft())  # however many come fresh
        if self._fresh:
            self._turn(self._fresh.popleft())  # however long that took
        end = time.monotonic() + seconds
        while self._fresh or self._others:
            if time.monotonic() >= end:
                break
            self._turn((self._fresh or self._others).popleft())

    def _turn(self, connection: Connection) -> None:
        if connection.stage is Stage.CLOSED:
            return
        try:
            if not self._take_one(connection):
                self._held.append(connection)
            elif connection.speaks:
                self._others.append(connection)
            else:
                connection.queued = False
                self._line_up(connection)
        except wire.ProtocolError as error:
            self.refuse(connection, str(error))
        self._watch(connection)

    def _take_one(self, connection: Connection) -> bool:
        """Handle one message; False if that has to wait."""
        message = connection.next
        if message is None:
            body = connection.body()
            if body is None:
                return True
            message, connection.size = _decode(body), len(body)
        # Nobody hears the answer; but what was done, and what is over, counts.
        if not (connection.hung_up and isinstance(message, QUESTIONS)):
            if not self._service.ready(connection, message):
                connection.next = message
                return False
            self._service.said(connection, message)
        self.handled += 1
        connection.next = None
        return True

    def _watch(self, connection: Connection) -> None:
        """Wait for what can be done with a connection now."""
        if connection.stage is Stage.CLOSED or connection.ended:
            return
        events = (0 if connection.queued else READABLE) | (WRITE if connection.unsent else 0)
        if events != connection.events:
            connection.events = events
            self._poller.modify(connection.sock.fileno(), events)

    def behind(self) -> frozenset[int]:
        """Scheduler halves that have said something which is not handled yet."""
        halves = (one for one in self.connections.values() if one.role == "scheduler" and one.stage is Stage.SESSION)
        return frozenset(one.id for one in halves if one.behind)

    # --- telling ------------------------------------------------------------------------------------------------

    def send(self, connection: Connection, message: wire.ManagerMessage, descriptor: int | None = None) -> None:
        if connection.stage is Stage.CLOSED or connection.hung_up:
            return
        try:
            connection.send(message, descriptor)
        except wire.ProtocolError as error:
            self._let_go(connection, str(error))
            return
        connection.flush()
        self._watch(connection)
        if connection.unsent > READ and sum(one.unsent for one in self.connections.values()) > UNREAD_BYTES:
            self._let_go(max(self.connections.values(), key=lambda one: one.unsent), "client does not read its answers")

    def _let_go(self, connection: Connection, reason: str) -> None:
        log.warning("%s disconnected: %s", connection, reason)
        self.drop(connection)

    def refuse(self, connection: Connection, reason: str) -> None:
        """Say why, and close it."""
        log.warning("%s refused: %s", connection, reason)
        self.send(connection, wire.Refused(reason))
        self.drop(connection)

    # --- going --------------------------------------------------------------------------------------------------

    def drop(self, connection: Connection) -> None:
        """Close a connection. What its process may still touch stays until that process is proved dead."""
        if connection.stage is Stage.CLOSED:
            return
        self._poller.unregister(connection.sock.fileno())
        connection.close_socket()
        self._strangers.pop(connection.id, None)
        self._torn.pop(connection.id, None)
        self._service.left(connection, is_dead(connection.pidfd))

    def _died(self, connection: Connection) -> None:
        self._poller.unregister(connection.pidfd)
        if connection.stage is Stage.CLOSED:
            self._service.left(connection, dead=True)
            return
        connection.hung_up = True
        self._poller.unregister(connection.sock.fileno())
        try:
            connection.last_words()
            if not connection.queued:
                self._line_up(connection)
        except wire.ProtocolError as error:
            self.refuse(connection, str(error))

    def forget(self, connection: Connection) -> None:
        """Nothing of it is in use any more."""
        if self.connections.pop(connection.id, None) is None:
            return
        self._processes[connection.process] -= 1
        if not self._processes[connection.process]:
            del self._processes[connection.process]
        self._poller.unregister(connection.pidfd)
        connection.close()
        if self._paused:
            self._resume()

    def _resume(self) -> None:
        self._paused = 0.0
        if self._listener.socket.fileno() >= 0:
            self._poller.modify(self._listener.socket.fileno(), READABLE)

    # --- time ---------------------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        """When :meth:`expire` has something to do."""
        ends = [next(iter(self._strangers.values())).deadline] if self._strangers else []
        ends += [one.moved + FRAME_SECONDS for one in self._torn.values()]
        return min([*ends, self._paused] if self._paused else ends, default=None)

    def expire(self) -> None:
        now = time.monotonic()
        for connection in list(self._strangers.values()):
            if connection.deadline > now:
                break
            self.refuse(connection, f"no introduction within {HELLO_SECONDS:g} s")
        for connection in list(self._torn.values()):
            if connection.moved + FRAME_SECONDS <= now:
                self.refuse(connection, f"the rest of a frame did not come within {FRAME_SECONDS:g} s")
        if self._paused and self._paused <= now:
            self._resume()

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()


def _decode(body: bytes | memoryview) -> wire.ClientMessage:
    try:
        return wire.FROM_CLIENT.decode(body)
    except msgspec.DecodeError as error:
        raise wire.ProtocolError(f"malformed message: {error}") from None
