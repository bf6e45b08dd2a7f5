"""How long the loop's turns and its answers take, for metrics."""

import time
from bisect import bisect_left
from itertools import accumulate
from typing import Any

from kvhold import protocol as wire
from kvhold.manager.connection import Connection

BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Seconds. What takes longer than the last is counted, too."""
MAX_ASKED = 1024
"""Questions of one connection whose answers are timed at once."""
_KINDS: dict[type, str] = {wire.Query: "query", wire.Lookup: "lookup", wire.Prepare: "prepare"}


class Histogram:
    """Counts of durations, in seconds, by the least of :data:`BOUNDS` that is not smaller."""

    def __init__(self) -> None:
        self.sum = 0.0
        self._counts = [0] * (len(BOUNDS) + 1)

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds

    def plain(self) -> dict[str, Any]:
        """Plain data; ``buckets`` are [bound, how many took at most so long], without the last, which is ``count``."""
        totals = list(accumulate(self._counts))
        return {"sum": self.sum, "count": totals[-1], "buckets": list(map(list, zip(BOUNDS, totals[:-1], strict=True)))}


class Times:
    """Turns, and answers by what was asked: from when a question was read until its answer is on its way."""

    def __init__(self) -> None:
        self.turns = Histogram()
        self.answers = {kind: Histogram() for kind in _KINDS.values()}

    def asked(self, connection: Connection, message: wire.ClientMessage) -> None:
        """A client says something that is begun now."""
        kind = _KINDS.get(type(message))
        if kind is not None:
            assert isinstance(message, wire.Query | wire.Lookup | wire.Prepare)
            connection.asked[message.op] = kind, connection.moved
            if len(connection.asked) > MAX_ASKED:  # some are never answered: they were given up, or came too late
                del connection.asked[next(iter(connection.asked))]

    def told(self, connection: Connection, message: wire.ManagerMessage) -> None:
        """A client is told something."""
        if isinstance(message, wire.Answer | wire.Residency):
            kind, since = connection.asked.pop(message.op, ("", 0.0))
            if kind:
                self.answers[kind].observe(time.monotonic() - since)
