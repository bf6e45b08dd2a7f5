"""One client's connection as the manager sees it."""

import os
import socket
from enum import Enum

from kvhold.protocol import PREAMBLE, FrameReader, ManagerMessage, ProtocolError, check_preamble, frame

OUTBOX_LIMIT = 32 << 20
"""Bytes that may wait for a client that does not read; beyond it the client is let go."""


class Stage(Enum):
    PREAMBLE = 1
    HELLO = 2
    SESSION = 3
    CLOSED = 4  # the socket is gone; the process is still watched


class Connection:
    """A non-blocking socket, its frames, and the process behind it. ``id`` is never reused within one manager."""

    def __init__(self, id: int, sock: socket.socket, pid: int, pidfd: int, deadline: float) -> None:
        self.id = id
        self.sock = sock
        self.pid = pid
        self.pidfd = pidfd
        self.deadline = deadline
        self.stage = Stage.PREAMBLE
        self.role = ""
        self.instance = ""
        self.engine = ""
        self.rank = 0
        self.step = 0
        self.report = b""
        self.said_bye = False
        self.since = 0.0
        self._opening = b""
        self._reader = FrameReader()
        self._outbox = bytearray()

    def __str__(self) -> str:
        who = f"{self.role} rank {self.rank} of {self.instance}" if self.role else "unknown client"
        return f"{who} (pid {self.pid})"

    def receive(self, size: int = 1 << 20) -> tuple[list[bytes] | None, bool]:
        """Complete frames that one read brought, None when the other side closed; and whether there may be more.

        Raises ProtocolError.
        """
        try:
            data = self.sock.recv(size)
        except (BlockingIOError, InterruptedError):
            return [], False
        except OSError:
            return None, False
        if not data:
            return None, False
        if self.stage is Stage.PREAMBLE:
            self._opening += data
            if len(self._opening) < len(PREAMBLE) and PREAMBLE.startswith(self._opening[:6]):
                return [], True
            check_preamble(self._opening[: len(PREAMBLE)])
            self.stage = Stage.HELLO
            data, self._opening = self._opening[len(PREAMBLE) :], b""
        return list(self._reader.feed(data)), True

    def send(self, message: ManagerMessage, descriptor: int | None = None) -> None:
        """Queue ``message``; a descriptor travels with it at once. Raises ProtocolError when the client never reads."""
        data = frame(message)
        if descriptor is not None:
            try:
                sent = socket.send_fds(self.sock, [data], [descriptor])
            except OSError:
                raise ProtocolError("cannot hand over the arena") from None
            data = data[sent:]
        self._outbox += data
        if len(self._outbox) > OUTBOX_LIMIT:
            raise ProtocolError("client does not read its answers")

    def flush(self) -> bool:
        """Send what the socket takes; True when all is sent."""
        while self._outbox:
            try:
                sent = self.sock.send(self._outbox)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:
                self._outbox.clear()
                return True
            del self._outbox[:sent]
        return True

    def close_socket(self) -> None:
        self.stage = Stage.CLOSED
        self.sock.close()

    def close(self) -> None:
        if self.stage is not Stage.CLOSED:
            self.close_socket()
        os.close(self.pidfd)
