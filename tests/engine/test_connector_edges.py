"""Edges of the connector that an engine reaches rarely: each of its parts alone, with stand-ins for the rest."""

import random
import tempfile
import time
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import msgspec
import pytest
import torch
from testbed.engine.bed import generate, prompt, scheduler_half
from testbed.engine.kvhold_bed import attached, counting, serving, until, warm_up, worker_side
from testbed.engine.vllm_config import tiny_config
from testbed.process.manager_process import Manager
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from kvhold import protocol as wire
from kvhold.client.arena import ArenaMapping
from kvhold.client.budget import Budget
from kvhold.client.channel import Channel
from kvhold.client.control import Control, Geometry, QuestionId, Slots
from kvhold.copy.job import Job
from kvhold.copy.layout import PagedLayout
from kvhold.engines.common import spaces
from kvhold.engines.common.accounts import Accounts
from kvhold.engines.common.announcements import Published
from kvhold.engines.common.batches import Batches
from kvhold.engines.common.groups import Group
from kvhold.engines.common.plans import CopyReport, Load, Publish, StepPlan
from kvhold.engines.common.question import LeasedBlocks
from kvhold.engines.common.questions import Questions
from kvhold.engines.vllm import tails
from kvhold.engines.vllm.connector import KvHoldConnector
from kvhold.engines.vllm.events import CacheEvents
from kvhold.engines.vllm.groups import kept_groups
from kvhold.engines.vllm.hits import HitSearch
from kvhold.engines.vllm.publishing import Publishing
from kvhold.engines.vllm.retention import Retention
from kvhold.engines.vllm.stats import KvHoldStats

FULL = Group(0, "full attention", 16, handed=False, whole=True, window=0)
WIDE = Group(1, "full attention", 64, handed=False, whole=True, window=0)
STATES = Group(1, "Mamba", 16, handed=True, whole=False, window=0)


def keys(count: int, first: int = 1) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(first, first + count)]


# Questions of waiting requests


