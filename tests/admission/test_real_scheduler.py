"""The model against vLLM's own Scheduler, and what the model says about deadlocks on that Scheduler itself.

No model runs: a fake connector promises blocks, the tests say when its transfers end, and every request that can
sample a token gets one.
"""

import importlib.util
import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from testbed.admission.model import (
    ABSENT,
    DONE,
    FAILED,
    LOADING,
    RECEIVED,
    RUNNING,
    WAITING,
    Ask,
    Engine,
    Event,
    Key,
    Request,
    State,
    apply,
    canonical,
    events,
    fits,
    in_flight,
    start,
)

from kvhold.engines.vllm.admission import Waiting, may_ask, most_blocks, order_matters

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM", allow_module_level=True)
import testbed.engine.bed  # noqa: F401 - the environment of vLLM and torch, before either is imported
import torch
from testbed.engine.vllm_config import tiny_config
from vllm.config import KVTransferConfig, SpeculativeConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, make_block_hash_with_group_id
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request as EngineRequest
from vllm.v1.request import RequestStatus
from vllm.version import __version_tuple__

STATUSES = {
    RequestStatus.WAITING: WAITING,
    RequestStatus.PREEMPTED: WAITING,
    RequestStatus.WAITING_FOR_REMOTE_KVS: LOADING,
    RequestStatus.RUNNING: RUNNING,
}
LONG = 1 << 20
STEP: Event = ("step", -1)


