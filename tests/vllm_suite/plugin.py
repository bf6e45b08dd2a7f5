"""pytest plugin: vLLM's own tests run against kvhold's connector.

Where a test would build a connector of vLLM's, or mock one, it gets :class:`Subject`: both halves of KvHoldConnector,
unchanged, attached to a real manager, with one worker half per rank and KV tensors of the size that the test's
configuration asks for. Whenever a test schedules a step, the worker halves carry it out, and what they report goes into
the next ``update_from_output``.

A test says which requests have how much of their prompt outside (its *script*). Where kvhold could say the same, the
manager is first made to hold just that, by another engine of the same model, and the connector's own lookup must find
it; and when the test says that a load has arrived, the worker halves must have ended it, and every cache group's blocks
must hold what its layers would have computed. What kvhold never says is only passed on: a synchronous load, a part of a
block, the last token of a prompt.
"""

import copy
import inspect
import logging
import math
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import selection
import testbed.engine.bed  # noqa: F401 - the environment of vLLM and torch, before either is imported
import torch
from testbed.oracle.oracle_kv import first_needed
from testbed.process.manager_process import Manager
from tests.v1.core import test_scheduler
from tests.v1.core.utils import create_scheduler
from tests.v1.kv_connector.unit.utils import MockKVConnector, create_vllm_config
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from vllm.model_executor.models import registry
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.version import __version_tuple__

from kvhold.engines.common.plans import CopyReport, StepPlan
from kvhold.engines.vllm import connector as product
from kvhold.engines.vllm import identity
from kvhold.engines.vllm.connector import KvHoldConnector
from kvhold.engines.vllm.groups import kept_groups
from kvhold.engines.vllm.support import Unsupported

SUBJECT = "KvHoldSubject"
"""Its name in vLLM's registry of connectors."""
PATIENCE = 60.0
"""Seconds for what takes milliseconds, before a test fails."""
LATER = __version_tuple__[:2] >= (0, 33)
"""What tests expect is the version's, not a feature's."""
Hits = Callable[[Request, int], tuple[int | None, bool]]

_socket: Path
_subjects: list["Subject"] = []


# The connector under test


