"""pytest plugin: vLLM's own tests run against kvhold's connector.

Where a test would build a connector of vLLM's, or mock one, it gets :class:`Subject`: both halves of KvHoldConnector,
unchanged, attached to a real manager, with KV tensors of the size that the test's configuration asks for. Whenever a
test schedules a step, the worker half carries it out, and its report goes into the next ``update_from_output``.

A test says which requests have how much of their prompt outside (its *script*). Where kvhold could say the same, the
manager is first made to hold just that, by another engine of the same model, and the connector's own lookup must find
it; and when the test says that a load has arrived, the worker half must have ended it. What kvhold never says is only
passed on: a synchronous load, a part of a block, the last token of a prompt.
"""

import copy
import inspect
import logging
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, Mock

import bed  # noqa: F401 - the environment of vLLM and torch, before either is imported
import pytest
import selection
import torch
from manager_process import Manager
from tests.v1.kv_connector.unit.utils import MockKVConnector, create_vllm_config
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.model_executor.models import registry
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvhold.engines.vllm import connector as product
from kvhold.engines.vllm import identity
from kvhold.engines.vllm.connector import KvHoldConnector
from kvhold.engines.vllm.plans import CopyReport, StepPlan
from kvhold.engines.vllm.support import Unsupported

SUBJECT = "KvHoldSubject"
"""Its name in vLLM's registry of connectors."""
PATIENCE = 10.0
"""Seconds for what takes milliseconds, before a test fails."""
Hits = Callable[[Request, int], tuple[int | None, bool]]

_socket: Path
_subjects: list["Subject"] = []


# The connector under test


