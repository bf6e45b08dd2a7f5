"""What of a message a record on an SSD has no room for is refused where it comes in."""

from dataclasses import replace
from typing import Any

import pytest

from kvhold import protocol as wire
from kvhold.core import events as ev
from kvhold.manager.translate import event_of

OPEN = ev.Open(1, 1, b"n" * 32, (1 << 32) - 1, 8, (4096,), 5)
COMMIT = ev.Commit(1, 1, b"p" * 64, (1 << 32) - 2, b"k" * 16, bytes(8), bytes(16), (4096,))


def fields(event: ev.Open | ev.Commit) -> list[Any]:
    return [getattr(event, name) for name in event.__slots__ if name != "session"]


def test_the_largest_numbers_pass() -> None:
    assert event_of(1, wire.Open(*fields(OPEN))) == OPEN
    assert event_of(1, wire.Commit(*fields(COMMIT))) == COMMIT


@pytest.mark.parametrize("group", [-1, 1 << 32])
def test_a_group_is_a_number_of_32_bits(group: int) -> None:
    with pytest.raises(wire.ProtocolError, match="group"):
        event_of(1, wire.Open(*fields(replace(OPEN, group=group))))


@pytest.mark.parametrize("wrong", [{"depth": -1}, {"depth": (1 << 32) - 1}, {"depth": 1 << 61}, {"parent": b"p" * 65}])
def test_a_commit_fits_into_records(wrong: dict[str, Any]) -> None:
    """Also the last of its keys: each is one deeper."""
    with pytest.raises(wire.ProtocolError, match="commit at depth"):
        event_of(1, wire.Commit(*fields(replace(COMMIT, **wrong))))
