"""Limits that client, wire and core each name for themselves, because none may import the other, are the same."""

from kvhold import protocol as wire
from kvhold.client import control
from kvhold.core import arena
from kvhold.core import events as ev
from kvhold.core.limits import Limits


def test_the_three_agree() -> None:
    assert wire.MAX_KEYS == ev.MAX_QUERY_KEYS
    assert wire.SHARD_ALIGN == arena.ALIGN
    assert control.MAX_BATCH == ev.MAX_BATCH
    assert Limits().lease_ns == 2 * wire.RESTORE_WITHIN * 1e9
