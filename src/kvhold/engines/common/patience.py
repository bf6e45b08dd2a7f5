"""How long a request may wait for the word on its hit: a part of the time that the hit would save.

The rate at which an engine computes prompts is measured while it does. A step's time is counted from its plan or from
the end of the step before, whichever is later, so that steps in flight at once are not counted twice.
"""

import time
from collections import deque

from kvhold.threads import ENGINE, belongs_to

_SHARE = 0.5
"""Of the time that computing the tokens in question would take."""
_LEAST, _MOST = 0.03, 1.0
"""Seconds that any request may wait, for a scheduler's hiccup is not worth a miss, and that none may exceed."""
_USUAL_RATE = 8000.0
"""Prompt tokens a second, as long as nothing was measured."""
_STEP_TOKENS = 64
"""Steps of fewer tokens say how long a step takes, not how long a token does."""
_MEMORY = 0.9
"""What a measurement weighs once the next one has come."""
_IN_FLIGHT = 64
"""Steps that may have been planned and not have ended; an engine has a handful."""


@belongs_to(ENGINE)
class Patience:
    """The patience of one engine; ``fixed`` is the same number of seconds for every request, if that is wanted."""

    def __init__(self, fixed: float | None) -> None:
        self._fixed = fixed
        self._begun: deque[tuple[int, float]] = deque(maxlen=_IN_FLIGHT)
        self._ended = 0.0
        self._tokens = 0.0
        self._seconds = 0.0

    def of(self, tokens: int) -> float:
        """Seconds that a request may wait for the answer whether ``tokens`` of its prompt can be restored."""
        if self._fixed is not None:
            return self._fixed
        rate = self._tokens / self._seconds if self._seconds > 0 else _USUAL_RATE
        return min(_MOST, max(_LEAST, _SHARE * tokens / rate))

    def step_begins(self, tokens: int) -> None:
        """A step that computes ``tokens`` was planned."""
        self._begun.append((tokens, time.monotonic()))

    def step_ends(self) -> None:
        """The output of the earliest step that was planned and has not ended is here."""
        if not self._begun:
            return
        tokens, begun = self._begun.popleft()
        begun, self._ended = max(begun, self._ended), time.monotonic()
        if tokens >= _STEP_TOKENS:
            self._tokens = self._tokens * _MEMORY + tokens
            self._seconds = self._seconds * _MEMORY + self._ended - begun
