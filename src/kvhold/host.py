"""What this host has to give, what it can never give, and who is at the other end of a socket on it."""

import errno
import os
import select
import socket
import struct
from pathlib import Path

from kvhold.cgroups import Bound, Cgroups
from kvhold.units import format_size

HUGE = 2 << 20
"""Bytes of a huge page, and of the smallest arena."""
PAGE = 64 << 20
"""Arena page; smaller arenas have smaller ones, so that several slot sizes find room."""
_HUGE_PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
_LONGEST_SOCKET = 107
_NOBODY = (errno.ECONNREFUSED, errno.ENOENT, errno.ENOTSOCK, errno.ENOTDIR)
_CREDENTIALS = struct.Struct("iII")


_cgroups = Cgroups()


def bounds(huge_pages: bool = False) -> list[Bound]:
    """All that bounds what this process can have: the host, and each of its cgroups that has a limit.

    Of ``huge_pages`` the host's are counted elsewhere: they are set aside in its memory already.
    """
    if huge_pages:
        return _cgroups.bounds(huge_pages)
    with open("/proc/meminfo") as meminfo:
        free = next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable:"))
    return [Bound("the host", total_memory(), free), *_cgroups.bounds()]


def tightest(huge_pages: bool) -> Bound | None:
    """The bound that leaves least to be taken, if there is any."""
    return min(bounds(huge_pages), key=lambda bound: bound.spare, default=None)


def available_memory() -> int:
    """Bytes that can be allocated without swapping, as far as the kernel tells, within the process's cgroups."""
    return min(bound.free for bound in bounds())


def total_memory() -> int:
    """Bytes of memory that this host has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def default_dram() -> int:
    """Bytes of arena that an engine's own manager takes unless told otherwise: 20% of free memory, at most 8GiB."""
    return max(HUGE, min(8 << 30, available_memory() // 5))


def page_size(dram: int) -> int:
    """Bytes of an arena page in an arena of ``dram`` bytes."""
    return min(PAGE, max(HUGE, dram // 32 // HUGE * HUGE))


def arena_size(dram: int) -> int:
    """Bytes of the arena that ``dram`` bytes make: whole pages."""
    return dram // page_size(dram) * page_size(dram)


def check_dram(dram: int, huge_pages: bool) -> None:
    """Raises ValueError, saying what ``dram`` bytes are, when no arena of this process can have them."""
    if dram < HUGE:
        raise ValueError(f"too small; give at least {format_size(HUGE)}")
    if dram > total_memory():
        raise ValueError(f"more than the host has, {format_size(total_memory())}; give less")
    for bound in bounds(huge_pages):
        if dram > bound.total:
            limit = f"{format_size(bound.total)}, the memory limit of {bound.owner}"
            raise ValueError(f"more than {limit}; give less, or raise the limit")


def check_huge_pages(dram: int) -> None:
    """Raises ValueError when the host has fewer huge pages than such an arena needs.

    Those in use count: they may be this arena's, or be free again by the time that they are wanted.
    """
    try:
        has = sum(int((_HUGE_PAGES / name).read_text()) for name in ("nr_hugepages", "nr_overcommit_hugepages"))
    except OSError:
        return  # not shown here, e.g. in a container: the kernel says it in its own time
    need = arena_size(dram) // HUGE
    if need > has:
        raise ValueError(
            f"{format_size(dram)} need {need} huge pages of 2MiB, and the host has {has}; "
            f"run `sysctl vm.nr_hugepages={need}`, give less DRAM or start without huge pages"
        )


def check_socket(path: Path) -> None:
    """Raises ValueError, saying what ``path`` is, when nobody can listen there for sure."""
    if not path.is_absolute():
        raise ValueError("not an absolute path; choose one")
    if len(os.fsencode(path)) > _LONGEST_SOCKET:
        raise ValueError(f"longer than {_LONGEST_SOCKET} bytes; choose a shorter path")


def peer(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process that connected to this Unix socket, or that listens at its other end."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return pid, uid


def listens(path: Path) -> bool:
    """Whether somebody has the socket at ``path``, even one too busy to take a connection."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except OSError as error:
            return error.errno not in _NOBODY
    return True


def is_dead(pidfd: int) -> bool:
    """Whether the process has ended, for certain."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))
