"""A copy that was begun."""

import threading
import time
from collections.abc import Sequence

GroupCopy = tuple[int, Sequence[int], Sequence[int]]
"""(group, its blocks, byte offsets of their objects in the arena)."""


class Job:
    """Ends exactly once, with :attr:`error` None or the reason. ``size`` is in bytes.

    ``done`` blocks, from the first on, were copied for certain when it failed.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.done = 0
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
