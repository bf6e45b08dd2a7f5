"""How an engine starts its own manager: ``python -m kvhold.manager SOCKET DRAM STARTER_FD HUGE_PAGES EVICTION
[PATH:SIZE]``.

``STARTER_FD`` is a socket. Its other end hears why this manager could not start.
"""

import contextlib
import os
import socket
import sys
from pathlib import Path

from kvhold.manager.config import MIN_FREE, ManagerConfig, parse_ssd
from kvhold.manager.process import run

# An engine's worker binds itself to the cores that it computes on, and a child inherits that: the manager's threads
# would all compete with it for them. The kernel keeps to those of the cpuset. Threads inherit it, so it comes first.
with contextlib.suppress(OSError):
    os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))

path, dram, starter_fd, huge_pages, eviction, *ssd = sys.argv[1:]
starter = os.dup(int(starter_fd))  # the server closes the other one, whose number may then stand for anything


def tell(status: int, reason: str) -> None:
    """Say to the starter, if it still listens, with which status and why this manager ends before it has served."""
    with contextlib.suppress(OSError), socket.socket(fileno=starter) as lifeline:
        lifeline.send(f"{status} {reason}".encode(errors="replace"), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


try:
    directories = tuple(parse_ssd(directory, MIN_FREE) for directory in ssd)
except ValueError as error:
    print(f"kvhold: {error}", file=sys.stderr)
    tell(2, str(error))
    sys.exit(2)
config = ManagerConfig(Path(path), int(dram), huge_pages == "1", eviction, starter_fd=int(starter_fd), ssd=directories)
try:
    status = run(config, tell)
except Exception as error:
    tell(1, f"{type(error).__name__}: {error}")
    raise
sys.exit(status)
