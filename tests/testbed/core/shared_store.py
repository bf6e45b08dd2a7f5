"""A remote store, which others fill as well, as the core hears of it."""

from kvhold.core import events as ev
from kvhold.core.remote.events import RemoteOpened, Serves


def opened(number: int) -> tuple[ev.FromBacking, ...]:
    """There is one, and it serves. What it has is not known."""
    return RemoteOpened(number), Serves(number, True)
