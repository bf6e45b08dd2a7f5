"""How an engine starts its own manager: ``python -m kvhold.manager SOCKET DRAM STARTER_FD HUGE_PAGES [PATH:SIZE]``."""

import sys
from pathlib import Path

from kvhold.manager.config import MIN_FREE, ManagerConfig, parse_ssd
from kvhold.manager.process import run

socket, dram, starter_fd, huge_pages, *ssd = sys.argv[1:]
sys.exit(
    run(
        ManagerConfig(
            Path(socket),
            int(dram),
            huge_pages == "1",
            starter_fd=int(starter_fd),
            ssd=tuple(parse_ssd(directory, MIN_FREE) for directory in ssd),
        )
    )
)
