"""Frames: how messages are cut out of a byte stream, and how much of it anybody may send."""

import mmap
import struct
from collections.abc import Iterator

import msgspec

MAX_FRAME = 4 << 20
"""Longest frame, in bytes: a query of 65,536 keys of 32 bytes fits."""
MAX_KEYS = 65_536
"""Keys in one query."""
MAX_OPS = 256
"""Operations in one release: each of them becomes objects of a hundred bytes where it is read."""
VERSION = 6
"""Version of the protocol; both sides must speak the same."""
PREAMBLE = b"KVHOLD" + struct.pack("<H", VERSION)
"""What a client sends before its first frame."""

MAX_REPORT = 4000
"""Bytes of a worker's report: those of 1,024 ranks fit into a frame."""
SHARD_ALIGN = 4096
"""Shards of an object start at multiples of this, and their lengths are given padded to it."""
RESTORE_WITHIN = 30.0
"""Seconds from a question until its restore must have been declared started; managers keep leases twice as long.

A client declares it (Started), sees the message into the socket, and only then looks at its clock. A manager takes
everything in that was sent before the lease's end before it ends it. So neither needs the other's answer.
"""
SOCKET_TAKEN = 3
"""Exit status of a manager whose socket another one has; to who started it: somebody was faster, attach to that."""

_LENGTH = struct.Struct("<I")
_OWN = 256 << 10
"""Bytes of a frame from which on what comes of it is kept in memory of its own.

That is never moved as it fills, and the system has it back at once.
"""
_encoder = msgspec.msgpack.Encoder()


class ProtocolError(Exception):
    """The other side sent what this protocol does not allow."""


def frame(message: msgspec.Struct) -> bytes:
    """``message`` as one frame."""
    buffer = bytearray(_LENGTH.size)
    _encoder.encode_into(message, buffer, _LENGTH.size)
    _LENGTH.pack_into(buffer, 0, len(buffer) - _LENGTH.size)
    return bytes(buffer)


def check_preamble(data: bytes) -> None:
    """Raise ProtocolError, saying what was met and what is spoken here, unless ``data`` opens a connection of ours."""
    if data == PREAMBLE:
        return
    if data[:6] != PREAMBLE[:6]:
        raise ProtocolError("not a kvhold client")
    (version,) = struct.unpack("<H", data[6:8])
    raise ProtocolError(f"client speaks protocol {version}, this manager speaks {VERSION}; install the same kvhold")


class FrameReader:
    """Collects bytes, as they come, and gives the bodies of complete frames.

    Raises ProtocolError for a frame that is too long, or for which there is no memory.
    """

    __slots__ = ("_buffer", "_filled", "_large", "_limit")

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self._large: mmap.mmap | None = None  # the first frame's own memory
        self._filled = 0  # bytes of it that have come
        self._buffer = bytearray()  # what comes after that
        self._limit = limit

    def add(self, data: bytes | memoryview) -> None:
        if self._large is None and self._end() > max(_OWN, len(self._buffer)):
            try:
                self._large = mmap.mmap(-1, self._end())
            except OSError as error:
                raise ProtocolError(f"there is no memory for a frame of {self._end()} bytes: {error}") from error
            self._filled = len(self._buffer)
            self._large[: self._filled] = self._buffer
            self._buffer.clear()
        if self._large is not None:
            part = data[: len(self._large) - self._filled]
            self._large[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            data = data[len(part) :]
        self._buffer += data

    @property
    def held(self) -> int:
        """Bytes that were added and not taken."""
        return self._filled + len(self._buffer)

    def _end(self) -> int:
        """Where the first frame ends; beyond what is here, if its rest or its length is not."""
        if len(self._buffer) < _LENGTH.size:
            return _LENGTH.size
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self._limit:
            raise ProtocolError(f"frame of {length} bytes, at most {self._limit} are allowed")
        return _LENGTH.size + int(length)

    @property
    def complete(self) -> bool:
        """Whether :meth:`take` has a frame to give."""
        if self._large is not None:
            return self._filled == len(self._large)
        return self._end() <= len(self._buffer)

    def take(self) -> bytes | memoryview | None:
        """The body of the first frame, if all of it is here."""
        if self._large is not None:
            if not self.complete:
                return None
            whole, self._large, self._filled = self._large, None, 0
            return memoryview(whole)[_LENGTH.size :]
        end = self._end()
        if end > len(self._buffer):
            return None
        body = bytes(memoryview(self._buffer)[_LENGTH.size : end])
        del self._buffer[:end]
        return body

    def feed(self, data: bytes | memoryview) -> Iterator[bytes | memoryview]:
        """Yield each body that ``data`` completes."""
        self.add(data)
        while (body := self.take()) is not None:
            yield body