class Answer:
    """A question that was answered: ``hit`` tokens, of which all blocks are there."""

    def __init__(self, number: int, hit: int, fails: bool = False) -> None:
        self.id = QuestionId(number, 1, 1, 1e12)
        self.hit, self.fails = hit, fails
        self.leased = [LeasedBlocks(0, range(hit // 16), array("Q", range(hit // 16)))]
        self.reason, self.cut, self.junction = "not_stored", None, 0
        self.stored = (range(16, hit + 1, 16),)

    def progress(self, budget: Budget | None) -> bool:
        if self.fails:
            raise IndexError("an answer of a wrong length")
        return True

    def leased_for(self, tokens: int) -> list[LeasedBlocks] | None:
        return self.leased if tokens == self.hit else None


class Asking:
    """Each of its questions is an :class:`Answer`; ``asked`` counts them, ``released`` are those given up."""

    def __init__(self, hit: int = 64, fails: bool = False) -> None:
        self.asked = 0
        self.released: list[int] = []
        self.control: Any = SimpleNamespace(
            attachment=1,
            silent=False,
            overdue=lambda question, patience: False,
            reading=lambda question: False,
            start=lambda question: True,
            release=lambda questions: self.released.extend(question.op for question in questions),
        )
        self.hit, self.fails = hit, fails
        self.accounts = Accounts()
        self.questions = Questions(self.control, Budget(0.0), self.accounts, self, patience=lambda tokens: 1.0)

    def ask(self, *_: Any) -> Any:
        self.asked += 1
        return Answer(self.asked, self.hit, self.fails)

    def find(self, request: str = "r", local: int = 0, limit: int = 96) -> int | None:
        return self.questions.find(request, local, limit, (), ())


def test_a_request_asks_once_until_what_it_asks_about_changes() -> None:
    asking = Asking()
    assert [asking.find() for _ in range(5)] == [64] * 5
    assert asking.asked == 1
    asking.find(local=16)
    assert asking.asked == 2, "the engine's own hit has grown"
    asking.find(local=16, limit=112)
    assert asking.asked == 3, "the request has become longer"
    asking.control.attachment = 2
    asking.find(local=16, limit=112)
    assert asking.asked == 4, "what another session said is void"
    asking.find("other", local=16, limit=112)
    assert asking.asked == 5


def test_the_end_of_a_request_and_a_reset_give_questions_up() -> None:
    asking = Asking()
    for name in ("a", "b", "c"):
        asking.find(name)
    asking.questions.drop("b")
    assert asking.released == [2]
    asking.questions.drop("b")
    asking.questions.drop_all()
    assert asking.released == [2, 1, 3]
    assert asking.questions.take("a", 64) is None
    asking.find("a")
    assert asking.asked == 4, "a request of the same name is another one"


def test_a_search_that_fails_is_a_miss_and_leaves_nothing_to_others() -> None:
    asking = Asking(fails=True)
    assert asking.find("a") == 0
    assert asking.released == [1]
    assert asking.questions.take("a", 64) is None
    assert asking.accounts.data["tokens_missed_error"] == 96
    asking.fails = False
    assert asking.find("b") == 64


def test_an_admission_without_a_restore_gives_the_lease_back_and_keeps_what_is_known() -> None:
    """The engine says so, too, when a restore has arrived; what is there must not be stored once more."""
    asking = Asking()
    asking.find()
    asking.questions.settle("r")
    asking.questions.settle("r")
    assert asking.released == [1]
    assert asking.questions.take("r", 64) is None
    assert asking.questions.stored("r") == (range(16, 65, 16),)
    restored = Asking()
    restored.find()
    taken = restored.questions.take("r", 64)
    assert taken is not None
    restored.questions.settle("r")  # the second call, of a restore that arrived
    assert restored.released == [], "whoever took the lease ends it"
    assert restored.questions.stored("r") == (range(16, 65, 16),)


def test_only_what_was_found_is_taken() -> None:
    asking = Asking()
    asking.find()
    assert asking.questions.take("r", 80) is None
    assert asking.questions.take("nobody", 64) is None
    taken = asking.questions.take("r", 64)
    assert taken is not None
    assert asking.questions.take("r", 64) is None, "once"


# Where a prompt can be resumed


def searching(*specs: Any, hash_tokens: int, context_ranks: int = 1) -> HitSearch:
    groups = [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)]
    cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    register_all_kvcache_specs(None)
    unit = max(spec.block_size for spec in specs) * context_ranks
    manager = KVCacheManager(
        cache, 1 << 20, scheduler_block_size=unit, hash_block_size=hash_tokens, dcp_world_size=context_ranks
    )
    parallel = SimpleNamespace(decode_context_parallel_size=context_ranks)
    config: Any = SimpleNamespace(parallel_config=parallel, max_in_flight_tokens=8192, num_prefill_lookahead_tokens=0)
    return HitSearch(config, cache, manager, kept_groups(config, cache))


def attention(block_size: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32)


def states(block_size: int) -> MambaSpec:
    return MambaSpec(block_size=block_size, shapes=((4, 8),), dtypes=(torch.float32,), mamba_cache_mode="align")


def window(block_size: int, tokens: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=tokens
    )


def test_a_failed_search_leaves_nothing_for_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    search = searching(attention(16), window(16, 32), hash_tokens=16)
    mine = keys(8)
    there = [frozenset(mine)] * 2
    assert search.best(mine, 0, 128, there).tokens == 128
    find = search._coordinator.find_longest_cache_hit

    def failing(*args: Any) -> Any:
        find(*args)
        raise RuntimeError("injected")

    monkeypatch.setattr(search._coordinator, "find_longest_cache_hit", failing)
    with pytest.raises(RuntimeError, match="injected"):
        search.best(mine, 64, 128, there)
    monkeypatch.undo()
    assert (search._pool.local, search._pool.stored) == ((), ())
    assert search.best(mine, 0, 128, [frozenset()] * 2).tokens == 0


def test_a_search_is_not_bounded_by_the_size_of_its_pool_and_changes_nothing() -> None:
    search = searching(attention(16), window(16, 64), hash_tokens=16)
    mine = keys(5000)
    there = [frozenset(mine)] * 2
    for _ in range(2):
        hit = search.best(mine, 0, 5000 * 16, there)
        assert hit.tokens == 5000 * 16
        assert hit.needed == (tuple(range(5000)), tuple(range(4996, 5000)))


def test_a_state_counts_only_at_its_own_boundary() -> None:
    search = searching(attention(16), states(16), hash_tokens=16)
    mine = keys(8)
    attended = frozenset(mine)
    assert search.best(mine, 0, 128, [attended, frozenset({mine[4]})]).needed == ((0, 1, 2, 3, 4), (4,))
    assert search.best(mine, 0, 64, [attended, frozenset({mine[4]})]).tokens == 0
    assert search.best(mine, 32, 128, [attended, frozenset({mine[4]})]).needed == ((2, 3, 4), (4,))
    assert search.best(mine, 80, 128, [attended, frozenset({mine[4]})]).tokens == 80, "the engine has as much itself"


def test_a_hit_ends_inside_of_a_block_only_where_the_engine_resumes_there() -> None:
    coarse = searching(attention(64), states(64), hash_tokens=16)
    assert coarse.partial
    mine = keys(8)
    hit = coarse.best(mine, 0, 127, [frozenset({mine[3], mine[5]}), frozenset({mine[5]})])
    assert (hit.tokens, hit.needed) == (96, ((0, 1), (1,)))
    alone = searching(attention(16), hash_tokens=16)
    assert not alone.partial
    with_window = searching(attention(64), window(16, 64), hash_tokens=16)
    assert not with_window.partial
    assert with_window.unit == 64


def test_with_context_parallel_ranks_a_block_covers_the_tokens_of_all() -> None:
    search = searching(attention(16), hash_tokens=32, context_ranks=2)
    assert (search.groups[0].block_tokens, search.key_tokens(0), search.unit) == (32, 32, 32)
    hit = search.best(keys(8), 64, 256, [frozenset(keys(6))])
    assert (hit.tokens, hit.needed) == (192, ((2, 3, 4, 5),))


# Publishing


class Block(int):
    """A block of the engine's pool, by number."""

    block_hash: bytes | None = None


class Storing:
    """A :class:`Publishing` over ``groups`` with hashes of 16 tokens; each rank's copy has 4096 bytes."""

    def __init__(self, *groups: Group, decode: bool = False, slots: int = 100, stored: Any = ()) -> None:
        self.touched: list[int] = []
        self.freed: list[int] = []
        self.told: list[tuple[Any, ...]] = []
        credit = {number: _slots(slots) for number in range(len(groups))}
        self.control: Any = SimpleNamespace(
            attachment=1,
            silent=False,
            credit=credit,
            commit=lambda space, parent, depth, keys, *_: self.told.append(("commit", space, depth, *keys)),
            give_back=lambda space, taken: self.told.append(("back", space, len(taken))),
        )
        spaces = tuple(range(len(groups)))
        self.accounts = Accounts()
        self.batches = Batches(self.control, self.accounts, SimpleNamespace(sure=lambda *_: True))  # type: ignore
        where: Any = SimpleNamespace(to_store=lambda _: spaces)
        asked: Any = SimpleNamespace(stored=lambda _: stored)
        self.publishing = Publishing(self.control, self.batches, where, asked, None, decode, True)
        self.blocks = [Block(number) for number in range(1000)]
        for block in self.blocks:
            block.block_hash = b"%d" % block
        pool: Any = SimpleNamespace(
            num_gpu_blocks=1000, blocks=self.blocks, touch=self.touched.extend, free_blocks=self.freed.extend
        )
        retention = object.__new__(Retention)
        retention.groups, retention.by_index = groups, {group.index: at for at, group in enumerate(groups)}
        retention.hash_tokens, retention._caching = 16, False
        # which blocks the engine would find itself: all that it hands over, but for those of a pass that is over
        self.outdated: set[int] = set()
        cached = SimpleNamespace(contain=lambda _, block: block not in self.outdated)
        engine_pool = SimpleNamespace(cached_block_hash_to_block=cached)
        self.checkpoints: dict[str, tuple[int, int]] = {}
        manager = SimpleNamespace(use_eagle=False, block_pool=engine_pool, _checkpoints=self.checkpoints)
        retention._managers = [manager] * len(groups)
        retention._coordinator = SimpleNamespace(num_reprefillable_tokens=0)  # type: ignore[assignment]
        self.publishing.bind(pool, retention)
        self.expected = [{0: 4096, 1: 4096}] * len(groups)

    def request(self, name: str = "r", prompt: int = 96, first: int = 1, hashes: int | None = None) -> Any:
        request = SimpleNamespace(
            request_id=name,
            block_hashes=keys(prompt // 16 if hashes is None else hashes, first),
            num_prompt_tokens=prompt,
            num_tokens=prompt,
            num_computed_tokens=0,
            num_in_flight_tokens=0,
            lora_request=None,
        )
        self.publishing.admit(request)  # type: ignore[arg-type]
        return request

    def step(
        self,
        request: Any,
        tokens: int,
        *tables: Sequence[int],
        handed: Iterable[tuple[int, int, int]] = (),
        preempted: bool = False,
        finished: bool = False,
    ) -> list[Publish]:
        """A step that computes ``tokens`` of ``request``."""
        name = request.request_id
        state = SimpleNamespace(
            get_block_ids=lambda asked: tables if asked == name else None,
            boundary_state_offloads={name: list(handed)} if handed else {},
        )
        output: Any = SimpleNamespace(
            num_scheduled_tokens={name: tokens} if tokens else {},
            kv_connector_block_state=state,
            preempted_req_ids={name} if preempted else None,
            finished_req_ids={name} if finished else set(),
        )
        plans: list[Publish] = []
        self.publishing.plan(output, plans)
        request.num_computed_tokens += tokens
        return plans

    @property
    def holding(self) -> bool:
        return self.batches.holding or self.publishing.awaiting

    def end(self, batch: int, *ranks: int, size: int = 4096) -> None:
        self.batches.ended(CopyReport({batch: dict.fromkeys(ranks, size)}), self.expected)


def _slots(count: int) -> Slots:
    return Slots(array("I", range(count)), array("Q", range(count)), array("Q", [1] * count))


def blocks(plans: list[Publish]) -> list[tuple[int, list[int]]]:
    return [(plan.group, plan.blocks) for plan in plans]


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
    storing.control.credit[0] = _slots(1)
    assert blocks(storing.step(other, 1, [])) == [(0, [12])]
    storing.blocks[14].block_hash = b"of another prompt"
    storing.control.credit[0] = _slots(9)
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
    storing.control.credit[0] = _slots(9)
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
    storing.control.credit[0] = _slots(9)
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


# Events


def routing() -> CacheEvents:
    control: Any = SimpleNamespace(attachment=1, silent=False)
    cache: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=attention(16))])
    events = CacheEvents(control, cache, (FULL,))
    events.begun((7,))
    return events


