"""One module for each kind of store, and what all of them offer.

Only the process that speaks to a store imports those modules, and with them a store's library.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Final, NamedTuple, Protocol

from kvhold.tiers.remote.url import RemoteConfig

ABSENT: Final = -1
"""There is no such value."""
UNKNOWN: Final = -2
"""The store did not say, or did not give it."""


class Slot(NamedTuple):
    """Where a value's header block and its payload are, or go to."""

    header: memoryview
    payload: memoryview

    @property
    def length(self) -> int:
        return len(self.header) + len(self.payload)

    def fill(self, value: memoryview) -> int:
        """Put ``value`` there if it is as long; how long it is."""
        if len(value) == self.length:
            self.header[:] = value[: len(self.header)]
            self.payload[:] = value[len(self.header) :]
        return len(value)


class Store(Protocol):
    """Values by name, many at once. Each call may block for as long as the store likes, and may be made by any thread.

    Whatever a call raises means that nothing is known of any of its names.
    """

    def exists(self, names: Sequence[str]) -> list[bool]: ...

    def get(self, names: Sequence[str], slots: Sequence[Slot]) -> list[int]:
        """The bytes of each value, put into its slot if they are as many as there are in it; or ABSENT or UNKNOWN."""
        ...

    def put(self, names: Sequence[str], slots: Sequence[Slot]) -> list[bool]:
        """Which of these the store says that it took. That proves nothing: ask whether it is there."""
        ...

    def remove(self, names: Sequence[str], prefix: str) -> None:
        """None of these, and of all that begin with ``prefix`` (unless it is empty), is there any more."""
        ...


def connect(config: RemoteConfig) -> Store:
    """The store of ``config``. ImportError: its library is missing; ValueError, OSError: it cannot be used, and why."""
    module = import_module(f"kvhold.tiers.remote.stores.{config.extra}")
    opened: Store = module.connect(config)
    return opened
