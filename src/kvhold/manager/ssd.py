"""The SSD tier as the loop sees it: one log per directory."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import fields

from kvhold.core import events as ev
from kvhold.core.log import events as lev
from kvhold.manager.config import ConfigError, SsdConfig
from kvhold.tiers.ssd.directory import claim_log, trim_log
from kvhold.tiers.ssd.executor import Executor
from kvhold.tiers.ssd.format import SegmentHead
from kvhold.tiers.ssd.recover import Found, Recovery
from kvhold.tiers.ssd.survey import DirectoryError, Log

log = logging.getLogger(__name__)

LOCK_SECONDS = 5.0
"""How long a directory may still be locked by a manager that was killed: its last write is under way."""


AGAIN_SECONDS = 10.0
"""After so long a directory that could not be opened is tried again."""


class SsdStore:
    """A directory's log. The directory is this process's from now on; nothing in it is lost before :meth:`trim`.

    Raises ConfigError, as :meth:`trim` does, if it cannot be used.
    """

    def __init__(self, config: SsdConfig, arena: memoryview) -> None:
        self._log = _claim(config)
        self._config = config
        self._arena = arena
        self._executor: Executor | None = None
        self._recovered_seconds: float | None = None
        self._closing = False

    def trim(self) -> None:
        """Make the log ready to be started. Takes away what a smaller budget has no room for."""
        try:
            trim_log(self._log)
        except DirectoryError as error:
            self._log.close()
            raise ConfigError(str(error)) from None
        self._recovery = Recovery(self._log)

    def start(self, log: int, tell: Callable[[ev.Event], None]) -> None:
        opened = self._log
        self._executor = Executor(opened, self._arena, lambda *ended: tell(ev.Done(*ended)))
        tell(lev.LogOpened(log, len(opened.numbers), opened.segment_bytes, opened.newest_seq))
        threading.Thread(target=self._recover, args=(log, tell), name="kvhold-ssd-recover", daemon=True).start()

    def _recover(self, number: int, tell: Callable[[ev.Event], None]) -> None:
        begun = time.monotonic()
        lives = self._recovery.lives
        heads = [head for segment, _ in lives if isinstance(head := self._log.heads[segment], SegmentHead)]
        ages = ages_of([head.created for head in heads], time.time_ns())
        tell(lev.Segments(number, tuple((*life, age) for life, age in zip(lives, ages, strict=True))))
        for part in self._recovery:
            if self._closing:
                return
            if isinstance(part, Found):
                continue
            records = tuple((name, group, key, shards, at) for name, group, key, shards, _, _, _, at, _ in part)
            if records:
                tell(lev.Recovered(number, part[0][5], records))
        tell(lev.LogReady(number))
        self._recovered_seconds = time.monotonic() - begun
        counts = {name: count for name, count in self._recovery.counts.items() if count}
        log.info("ssd: %s: index rebuilt in %.2f s: %s", self._config.path, self._recovered_seconds, counts)

    def submit(self, effect: ev.ToBacking) -> None:
        assert self._executor is not None
        assert isinstance(effect, lev.ToLog)
        self._executor.submit(effect)

    def report(self) -> dict[str, object]:
        assert self._executor is not None
        waiting, running, oldest = self._executor.in_flight()
        counters = self._executor.counters()
        return {
            "path": str(self._config.path),
            "budget_bytes": self._config.size,
            "recovered_seconds": self._recovered_seconds,
            "recovery": dict(self._recovery.counts),
            "io_waiting": waiting,
            "io_running": running,
            "io_oldest_seconds": oldest,
            "last_error": self._executor.last_error,
            **{field.name: getattr(counters, field.name) for field in fields(counters)},
        }

    def close(self, seconds: float) -> None:
        self._closing = True
        if self._executor is None or self._executor.close(seconds):
            self._log.close()
        else:
            log.warning("ssd: %s: a call to the disk hangs, and is not waited for", self._config.path)


class Latecomer(threading.Thread):
    """Tries again and again to open a directory, for a manager that serves without it meanwhile.

    ``reason`` is why it is not open. ``adopt`` is handed the store when it is.
    """

    def __init__(
        self, config: SsdConfig, arena: memoryview, reason: str, adopt: Callable[["Latecomer", SsdStore], None]
    ) -> None:
        super().__init__(name="kvhold-ssd-latecomer", daemon=True)
        self.path = config.path
        self.forgone = ""
        """Why it is not tried any more."""
        self.since = time.monotonic()
        self._reason = reason
        self._config = config
        self._arena = arena
        self._adopt = adopt

    @property
    def reason(self) -> str:
        return f"{self._reason}; it is not tried again: {self.forgone}" if self.forgone else self._reason

    def run(self) -> None:
        while True:
            time.sleep(AGAIN_SECONDS)
            if self.forgone:
                return
            try:
                store = SsdStore(self._config, self._arena)
                store.trim()
            except ConfigError as error:
                self._reason = str(error)
            else:
                self._adopt(self, store)
                return


def ages_of(created: Sequence[int], now: int) -> list[int]:
    """Nanoseconds since lives were begun, the oldest first, whatever the clock said when each was, or says now.

    A life that is said to have begun before an earlier one is as old as that one, and one that is said to begin later
    than now as old as the next one.
    """
    ages: list[int] = []
    most, known = now, 0
    for then in created:
        most = min(most, now - then) if then <= now else most
        ages.append(most if then <= now else 0)
    for index in reversed(range(len(ages))):
        known = ages[index] = max(ages[index], known)
    return ages


def _claim(config: SsdConfig) -> Log:
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return claim_log(config.path, config.size, min_free=config.min_free)
        except DirectoryError as error:
            if "in use" not in str(error) or time.monotonic() > end:
                raise ConfigError(str(error)) from None
        time.sleep(0.1)
