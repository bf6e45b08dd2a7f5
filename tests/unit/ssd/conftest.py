"""Of all tests of the file layer."""

import logging

import pytest


@pytest.fixture(autouse=True)
def _logs_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that ran in this process before has sent kvhold's log where its own goes."""
    monkeypatch.setattr(logging.getLogger("kvhold"), "propagate", True)