def published(tokens: int = 33) -> Published:
    request = Request("r", list(range(tokens)), SamplingParams(max_tokens=1), None)
    return Published(request, b"", 0, 16)


def test_stored_removed_and_stored_again_in_one_step_are_three_events() -> None:
    events, [key] = routing(), keys(1)
    for _ in range(2):
        events.expect(7, key, published())
        events.stored(7, [key])
        events.removed(7, [key])
    events.expect(7, key, published())
    events.stored(7, [key])
    kinds = [type(event) for event in events.take()]
    assert kinds == [BlockStored, BlockRemoved, BlockStored, BlockRemoved, BlockStored]
    assert list(events.take()) == []
    assert list(events.take()) == []


def test_a_removal_that_comes_with_a_publish_leaves_nothing_announced() -> None:
    events, [key] = routing(), keys(1)
    events.expect(7, key, published())
    events.removed(7, [key])
    assert list(events.take()) == [], "nobody was told of it"
    for _ in range(2):  # another request has stored it once more
        events.expect(7, key, published())
        events.stored(7, [key])
    events.removed(7, [key])
    events.removed(7, [key])
    stored, removed = events.take()
    assert isinstance(removed, BlockRemoved)
    assert (stored.medium, removed.medium) == (MEDIUM_CPU, MEDIUM_CPU)
    assert (removed.group_idx, removed.locality) == (0, "LOCAL")
    assert not events._announced[7]


