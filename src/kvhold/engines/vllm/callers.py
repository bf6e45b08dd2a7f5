"""Which of vLLM's functions is calling: some of what a connector needs to know is on the stack alone."""

import sys
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


def callers(kind: type[T]) -> Iterator[T]:
    """The objects of ``kind`` in whose methods this is called, the nearest first; one may come several times."""
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, kind):
            yield found
        frame = frame.f_back  # type: ignore[assignment]
