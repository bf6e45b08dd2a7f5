"""The DRAM arena: a sealed memfd, populated page by page before anybody may use it.

A page that cannot be allocated kills whoever touches it first (SIGBUS). So it is the manager that touches, through a
call that fails instead, and only pages that are there are ever given out; nobody can shrink the file afterwards.
"""

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Callable

from kvhold.core.arena import ALIGN
from kvhold.host import HUGE, PAGE, arena_size, check_dram, page_size, tightest
from kvhold.manager.config import ConfigError
from kvhold.units import format_size

log = logging.getLogger(__name__)

AGAIN_SECONDS = 5.0
"""How long after it was stopped by a lack of memory populating looks for more."""
_PIECE = 16 << 20
"""Bytes between two looks at what is left: others take memory at the same time."""
_MADV_POPULATE_WRITE = 23
_F_ADD_SEALS, _F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 1, 2, 4
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class ArenaMemory:
    """The arena's file and the manager's own mapping of it; ``pages`` whole pages of ``page`` bytes."""

    def __init__(self, dram: int, huge_pages: bool) -> None:
        try:
            check_dram(dram, huge_pages)
        except ValueError as error:
            raise ConfigError(f"dram: {format_size(dram)} is {error}") from None
        self.page = page_size(dram)
        self.bytes = arena_size(dram)
        self.pages = self.bytes // self.page
        self._huge_pages = huge_pages
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        try:
            self.fd = os.memfd_create("kvhold-arena", flags | (os.MFD_HUGETLB | os.MFD_HUGE_2MB if huge_pages else 0))
            os.ftruncate(self.fd, self.bytes)
            self._map = mmap.mmap(self.fd, self.bytes)
        except (OSError, OverflowError) as error:
            if not huge_pages:
                raise ConfigError(f"dram: {format_size(dram)} cannot be mapped: {error}") from None
            need = self.bytes // HUGE
            raise ConfigError(
                f"huge_pages: the kernel has no {need} free huge pages of 2MiB ({error}); "
                f"run `sysctl vm.nr_hugepages={need}` or start without huge pages"
            ) from None
        fcntl.fcntl(self.fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
        self._map.madvise(mmap.MADV_DONTFORK)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        if _madvise(self._address, 0, _MADV_POPULATE_WRITE):
            raise ConfigError("dram: this kernel cannot populate memory safely; kvhold needs Linux 5.14 or newer")
        if not self._populate(0):
            raise ConfigError(
                f"dram: not even {format_size(self.page)} of memory can be allocated{self._shortage()}; free some"
            )

    @property
    def view(self) -> memoryview:
        """All of it. Only what was populated may be touched."""
        return memoryview(self._map)

    def populate(self, added: Callable[[int], None], ended: threading.Event) -> None:
        """Allocate all pages but the first, which is there, saying so through ``added``.

        Where memory ends, says so once, and goes on when there is more; until ``ended``.
        """
        index, short = 1, False
        while index < self.pages and not ended.is_set():
            if self._populate(index):
                index += 1
                added(1)
            elif short:
                ended.wait(AGAIN_SECONDS)
            else:
                short = True
                log.warning(
                    "arena: only %s of %s can be allocated now%s; the rest follows once there is room",
                    format_size(index * self.page),
                    format_size(self.bytes),
                    self._shortage(),
                )

    def _populate(self, index: int) -> bool:
        """Allocate a page, or none of it where that would go beyond what others are left."""
        start, end = index * self.page, (index + 1) * self.page
        for at in range(start, end, _PIECE):
            bound = tightest(self._huge_pages)
            if (bound is not None and bound.spare < end - at) or _populate(self._address + at, min(_PIECE, end - at)):
                self._map.madvise(mmap.MADV_REMOVE, start, self.page)
                return False
        return True

    def _shortage(self) -> str:
        bound = tightest(self._huge_pages)
        if bound is None:
            return ""
        return f": {bound.owner} has {format_size(bound.free)} of {format_size(bound.total)} left for everybody else"


def _populate(address: int, size: int) -> int:
    """0, or the errno of a kernel that could not allocate ``size`` bytes at ``address``.

    In small pieces: a call holds the process's memory lock, and the loop's thread must get it in between.
    """
    at, end = address, address + size
    while at < end:
        if _madvise(at, min(HUGE, end - at), _MADV_POPULATE_WRITE) == 0:
            at += HUGE
            continue
        error = ctypes.get_errno()
        if error not in (errno.EINTR, errno.EAGAIN):
            return error
    return 0


assert PAGE % ALIGN == 0