def test_an_engine_that_would_idle_goes_on_while_somebody_is_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    events, [key] = routing(), keys(1)
    assert not events.awaited
    events.expect(7, key, published())
    assert events.awaited
    events.stored(7, [key])
    assert not events.awaited
    events.expect(7, key, published())
    events.expect_no_more(7, [key])
    assert not events.awaited


def test_an_idle_engine_does_not_go_on_for_a_manager_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    events, [key] = routing(), keys(1)
    now = time.monotonic()
    monkeypatch.setattr("kvhold.engines.common.announcements.time.monotonic", lambda: now)
    events.expect(7, key, published())
    events.stored(7, [key])
    events._control.look = lambda parts: QuestionId(1, 1, 1, now)  # type: ignore[method-assign]
    events.begun((8,))  # the next session is asked what is left of it
    assert events.awaited
    now += 2
    assert not events.awaited


class Line:
    """A session with a manager that has ``there``; it answers what it is asked when it is told to."""

    def __init__(self, there: set[bytes]) -> None:
        self.there = there
        self.lost, self.drained = False, True
        self.turns, self.unsent = 0, 0
        self.welcome = wire.Welcome(7, 1, 1 << 20)
        self.asked: list[wire.Lookup] = []
        self.inbox: list[Any] = [wire.Ready()]

    def send(self, message: Any) -> None:
        if isinstance(message, wire.Lookup):
            self.asked.append(message)

    def receive(self, wait: float) -> list[Any]:
        said, self.inbox = self.inbox, []
        return said

    def answer(self) -> None:
        for asked in self.asked:
            [(_, packed)] = asked.parts
            tiers = bytes(packed[at : at + 32] in self.there for at in range(0, len(packed), 32))
            self.inbox.append(wire.Residency(asked.op, (tiers,)))
        self.asked.clear()


