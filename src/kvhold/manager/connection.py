"""One client's connection as the manager sees it."""

import fcntl
import os
import socket
import struct
import termios
import time
from enum import Enum

from kvhold.protocol import PREAMBLE, ClientMessage, FrameReader, ManagerMessage, ProtocolError, check_preamble, frame

OUTBOX_LIMIT = 32 << 20
"""Bytes that may wait for a client that does not read; beyond it the client is let go."""
READ = 256 << 10
"""Bytes of one read. What a client has said waits in the kernel until it has all been handled that was read before."""
_LAST_WORDS = 1 << 20
"""Bytes that are read of a client that has died."""
_scratch = bytearray(READ)  # a new one for each read would leave holes in the process's memory


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
        self.process = pid, os.fstat(pidfd).st_ino  # of another PID namespace, only newer kernels tell one from another
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
        self.lost = False  # closed without a word
        self.hung_up = False  # nobody hears answers
        self.ended = False  # nothing more is to be read
        self.queued = False  # for its turn
        self.events = 0  # what the poller waits for
        self.next: ClientMessage | None = None  # said, and not handled yet
        self.size = 0  # of its frame
        self.owed = False  # one answer, before anything else is begun
        self.taken = 0  # bytes of what was begun since all was finished last
        self.moved = time.monotonic()  # when it said anything last
        self.asked: dict[int, tuple[str, float]] = {}  # by operation: what it has asked, and when that was read
        self._opening = b""
        self._reader = FrameReader()
        self._outbox = bytearray()

    def __str__(self) -> str:
        who = f"{self.role} rank {self.rank} of {self.instance}" if self.role else "unknown client"
        return f"{who} (pid {self.pid})"

    # --- what it says -------------------------------------------------------------------------------------------

    def receive(self) -> bool:
        """Read once; whether anything came. Sets :attr:`ended` at the end of what there is. Raises ProtocolError."""
        try:
            size = self.sock.recv_into(_scratch)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            size = 0
        if not size:
            self.ended = True
            return False
        self._take_in(memoryview(_scratch)[:size])
        return True

    def last_words(self) -> None:
        """Read what its dead process has said; its children may have the socket and go on. Raises ProtocolError."""
        left = _LAST_WORDS
        while left > 0 and self.receive():
            left -= READ
        self.ended = True

    def _take_in(self, data: memoryview) -> None:
        self.moved = time.monotonic()
        if self.stage is Stage.PREAMBLE:
            self._opening += data
            if len(self._opening) < len(PREAMBLE) and PREAMBLE.startswith(self._opening[:6]):
                return
            check_preamble(self._opening[: len(PREAMBLE)])
            self.stage = Stage.HELLO
            data, self._opening = memoryview(self._opening)[len(PREAMBLE) :], b""
        self._reader.add(data)

    def body(self) -> bytes | memoryview | None:
        """The next complete frame's. Raises ProtocolError."""
        return self._reader.take()

    @property
    def speaks(self) -> bool:
        """Whether it has said something that was read and is not handled yet. Raises ProtocolError."""
        return self.next is not None or self._reader.complete

    @property
    def behind(self) -> bool:
        """Whether it has said something that is not handled yet, wherever that is."""
        return self.queued or struct.unpack("i", fcntl.ioctl(self.sock, termios.FIONREAD, b"\0\0\0\0"))[0] > 0

    @property
    def held(self) -> int:
        """Bytes that were read and are not handled yet."""
        return self._reader.held

    # --- what it is told ----------------------------------------------------------------------------------------

    @property
    def unsent(self) -> int:
        """Bytes that wait for it to read."""
        return len(self._outbox)

    def send(self, message: ManagerMessage, descriptor: int | None = None) -> None:
        """Queue ``message``; a descriptor travels with it at once. Raises ProtocolError when the client never reads."""
        data = frame(message)
        if descriptor is not None:
            try:
                sent = socket.send_fds(self.sock, [data], [descriptor])
            except OSError:
                raise ProtocolError("the descriptor that the session maps cannot be handed over") from None
            data = data[sent:]
        self._outbox += data
        if len(self._outbox) > OUTBOX_LIMIT:
            raise ProtocolError("client does not read its answers")

    def flush(self) -> None:
        """Send what the socket takes."""
        while self._outbox:
            try:
                sent = self.sock.send(self._outbox)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self.hung_up = True
                self._outbox.clear()
                return
            del self._outbox[:sent]

    def close_socket(self) -> None:
        self.stage = Stage.CLOSED
        self.next = None
        self._reader = FrameReader()
        self._outbox = bytearray()
        self.sock.close()

    def close(self) -> None:
        if self.stage is not Stage.CLOSED:
            self.close_socket()
        os.close(self.pidfd)
