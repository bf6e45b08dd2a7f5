"""The stores behind the arena: those that are open, and directories that may be some day."""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from kvhold.core import Core
from kvhold.core import events as ev
from kvhold.manager.ssd import Latecomer
from kvhold.manager.store import Store

log = logging.getLogger(__name__)

RECOVERING = 32
"""Batches of recovered records that may wait for the loop."""


class Stores:
    """``opened`` are in use, by number; ``latecomers`` could not be opened when this manager started.

    ``call`` has a function run on the loop's thread; ``handle`` takes, there, what a store tells.
    """

    def __init__(
        self,
        core: Core,
        opened: Sequence[Store],
        handle: Callable[[ev.Event], None],
        call: Callable[[Callable[[], None]], None],
    ) -> None:
        self.opened = dict(enumerate(opened, 1))
        self.latecomers: list[Latecomer] = []
        self._core = core
        self._handle = handle
        self._call = call
        self._recovering = threading.BoundedSemaphore(RECOVERING)

    def start(self) -> None:
        for number, store in self.opened.items():
            store.start(number, self._told)

    def wait_for(self, latecomers: Iterable[Latecomer]) -> None:
        """Have ``latecomers`` try on; from before :meth:`start`."""
        self.latecomers += latecomers
        for latecomer in self.latecomers:
            latecomer.start()

    def adopt(self, latecomer: Latecomer, store: Store) -> None:
        """From any thread: use a directory that could not be opened when this manager started."""

        def adopted() -> None:
            if self._core.counters["quarantined"] and not latecomer.forgone:
                latecomer.forgone = "it may hold objects of which a restore has failed"
            if latecomer.forgone:
                store.close(0)
                return
            log.info("ssd: %s is open now", latecomer.path)
            self.latecomers.remove(latecomer)
            number = max(self.opened, default=0) + 1
            self.opened[number] = store
            store.start(number, self._told)

        self._call(adopted)

    def purging(self) -> None:
        """What is purged now would come back with a directory that is opened later: none is."""
        for latecomer in self.latecomers:
            latecomer.forgone = "it would bring back what was purged meanwhile"

    def not_reached(self) -> str:
        """Why a purge is not durable although all that is open has done it; empty if it is."""
        if not self.latecomers:
            return ""
        paths = ", ".join(str(latecomer.path) for latecomer in self.latecomers)
        return (
            f"it is purged here, but not in {paths}, which this manager could not open: what that has is found again "
            "once a manager opens it; purge again then, or remove it"
        )

    def submit(self, effect: ev.ToBacking) -> None:
        self.opened[effect.backing].submit(effect)

    def _told(self, event: ev.Event) -> None:
        """From a store's thread: what a backing found, or that an I/O ended. Waits while too much that was found waits.

        That there is one is told on the loop's own: from then on the core knows it, and it takes every purge.
        """
        if isinstance(event, ev.BackingOpened):
            self._handle(event)
        elif not isinstance(event, ev.Inventory):
            self._call(lambda: self._handle(event))
        else:

            def recovered() -> None:
                self._recovering.release()
                self._handle(event)

            self._recovering.acquire()
            self._call(recovered)

    def close(self, seconds: float) -> None:
        """Begin nothing more; wait at most so long, for each, for what is under way."""
        for store in self.opened.values():
            store.close(seconds)