def test_of_many_announced_blocks_each_step_asks_about_a_few() -> None:
    """Meanwhile blocks are removed, stored and announced, and a session ends; what a router believes is right."""
    events, rng = routing(), random.Random(3)
    many, slot = keys(20_000), published()
    for key in many:
        events.expect(7, key, slot)
        events.stored(7, [key])
    believed = {hash_of for event in events.take() for hash_of in event.block_hashes}
    assert len(believed) == len(many)
    there = {key for key in many if rng.random() < 0.5}
    attacher: Any = SimpleNamespace(channel=None)
    events._control = control = Control(attacher, 10.0, 10.0)
    control.watcher = events

    def step() -> None:
        control.take_up()
        for event in events.take():
            told = set(event.block_hashes)
            assert len(told) <= 1100, "what one step tells is bounded, too"
            if isinstance(event, BlockStored):
                assert not told & believed, "announced twice"
                believed.update(told)
            else:
                assert told <= believed, "withdrawn without having been announced"
                believed.difference_update(told)

    steps = 0
    for space, most in ((8, 5), (9, 1 << 30)):  # the first of the new sessions ends when a part has been asked
        attacher.channel = line = Line(there)
        control.take_up()
        control.open(space, Geometry(b"n" * 32, 0, 32, (4096,)), 0)
        events.begun((space,))
        for _ in range(most):
            assert sum(len(asked.parts[0][1]) for asked in line.asked) <= 1024 * 32, "more than a slice at once"
            line.answer()
            lost, again, new = (rng.choice(many) for _ in range(3))
            if lost in there:
                there.discard(lost)
                line.inbox.append(wire.Removed(space, lost))
            for key in (again, new):
                if key not in there:
                    there.add(key)
                    events.expect(space, key, slot)
                    line.inbox.append(wire.Added(space, key))
            step()
            steps += 1
            if not line.asked and not line.inbox:
                break
    assert steps >= 20
    assert believed == {maybe_convert_block_hash(BlockHash(key)) for key in there}
    assert not events.awaited


def test_what_was_announced_of_a_closed_space_is_withdrawn_bit_by_bit() -> None:
    events, many, slot = routing(), keys(3000), published()
    events._control.release = lambda questions: None  # type: ignore[method-assign]
    events.opened((8,))
    for key in many:
        events.expect(8, key, slot)
        events.stored(8, [key])
    assert list(events.take())
    events.closed((8,))
    assert events.awaited, "an engine that would idle goes on"
    first = list(events.take())
    events.opened((9,))
    events.expect(9, many[0], slot)  # not withdrawn yet: the router knows it still
    events.stored(9, [many[0]])
    rest = [event for _ in range(3) for event in events.take()]
    gone = [name for event in (*first, *rest) for name in event.block_hashes]
    assert all(isinstance(event, BlockRemoved) and len(event.block_hashes) <= 1024 for event in (*first, *rest))
    assert len(gone) == len(set(gone)) == 2999
    assert not events.awaited


