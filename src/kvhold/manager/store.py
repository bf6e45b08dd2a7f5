"""What the loop asks of a tier that keeps records outside of DRAM."""

from collections.abc import Callable
from typing import Protocol

from kvhold.core import events as ev


class Store(Protocol):
    """One backing. No method waits for a device; what comes of it is told through ``tell``, from any thread."""

    def start(self, number: int, tell: Callable[[ev.Event], None]) -> None:
        """Become the backing with this ``number``: tell what its kind has to say of that, then one Done per I/O.

        A Found answers an Ask.
        """
        ...

    def submit(self, effect: ev.ToBacking) -> None: ...

    def report(self) -> dict[str, object]:
        """Plain data for status and metrics."""
        ...

    def close(self, seconds: float) -> None:
        """Begin nothing more; wait at most so long for what is under way."""
        ...
