"""Which thread an object belongs to: written down at its class, and checked in tests alone."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

ENGINE = "engine"
"""The thread on which an engine's half works: a scheduler's or a worker's. It is the same one for an object's life."""
ATTACHER = "attacher"
"""The half's own thread that finds managers, attaches to them, and maps and unmaps arenas."""
ANY = ""
"""Any thread at any time."""


def belongs_to(thread: str, but: dict[str, tuple[str, ...]] | None = None) -> Callable[[type[T]], type[T]]:
    """Note that a class's public methods are called on ``thread``, and those named in ``but`` on others.

    What is noted is ``thread_of``, by method, with "" for all that are not named.
    """

    def note(kind: type[T]) -> type[T]:
        others = {method: other for other, methods in (but or {}).items() for method in methods}
        kind.thread_of = {"": thread, **others}  # type: ignore[attr-defined]
        return kind

    return note