@pytest.mark.parametrize("last", [0, 1])
def test_of_two_questions_about_a_block_the_later_one_counts(last: int) -> None:
    events, [key] = routing(), keys(1)
    answers: dict[int, tuple[bytes, ...]] = {}
    control: Any = events._control
    control.look = lambda parts: QuestionId(len(events._asked) + 1, 1, 1, time.monotonic())
    control.residency = lambda question: answers.get(question.op)
    control.release = lambda questions: None
    events._ask(7, [key], {key: published()})
    events.removed(7, [key])
    events._ask(7, [key], {key: published()})
    answers[1] = (b"\x01",)  # from before it was removed
    assert list(events.take()) == []
    answers[2] = (bytes([last]),)
    assert [type(event) for event in events.take()] == [BlockStored] * last
    assert not events._open
    events.removed(7, [key])
    assert [type(event) for event in events.take()] == [BlockRemoved] * last


# Both halves in the engine


def test_while_the_workers_disagree_nothing_is_found_or_stored_and_the_log_says_why(
    llama_dir: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that begins after the engine's start cannot stop it: it serves nothing until all agree."""
    said: list[str] = []
    monkeypatch.setattr(spaces.log, "error", lambda text, *args: said.append(text % args))
    with serving(llama_dir, manager) as llm, counting() as counts:
        copies = worker_side().copies
        assert copies is not None
        other, agreed = replace(copies._report, owner=1), copies.mappings._hello
        copies.mappings._hello = msgspec.structs.replace(agreed, report=other.packed())
        manager.restart()
        until(lambda: attached(llm), "it attaches again")
        generate(llm, [prompt(100, 1)] * 2)
        assert llm.reset_prefix_cache()
        generate(llm, [prompt(100, 1)])
        assert (counts["blocks_published"], counts["tokens_hit"], counts["load_failures"]) == (0, 0, 0)
        assert len(said) == 1
        assert "disagree about their KV cache: rank 0: " in said[0]
        with pytest.raises(ValueError, match="disagree about their KV cache: rank 0: "):
            scheduler_half(llm).set_xfer_handshake_metadata_pp_aware({})  # as at the start, which it stops
        copies.mappings._hello = agreed
        manager.restart()
        until(lambda: attached(llm), "it attaches again")
        warm_up(llm)
        generate(llm, [prompt(100, 2)])
        assert counts["blocks_published"] == 3


# Workers


class Copying:
    """Stands for a copy engine of host memory: notes what is begun, and ends it when the test does."""

    def __init__(self, layouts: Sequence[PagedLayout]) -> None:
        self.begun: list[tuple[Any, ...]] = []
        self.jobs: list[Job] = []

    def register(self, arena: ArenaMapping) -> None:
        pass

    unregister = register

    def begin_restore(self, arena: ArenaMapping, parts: Any) -> Job:
        return self._begin("restore", *[(group, list(mine), list(offsets)) for group, mine, offsets in parts])

    def begin_publish(self, arena: ArenaMapping, group: int, mine: Sequence[int], offsets: Sequence[int]) -> Job:
        return self._begin("publish", group, list(mine), list(offsets))

    def _begin(self, *what: Any) -> Job:
        self.begun.append(what)
        self.jobs.append(Job(1))
        return self.jobs[-1]

    def advance(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Rank:
    """One rank's connector, attached, and the copies that it begins."""

    connector: KvHoldConnector
    copying: Copying
    incarnation: int

    @property
    def begun(self) -> list[tuple[Any, ...]]:
        return self.copying.begun

    def plan(
        self, step: int, loads: list[Load], publishes: list[Publish], starts: Any = ((0, 4096, 8192, 12288),)
    ) -> StepPlan:
        return StepPlan(step, self.incarnation, loads, publishes, starts)

    def step(self, plan: StepPlan) -> None:
        """What the engine has a worker do in a step, but for asking what has ended."""
        self.connector.bind_connector_metadata(plan)
        self.connector.start_load_kv(cast(Any, None))
        self.connector.wait_for_save()
        self.connector.clear_connector_metadata()

    def results(self) -> tuple[set[str], set[str], set[int]]:
        """Restores that have ended, those that are failed as a whole, and blocks that were not filled."""
        results = self.connector.get_transfer_results(set())
        return results.finished_recving, results.failed_recving, self.connector.get_block_ids_with_load_errors()


@pytest.fixture(scope="module")
def a_manager() -> Iterator[Manager]:
    with tempfile.TemporaryDirectory(prefix="kvhold-") as folder:
        process = Manager(Path(folder), dram="32MiB")
        yield process
        process.kill()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return tiny_config(tmp_path_factory.mktemp("tiny"), 1024)


@pytest.fixture
def ranks(base: VllmConfig, a_manager: Manager) -> Iterator[Callable[..., Rank]]:
    """Makes attached ranks of an engine of four; ``groups`` are how many layers of each cache group a rank has."""
    made: list[Rank] = []

    def make(*groups: int, rank: int = 0) -> Rank:
        config = copy(base)
        config.model_config = copy(base.model_config)
        config.model_config.hf_text_config = copy(base.model_config.hf_text_config)
        config.model_config.hf_text_config.num_key_value_heads = 4
        parallel = config.parallel_config = copy(base.parallel_config)
        parallel.tensor_parallel_size = parallel.world_size = 4
        parallel.rank = rank
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="KvHoldConnector",
            kv_role="kv_both",
            engine_id=str(uuid.uuid4()),
            kv_connector_extra_config={"socket": str(a_manager.socket)},
        )
        spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32)
        names = [[f"layer {at}.{layer}" for layer in range(layers)] for at, layers in enumerate(groups or (1,))]
        cache = KVCacheConfig(16, [], [KVCacheGroupSpec(layers, spec) for layers in names])
        copiers: list[Copying] = []
        connector = KvHoldConnector(config, KVConnectorRole.WORKER, cache)
        with patch("kvhold.copy.host.HostCopier", lambda layouts: copiers.append(Copying(layouts)) or copiers[0]):
            connector.register_kv_caches(
                {
                    layer: torch.zeros((16, spec.page_size_bytes), dtype=torch.uint8)
                    for group in names
                    for layer in group
                }
            )
        made.append(Rank(connector, copiers[0], arena_of(a_manager.socket)))
        return made[-1]

    yield make
    for each in made:
        for job in each.copying.jobs:
            if not job.ended:
                job.end()
        each.connector.shutdown()


