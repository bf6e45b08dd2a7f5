"""Of all tests of the file layer."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _logs_are_heard() -> Iterator[None]:
    """An engine that ran in this process before has given kvhold's log its own level and output."""
    ours = logging.getLogger("kvhold")
    before = ours.propagate, ours.level, ours.disabled
    ours.propagate, ours.disabled = True, False
    ours.setLevel(logging.NOTSET)
    yield
    ours.propagate, ours.disabled = before[0], before[2]
    ours.setLevel(before[1])