class Subject(KvHoldConnector):
    """A scheduler half with its worker half, its manager and the test's script.

    ``live`` ones have no script: what the connector finds is loaded, and the test is told when it has arrived.
    """

    live = False

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        transfer = vllm_config.kv_transfer_config
        script = dict(transfer.kv_connector_extra_config)
        config, cache = _with_manager(vllm_config), _one_group(kv_cache_config)
        _count("attached")
        super().__init__(config, role, cache)
        self._script: Hits | None = None
        self._mock = MockKVConnector(vllm_config, role, kv_cache_config) if "matched_tokens" in script else None
        self._block = cache.kv_cache_groups[0].kv_cache_spec.block_size
        self._config, self._cache = config, cache
        self._donor: Scheduler | None = None
        self._promised: dict[str, tuple[int, int]] = {}  # blocks [first, last) of requests whose load must succeed
        self._ended: dict[str, bool] = {}  # loads that the worker half has ended; whether they failed
        self._steps: dict[int, tuple[CopyReport, set[str]]] = {}  # what the worker half ended: publishes, and loads
        self._other: KvHoldConnector | None = None
        if role is KVConnectorRole.WORKER:
            return
        self._other = KvHoldConnector(config, KVConnectorRole.WORKER, cache)
        self._tensors = _kv_caches(cache)  # the halves know addresses only
        self._other.register_kv_caches(self._tensors)
        self.set_xfer_handshake_metadata({0: self._other.get_handshake_metadata()})
        _subjects.append(self)

    def close(self) -> None:
        self.shutdown()
        if self._other is not None:
            self._other.shutdown()

    # --- the script: tests replace the method on the instance -------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, "_script" if name == "get_num_new_matched_tokens" else name, value)

    def __delattr__(self, name: str) -> None:
        if name == "get_num_new_matched_tokens":
            self._script = None
        else:
            object.__delattr__(self, name)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.live:
            return self._found(request, num_computed_tokens)
        if self._script is not None:
            said = self._script(request, num_computed_tokens)
        elif self._mock is not None:
            said = self._mock.get_num_new_matched_tokens(request, num_computed_tokens)
        elif (request.kv_transfer_params or {}).get("do_remote_prefill"):
            rest = (request.num_tokens - 1) // self._block * self._block - num_computed_tokens
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
        first, last = computed // self._block, min(computed + tokens, request.num_tokens - 1) // self._block
        if wanted:
            self._stock(request, last)
        found, found_async = super().get_num_new_matched_tokens(request, computed)
        if wanted and last > first:
            least = (last - first) * self._block
            assert found is not None, f"kvhold had no answer for {request.request_id} within a second"
            assert found >= least, f"kvhold finds {found} tokens of {request.request_id}, there are {least}"
            assert found_async, "kvhold's loads are asynchronous"
            if computed + tokens == last * self._block:
                self._promised[request.request_id] = first, last
        return said

    def _found(self, request: Request, computed: int) -> tuple[int | None, bool]:
        found, load_async = super().get_num_new_matched_tokens(request, computed)
        if found:
            first = computed // self._block
            self._promised[request.request_id] = first, first + found // self._block
        return found, load_async

    def _stock(self, request: Request, blocks: int) -> None:
        """Have another engine of the same model publish the first blocks of ``request``."""
        if self._donor is None:
            self._donor = _donor(self._config, self._cache)
        tokens, hashes = list(request.all_token_ids), list(request.block_hashes)
        assert len(hashes) >= blocks
        _publish(self._donor, tokens[: blocks * self._block], hashes[:blocks])

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepPlan:
        plan = super().build_connector_meta(scheduler_output)
        plan.requests = MockKVConnector.build_connector_meta(self, scheduler_output).requests  # which tests count
        return plan

    # --- the worker's part of a step ----------------------------------------------------------------------------

    def compute(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """The forward pass: every block that it completes then holds its hash."""
        for name, scheduled in output.num_scheduled_tokens.items():
            request = scheduler.requests[name]
            end = min(request.num_computed_tokens // self._block, len(request.block_hashes))
            start = (request.num_computed_tokens - scheduled) // self._block
            if start < end:
                table = scheduler.kv_cache_manager.get_block_ids(name)[0][start:end]
                for tensor in self._tensors.values():
                    tensor[table] = _pages(request.block_hashes[start:end], tensor)

    def carry_out(self, output: SchedulerOutput) -> None:
        """Run ``output``'s plan on the worker half, to the end of its copies."""
        plan, worker = output.kv_connector_metadata, self._other
        if not isinstance(plan, StepPlan):
            return
        worker.handle_preemptions(plan)
        worker.bind_connector_metadata(plan)
        worker.start_load_kv(None)
        worker.wait_for_save()
        loads, batches = {load.request for load in plan.loads}, {publish.batch for publish in plan.publishes}
        self._ended = {name: failed for name, failed in self._ended.items() if name not in loads}
        report = CopyReport()
        deadline = time.monotonic() + PATIENCE
        while True:
            results = worker.get_transfer_results(output.finished_req_ids)
            self._ended |= {name: name in results.failed_recving for name in results.finished_recving}
            part = worker.build_connector_worker_meta()
            report = report.aggregate(part) if part is not None else report
            if loads <= self._ended.keys() and batches <= report.ended.keys():
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"the worker half has not ended {plan}")
            time.sleep(0.0002)
        worker.clear_connector_metadata()
        self._steps[plan.step] = report, loads

    def reported(self, scheduler: Scheduler, output: SchedulerOutput, result: ModelRunnerOutput) -> ModelRunnerOutput:
        """``result`` with what the worker half reported of ``output``'s step."""
        said = result.kv_connector_output
        plan = getattr(output, "kv_connector_metadata", None)
        report, loads = CopyReport(), set()
        if isinstance(plan, StepPlan):
            report, loads = self._steps.pop(plan.step, (report, loads))
        if self.live and loads:
            said = KVConnectorOutput(finished_recving=loads)
        for name in (said.finished_recving or ()) if said is not None else ():
            if (promised := self._promised.pop(name, None)) is not None:
                self._check_arrived(scheduler, name, *promised)
        if report.ended:
            said = replace(said if said is not None else KVConnectorOutput(), kv_connector_worker_meta=report)
        return replace(result, kv_connector_output=said)

    def _check_arrived(self, scheduler: Scheduler, name: str, first: int, last: int) -> None:
        assert name in self._ended, f"{name}'s load has arrived, but the worker half never ended it"
        assert not self._ended[name], f"{name}'s load failed in the worker half"
        request = scheduler.requests[name]
        table = scheduler.kv_cache_manager.get_block_ids(name)[0][first:last]
        for tensor in self._tensors.values():
            wanted = _pages(request.block_hashes[first:last], tensor)
            assert torch.equal(tensor[table], wanted), f"{name}'s blocks {table} do not hold what was loaded"
        _count("loads")


def _with_manager(config: VllmConfig, **changes: Any) -> VllmConfig:
    """A copy of ``config`` for kvhold: its settings instead of those of the connector that the test named."""
    config = copy.copy(config)
    settings = {"socket": str(_socket), "step_budget_ms": 1000, "answer_deadline_ms": 1000}
    transfer = copy.copy(config.kv_transfer_config)
    for name, value in {"kv_connector_extra_config": settings, **changes}.items():
        setattr(transfer, name, value)
    config.kv_transfer_config = transfer
    return config


def _one_group(cache: KVCacheConfig) -> KVCacheConfig:
    """``cache``, or a minimal one for tests that have no need of any."""
    if cache.kv_cache_groups:
        return cache
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return KVCacheConfig(num_blocks=16, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])


