"""How an engine starts its own manager: ``python -m kvhold.manager SOCKET DRAM STARTER_FD HUGE_PAGES [PATH:SIZE]``."""

import contextlib
import os
import sys
from pathlib import Path

from kvhold.manager.config import MIN_FREE, ManagerConfig, parse_ssd
from kvhold.manager.process import run

# An engine's worker binds itself to the cores that it computes on, and a child inherits that: the manager's threads
# would all compete with it for them. The kernel keeps to those of the cpuset. Threads inherit it, so it comes first.
with contextlib.suppress(OSError):
    os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))

socket, dram, starter_fd, huge_pages, *ssd = sys.argv[1:]
try:
    directories = tuple(parse_ssd(directory, MIN_FREE) for directory in ssd)
except ValueError as error:
    print(f"kvhold: {error}", file=sys.stderr)
    sys.exit(2)
sys.exit(run(ManagerConfig(Path(socket), int(dram), huge_pages == "1", starter_fd=int(starter_fd), ssd=directories)))
