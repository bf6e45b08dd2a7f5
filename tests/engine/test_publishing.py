"""Which blocks of a step are stored, and which never are."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from testbed.engine.storing import FULL, STATES, WIDE, Storing, blocks, granted, keys

from kvhold.engines.common.groups import Group
from kvhold.engines.vllm import tails
from kvhold.engines.vllm.retention import Retention


def test_what_is_being_stored_is_not_stored_again_by_another_request_or_a_later_step() -> None:
    storing = Storing(FULL)
    first, second = storing.request("a"), storing.request("b", prompt=128)
    plans = storing.step(first, 96, range(10, 16))
    assert blocks(plans) == [(0, [10, 11, 12, 13, 14, 15])]
    assert blocks(storing.step(second, 128, range(20, 28))) == [(0, [26, 27])], "the rest is on its way"
    assert storing.step(second, 1, range(20, 29)) == []


def test_null_blocks_and_what_is_there_already_are_passed_over() -> None:
    storing = Storing(FULL, stored=({32, 80},))
    assert blocks(storing.step(storing.request(), 96, [10, 11, 0, 13, 14, 15])) == [(0, [10]), (0, [13]), (0, [15])]


@pytest.mark.parametrize("group", [FULL, replace(FULL, whole=False, window=64)], ids=["chain", "window"])
def test_what_a_request_leaves_for_want_of_slots_is_stored_as_far_as_it_is_still_there(group: Group) -> None:
    storing = Storing(group, slots=2)
    request = storing.request()
    assert blocks(storing.step(request, 96, range(10, 16))) == [(0, [10, 11])]
    request.num_computed_tokens, request.num_tokens = 96, 97
    storing.publishing.finish(request, (range(10, 16),))
    storing.publishing.forget("r")
    assert storing.holding
    other = storing.request("other", first=100)
    assert storing.step(other, 1, []) == [], "there are no slots yet"
    storing.control.credit[0] = granted(1)
    assert blocks(storing.step(other, 1, [])) == [(0, [12])]
    storing.blocks[14].block_hash = b"of another prompt"
    storing.control.credit[0] = granted(9)
    assert blocks(storing.step(other, 1, [])) == [(0, [13])] + ([] if group.whole else [(0, [15])])
    storing.end(1, 0, 1)
    storing.end(2, 0, 1)
    storing.end(3, 0, 1)
    if not group.whole:
        storing.end(4, 0, 1)
    assert not storing.holding
    assert len(storing.freed) == len(storing.touched), "nothing is held for it"


@pytest.mark.parametrize("why", ["time", "session", "silence", "reset"])
def test_what_a_request_leaves_is_not_waited_for_in_vain(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storing = Storing(FULL, slots=0)
    request = storing.request()
    storing.step(request, 96, range(10, 16))
    request.num_computed_tokens, request.num_tokens = 96, 97
    storing.publishing.finish(request, (range(10, 16),))
    storing.publishing.forget("r")
    storing.control.credit[0] = granted(9)
    assert storing.holding
    match why:
        case "time":
            monkeypatch.setattr(tails, "TAIL_SECONDS", -1.0)
        case "session":
            storing.control.attachment = 2
        case "silence":
            storing.control.silent = True
        case "reset":
            storing.publishing.forget_all()
    assert storing.holding is (why == "silence"), "the engine steps no longer than that"
    assert storing.step(storing.request("other", first=100), 1, []) == []
    assert not storing.holding


def test_a_block_that_was_evicted_meanwhile_is_stored_again() -> None:
    """Of a restored prompt all blocks are offered, and only what the manager said it has is left out."""
    assert (
        blocks((there := Storing(FULL, stored=({16, 32, 48, 64, 80, 96},))).step(there.request(), 96, range(9, 15)))
        == []
    )
    gone = Storing(FULL, stored=({16, 32, 64, 80, 96},))
    assert blocks(gone.step(gone.request(), 96, range(9, 15))) == [(0, [11])]
    unknown = Storing(FULL, stored=())  # the question failed
    assert blocks(unknown.step(unknown.request(), 96, range(9, 15))) == [(0, list(range(9, 15)))]


def test_while_it_is_not_known_what_is_there_nothing_is_stored() -> None:
    storing = Storing(FULL, stored=None)
    assert storing.step(storing.request(), 96, range(9, 15)) == []


def test_small_blocks_do_not_wait_for_large_ones() -> None:
    storing = Storing(FULL, WIDE)
    request = storing.request(prompt=128)
    assert blocks(storing.step(request, 40, [1, 2, 3], [50])) == [(0, [1, 2])]
    assert blocks(storing.step(request, 40, range(1, 6), [50, 51])) == [(0, [3, 4, 5]), (1, [50])]
    assert blocks(storing.step(request, 48, range(1, 9), [50, 51])) == [(0, [6, 7, 8]), (1, [51])]


def test_tokens_without_a_hash_are_not_stored() -> None:
    """Guesses are counted as computed until they are checked."""
    storing = Storing(FULL, decode=True)
    request = storing.request(prompt=80, hashes=5)
    assert blocks(storing.step(request, 80 + 20, range(1, 9))) == [(0, [1, 2, 3, 4, 5])]
    request.block_hashes = keys(6)
    request.num_computed_tokens = 96  # four of them were right
    assert blocks(storing.step(request, 1, range(1, 9))) == [(0, [6])]


@pytest.mark.parametrize("decode", [False, True])
def test_generated_blocks_only_on_demand(decode: bool) -> None:
    storing = Storing(FULL, decode=decode)
    request = storing.request(prompt=40, hashes=2)
    assert blocks(storing.step(request, 40, [1, 2, 3])) == [(0, [1, 2])]
    request.block_hashes = keys(3)
    assert blocks(storing.step(request, 8, [1, 2, 3])) == ([(0, [3])] if decode else [])


def test_a_resumed_request_is_stored_from_its_new_blocks() -> None:
    storing = Storing(FULL, slots=2)
    request = storing.request()
    assert blocks(storing.step(request, 48, [1, 2, 3])) == [(0, [1, 2])]
    assert storing.step(request, 0, [1, 2, 3], preempted=True) == []
    request.num_computed_tokens = 0
    storing.control.credit[0] = granted(9)
    storing.publishing.admit(request)
    assert blocks(storing.step(request, 64, [30, 31, 32, 33])) == [(0, [32, 33])], "two are on their way"


def test_states_are_stored_only_when_they_are_handed_over() -> None:
    storing = Storing(FULL, STATES)
    request = storing.request()
    assert blocks(storing.step(request, 64, range(1, 5), range(60, 64))) == [(0, [1, 2, 3, 4])]
    handed = [(1, 62, 48)]
    assert blocks(storing.step(request, 32, range(1, 7), range(60, 66), handed=handed)) == [(0, [5, 6]), (1, [62])]
    [plan] = storing.step(request, 1, range(1, 8), range(60, 67), handed=[(1, 70, 80)])
    storing.end(plan.batch, 0, 1)
    assert storing.told == [("commit", 1, 4, keys(5)[4])], "under the hash of its boundary"


@pytest.mark.parametrize(
    "handed",
    [(1, 0, 48), (1, 62, 0), (1, 62, -16), (1, 62, 112), (1, 62, 40), (7, 62, 48)],
    ids=["null", "no boundary", "negative", "beyond the hashes", "between hashes", "no group of ours"],
)
def test_a_state_that_cannot_be_right_is_not_stored(handed: tuple[int, int, int]) -> None:
    storing = Storing(FULL, STATES)
    request = storing.request()
    storing.step(request, 96, range(1, 7), [0] * 6)
    assert storing.step(request, 1, range(1, 8), [0] * 6, handed=[handed]) == []


def test_a_state_in_the_middle_of_a_step_is_stored_only_if_the_step_saves_one_there() -> None:
    """vLLM 0.32 offers the block of a state as one of later tokens, where prompts part inside of a block."""
    storing = Storing(FULL, STATES)
    request = storing.request()
    storing.step(request, 32, range(1, 3), [0, 61])
    assert blocks(storing.step(request, 48, range(1, 6), [0, 61, 0, 62, 63], handed=[(1, 62, 64)])) == [(0, [3, 4, 5])]
    storing = Storing(FULL, STATES)
    request = storing.request()
    storing.checkpoints["r"] = (64, 3)
    plans = storing.step(request, 80, range(1, 6), [0, 0, 0, 62, 63], handed=[(1, 62, 64)])
    assert blocks(plans) == [(0, [1, 2, 3, 4, 5]), (1, [62])]


def test_a_state_whose_block_is_another_requests_by_now_is_not_stored() -> None:
    storing = Storing(FULL, STATES)
    request = storing.request()
    storing.step(request, 48, range(1, 4), [0, 0, 62])
    storing.outdated.add(62)
    assert storing.step(request, 1, range(1, 5), [0, 0, 62, 63], handed=[(1, 62, 48)]) == []


def test_a_state_of_a_request_that_ends_or_is_preempted_or_unknown_is_not_stored() -> None:
    for ending in ("preempted", "finished", "unknown"):
        storing = Storing(FULL, STATES)
        request = storing.request()
        if ending == "unknown":
            storing.publishing.forget("r")
        what: Any = {} if ending == "unknown" else {ending: True}
        assert storing.step(request, 0, range(1, 7), [0, 0, 62, 0, 0, 0], handed=[(1, 62, 48)], **what) == [], ending
    assert blocks(storing.batches.take_late()) == []


def test_at_a_requests_end_its_state_is_stored_with_the_block_it_stands_in() -> None:
    storing = Storing(Group(0, "full attention", 64, handed=False, whole=True, window=0), STATES)
    request = storing.request(prompt=97, hashes=6)
    assert blocks(storing.step(request, 96, [5, 6], [0] * 6)) == [(0, [5])]
    storing.touched.clear()
    storing.publishing.finish(request, ([5, 6], [0, 0, 0, 0, 0, 61]), [(1, 61, 96)])
    assert storing.touched == [61, 6], "held at once"
    assert storing.holding
    storing.publishing.forget("r")
    late = storing.batches.take_late()
    assert blocks(late) == [(1, [61]), (0, [6])]
    assert storing.batches.take_late() == []
    for plan in late:
        storing.end(plan.batch, 0, 1)
    assert storing.told == [("commit", 1, 5, keys(6)[5]), ("commit", 0, 1, keys(6)[5])]


@pytest.mark.parametrize(
    ("handed", "in_flight"),
    [((1, 61, 96), 16), ((1, 61, 97), 0), ((1, 61, 112), 0), ((1, 0, 96), 0), ((1, 61, 0), 0)],
    ids=["still computed", "between hashes", "beyond what was computed", "null", "no boundary"],
)
def test_a_tail_that_cannot_be_right_is_not_stored(handed: tuple[int, int, int], in_flight: int) -> None:
    storing = Storing(Group(0, "full attention", 64, handed=False, whole=True, window=0), STATES)
    request = storing.request(prompt=97, hashes=6)
    storing.step(request, 96, [5, 6], [0] * 6)
    request.num_in_flight_tokens = in_flight
    storing.publishing.finish(request, ([5, 6], [0] * 6), [handed])
    assert storing.batches.take_late() == []


def test_what_another_connector_still_loads_is_not_stored() -> None:
    storing = Storing(FULL)
    request = storing.request()
    request.num_computed_tokens = 64  # what is loaded counts as computed from its admission on
    storing.publishing.finish(request, ([1, 2, 3, 4],))
    assert storing.batches.take_late() == []


def test_a_session_whose_prompt_grows_stores_each_block_once() -> None:
    storing = Storing(FULL)
    request = storing.request(prompt=64)
    [plan] = storing.step(request, 64, range(1, 5))
    storing.end(plan.batch, 0, 1)
    storing.step(request, 1, range(1, 6))
    request.num_computed_tokens = 64
    request.num_prompt_tokens, request.block_hashes = 128, keys(8)
    storing.publishing.admit(request)
    assert blocks(storing.step(request, 64, range(1, 9))) == [(0, [5, 6, 7, 8])]


def test_what_rests_on_another_connectors_failed_load_is_not_stored() -> None:
    storing = Storing(FULL)
    [plan] = storing.step(storing.request(), 64, range(1, 5))
    storing.batches.distrust()
    storing.end(plan.batch, 0, 1)
    assert storing.told == [("back", 0, 4)]
    assert not storing.holding


def test_a_mask_that_is_not_about_the_blocks_asked_for_is_an_error() -> None:
    retention = object.__new__(Retention)
    retention.groups, retention._caching = (FULL,), True
    manager: Any = SimpleNamespace(cache_hit_alignment_tokens=16, kv_cache_spec=None, use_eagle=False, dcp_world_size=1)
    retention._managers = [manager]
    coordinator: Any = SimpleNamespace(scheduler_block_size=16, eagle_group_ids=(), retention_interval=None)
    retention._coordinator = coordinator
    request: Any = SimpleNamespace(num_prompt_tokens=96, shared_prefix_boundary=0)
    manager.reachable_block_mask = lambda **_: [True, False]
    assert retention.useful(0, 3, 5, request) == [True, False]
    with pytest.raises(ValueError, match="for 3 blocks has 2 entries"):
        retention.useful(0, 3, 6, request)