def arena_of(socket: Path) -> int:
    """Which arena the manager has."""
    channel = Channel(socket, wire.Hello("admin"), 60.0)
    try:
        return channel.welcome.incarnation
    finally:
        channel.close()


def test_a_step_is_stored_once_however_often_it_is_asked_for_and_also_without_a_forward_pass(
    ranks: Callable[..., Rank],
) -> None:
    rank = ranks()
    connector = rank.connector
    connector.bind_connector_metadata(rank.plan(1, [], [Publish(1, 0, [3], array("Q", [0]))]))
    connector.wait_for_save()
    connector.wait_for_save()
    connector.clear_connector_metadata()
    assert len(rank.begun) == 1
    connector.bind_connector_metadata(rank.plan(2, [], [Publish(2, 0, [4], array("Q", [0]))]))
    connector.clear_connector_metadata()  # there was nothing to compute, so nobody said that it is over
    assert len(rank.begun) == 2
    connector.clear_connector_metadata()
    assert [what[2] for what in rank.begun] == [[3], [4]]


def test_a_stage_that_never_comes_to_its_saves_makes_them_with_the_next_step(ranks: Callable[..., Rank]) -> None:
    """vLLM's first model runner leaves them out on all but the last pipeline stage of an engine that speculates."""
    rank = ranks()
    rank.connector.bind_connector_metadata(rank.plan(1, [], [Publish(1, 0, [3], array("Q", [0]))]))
    rank.connector.bind_connector_metadata(rank.plan(2, [], []))
    assert rank.begun == [("publish", 0, [3], [0])]