def _pages(hashes: list[bytes], tensor: torch.Tensor) -> torch.Tensor:
    """Blocks of ``tensor`` that hold ``hashes``, each over and over."""
    rows = [torch.frombuffer(bytearray(key), dtype=torch.uint8) for key in hashes]
    size = tensor.shape[1]
    return torch.stack([row.repeat(-(-size // len(row)))[:size] for row in rows])


def _kv_caches(cache: KVCacheConfig) -> dict[str, torch.Tensor]:
    """One allocation, layer by layer, as vLLM makes it."""
    [group] = cache.kv_cache_groups
    layers = torch.zeros(
        (len(group.layer_names), cache.num_blocks, group.kv_cache_spec.page_size_bytes), dtype=torch.uint8
    )
    return dict(zip(group.layer_names, layers, strict=True))


# Another engine of the same model, whose prompts the manager then holds


def _donor(config: VllmConfig, cache: KVCacheConfig) -> Scheduler:
    block = cache.kv_cache_groups[0].kv_cache_spec.block_size
    config = _with_manager(config, kv_connector=SUBJECT, kv_role="kv_both", engine_id="donor")
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.max_num_batched_tokens = 7 * block - 1  # chunks that end inside of a block
    config.scheduler_config.enable_chunked_prefill = True
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.num_gpu_blocks = 2048
    return Scheduler(
        vllm_config=config,
        kv_cache_config=replace(cache, num_blocks=2048),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block,
        hash_block_size=block,
    )


def _publish(donor: Scheduler, tokens: list[int], hashes: list[bytes]) -> None:
    """Run a prompt of ``tokens`` on the donor until the manager says that it has all of its blocks."""
    deadline = time.monotonic() + PATIENCE
    while _resident(donor, tokens, hashes) < len(hashes):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the donor could not publish {len(hashes)} blocks")
        donor.add_request(_request("prompt", tokens, hashes))
        while donor.has_requests():
            output = donor.schedule()
            names = list(output.num_scheduled_tokens)
            done = [donor.requests[name].num_computed_tokens >= len(tokens) for name in names]
            indices = {name: at for at, name in enumerate(names)}
            sampled = [[0] if now else [] for now in done]
            donor.update_from_output(output, ModelRunnerOutput(names, indices, sampled_token_ids=sampled))
        donor.reset_prefix_cache()


def _resident(donor: Scheduler, tokens: list[int], hashes: list[bytes]) -> int:
    """Leading blocks of a prompt that the manager has."""
    connector = donor.connector
    question = _request("question", [*tokens, 0], hashes)
    found, _ = KvHoldConnector.get_num_new_matched_tokens(connector, question, 0)
    connector.request_finished_all_groups(question, ([],))
    donor.update_from_output(donor.schedule(), ModelRunnerOutput([], {}))  # a question belongs to a step
    return (found or 0) // connector._block


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


def _random(module: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """Random requests, live; without images, since the stand-in for the model takes none."""
    _all_schedulers(module, patch)
    patch.setattr(Subject, "live", True)
    create = module._create_random_request
    patch.setattr(module, "_create_random_request", lambda **kwargs: create(**(kwargs | {"num_mm_item_range": (0, 0)})))


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


def _handshake(module: ModuleType, patch: pytest.MonkeyPatch) -> None:
    class Handshaken(KvHoldConnector):
        def __init__(self) -> None:
            _count("attached")
            self.legacy_metadata: dict[int, Any] | None = None

        def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
            self.legacy_metadata = metadata

    patch.setattr(module, "_LegacyConnector", Handshaken)


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
    real._tensors = _kv_caches(real._cache)
    real.register_kv_caches(real._tensors)
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
        if (why := file.without.get(item.name, file.without.get(item.originalname))) is not None:
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
    yield
    for subject in reversed(_subjects):
        subject.close()
    _subjects.clear()
    attached, name = _counts["attached"] > 0, request.node.nodeid.split("::")[0]
    _files[name] = _files.get(name, False) or attached
    _totals["tests"] += attached
    _totals["loads"] += _counts["loads"]
    assert not _guard.seen, "\n".join(_guard.seen)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not all(_files.values()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name in (name for name, attached in _files.items() if not attached):
        terminalreporter.write_line(f"ERROR {name}: no test had kvhold's connector")
    terminalreporter.write_line(
        f"kvhold took part in {_totals['tests']} tests; {_totals['loads']} loads were checked byte by byte"
    )
