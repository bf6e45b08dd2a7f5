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
from collections.abc import Callable

from kvhold.core.arena import ALIGN
from kvhold.host import HUGE, PAGE, arena_size, available_memory, check_dram, page_size, total_memory
from kvhold.manager.config import ConfigError
from kvhold.units import format_size

log = logging.getLogger(__name__)

RESERVE = 1 << 30
"""What populating leaves to everybody else, or a twentieth of the host's memory if that is more."""
_MADV_POPULATE_WRITE = 23
_F_ADD_SEALS, _F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 1, 2, 4
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class ArenaMemory:
    """The arena's file and the manager's own mapping of it; ``pages`` whole pages of ``page`` bytes."""

    def __init__(self, dram: int, huge_pages: bool) -> None:
        try:
            check_dram(dram)
        except ValueError as error:
            raise ConfigError(f"dram: {format_size(dram)} is {error}") from None
        self.page = page_size(dram)
        self.bytes = arena_size(dram)
        self.pages = self.bytes // self.page
        self._reserved = huge_pages  # the kernel has set them aside: they are not part of what is free
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
        if available_memory() < self.page or _populate(self._address, self.page):
            raise ConfigError(f"dram: not even {format_size(self.page)} of memory can be had; free some")

    @property
    def view(self) -> memoryview:
        """All of it. Only what was populated may be touched."""
        return memoryview(self._map)

    def populate(self, added: Callable[[int], None], stop: Callable[[], bool]) -> None:
        """Allocate all pages but the first, which is there, saying so through ``added``.

        Stops early, with a warning, where memory ends.
        """
        reserve = max(RESERVE, total_memory() // 20)
        for index in range(1, self.pages):
            if stop():
                return
            short = not self._reserved and available_memory() - self.page < reserve
            if short or _populate(self._address + index * self.page, self.page):
                log.warning(
                    "arena: only %s of %s could be had, %s are left for everybody else",
                    format_size(index * self.page),
                    format_size(self.bytes),
                    format_size(available_memory()),
                )
                return
            added(1)


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