class Subject(KvHoldConnector):
    """A scheduler half with its worker halves, its manager and the test's script.

    ``live`` ones have no script: what the connector finds is loaded, and the test is told when it has arrived.
    """

    live = False

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        transfer = vllm_config.kv_transfer_config
        script = dict(transfer.kv_connector_extra_config)
        config, cache = _with_manager(vllm_config), _with_groups(kv_cache_config)
        _count("attached")
        super().__init__(config, role, cache)
        self._script: Hits | None = None
        self._mock = MockKVConnector(vllm_config, role, kv_cache_config) if "matched_tokens" in script else None
        self._config, self._cache = config, cache
        self._groups = kept_groups(config, cache)
        self._unit = math.lcm(*(group.block_tokens for group in self._groups))
        self._hash = self._unit  # tokens of a hash; the engine says
        self._donor: Scheduler | None = None
        self._stocked: dict[str, tuple[int, int]] = {}  # tokens [first, last) that a request was told of
        self._promised: dict[str, tuple[int, int]] = {}  # the same of requests whose load must succeed
        self._ended: dict[str, bool] = {}  # loads that the worker halves have ended; whether they failed
        self._steps: dict[int, tuple[CopyReport, set[str]]] = {}  # what workers ended: publishes, and loads
        self._ranks: list[tuple[KvHoldConnector, dict[str, torch.Tensor]]] = []
        if role is KVConnectorRole.WORKER:
            return
        parallel = config.parallel_config
        world = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self._ranks = [_rank(config, cache, rank) for rank in range(world)]
        self.set_xfer_handshake_metadata_pp_aware({})
        _subjects.append(self)

    def close(self) -> None:
        self.shutdown()
        for worker, _ in self._ranks:
            worker.shutdown()

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._hash = kv_cache_manager.block_pool.hash_block_size

    # --- the script: tests replace the method on the instance -------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, "_script" if name == "get_num_new_matched_tokens" else name, value)

    def __delattr__(self, name: str) -> None:
        if name == "get_num_new_matched_tokens":
            self._script = None
        else:
            object.__delattr__(self, name)

    @property
    def config(self) -> Any:
        """What a test that knows vLLM's mock may change while it runs."""
        return self._mock.config

    @config.setter
    def config(self, value: Any) -> None:
        self._mock.config = value

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.live:
            return self._found(request, num_computed_tokens)
        if self._script is not None:
            said = self._script(request, num_computed_tokens)
        elif self._mock is not None:
            said = self._mock.get_num_new_matched_tokens(request, num_computed_tokens)
        elif (request.kv_transfer_params or {}).get("do_remote_prefill"):
            rest = (request.num_tokens - 1) // self._unit * self._unit - num_computed_tokens
            said = (rest, True) if rest > 0 else (0, False)
        else:
            said = 0, False
        return self.confirmed(request, num_computed_tokens, said)

    def confirmed(self, request: Request, computed: int, said: tuple[int | None, bool]) -> tuple[int | None, bool]:
        """``said``, after the connector's own lookup agreed that so much is there."""
        tokens, load_async = said
        if tokens is None:
            return said
        wanted = tokens > 0 and load_async and not request.skip_reading_prefix_cache
        end = min(computed + tokens, request.num_tokens - 1) // self._unit * self._unit
        if wanted:
            self._stock(request, end)
        found, found_async = super().get_num_new_matched_tokens(request, computed)
        half = self._scheduler
        if (
            wanted and request.request_id in half.restores._admission._withheld
        ):  # found, but kept back as its failure could stop the engine
            found, found_async = half._questions._by_request[request.request_id].question.hit, True
        if wanted and end > computed:
            assert found is not None, f"kvhold had no answer for {request.request_id} within a second"
            assert found >= end - computed, f"kvhold finds {found} of {end - computed} tokens of {request.request_id}"
            assert found_async, "kvhold's loads are asynchronous"
            self._stocked[request.request_id] = computed, end
        return said

    def _found(self, request: Request, computed: int) -> tuple[int | None, bool]:
        found, load_async = super().get_num_new_matched_tokens(request, computed)
        if found:
            self._stocked[request.request_id] = computed, computed + found
        return found, load_async

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens > 0:
            first, last = self._stocked.pop(request.request_id, (0, 0))
            if first + num_external_tokens == last:
                self._promised[request.request_id] = first, last

    def _stock(self, request: Request, tokens: int) -> None:
        """Have another engine of the same model publish the first ``tokens`` of ``request``."""
        if self._donor is None:
            self._donor = _donor(self)
        hashes = list(request.block_hashes[: tokens // self._hash])
        assert len(hashes) * self._hash == tokens
        _publish(self._donor, list(request.all_token_ids)[:tokens], hashes)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepPlan:
        plan = super().build_connector_meta(scheduler_output)
        plan.requests = MockKVConnector.build_connector_meta(self, scheduler_output).requests  # which tests count
        return plan

    # --- the workers' part of a step ----------------------------------------------------------------------------

    def compute(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """The forward pass: every block that it completes then holds the hash of what it ends with."""
        if zeroed := list(output.new_block_ids_to_zero or ()):
            for tensor in self._tensors():
                tensor[zeroed] = 0
        for source, target in output.kv_cache_block_copies or ():
            for tensor in self._tensors():
                tensor[target] = tensor[source]
        for name, scheduled in output.num_scheduled_tokens.items():
            request = scheduler.requests[name]
            end = min(request.num_computed_tokens, len(request.block_hashes) * self._hash)
            start = max(0, request.num_computed_tokens - scheduled)
            tables = scheduler.kv_cache_manager.get_block_ids(name)
            for at, group in enumerate(self._groups):
                self._fill(at, tables[group.index], request, start, end)
                if group.handed and (end % self._hash or end < request.num_computed_tokens):
                    self._spoil(at, tables[group.index][(request.num_computed_tokens - 1) // group.block_tokens])

    def _fill(self, at: int, table: list[int], request: Request, start: int, end: int) -> None:
        """What the computation of tokens ``start`` to ``end`` leaves in blocks of a group."""
        size, handed = self._groups[at].block_tokens, self._groups[at].handed
        ends = [] if handed else list(range(start // size * size + size, end + 1, size))
        if start < end and end % self._hash == 0 and end not in ends:
            ends.append(end)  # a part of a block, or a state
        filled = [(table[(each - 1) // size], self._key(request, each)) for each in ends]
        filled = [(block, key) for block, key in filled if block]
        for tensor in self._tensors(at) if filled else ():
            tensor[[block for block, _ in filled]] = _pages([key for _, key in filled], tensor)

    def _spoil(self, at: int, block: int) -> None:
        """A running state is one of tokens that have no hash."""
        for tensor in self._tensors(at):
            tensor[block] = 0

    def _key(self, request: Request, tokens: int) -> bytes:
        return request.block_hashes[tokens // self._hash - 1]

    def _tensors(self, at: int | None = None) -> list[torch.Tensor]:
        """Those of a kept group, or all, of all ranks."""
        groups = self._cache.kv_cache_groups if at is None else [self._cache.kv_cache_groups[self._groups[at].index]]
        return [tensors[layer] for _, tensors in self._ranks for group in groups for layer in group.layer_names]

    def carry_out(self, output: SchedulerOutput) -> None:
        """Run ``output``'s plan on the worker halves, to the end of its copies."""
        plan = self._plan_of(output)
        if plan is None:
            return
        loads, batches = {load.request for load in plan.loads}, {publish.batch for publish in plan.publishes}
        self._ended = {name: failed for name, failed in self._ended.items() if name not in loads}
        for worker, _ in self._ranks:
            worker.handle_preemptions(plan)
            worker.bind_connector_metadata(plan)
            worker.start_load_kv(None)
            worker.wait_for_save()
        report, ended = CopyReport(), [set[str]() for _ in self._ranks]
        failed: set[str] = set()
        deadline = time.monotonic() + PATIENCE
        while any(loads - mine for mine in ended) or len(report.ended) < len(batches):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the worker halves have not ended {plan}")
            for mine, (worker, _) in zip(ended, self._ranks, strict=True):
                results = worker.get_transfer_results(output.finished_req_ids)
                spoiled = worker.get_block_ids_with_load_errors()
                assert not (spoiled and len(self._cache.kv_cache_groups) > 1), "the engine does not take those"
                mine |= results.finished_recving
                failed |= results.failed_recving
                failed |= {load.request for load in plan.loads if not spoiled.isdisjoint(load.blocks)}
                assert failed <= set().union(*ended), "a failure is told no later than the end"
                if (part := worker.build_connector_worker_meta()) is not None:
                    report = report.aggregate(part)
            time.sleep(0.0002)
        for worker, _ in self._ranks:
            worker.clear_connector_metadata()
        self._ended |= {name: name in failed for name in loads}
        self._steps[plan.step] = report, loads

    def _plan_of(self, output: SchedulerOutput) -> StepPlan | None:
        plan = getattr(output, "kv_connector_metadata", None)
        if isinstance(plan, MultiKVConnectorMetadata):
            [plan] = [each for each in plan.metadata if isinstance(each, StepPlan)]
        return plan if isinstance(plan, StepPlan) else None

    def reported(self, scheduler: Scheduler, output: SchedulerOutput, result: ModelRunnerOutput) -> ModelRunnerOutput:
        """``result`` with what the worker halves reported of ``output``'s step."""
        said = result.kv_connector_output
        plan = self._plan_of(output)
        report, loads = CopyReport(), set()
        if plan is not None:
            report, loads = self._steps.pop(plan.step, (report, loads))
        if self.live and loads:
            said = KVConnectorOutput(finished_recving=loads)
        for name in (said.finished_recving or ()) if said is not None else ():
            if (promised := self._promised.pop(name, None)) is not None:
                self._check_arrived(scheduler, name, *promised)
        if report.ended:
            several = isinstance(scheduler.connector, MultiConnector)
            meta = _multiplied(scheduler.connector, self, report) if several else report
            said = replace(said if said is not None else KVConnectorOutput(), kv_connector_worker_meta=meta)
        return replace(result, kv_connector_output=said)

    def _check_arrived(self, scheduler: Scheduler, name: str, first: int, last: int) -> None:
        assert name in self._ended, f"{name}'s load has arrived, but the worker halves never ended it"
        assert not self._ended[name], f"{name}'s load failed in a worker half"
        request = scheduler.requests[name]
        tables = scheduler.kv_cache_manager.get_block_ids(name)
        for at, group in enumerate(self._groups):
            size, table = group.block_tokens, tables[group.index]
            needed = first_needed(self._cache.kv_cache_groups[group.index].kv_cache_spec, last)
            wanted = [
                (table[block], self._key(request, min((block + 1) * size, last)))
                for block in range(max(first, needed) // size, -(-last // size))
                if table[block]
            ]
            if needed == last:
                continue  # a chunk that begins with the next token needs nothing of the former ones
            assert wanted, f"group {group.index} of {name} has no block for what was loaded"
            blocks = [block for block, _ in wanted]
            for tensor in self._tensors(at):
                pages = _pages([key for _, key in wanted], tensor)
                assert torch.equal(tensor[blocks], pages), f"{name}'s blocks {blocks} do not hold what was loaded"
        _count("loads")
        if len(self._groups) > 1:
            _count("hybrid loads")


def _rank(config: VllmConfig, cache: KVCacheConfig, rank: int) -> tuple[KvHoldConnector, dict[str, torch.Tensor]]:
    config = copy.copy(config)
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.rank = rank
    worker = KvHoldConnector(config, KVConnectorRole.WORKER, cache)
    tensors = _kv_caches(cache)  # the halves know addresses only
    worker.register_kv_caches(tensors)
    return worker, tensors


def _multiplied(parent: Any, child: Subject, report: CopyReport) -> MultiKVConnectorWorkerMetadata:
    """``report`` as MultiConnector hands it to ``child``."""
    parts = tuple(report if each is child else None for each in parent._connectors)
    return MultiKVConnectorWorkerMetadata(metadata=parts)


def _with_manager(config: VllmConfig, **changes: Any) -> VllmConfig:
    """A copy of ``config`` for kvhold: its settings instead of those of the connector that the test named.

    A test may build two schedulers of one configuration, which in life are two engines."""
    config = copy.copy(config)
    settings = {"socket": str(_socket), "step_budget_ms": 1000, "answer_deadline_ms": 1000}
    transfer = copy.copy(config.kv_transfer_config)
    named = {"kv_connector_extra_config": settings, "engine_id": str(uuid.uuid4())}
    for name, value in {**named, **changes}.items():
        setattr(transfer, name, value)
    config.kv_transfer_config = transfer
    return config


def _with_groups(cache: KVCacheConfig) -> KVCacheConfig:
    """``cache``, or a minimal one for tests that have no need of any."""
    if cache.kv_cache_groups:
        return cache
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return KVCacheConfig(num_blocks=16, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])


def _pages(hashes: list[bytes], tensor: torch.Tensor) -> torch.Tensor:
    """Blocks of ``tensor`` that hold ``hashes``, each over and over."""
    size = tensor.shape[1]
    rows = [torch.frombuffer(bytearray(key), dtype=torch.uint8) for key in hashes]
    return torch.stack([row.repeat(-(-size // len(row)))[:size] for row in rows])


def _kv_caches(cache: KVCacheConfig) -> dict[str, torch.Tensor]:
    """One allocation for each group, layer by layer, as vLLM makes it."""
    tensors: dict[str, torch.Tensor] = {}
    for group in cache.kv_cache_groups:
        size = group.kv_cache_spec.page_size_bytes
        layers = torch.zeros((len(group.layer_names), cache.num_blocks, size), dtype=torch.uint8)
        tensors |= zip(group.layer_names, layers, strict=True)
    return tensors


# Another engine of the same model, whose prompts the manager then holds


def _donor(subject: Subject) -> Scheduler:
    unit = subject._unit
    config = _with_manager(subject._config, kv_connector=SUBJECT, kv_role="kv_both")
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.max_num_batched_tokens = 7 * unit - 1  # chunks that end inside of a block
    config.scheduler_config.enable_chunked_prefill = True
    config.scheduler_config.async_scheduling = False
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.num_gpu_blocks = 2048
    return Scheduler(
        vllm_config=config,
        kv_cache_config=replace(subject._cache, num_blocks=2048),
        structured_output_manager=StructuredOutputManager(config),
        block_size=unit,
        hash_block_size=subject._hash,
    )


def _publish(donor: Scheduler, tokens: list[int], hashes: list[bytes]) -> None:
    """Run a prompt of one token more than ``tokens`` on the donor until the manager has what a hit on those needs."""
    deadline = time.monotonic() + PATIENCE
    prompt = [*tokens, 0]
    while _resident(donor, prompt, hashes) < len(tokens):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the donor could not publish {len(tokens)} tokens")
        donor.add_request(_request("prompt", prompt, hashes))
        while donor.has_requests():
            output = donor.schedule()
            names = list(output.num_scheduled_tokens)
            done = [donor.requests[name].num_computed_tokens >= len(prompt) for name in names]
            indices = {name: at for at, name in enumerate(names)}
            sampled = [[0] if now else [] for now in done]
            donor.update_from_output(output, ModelRunnerOutput(names, indices, sampled_token_ids=sampled))
        donor.reset_prefix_cache()


def _resident(donor: Scheduler, prompt: list[int], hashes: list[bytes]) -> int:
    """Leading tokens of a prompt that an engine without any could restore."""
    connector = donor.connector
    question = _request("question", prompt, hashes)
    found, _ = KvHoldConnector.get_num_new_matched_tokens(connector, question, 0)
    connector.request_finished_all_groups(question, tuple([] for _ in connector._cache.kv_cache_groups))
    donor.update_from_output(donor.schedule(), ModelRunnerOutput([], {}))  # a question belongs to a step
    return found or 0


def _request(name: str, tokens: list[int], hashes: list[bytes]) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=lambda request: hashes[len(request.block_hashes) :],
    )


# Hooks into vLLM


def _hook_scheduler() -> None:
    schedule, update = Scheduler.schedule, Scheduler.update_from_output

    @wraps(schedule)
    def schedule_and_carry_out(self: Scheduler, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = schedule(self, *args, **kwargs)
        if (subject := _subject_of(self)) is not None:
            subject.compute(self, output)
            subject.carry_out(output)
        return output

    @wraps(update)
    def update_with_report(self: Scheduler, scheduler_output: SchedulerOutput, result: ModelRunnerOutput) -> Any:
        if (subject := _subject_of(self)) is not None:
            result = subject.reported(self, scheduler_output, result)
        return update(self, scheduler_output, result)

    Scheduler.schedule, Scheduler.update_from_output = schedule_and_carry_out, update_with_report


def _subject_of(scheduler: Scheduler) -> Subject | None:
    if isinstance(scheduler.connector, MultiConnector):
        return next((each for each in scheduler.connector._connectors if isinstance(each, Subject)), None)
    if isinstance(scheduler.connector, Mock):
        found = vars(scheduler.connector).get("subject")
        return found if type(found) is Subject else None
    return scheduler.connector if isinstance(scheduler.connector, Subject) else None


class Confirming(MagicMock):
    """A mocked lookup whose answers the connector's own lookup confirms."""

    subject: Subject

    def __call__(self, request: Request, computed: int) -> tuple[int | None, bool]:
        return self.subject.confirmed(request, computed, super().__call__(request, computed))

    def _get_child_mock(self, **kwargs: Any) -> MagicMock:
        return MagicMock(**kwargs)


def mocked(subject: Subject) -> MagicMock:
    """What the tests' ``create_mock_connector`` returns: a mock around the subject."""
    mock = MagicMock(spec=Subject, wraps=subject)
    mock.subject = subject
    mock.supports_divergent_local_hybrid_hits = subject.supports_divergent_local_hybrid_hits
    mock.requires_kv_delivery = subject.requires_kv_delivery
    mock.get_num_new_matched_tokens = Confirming(wraps=subject.get_num_new_matched_tokens)
    mock.get_num_new_matched_tokens.subject = subject

    def finished(request: Request, block_ids: tuple[list[int], ...]) -> Any:
        answer = subject.request_finished_all_groups(request, block_ids)
        mock.request_finished(request, block_ids[0])  # which is what the tests count
        return answer

    mock.request_finished_all_groups.side_effect = finished
    return mock


# What each file of vLLM's tests gets


def _schedulers(module: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """Every scheduler that the test builds has the subject, whichever connector it names."""
    for name in ("NixlConnector", "ExampleConnector", "MockKVConnector"):
        patch.setitem(KVConnectorFactory._registry, name, lambda: Subject)
    if (configure := getattr(module, "create_vllm_config", None)) is not None:
        patch.setattr(module, "create_vllm_config", lambda **kwargs: configure(**({"kv_role": "kv_both"} | kwargs)))
    if hasattr(module, "create_mock_connector"):
        patch.setattr(module, "create_mock_connector", lambda: mocked(_subjects[-1]))


def _all_schedulers(module: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """Also schedulers that the test builds without a connector."""
    _schedulers(module, patch)
    for name, wanted in (("create_scheduler", SUBJECT), ("create_scheduler_with_priority", True)):
        if (create := getattr(module, name, None)) is not None:
            patch.setattr(module, name, _by_default(create, wanted))


def _states(block_size: int) -> MambaSpec:
    return MambaSpec(block_size=block_size, shapes=((4, 8),), dtypes=(torch.float32,), mamba_cache_mode="align")


_SPEC: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
GROUPS: dict[str, list[KVCacheSpec]] = {
    "one-group": [],
    "window": [SlidingWindowSpec(**_SPEC, sliding_window=100)],
    "chunks": [ChunkedLocalAttentionSpec(**_SPEC, attention_chunk_size=64)],
    "states": [_states(16)],
    "partial-blocks": [_states(64)],  # hits may end inside of a block
}
"""Cache groups that the random test is given besides its own."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if _file(metafunc.definition).attach == "random":
        metafunc.fixturenames.append("kvhold_groups")
        metafunc.parametrize("kvhold_groups", list(GROUPS), indirect=True)


@pytest.fixture
def kvhold_groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The random test's schedulers have these groups."""

    def build(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, **kwargs: Any) -> Scheduler:
        vllm_config.cache_config.mamba_cache_mode = "align"
        groups = [KVCacheGroupSpec([f"layer {at}"], spec) for at, spec in enumerate(GROUPS[request.param])]
        cache = replace(kv_cache_config, kv_cache_groups=[*kv_cache_config.kv_cache_groups, *groups])
        register_all_kvcache_specs(vllm_config)
        unit = max(group.kv_cache_spec.block_size for group in cache.kv_cache_groups)
        return Scheduler(vllm_config=vllm_config, kv_cache_config=cache, **(kwargs | {"block_size": unit}))

    if GROUPS[request.param]:
        monkeypatch.setattr(test_scheduler, "Scheduler", build)


def _random(module: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """Random requests, live; without images, since the stand-in for the model takes none."""
    _all_schedulers(module, patch)
    patch.setattr(Subject, "live", True)
    create = module._create_random_request
    patch.setattr(module, "_create_random_request", lambda **kwargs: create(**(kwargs | {"num_mm_item_range": (0, 0)})))


def _configured(module: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """Schedulers for which the test writes the configuration itself."""
    config, transfer = module.VllmConfig, KVTransferConfig(kv_connector=SUBJECT, kv_role="kv_both")
    patch.setattr(module, "VllmConfig", lambda **kwargs: config(**({"kv_transfer_config": transfer} | kwargs)))


def _streaming(module: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """Sessions whose prompt grows. The test's scheduler has mocks for a configuration, and its requests no hashes."""
    settings = {"num_blocks": 1000, "max_model_len": 1024, "skip_tokenizer_init": True, "enable_prefix_caching": True}
    patch.setattr(module, "create_scheduler", lambda: create_scheduler(use_kv_connector=SUBJECT, **settings))
    original = module.DummyRequest

    class Hashed(original):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._block_hasher = get_request_block_hasher(16, sha256)
            self.update_block_hashes()

    patch.setattr(module, "DummyRequest", Hashed)


def _by_default(create: Callable[..., Scheduler], connector: Any) -> Callable[..., Scheduler]:
    return lambda *args, **kwargs: create(*args, **({"use_kv_connector": connector} | kwargs))


def _registry(module: ModuleType, patch: pytest.MonkeyPatch) -> None:
    def load() -> type[KvHoldConnector]:
        _count("attached")
        return KvHoldConnector

    for name in ("SimpleCPUOffloadConnector", "OffloadingConnector"):
        patch.setitem(KVConnectorFactory._registry, name, load)


def _children(module: ModuleType, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "MockHMAConnector", Subject)


def _second_child(module: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """Ours is MultiConnector's second child, live. The test reads plans of the connector that it replaces."""

    class Plan(StepPlan):
        store_event = -1

        @property
        def load_gpu_blocks(self) -> list[int]:
            return [block for load in self.loads for block in load.blocks]

    class Child(Subject):
        live = True
        scheduler_manager = SimpleNamespace(_expected_worker_count=1)
        stored = -1

        def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepPlan:
            plan = super().build_connector_meta(scheduler_output)
            self.stored = plan.step if plan.publishes else self.stored  # the test looks a step later than we store
            plan.__class__, plan.store_event = Plan, self.stored
            return plan

    patch.setitem(KVConnectorFactory._registry, "SimpleCPUOffloadConnector", lambda: Child)
    patch.setattr(module, "SimpleCPUOffloadMetadata", Plan)
    patch.setattr(module, "SimpleCPUOffloadWorkerMetadata", lambda **_: CopyReport())


def _handshake(module: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """The engine gives our class the reports of all stages."""

    class Handshaken(KvHoldConnector):
        def __init__(self) -> None:
            _count("attached")
            self._scheduler = None
            self.legacy_metadata: dict[int, Any] | None = None
            self.pp_aware_metadata: dict[tuple[int, int], Any] | None = None

        def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
            super().set_xfer_handshake_metadata_pp_aware(metadata)
            self.pp_aware_metadata = metadata

    patch.setattr(module, "_PPAwareConnector", Handshaken)


def _recorder(module: ModuleType, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(KVConnectorFactory._registry, "TestExampleConnector", lambda: Recorder)


class Recorder(Subject):
    """A worker half that counts the calls from outside."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.call_record: dict[str, int] = defaultdict(int)
        self._inside = False
        for name in ("bind_connector_metadata", "start_load_kv", "wait_for_save", "clear_connector_metadata"):
            setattr(self, name, self._counted(name, getattr(self, name)))

    def _counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            outermost, self._inside = not self._inside, True
            self.call_record[name] += outermost
            try:
                return method(*args, **kwargs)
            finally:
                self._inside = not outermost

        return counted


def _runner_v2(module: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """The mocked worker half passes each call on to a real one."""
    real = Subject(create_vllm_config(kv_connector=SUBJECT), KVConnectorRole.WORKER, KVCacheConfig(0, [], []))
    tensors = _kv_caches(real._cache)
    real.register_kv_caches(tensors)
    real._ranks = [(real, tensors)]
    _subjects.append(real)

    class Through(Mock):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            getattr(real, self._mock_name)(*args, **kwargs)
            return super().__call__(*args, **kwargs)

    def backend() -> Mock:
        mock = Mock()
        for name in dir(KvHoldConnector):
            if not name.startswith("_") and name != "register_kv_caches" and callable(getattr(real, name)):
                setattr(mock, name, Through(name=name))
        return mock

    patch.setattr(module, "Mock", backend)


# pytest


class Guard(logging.Handler):
    """Exceptions that the connector's guards kept from the engine: no test may pass with one."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.seen.append(self.format(record))


_guard = Guard()
_counts: Counter[str] = Counter()  # of the test that runs
_totals: Counter[str] = Counter()
_files: dict[str, bool] = {}  # whether a test of it had the connector


def _count(what: str) -> None:
    _counts[what] += 1


def pytest_configure(config: pytest.Config) -> None:
    for marker in ("cpu_test", "skip_global_cleanup"):
        config.addinivalue_line("markers", f"{marker}: vLLM's")
    logging.getLogger(product.__name__).addHandler(_guard)
    KVConnectorFactory._registry[SUBJECT] = lambda: Subject
    init_none_hash(sha256)  # as every engine does that has a connector
    registry._run_in_subprocess = lambda inspect: inspect()  # spares a second import of vLLM
    _hook_scheduler()


def _file(item: pytest.Item) -> selection.File:
    return selection.FILES[item.nodeid.split("::")[0]]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if not _file(item).wants(item.name)])
    items[:] = [item for item in items if _file(item).wants(item.name)]
    for item in items:
        assert isinstance(item, pytest.Function)
        file, source = _file(item), inspect.getsource(item.function)
        if (why := file.reason(item.name, item.originalname, later=LATER)) is not None:
            item.add_marker(pytest.mark.skip(reason=why))
        for model, why in selection.ABSENT_MODELS.items():
            if model in source:
                item.add_marker(pytest.mark.skip(reason=why))
        if (why := file.refusal(item.name)) is not None:
            item.add_marker(pytest.mark.xfail(raises=Unsupported, strict=True, reason=why))


@pytest.fixture(scope="session", autouse=True)
def kvhold_manager() -> Iterator[None]:
    global _socket
    with tempfile.TemporaryDirectory(prefix="kvhold-") as folder:
        manager = Manager(Path(folder), dram="64MiB")
        _socket = manager.socket
        yield
        assert manager.alive, manager.log_tail()
        assert manager.terminate() == 0, manager.log_tail()


@pytest.fixture(autouse=True)
def kvhold_subject(
    request: pytest.FixtureRequest, kvhold_manager: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    # No test finds what another one left: each has a model of its own.
    monkeypatch.setattr(identity, "weights_identity", lambda *_: request.node.nodeid)
    _counts.clear()
    _guard.seen.clear()
    globals()[f"_{_file(request.node).attach}"](request.module, monkeypatch)
    if _file(request.node).attach == "random":
        request.getfixturevalue("kvhold_groups")
    yield
    for subject in reversed(_subjects):
        subject.close()
    _subjects.clear()
    attached, name = _counts["attached"] > 0, request.node.nodeid.split("::")[0]
    _files[name] = _files.get(name, False) or attached
    _totals["tests"] += attached
    _totals.update({name: _counts[name] for name in ("loads", "hybrid loads")})
    assert not _guard.seen, "\n".join(_guard.seen)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not all(_files.values()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name in (name for name, attached in _files.items() if not attached):
        terminalreporter.write_line(f"ERROR {name}: no test had kvhold's connector")
    terminalreporter.write_line(
        f"kvhold took part in {_totals['tests']} tests; {_totals['loads']} loads were checked byte by byte, "
        f"{_totals['hybrid loads']} of them of several cache groups"
    )
