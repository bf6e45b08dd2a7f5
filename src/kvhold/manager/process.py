"""A manager as a process: signals, logging, and what it says when it starts."""

import gc
import logging
import resource
import signal
import sys

from kvhold import __version__
from kvhold.manager.config import ConfigError, ManagerConfig, SocketTaken
from kvhold.manager.server import Server
from kvhold.protocol import SOCKET_TAKEN
from kvhold.units import format_size

log = logging.getLogger(__name__)


def run(config: ManagerConfig) -> int:
    """Serve until a signal or, embedded, until the last engine left; the exit status."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s kvhold %(levelname)s %(message)s")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        server = Server(config)
        if config.http is not None:
            from kvhold.manager.http import serve_http

            serve_http(server, *config.http)
    except ConfigError as error:
        log.error("%s", error)
        return SOCKET_TAKEN if isinstance(error, SocketTaken) else 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    log.info(
        "kvhold %s on %s: %s of DRAM%s in pages of %s%s",
        __version__,
        config.socket,
        format_size(server.memory.bytes),
        " (huge pages)" if config.huge_pages else "",
        format_size(server.memory.page),
        f", http://{config.http[0]}:{config.http[1]}" if config.http else "",
    )
    gc.freeze()
    server.run()
    log.info("ended")
    return 0
