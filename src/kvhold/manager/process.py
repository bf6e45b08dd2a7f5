"""A manager as a process: signals, logging, and what it says when it starts."""

import gc
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import closing

from kvhold import __version__
from kvhold.manager.config import ConfigError, ManagerConfig, SocketTaken, SsdConfig
from kvhold.manager.listener import Listener, sweep
from kvhold.manager.memory import ArenaMemory
from kvhold.manager.quiet import QuietHandler
from kvhold.manager.server import Server
from kvhold.manager.ssd import Latecomer, SsdStore
from kvhold.protocol import SOCKET_TAKEN
from kvhold.units import format_size

log = logging.getLogger(__name__)

_ENDINGS = (signal.SIGTERM, signal.SIGINT)


def run(config: ManagerConfig, refused: Callable[[int, str], None] | None = None) -> int:
    """Serve until a signal or, embedded, until the last engine left; the exit status.

    ``refused`` is told the status and the reason, beside the log, when a setting cannot be used.
    """
    logging.basicConfig(
        handlers=[QuietHandler(sys.stderr)],
        level=logging.INFO,
        format="%(asctime)s kvhold %(levelname)s %(message)s",
    )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ending = _Ending()
    try:
        with closing(Listener(config.socket)) as listener:
            ending.leave = listener.close
            _serve(config, listener, ending)
    except ConfigError as error:
        log.error("%s", error)
        status = SOCKET_TAKEN if isinstance(error, SocketTaken) else 2
        if refused is not None:
            refused(status, str(error))
        return status
    log.info("ended")
    return 0


class _Ending:
    """Ends the process at a signal: at once while it starts, in order once :meth:`hand_over` was called.

    A thread of its own waits for signals, because the one that starts may hang in a call to a sick disk.
    """

    def __init__(self) -> None:
        self.leave: Callable[[], None] = lambda: None
        """What is to be done before a start is broken off. What it has written so far is as after kill -9."""
        self._lock = threading.Lock()
        self._stop: Callable[[], None] | None = None
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDINGS)  # in every thread, as they inherit it
        threading.Thread(target=self._wait, name="kvhold-signals", daemon=True).start()

    def hand_over(self, stop: Callable[[], None]) -> None:
        """From now on, a signal calls ``stop`` and does nothing else."""
        with self._lock:
            self._stop = stop

    def _wait(self) -> None:
        while True:
            number = signal.sigwait(_ENDINGS)
            with self._lock:
                if self._stop is None:
                    self.leave()
                    log.info("ended by %s while it was starting", signal.Signals(number).name)
                    os._exit(0)
                self._stop()


def _serve(config: ManagerConfig, listener: Listener, ending: _Ending) -> None:
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
    server.stores.wait_for(Latecomer(ssd, memory.view, reason, server.stores.adopt) for ssd, reason in late)
    ending.hand_over(server.stop)
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
    server.run()
