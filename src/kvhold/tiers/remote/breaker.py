"""Whether the store is of use: decided from how calls end, with the clock handed in. No I/O."""

from typing import Final

IN_A_ROW: Final = 3
"""So many calls that fail or are late as a whole, one after the other, and nobody waits for the store any more."""
FIRST: Final = 1.0
LONGEST: Final = 30.0
"""Seconds before the first probe of a store that does not serve, and between two of them in the end."""


class Breaker:
    """``state`` is "starting", "serving", "down" or "refusing" (it answers, but takes nothing).

    ``since`` is when that began, ``why`` what it is for.
    Times are seconds of one steady clock.
    """

    def __init__(self, now: float) -> None:
        self.state = "starting"
        self.since = now
        self.why = "not probed yet"
        self.probe_at: float | None = now
        """When the next probe is due; None while it serves or is being probed."""
        self._pause = FIRST
        self._bad = 0

    @property
    def serving(self) -> bool:
        return self.state == "serving"

    def ended(self, now: float, why: str = "") -> None:
        """A call has ended; ``why`` says that it failed or was late as a whole."""
        if not self.serving:
            return
        self._bad = self._bad + 1 if why else 0
        if self._bad >= IN_A_ROW:
            self.stop(now, why)

    def stop(self, now: float, why: str, state: str = "down") -> None:
        """Nothing can be had at present: the process that speaks to it is dead, or a probe has failed."""
        if state != self.state:
            self.since = now
        if self.serving or self.state == "starting":
            self._pause = FIRST
        self.state, self.why = state, why
        self.probe_at = now + self._pause
        self._pause = min(LONGEST, 2 * self._pause)

    def probing(self) -> None:
        """A probe has begun. It ends with :meth:`serves` or :meth:`stop`."""
        self.probe_at = None

    def serves(self, now: float) -> None:
        """A probe has succeeded."""
        if not self.serving:
            self.since = now
        self.state, self.why, self.probe_at, self._bad = "serving", "", None, 0
        self._pause = FIRST