def test_each_rank_copies_its_own_part(ranks: Callable[..., Rank]) -> None:
    load, publish = Load("r", [(0, [3, 4], array("Q", [0, 65536]))], [3, 4]), Publish(1, 0, [5], array("Q", [131072]))
    for number, start in enumerate((0, 4096, 8192, 12288)):
        rank = ranks(rank=number)
        rank.step(rank.plan(1, [load], [publish]))
        assert rank.begun == [("restore", (0, [3, 4], [start, 65536 + start])), ("publish", 0, [5], [131072 + start])]


def test_a_rank_copies_nothing_of_a_group_that_it_has_no_layers_of(ranks: Callable[..., Rank]) -> None:
    rank = ranks(1, 0)
    load = Load("r", [(0, [3], array("Q", [0])), (1, [4], array("Q", [0]))], [3, 4])
    publishes = [Publish(1, 0, [5], array("Q", [0])), Publish(2, 1, [6], array("Q", [0]))]
    rank.step(rank.plan(1, [load], publishes, ((0,), (0,))))
    assert rank.begun == [("restore", (0, [3], [0])), ("publish", 0, [5], [0])]


@pytest.mark.parametrize("groups", [1, 2])
def test_a_failure_is_told_no_later_than_the_end(groups: int, ranks: Callable[..., Rank]) -> None:
    rank = ranks(*[1] * groups)
    loads = [
        Load(name, [(0, mine, array("Q", [0, 0, 0]))], mine) for name, mine in (("a", [3, 4, 5]), ("b", [6, 7, 8]))
    ]
    rank.step(rank.plan(1, loads, [], ((0,),) * groups))
    assert rank.results() == (set(), set(), set())
    bad, good = rank.copying.jobs
    bad.done = 1
    bad.end("injected")
    assert rank.results() == (({"a"}, set(), {4, 5}) if groups == 1 else ({"a"}, {"a"}, set()))
    good.end()
    assert rank.results() == ({"b"}, set(), set())
    assert rank.results() == (set(), set(), set()), "told once"


def test_a_load_that_cannot_begin_ends_as_a_failed_one(ranks: Callable[..., Rank]) -> None:
    """Its request waits for the end of it."""
    rank = ranks()
    elsewhere = Load("r", [(0, [3], array("Q", [0]))], [3])
    rank.step(replace(rank.plan(1, [elsewhere], [], ((0,),)), incarnation=rank.incarnation + 1))  # another manager's
    rank.step(rank.plan(2, [Load("s", [], [4])], []))
    assert rank.results() == ({"r", "s"}, set(), {3, 4})
    assert rank.begun == []


def test_copies_of_a_failed_batch_are_told_and_others_go_on(ranks: Callable[..., Rank]) -> None:
    rank = ranks()
    rank.step(rank.plan(1, [], [Publish(1, 0, [3], array("Q", [0])), Publish(2, 0, [4], array("Q", [0]))]))
    first, second = rank.copying.jobs
    second.end("injected")
    assert rank.connector.build_connector_worker_meta() == CopyReport({2: {0: -1}})
    assert rank.connector.build_connector_worker_meta() is None
    first.end()
    assert rank.connector.build_connector_worker_meta() == CopyReport({1: {0: 4096}})


def test_reports_of_ranks_become_one() -> None:
    one = CopyReport({1: {0: 4096}, 2: {0: -1}})
    two = CopyReport({1: {1: 4096}, 3: {1: 4096}})
    assert one.aggregate(two) == CopyReport({1: {0: 4096, 1: 4096}, 2: {0: -1}, 3: {1: 4096}})
    assert one == CopyReport({1: {0: 4096}, 2: {0: -1}}), "neither is changed"


def test_counts_of_ranks_and_steps_add_up() -> None:
    first, second = Accounts(), Accounts()
    first.add("loads")
    first.add("load_bytes", 100, rank=0)
    second.add("loads", 2)
    second.add("load_bytes", 50, rank=1)
    taken, other = KvHoldStats.taken(first), KvHoldStats.taken(second)
    assert taken is not None
    assert other is not None
    assert KvHoldStats.taken(first) is None
    assert taken.aggregate(other).reduce() == {"loads": 3, "load_bytes/0": 100, "load_bytes/1": 50}