class Fake(KVConnectorBase_V1):
    """The connector of :class:`model.Ask`: it promises what an ask has outside, asynchronously, and remembers failures.

    Its gate is fed as kvhold's would be: by what vLLM tells a connector.
    """

    world: "Real"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.failed: set[str] = set()
        self.answered: set[str] = set()
        self.loading: dict[str, Waiting] = {}

    def get_num_new_matched_tokens(self, request: EngineRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        engine, ask = self.world.engine, self.world.asks[int(request.request_id)]
        if ask.late and request.request_id not in self.answered:
            return None, False
        if request.request_id in self.failed and not engine.insists:
            return 0, False
        size = engine.block_tokens
        end = min(ask.outside, request.num_tokens - 1) // size * size
        if engine.gate:
            end = min(end, most_blocks(engine.blocks, [size], engine.drafts) * size)
        if end <= num_computed_tokens:
            return 0, False
        if engine.gate and order_matters(engine.policy, engine.whole_prompt):
            first = min(request.num_tokens, end + engine.budget) + engine.drafts
            begin = -(-min(first, engine.max_len) // size)
            if not may_ask(_rank(request), begin, self.loading.values(), engine.blocks):
                return (None if engine.gate == "later" else 0), False
        return end - num_computed_tokens, True

    def update_state_after_alloc(self, request: EngineRequest, blocks: Any, num_external_tokens: int) -> None:
        self.loading.pop(request.request_id, None)
        if num_external_tokens:
            self.loading[request.request_id] = Waiting(_rank(request), len(blocks.get_block_ids()[0]))

    def request_finished(self, request: EngineRequest, block_ids: list[int]) -> tuple[bool, None]:
        self.loading.pop(request.request_id, None)
        return False, None

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.failed |= connector_output.failed_recving

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...


def _rank(request: EngineRequest) -> tuple[int, float, str]:
    return request.priority, request.arrival_time, request.request_id


KVConnectorFactory.register_connector("AdmissionFake", __name__, Fake.__name__)


@pytest.fixture(scope="module", autouse=True)
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One configuration for all schedulers of this file, of which each takes a changed copy."""
    fake = KVTransferConfig(kv_connector="AdmissionFake", kv_role="kv_both", kv_load_failure_policy="recompute")
    Real.config = tiny_config(tmp_path_factory.mktemp("model"), LONG, fake)
    with patch.object(kv_cache_utils, "NONE_HASH", b"none", create=True):
        yield


class Real:
    """vLLM's Scheduler, led through the events of the model."""

    config: VllmConfig

    def __init__(self, engine: Engine, asks: Sequence[Ask], overlap: bool = False) -> None:
        start(engine, asks)  # refuses what could never run
        config = copy(self.config)
        config.model_config = copy(config.model_config)
        config.model_config.max_model_len = engine.max_len
        config.scheduler_config = copy(config.scheduler_config)
        config.scheduler_config.max_num_seqs = engine.seats
        config.scheduler_config.max_num_batched_tokens = engine.budget
        config.scheduler_config.policy = engine.policy
        config.scheduler_config.scheduler_reserve_full_isl = engine.whole_prompt
        config.scheduler_config.watermark = (engine.watermark + 0.5) / (engine.blocks + 1)
        config.scheduler_config.async_scheduling = overlap
        config.cache_config = copy(config.cache_config)
        config.cache_config.block_size = engine.block_tokens
        config.cache_config.num_gpu_blocks = engine.blocks + 1  # and the null block
        if engine.drafts:
            config.speculative_config = _ngram(config, engine.drafts)
        spec = FullAttentionSpec(block_size=engine.block_tokens, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache = KVCacheConfig(engine.blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])
        register_all_kvcache_specs(config)
        self.engine, self.asks = engine, asks
        self.scheduler = (AsyncScheduler if overlap else Scheduler)(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=SimpleNamespace(
                accept_tokens=lambda request, tokens: True, validate_tokens=lambda request, tokens: tokens
            ),
            block_size=engine.block_tokens,
        )
        self.connector = self.scheduler.connector
        self.connector.world = self
        self.requests: dict[int, EngineRequest] = {}
        self.keys: dict[bytes, Key] = {}
        self.now = 0
        self.depth = 2 if overlap else 1
        self.under_way: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        if not engine.reserve:
            self.scheduler._inflight_prefill_reserved_blocks = lambda: 0
        if not engine.holders_first:
            self.scheduler._holds_kv_blocks = lambda request: False

    # --- events -------------------------------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        what, index = event
        if what == "step":
            self._step()
        elif what == "arrive":
            self._arrive(index)
        elif what == "answer":
            self.connector.answered.add(str(index))
        elif what == "abort":
            self.scheduler.finish_requests(str(index), RequestStatus.FINISHED_ABORTED)
        else:
            failed = {str(index)} if what == "failed" else set()
            report = KVConnectorOutput(finished_recving={str(index)}, failed_recving=failed)
            self.scheduler.update_from_output(
                SchedulerOutput.make_empty(), ModelRunnerOutput([], {}, kv_connector_output=report)
            )

    def _arrive(self, index: int) -> None:
        ask = self.asks[index]
        shared = [10 + ask.family] * ask.shared
        request = EngineRequest(
            str(index),
            shared + [100 + index] * (ask.prompt - ask.shared),
            SamplingParams(max_tokens=ask.output, ignore_eos=True),
            None,
            arrival_time=float(self.now),
            priority=ask.priority,
            block_hasher=get_request_block_hasher(self.engine.block_tokens, sha256),
        )
        self.now += 1
        self.requests[index] = request
        self.scheduler.add_request(request)

    def _step(self) -> None:
        """Schedule, and take the output of the step before the last one if they overlap."""
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        # The token differs from all of prompts; a step that ends inside of a prompt samples none.
        tokens = [[] if self.scheduler.requests[name].is_prefill_chunk else [200 + int(name)] for name in names]
        done = ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled_token_ids=tokens)
        self.under_way.append((output, done))
        if len(self.under_way) >= self.depth:
            self._finish_step()

    def _finish_step(self) -> None:
        output, done = self.under_way.popleft()
        self.scheduler.update_from_output(output, done)
        if self.engine.drafts:
            drafts = [[300] * self.engine.drafts for _ in done.req_ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(list(done.req_ids), drafts))

    def drained(self, limit: int = 400) -> bool:
        """Whether all requests finish once every transfer that begins also ends."""
        for _ in range(limit):
            for index in range(len(self.asks)):
                if in_flight(self._request(index)):
                    self.apply(("restored", index))
            self.connector.answered.update(map(str, self.requests))
            if not self.scheduler.requests:
                return True
            self._step()
        return False

    def is_stuck(self) -> bool:
        """Whether requests wait with no transfer under way, and steps change nothing."""
        self._step()
        before = self.state()
        for _ in range(20):
            self._step()
        return bool(self.scheduler.requests) and self.state() == before and not any(map(in_flight, before.requests))

    # --- what the model would say -------------------------------------------------------------------------------

    def requests_alone(self) -> State:
        """Enough to know what may happen next. Blocks whose release is put off have no place in the model."""
        return State(tuple(self._request(index) for index in range(len(self.asks))), (), (), (), (), ())

    def state(self) -> State:
        scheduler, manager = self.scheduler, self.scheduler.kv_cache_manager
        for index, request in self.requests.items():
            for block, value in enumerate(request.block_hashes):
                shared = (block + 1) * self.engine.block_tokens <= self.asks[index].shared
                key = (~self.asks[index].family, block) if shared else (index, block)
                self.keys[make_block_hash_with_group_id(value, 0)] = key
        cache = [
            (self.keys[value], tuple(blocks) if isinstance(blocks, dict) else (blocks.block_id,))
            for value, blocks in manager.block_pool.cached_block_hash_to_block._cache.items()
        ]
        state = State(
            self.requests_alone().requests,
            tuple(int(request.request_id) for request in scheduler.running),
            tuple(int(request.request_id) for request in scheduler.waiting),
            tuple(int(request.request_id) for request in scheduler.kv_holding_waiting),
            tuple(block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()),
            tuple(cache),
        )
        return canonical(self.engine, self.asks, state)

    def _request(self, index: int) -> Request:
        request, name, scheduler = self.requests.get(index), str(index), self.scheduler
        if request is None:
            return Request(ABSENT)
        manager = scheduler.kv_cache_manager
        received = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS and (
            name in scheduler.finished_recving_kv_req_ids
        )
        return Request(
            status=STATUSES.get(request.status, DONE),
            computed=request.num_computed_tokens,
            out=request.num_output_tokens,
            blocks=tuple(manager.get_block_ids(name)[0]),
            cached=manager.coordinator.single_type_managers[0].num_cached_block.get(name, 0),
            report=(FAILED if name in scheduler.failed_recving_kv_req_ids else RECEIVED) if received else 0,
            prefilling=request in scheduler._inflight_prefills,
            failed=name in self.connector.failed,
            answered=name in self.connector.answered,
            orphan=request.is_finished() and name in scheduler.requests,
            arrival=int(request.arrival_time),
        )


def _ngram(config: VllmConfig, drafts: int) -> SpeculativeConfig:
    return SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=drafts,
        prompt_lookup_min=1,
        prompt_lookup_max=3,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )


