"""What this host has to give, and who is at the other end of a socket on it."""

import os
import socket
import struct

_CREDENTIALS = struct.Struct("iII")


def available_memory() -> int:
    """Bytes that the kernel thinks can be allocated without swapping, within this process's cgroup."""
    with open("/proc/meminfo") as meminfo:
        free = next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable:"))
    try:
        with open("/sys/fs/cgroup/memory.max") as most, open("/sys/fs/cgroup/memory.current") as current:
            limit = most.read().strip()
            if limit != "max":
                free = min(free, max(0, int(limit) - int(current.read())))
    except OSError:
        pass
    return free


def total_memory() -> int:
    """Bytes of memory that this host has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def default_dram() -> int:
    """Bytes of arena that an engine's own manager takes unless told otherwise: 20% of free memory, at most 8GiB."""
    return min(8 << 30, available_memory() // 5)


def peer(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process that connected to this Unix socket, or that listens at its other end."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return pid, uid
