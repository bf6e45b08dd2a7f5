"""How long the blocks of a copy are held, and what follows from its end."""

import pytest
from testbed.engine.storing import FULL, STATES, Storing, blocks, keys

from kvhold.engines.common.groups import Group


def test_blocks_are_let_go_once_from_the_tail_when_all_ranks_are_done() -> None:
    storing = Storing(FULL)
    [plan] = storing.step(storing.request(), 96, range(10, 16))
    assert storing.touched == [10, 11, 12, 13, 14, 15]
    storing.end(plan.batch, 0)
    storing.end(plan.batch, 0)
    assert storing.freed == []
    storing.end(plan.batch, 1)
    assert storing.freed == [15, 14, 13, 12, 11, 10]
    storing.end(plan.batch, 0, 1)
    storing.end(99, 0, 1)
    assert storing.freed == [15, 14, 13, 12, 11, 10]
    assert storing.told == [("commit", 0, 0, *keys(6))]


def test_two_copies_of_one_block_hold_it_each_for_itself() -> None:
    storing = Storing(Group(0, "full attention", 64, handed=False, whole=True, window=0), STATES, decode=True)
    request = storing.request(prompt=112, hashes=7)
    [_, tail] = storing.step(request, 48, [5], [0] * 3, handed=[(1, 61, 48)])
    [whole] = storing.step(request, 64, [5, 6], [0] * 7)
    assert (tail.blocks, whole.blocks) == ([5], [5])
    storing.end(tail.batch, 0, 1)
    assert (storing.touched.count(5), storing.freed.count(5)) == (2, 1)
    storing.end(whole.batch, 0, 1)
    assert storing.freed.count(5) == 2


def test_copies_end_in_any_order_and_one_that_failed_spoils_no_other() -> None:
    storing = Storing(FULL)
    [first] = storing.step(storing.request("a"), 32, [1, 2])
    [second] = storing.step(storing.request("b", first=50), 32, [3, 4])
    [third] = storing.step(storing.request("c", first=90), 32, [5, 6])
    storing.end(third.batch, 0, 1)
    storing.end(second.batch, 0)
    storing.end(second.batch, 1, size=-1)
    storing.end(first.batch, 1, 0)
    assert storing.freed == [6, 5, 4, 3, 2, 1]
    assert storing.told == [("commit", 0, 0, *keys(2, 90)), ("back", 0, 2), ("commit", 0, 0, *keys(2))]
    assert not storing.holding


def test_what_failed_is_stored_by_who_computes_it_next() -> None:
    storing = Storing(FULL)
    [plan] = storing.step(storing.request("a"), 32, [1, 2])
    storing.end(plan.batch, 0, size=-1)
    storing.end(plan.batch, 1)
    assert blocks(storing.step(storing.request("b"), 32, [3, 4])) == [(0, [3, 4])]


def test_a_copy_that_does_not_end_is_reported_once_and_keeps_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvhold.engines.common import batches

    storing = Storing(FULL)
    request = storing.request(prompt=160)
    [plan] = storing.step(request, 32, [1, 2])
    monkeypatch.setattr(batches, "STALL_SECONDS", -1)
    for _ in range(3):
        storing.step(request, 0, [1, 2])
    assert storing.accounts.data["publishes_stalled"] == 1
    assert (storing.freed, storing.holding) == ([], True)
    storing.end(plan.batch, 0, 1)
    assert storing.freed == [2, 1]