# Random worlds

PASSES_OVER = __version_tuple__[:2] >= (0, 33)
"""Nothing but the version tells: it is a statement inside of a method."""


def world(draw: random.Random, overlap: bool = False) -> tuple[Engine, list[Ask]]:
    """A small engine and a few requests that fit into it, one by one."""
    size = draw.choice([1, 1, 2, 4])
    blocks = draw.randint(3, 8)
    room = blocks * size
    drafts = 0 if overlap else draw.choice([0, 0, 0, 1, min(3, room - 2)])
    engine = Engine(
        blocks=blocks,
        budget=draw.choice([max(2, 1 + drafts), room, 4 * room]),
        block_tokens=size,
        seats=draw.choice([2, 8, 8]),
        max_len=draw.choice([room, LONG]),
        policy=draw.choice(["fcfs", "priority"]),
        whole_prompt=draw.random() < 0.6,
        watermark=draw.choice([0, 0, 1]),
        drafts=drafts,
        gate=draw.choice(["", "", "later", "miss"]),
        passes_over=PASSES_OVER,
    )
    asks: list[Ask] = []
    shared, count = draw.randint(0, room // 2), draw.randint(3, 7)
    while len(asks) < count:
        prompt = draw.randint(1, room - 1)
        family = prompt > shared and draw.random() < 0.5
        ask = Ask(
            prompt=prompt,
            output=draw.randint(1, max(1, room // 2)),
            outside=draw.choice([0, prompt, draw.randint(0, prompt)]),
            priority=draw.randint(0, 2),
            family=0 if family else -1,
            shared=shared if family else 0,
            late=draw.random() < 0.2,
            fails=draw.random() < 0.3,
            aborts=draw.random() < 0.2,
        )
        if fits(engine, ask):
            asks.append(ask)
    return engine, asks


def harmless(engine: Engine) -> bool:
    """Whether docs/admission.md says that this engine cannot deadlock."""
    one_block = engine.drafts < engine.block_tokens
    return bool(engine.gate) or (one_block and not order_matters(engine.policy, engine.whole_prompt))


def chosen(draw: random.Random, asks: Sequence[Ask], state: State) -> Event:
    """A step, or something else that may happen; the latter often enough that it happens in the midst of things."""
    other = [event for event in events(asks, state) if event[0] != "step"]
    other = [event for event in other if event[0] != "abort" or draw.random() < 0.1]
    return draw.choice(other) if other and draw.random() < 0.4 else STEP


def test_model_and_scheduler_agree_and_drain_on_random_schedules() -> None:
    seen: Counter[str] = Counter()
    for seed in range(300):
        draw = random.Random(seed)
        engine, asks = world(draw)
        real, state, trace = Real(engine, asks), start(engine, asks), []
        while len(trace) < 100 and any(request.status != DONE for request in state.requests):
            event = chosen(draw, asks, state)
            trace.append(event)
            before, state = state, apply(engine, asks, state, event)
            real.apply(event)
            assert real.state() == state, f"seed {seed}: {engine}, {asks}, {trace}"
            seen[event[0]] += 1
            seen["changed"] += state != before
            seen["preempted"] += event == STEP and not set(before.running) <= {*state.running, *_done(state)}
        if harmless(engine):
            seen["drained"] += 1
            assert real.drained(), f"seed {seed}: {engine}, {asks}, {trace}"
    print(dict(seen))
    assert min(seen[what] for what in ("restored", "failed", "abort", "answer", "preempted", "drained")) > 50, seen


def _done(state: State) -> list[int]:
    return [index for index, request in enumerate(state.requests) if request.status == DONE]


def test_overlapping_steps_drain_on_random_schedules() -> None:
    """Async scheduling, where blocks of preempted requests are freed late. The model does not have it."""
    for seed in range(200):
        draw = random.Random(seed)
        engine, asks = world(draw, overlap=True)
        real = Real(engine, asks, overlap=True)
        assert real.scheduler.defer_block_free
        for _ in range(80):
            real.apply(chosen(draw, asks, real.requests_alone()))
        if harmless(engine):
            assert real.drained(), f"seed {seed}: {engine}, {asks}"


# The counterexample, and what else stops vLLM's scheduler


def led(engine: Engine, asks: Sequence[Ask], *trace: Event) -> Real:
    real = Real(engine, asks)
    for event in trace:
        real.apply(event)
    return real


NAMED = {
    "128 of 255": (255, Ask(129, 2, outside=128), Ask(128, 1, priority=-1)),
    "4 of 7": (7, Ask(5, 2, outside=4), Ask(4, 1, priority=-1)),
}
"""A finished restore that holds 128 blocks, and at the queue's head a cold request that needs 128 of the 127 free."""
NAMED_TRACE: tuple[Event, ...] = (("arrive", 0), STEP, ("restored", 0), ("arrive", 1))


@pytest.mark.parametrize("name", NAMED)
def test_the_named_counterexample_drains(name: str) -> None:
    blocks, *asks = NAMED[name]
    real = led(Engine(blocks, LONG, policy="priority"), asks, *NAMED_TRACE)
    free = real.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert (free, blocks - free) == (asks[1].prompt - 1, asks[0].outside)
    assert real.drained()


@pytest.mark.parametrize("name", NAMED)
def test_it_drains_without_the_reservation_too(name: str) -> None:
    """Not the reservation prevents it, but that requests with blocks are visited before all others."""
    blocks, *asks = NAMED[name]
    assert led(Engine(blocks, LONG, policy="priority", reserve=False), asks, *NAMED_TRACE).drained()


@pytest.mark.parametrize("reserve", [True, False])
@pytest.mark.parametrize("name", NAMED)
def test_it_deadlocks_with_one_queue_for_all(name: str, reserve: bool) -> None:
    blocks, *asks = NAMED[name]
    engine = Engine(blocks, LONG, policy="priority", reserve=reserve, holders_first=False)
    assert led(engine, asks, *NAMED_TRACE).is_stuck()


TWO = (Ask(130, 1, outside=1), Ask(130, 1, outside=129))
"""The first holds one block and needs 129, of which the second holds nearly all: visited in this order."""
TWO_TRACE: tuple[Event, ...] = (("arrive", 0), ("arrive", 1), STEP, ("restored", 0))


def test_two_restores_deadlock_without_the_reservation() -> None:
    assert led(Engine(131, LONG, reserve=False), TWO, *TWO_TRACE, ("restored", 1)).is_stuck()
    assert led(Engine(131, LONG), TWO, *TWO_TRACE).drained()


BACKWARDS = (Ask(3, 1, outside=2, priority=1), Ask(4, 1, outside=2))
"""The second is given blocks last, which the engine allows since it keeps enough for the first; it is visited first."""
BACKWARDS_TRACE: tuple[Event, ...] = (("arrive", 0), STEP, ("arrive", 1), STEP, ("restored", 0), ("restored", 1))


def test_priorities_without_full_isl_deadlock_and_the_gate_prevents_it() -> None:
    engine = Engine(5, LONG, policy="priority", whole_prompt=False)
    assert led(engine, BACKWARDS, *BACKWARDS_TRACE).is_stuck()
    trace = [event for event in BACKWARDS_TRACE if event != ("restored", 1)]  # it is not given blocks then
    assert led(replace(engine, gate="later"), BACKWARDS, *trace).drained()
    assert led(replace(engine, gate="miss"), BACKWARDS, *trace).drained()
    assert led(replace(engine, whole_prompt=True), BACKWARDS, *trace).drained()
    assert led(replace(engine, policy="fcfs"), BACKWARDS, *BACKWARDS_TRACE).drained()


def test_drafts_beyond_a_block_lock_out_a_restore_that_fills_the_pool_and_the_gate_prevents_it() -> None:
    """One request in an idle engine: it fits, its restore and the blocks of one more decoding step do not."""
    engine = Engine(blocks=4, budget=LONG, block_tokens=16, max_len=64, drafts=24)  # suffix decoding's default
    asks = [Ask(50, 8, outside=50), Ask(10, 1)]
    assert led(engine, asks, ("arrive", 0), ("arrive", 1)).is_stuck()
    assert led(replace(engine, gate="later"), asks, ("arrive", 0), ("arrive", 1)).drained()
    assert led(replace(engine, drafts=8), asks, ("arrive", 0), ("arrive", 1)).drained()


def test_a_connector_that_asks_again_after_a_failure_deadlocks() -> None:
    """vLLM goes on to reserve blocks for the request that failed, against that very request."""
    asks = [Ask(3, 1, outside=2), Ask(1, 1)]
    trace: tuple[Event, ...] = (("arrive", 0), STEP, ("failed", 0), ("arrive", 1))
    assert led(Engine(4, LONG, insists=True), asks, *trace).is_stuck()
    assert led(Engine(4, LONG), asks, *trace).drained()
