"""A copy that was begun."""

import threading
import time


class Job:
    """Ends exactly once, with :attr:`error` None or the reason. ``size`` is in bytes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.error: str | None = None
        self.seconds = 0.0
        self._begun = time.perf_counter()
        self._ended = threading.Event()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def end(self, error: str | None = None) -> None:
        self.error = error
        self.seconds = time.perf_counter() - self._begun
        self._ended.set()

    def wait(self, seconds: float) -> bool:
        return self._ended.wait(seconds)
