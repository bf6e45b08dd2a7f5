"""How long somebody who must not wait may wait, all in all."""

import time
from collections.abc import Callable


class Budget:
    """Seconds that may be waited until they are renewed: for an engine's scheduler, in one step."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds
        self.waited = 0.0  # seconds, since the beginning
        self.exhausted = 0  # waits that used it up
        self._seconds = seconds

    def renew(self) -> None:
        self.left = self._seconds

    def spend(self, wait: Callable[[float], object]) -> None:
        """Have ``wait`` wait for something, at most for what is left."""
        if self.left > 0:
            begun = time.monotonic()
            wait(self.left)
            spent = time.monotonic() - begun
            self.left -= spent
            self.waited += spent
            self.exhausted += self.left <= 0
