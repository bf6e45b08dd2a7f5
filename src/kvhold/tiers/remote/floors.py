"""What is too old to be believed: after a purge, nothing of its namespace that may have been computed before it."""

import time
from collections.abc import Callable
from typing import Final

MARGIN: Final = 60 * 10**9
"""Nanoseconds by which the clocks of hosts may differ."""
_FARTHEST: Final = 24 * 3600 * 10**9
"""Nanoseconds by which another host's clock may be ahead of this one's before it is taken for broken."""
_MOST: Final = 4096


class Floors:
    """Floors by namespace, in ns of wall time, until this process ends. A clock that is set back lowers none.

    A purge's floor lies :data:`MARGIN` after this host's clock, and after the latest object that was seen of the
    namespace: so another host's clock may be far ahead.
    """

    def __init__(self, wall: Callable[[], int] = time.time_ns, steady: Callable[[], int] = time.monotonic_ns) -> None:
        self._wall = wall
        self._steady = steady
        self._ahead = wall() - steady()
        self._all = 0
        self._floors: dict[bytes, int] = {}
        self._seen: dict[bytes, int] = {}

    def purged(self, namespace: bytes) -> None:
        """All of ``namespace`` (empty: everything) was purged just now."""
        latest = self._seen.get(namespace, 0) if namespace else max(self._seen.values(), default=0)
        now = self.now()
        floor = max(now, min(latest, now + _FARTHEST)) + MARGIN
        if not namespace or (namespace not in self._floors and len(self._floors) >= _MOST):
            self._all = max(self._all, floor)
        else:
            self._floors[namespace] = max(self._floors.get(namespace, 0), floor)

    def of(self, namespace: bytes) -> int:
        """What was computed before this is not believed; 0 if everything is."""
        return max(self._all, self._floors.get(namespace, 0))

    def saw(self, namespace: bytes, created: int) -> None:
        """The store has an object that says so."""
        if namespace in self._seen or len(self._seen) < _MOST:
            self._seen[namespace] = max(self._seen.get(namespace, 0), created)

    def now(self) -> int:
        """The wall clock's time, or what it would be had nobody set it back."""
        wall = self._wall()
        self._ahead = max(self._ahead, wall - self._steady())
        return self._ahead + self._steady()
