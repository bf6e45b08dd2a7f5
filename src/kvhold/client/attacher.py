"""Keeps one half of an engine attached to a manager, from a thread of its own.

The engine's threads never connect, map, pin or start anything: they look at :attr:`Attacher.channel`, which is the
session of this moment or None, and go on without a cache while it is None.
"""

import logging
import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kvhold.client.channel import AttachError, Channel, NoManager
from kvhold.client.embedded import Embedded
from kvhold.protocol import Hello
from kvhold.threads import ANY, ENGINE, belongs_to
from kvhold.units import format_size

log = logging.getLogger("kvhold")

_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.5)
_SHORT_SECONDS = 1.0
"""A session that is over so soon may have been refused for what was said in it, and the next one would be as well."""
_LONGEST_PAUSE_SECONDS = 10.0
"""How long is waited at most after several of them in a row; twice as long each time."""
_TICK_SECONDS = 0.1


class Half(Protocol):
    """What the attacher tells the half it works for, always from the attacher's thread."""

    def hello(self) -> Hello:
        """How this half introduces itself now."""

    def attached(self, channel: Channel) -> None:
        """A session was had; it becomes :attr:`Attacher.channel` when this returns."""

    def readable(self, channel: Channel) -> None:
        """The session has messages. Called for a half that :attr:`reads` in the attacher's thread."""

    def tick(self, channel: Channel) -> bool:
        """Called at each wake-up; True asks for another soon."""


@belongs_to(ENGINE, but={ANY: ("wake",)})
class Attacher:
    """Attaches ``half`` to ``embedded``, or where a manager listens on one of ``paths``, or starts ``embedded``.

    With a manager that others run, it stays: a lost one is waited for, never replaced by one of the engine's own. The
    attacher's thread tells ``preferred`` where that one listens, once ``embedded`` is given up for it.
    """

    def __init__(
        self,
        half: Half,
        paths: list[Path],
        embedded: Embedded | None,
        reads: bool,
        preferred: Callable[[Path], None] | None = None,
    ) -> None:
        self.channel: Channel | None = None
        self._last: Channel | None = None  # it keeps the arena's memory, until it is closed
        self._half = half
        self._paths = paths
        self._embedded = embedded
        self._reads = reads
        self._preferred = preferred
        self._first = threading.Event()
        self._stopping = False
        self._farewell: Callable[[], None] = _nothing
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="kvhold-attacher", daemon=True)

    def start(self, wait: float) -> None:
        """Begin to attach, and return when the first attempt has ended or ``wait`` seconds have passed."""
        self._thread.start()
        self._first.wait(wait)

    def stop(self, farewell: Callable[[], None]) -> None:
        """Attach no more, let the half say ``farewell`` to the session it has, and end.

        The thread that uses the session says it: the attacher's for a half that reads there, or else the caller's.
        """
        self._farewell = farewell if self._reads else _nothing
        self._stopping = True
        if not self._reads:
            farewell()
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout=10)
        if not self._thread.is_alive() and self._wake_write >= 0:  # and the caller is done: nobody uses them any more
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_read = self._wake_write = -1
            if self._last is not None:
                self._last.close()
        if self._embedded is not None:
            self._embedded.close()

    def write_out(self) -> None:
        """Have the engine's own manager write what waits for its SSD, for a few seconds."""
        if self._embedded is not None:
            self._embedded.write_out()

    def wake(self) -> None:
        """Have :meth:`Half.tick` called soon."""
        if self._wake_write < 0:
            return
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            pass

    def _run(self) -> None:
        attempt = short = 0
        said = ""
        while not self._stopping:
            channel = None
            try:
                channel = self._attach()
                self._half.attached(channel)
            except Exception as error:  # noqa: BLE001 - whatever it is, the engine goes on, and this tries again
                if channel is not None:
                    channel.abandon()
                if str(error) != said:
                    said = str(error)
                    log.warning("kvhold: not attached, the engine goes on without it: %s", error)
                self._first.set()
                self._pause(_RETRY_SECONDS[min(attempt, len(_RETRY_SECONDS) - 1)])
                attempt += 1
                continue
            log.info("kvhold: attached to the manager on %s", channel.path)
            attempt, said = 0, ""
            self.channel = self._last = channel
            self._first.set()
            begun = time.monotonic()
            try:
                self._watch(channel)
                if self._stopping:
                    self._farewell()
            except Exception:
                log.exception("kvhold: the session with %s is given up", channel.path)
            self.channel = None
            channel.abandon()  # closed once the engine's thread has let go of it too
            if not self._stopping:
                log.warning("kvhold: the manager on %s is gone; attaching again", channel.path)
            short = short + 1 if time.monotonic() - begun < _SHORT_SECONDS else 0
            if short > 1:
                self._pause(min(_RETRY_SECONDS[0] * 2**short, _LONGEST_PAUSE_SECONDS))

    def _attach(self) -> Channel:
        hello = self._half.hello()
        own = self._embedded.paths if self._embedded is not None else ()
        failure: AttachError | None = None
        for path in (*own, *self._paths):
            try:
                channel = Channel(path, hello, _CONNECT_SECONDS)
            except AttachError as error:
                if path not in own and (failure is None or isinstance(failure, NoManager)):
                    failure = error
                continue
            if path not in own and self._embedded is not None:
                self._paths, self._embedded = [path], None
                if self._preferred is not None:
                    self._preferred(path)
            return channel
        failure = failure or NoManager("no folder can have a manager's socket")
        if self._embedded is None:
            raise failure
        self._start(self._embedded, failure)
        return Channel(self._embedded.path, hello, _CONNECT_SECONDS)

    def _start(self, embedded: Embedded, failure: AttachError) -> None:
        """Have the engine's own manager run, which is no matter of course where another one does not answer.

        Of several processes that come to this at once, the one that started it says so.
        """
        absent = isinstance(failure, NoManager)
        try:
            started = embedded.start()
        except AttachError as error:
            raise error if absent else AttachError(f"{failure}; {error}") from None
        size = format_size(embedded.dram)
        if started and absent:
            others = ", ".join(map(str, self._paths))
            log.info("kvhold: no manager on %s; the engine has started its own with %s of DRAM", others, size)
        elif started:
            log.warning("kvhold: %s; the engine has started its own with %s of DRAM instead", failure, size)

    def _watch(self, channel: Channel) -> None:
        """Return when the session is over."""
        poller = select.poll()
        poller.register(channel.socket, select.POLLRDHUP | (select.POLLIN if self._reads else 0))
        poller.register(self._wake_read, select.POLLIN)
        busy = False
        while not self._stopping:
            ready = dict(poller.poll(_TICK_SECONDS * 1000 if busy else None))
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            events = ready.get(channel.socket.fileno(), 0)
            if self._reads and events & select.POLLIN:
                self._half.readable(channel)
            busy = self._half.tick(channel)
            if channel.lost or events & (select.POLLRDHUP | select.POLLHUP | select.POLLERR):
                return

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        while not self._stopping and (left := end - time.monotonic()) > 0:
            if poller.poll(left * 1000):
                os.read(self._wake_read, 4096)


def _nothing() -> None:
    pass
