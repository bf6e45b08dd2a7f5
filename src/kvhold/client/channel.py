"""One session with a manager: a connected socket, its messages, and what the Welcome brought."""

import mmap
import os
import select
import socket
import time
from pathlib import Path

import msgspec

from kvhold import protocol as wire
from kvhold.client.wait import wait_for
from kvhold.host import peer

_MOST_MESSAGES = 256
"""Taken in by one call, so that a manager with much to say does not keep an engine from its step; the rest waits."""
OUTBOX_LIMIT = 16 << 20
"""Bytes that may wait for a manager that does not read; beyond it the session is given up."""


class AttachError(Exception):
    """No session could be had; the message says why."""


class NoManager(AttachError):
    """Nobody listens there."""


class Channel:
    """A session of ``hello.role`` at ``path``. One thread at a time may use it; any may :meth:`abandon` it.

    Raises AttachError when nobody listens, the listener is another user's, or the manager refuses.
    """

    def __init__(self, path: Path, hello: wire.Hello, timeout: float) -> None:
        self.path = path
        self.lost = False
        self._pid = os.getpid()
        self._reader = wire.FrameReader()
        self._outbox = bytearray()
        self._inbox: list[wire.ManagerMessage] = []
        self._buffer = bytearray(1 << 16)
        self.arena_fd = -1
        self._heartbeat: memoryview | None = None
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self.socket.settimeout(timeout)
            self.socket.connect(str(path))
            if peer(self.socket)[1] != os.getuid():
                raise AttachError(f"{path} is another user's")
            self.socket.sendall(wire.PREAMBLE + wire.frame(hello))
            self.welcome = self._await_welcome(timeout, hello.role)
            self.socket.settimeout(None)
        except OSError as error:
            self.close()
            kind = NoManager if isinstance(error, FileNotFoundError | ConnectionRefusedError) else AttachError
            raise kind(f"no manager answers on {path}: {error}") from None
        except (AttachError, wire.ProtocolError, msgspec.DecodeError) as error:
            self.close()
            raise AttachError(str(error)) from None

    def _await_welcome(self, timeout: float, role: str) -> wire.Welcome:
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            data, descriptors, _, _ = socket.recv_fds(self.socket, 1 << 16, 1)
            for descriptor in descriptors:
                if role == "scheduler":
                    self._map_heartbeat(descriptor)
                else:
                    self.arena_fd = descriptor
            if not data:
                raise AttachError(f"the manager on {self.path} closed the connection")
            self._inbox += map(wire.FROM_MANAGER.decode, self._reader.feed(data))
            if self._inbox:
                match self._inbox.pop(0):
                    case wire.Welcome() as welcome:
                        if role == "scheduler" and self._heartbeat is None:
                            raise AttachError(f"the manager on {self.path} handed over no heartbeat page")
                        return welcome
                    case wire.Refused(reason):
                        raise AttachError(f"the manager on {self.path} refused: {reason}")
                    case other:
                        raise AttachError(f"the manager on {self.path} sent {type(other).__name__} before Welcome")
        raise AttachError(f"the manager on {self.path} did not answer within {timeout:g} s")

    def _map_heartbeat(self, descriptor: int) -> None:
        try:
            self._heartbeat = memoryview(mmap.mmap(descriptor, mmap.PAGESIZE, prot=mmap.PROT_READ)).cast("Q")
        finally:
            os.close(descriptor)

    @property
    def turns(self) -> int:
        """Turns of the manager's loop, as a scheduler session sees them: while they grow in number, it runs."""
        return self._heartbeat[0] if self._heartbeat is not None else 0

    @property
    def unsent(self) -> int:
        """Bytes of what was said that the socket did not take: the manager has not read what was said before."""
        return len(self._outbox)

    def send(self, message: wire.ClientMessage) -> None:
        """Queue ``message`` and send what the socket takes now; never waits."""
        self._outbox += wire.frame(message)
        self.flush()

    @property
    def drained(self) -> bool:
        """Whether all that was said is with the kernel, for a manager to read."""
        return not self._outbox and not self.lost

    def flush(self) -> None:
        try:
            while self._outbox and not self.lost:
                sent = self.socket.send(self._outbox, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                del self._outbox[:sent]
        except BlockingIOError:
            if len(self._outbox) > OUTBOX_LIMIT:
                self.abandon()
        except OSError:
            self.abandon()

    def receive(self, wait: float = 0.0) -> list[wire.ManagerMessage]:
        """Messages that are here, or come within ``wait`` seconds; sets :attr:`lost` at the session's end."""
        messages, self._inbox = self._inbox, []
        end = time.monotonic() + wait
        while not self.lost and len(messages) < _MOST_MESSAGES:
            self.flush()
            try:
                size = self.socket.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
                if not size:
                    self.abandon()
                for body in self._reader.feed(memoryview(self._buffer)[:size]):
                    messages.append(wire.FROM_MANAGER.decode(body))
            except BlockingIOError:
                left = end - time.monotonic()
                if messages or left <= 0 or self.lost:
                    break
                # A question that is larger than the socket's buffer must go out before it can be answered.
                wait_for(self.socket.fileno(), select.POLLIN | (select.POLLOUT if self._outbox else 0), left)
            except (OSError, wire.ProtocolError, msgspec.DecodeError):
                self.abandon()
        return messages

    def abandon(self) -> None:
        """Mark the session lost and wake whoever watches the socket; the descriptor stays until :meth:`close`."""
        self.lost = True
        if os.getpid() == self._pid:  # a forked child has no say in its parent's session
            try:
                self.socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def bye(self) -> None:
        """Say that nothing of this session is in use any more, and end it."""
        if not self.lost and os.getpid() == self._pid:
            self.send(wire.Bye())
        self.abandon()

    def close(self) -> None:
        self.lost = True
        self.socket.close()
        if self.arena_fd >= 0:
            os.close(self.arena_fd)
            self.arena_fd = -1

    __del__ = close
