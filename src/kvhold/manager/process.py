"""A manager as a process: signals, logging, and what it says when it starts."""

import gc
import logging
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import closing

from kvhold import __version__
from kvhold.manager.config import ConfigError, ManagerConfig, SocketTaken, SsdConfig
from kvhold.manager.listener import Listener, sweep
from kvhold.manager.memory import ArenaMemory
from kvhold.manager.server import Server
from kvhold.manager.ssd import Latecomer, SsdStore
from kvhold.protocol import SOCKET_TAKEN
from kvhold.units import format_size

log = logging.getLogger(__name__)

_ENDINGS = (signal.SIGTERM, signal.SIGINT)


def run(config: ManagerConfig, refused: Callable[[str], None] | None = None) -> int:
    """Serve until a signal or, embedded, until the last engine left; the exit status.

    ``refused`` is told, beside the log, of a setting that cannot be used.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s kvhold %(levelname)s %(message)s")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDINGS)  # what comes while it starts is heeded once it runs
    try:
        with closing(Listener(config.socket)) as listener:
            _serve(config, listener)
    except ConfigError as error:
        log.error("%s", error)
        if refused is not None:
            refused(str(error))
        return SOCKET_TAKEN if isinstance(error, SocketTaken) else 2
    log.info("ended")
    return 0


def _serve(config: ManagerConfig, listener: Listener) -> None:
    if config.starter_fd is not None:
        sweep(config.socket.parent)
    memory = ArenaMemory(config.dram, config.huge_pages)
    stores: list[SsdStore] = []
    opened: list[SsdConfig] = []
    late: list[tuple[SsdConfig, str]] = []
    for index, ssd in enumerate(config.ssd):
        if ssd.path.resolve() in [other.path.resolve() for other in config.ssd[:index]]:
            raise ConfigError(f"ssd: {ssd.path} is given twice; name each directory once, with its whole size")
        try:
            store = SsdStore(ssd, memory.view)
            if config.starter_fd is not None:
                store.trim()  # nothing is left that could refuse this start
            stores.append(store)
        except ConfigError as error:
            if config.starter_fd is None:
                raise
            log.error("%s. This engine's manager runs without the directory, and tries it again", error)
            late.append((ssd, str(error)))
        else:
            opened.append(ssd)
    server = Server(config, listener, memory, stores)
    address = ""
    if config.http is not None:
        from kvhold.manager.http import serve_http

        address = serve_http(server, *config.http)
    if config.starter_fd is None:
        for store in stores:  # a start that is refused has taken nothing from an SSD
            store.trim()
    server.wait_for(Latecomer(ssd, memory.view, reason, server.adopt) for ssd, reason in late)
    for number in _ENDINGS:
        signal.signal(number, lambda *_: server.stop())
    # The kernel may give a signal to any thread, and the loop's, which alone runs the handler, may sleep meanwhile.
    signal.set_wakeup_fd(server.wake_descriptor, warn_on_full_buffer=False)
    listener.listen()
    log.info(
        "kvhold %s on %s: %s of DRAM%s in pages of %s%s%s",
        __version__,
        config.socket,
        format_size(memory.bytes),
        " (huge pages)" if config.huge_pages else "",
        format_size(memory.page),
        "".join(f", {format_size(ssd.size)} of {ssd.path}" for ssd in opened),
        f", {address}" if address else "",
    )
    gc.freeze()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDINGS)
    server.run()
