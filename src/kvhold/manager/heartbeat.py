"""A sign of life that costs nothing: the loop's turns, counted in a page of memory that sessions map.

A manager that is slow and one that does not run look alike on a socket. The page tells them apart in any PID namespace,
also when the manager's process is stopped.
"""

import fcntl
import mmap
import os

from kvhold.manager.config import ConfigError

_F_ADD_SEALS, _F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_FUTURE_WRITE = 1033, 1, 2, 4, 16


class Heartbeat:
    """The page and its descriptor ``fd``, which may be handed out: nobody else can write there or resize it."""

    def __init__(self) -> None:
        try:
            self.fd = os.memfd_create("kvhold-heartbeat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, mmap.PAGESIZE)
            self._turns = memoryview(mmap.mmap(self.fd, mmap.PAGESIZE)).cast("Q")
            seals = _F_SEAL_FUTURE_WRITE | _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL
            fcntl.fcntl(self.fd, _F_ADD_SEALS, seals)
        except OSError as error:
            raise ConfigError(f"the page of memory that shows that the manager runs cannot be made: {error}") from None

    def beat(self) -> None:
        """A turn of the loop has begun."""
        self._turns[0] += 1
