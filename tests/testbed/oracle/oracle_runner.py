"""vLLM's own scheduler and kvhold's own connector, with a model runner that computes nothing and checks everything.

Before each step's forward, whatever a model would read from the KV cache is compared byte by byte with what it must be.
Copies end when the test wants, in the steps of a random number generator, per rank: a GPU's do, too.
"""

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from testbed.oracle.oracle_kinds import Kind
from testbed.oracle.oracle_kv import Array, Memory, Tape, WrongBytes, allocate, first_needed
from vllm.config import KVTransferConfig, SpeculativeConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups  # from vLLM 0.33 on
except ModuleNotFoundError:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

from kvhold.copy.host import HostCopier
from kvhold.copy.job import Job

MAX_LEN = 512


# --- copies that take their time --------------------------------------------------------------------------------


@dataclass
class Weather:
    """How copies fare: ``late`` is the chance, per engine step, that the next copy of a rank does not end in it."""

    random: random.Random
    late: float = 0.0
    refuse: float = 0.0  # begin_restore raises
    fail: float = 0.0  # a restore ends with an error, having copied nothing
    spoil: float = 0.0  # a publish ends with an error
    # Bugs, which the test must notice:
    break_restore: Callable[..., tuple[Any, ...]] | None = None  # other arguments for the copier
    break_publish: Callable[..., tuple[Any, ...]] | None = None
    lie: bool = False  # a publish is said to have ended when it begins


class SlowCopier:
    """A HostCopier whose copies end in some later step; those of one direction in the order in which they began."""

    def __init__(self, real: Any, weather: Weather, counts: Counter[str]) -> None:
        self._real = real
        self._weather = weather
        self._counts = counts
        self._waiting: tuple[deque[Any], deque[Any]] = (deque(), deque())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def begin_publish(self, *args: Any, **kwargs: Any) -> Job:
        self._counts["copies out"] += 1
        if self._weather.break_publish is not None:
            args = self._weather.break_publish(*args)
        return self._later(1, self._real.begin_publish, args, kwargs, self._weather.spoil)

    def begin_restore(self, *args: Any, **kwargs: Any) -> Job:
        if self._weather.random.random() < self._weather.refuse:
            self._counts["copies refused"] += 1
            raise RuntimeError("injected: cannot begin")
        if self._weather.break_restore is not None:
            args = self._weather.break_restore(*args)
        self._counts["copies in"] += 1
        return self._later(0, self._real.begin_restore, args, kwargs, self._weather.fail)

    def _later(self, way: int, begin: Callable[..., Job], args: Any, kwargs: Any, fail: float) -> Job:
        job = Job(0)
        failed = self._weather.random.random() < fail
        self._waiting[way].append((job, begin, args, kwargs, failed))
        if way == 1 and self._weather.lie:
            job.end()
        if self._weather.late == 0.0 and way == 1:
            self._run(way)
        return job

    def advance(self) -> None:
        for way in (0, 1):
            while self._waiting[way] and self._weather.random.random() >= self._weather.late:
                self._run(way)

    def _run(self, way: int) -> None:
        job, begin, args, kwargs, failed = self._waiting[way].popleft()
        if failed:
            self._counts["copies failed"] += 1
            if way == 0:  # not all of it was copied, and less of that is known
                arena, parts = args
                copies = [(group, *pair) for group, *pairs in parts for pair in zip(*pairs, strict=True)]
                copied = self._weather.random.randrange(len(copies))
                args = (arena, [(group, [block], [offset]) for group, block, offset in copies[:copied]])
                job.done = self._weather.random.choice([0, copied])
            self._end(begin(*args, **kwargs))
            job.end("injected: failed")
            return
        real = self._end(begin(*args, **kwargs))
        job.size, job.done = real.size, real.done
        job.end(real.error)

    def _end(self, job: Job) -> Job:
        while not job.ended:
            self._real.advance()
        return job


@contextmanager
def slow_copies(weather: Weather, counts: Counter[str]) -> Iterator[None]:
    def make(*args: Any, **kwargs: Any) -> SlowCopier:
        return SlowCopier(HostCopier(*args, **kwargs), weather, counts)

    with patch("kvhold.copy.host.HostCopier", make):
        yield


# --- the engine -------------------------------------------------------------------------------------------------


@dataclass
class Live:
    """What the worker knows of a request, and how it got there."""

    tape: Tape
    prompt: int
    want: int
    request: Request
    tables: list[list[int]] = field(default_factory=list)
    state_column: int | None = None  # preprocess_mamba's mamba_state_idx
    hit: int | None = None  # tokens that were there when it was first scheduled
    external: int = 0  # tokens of the restore that was asked for last
    restored: int = 0  # tokens that a restore has brought and no step has read yet


@dataclass
class Item:
    """What a step does for a request: tokens from ``start`` on. ``digests`` has drafts, ``later`` what was sampled."""

    name: str
    live: Live
    start: int
    count: int
    digests: Array
    later: Array = field(default_factory=lambda: np.zeros(0, np.uint64))
    sampled: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Shape:
    """What differs from engine to engine of one kind."""

    blocks: int
    budget: int
    seats: int
    step_budget_ms: float = 20.0
    answer_deadline_ms: float = 30.0


class OracleEngine:
    """One engine instance of ``kind``, attached to the manager on ``socket``; without one vLLM alone."""

    def __init__(
        self, base: VllmConfig, kind: Kind, shape: Shape, socket: str | None, weather: Weather, counts: Counter[str]
    ) -> None:
        self.kind, self.shape, self.counts, self.weather = kind, shape, counts, weather
        self.noise = np.random.default_rng(weather.random.getrandbits(64))
        self.random = weather.random
        self.live: dict[str, Live] = {}
        self.steps = 0
        self.finished: dict[str, Live] = {}
        self._known: dict[bytes, tuple[Any, int]] = {}  # block hash -> digests, tokens
        config = self._configure(base, socket)
        theirs = self._cache_config(config)
        self.cache = generate_scheduler_kv_cache_config([theirs])  # in which a group has one spec for all of its layers
        layout = config.cache_config.get_resolved_kv_cache_layout()
        register_all_kvcache_specs(config)
        self.workers: list[Any] = []
        self.memories: list[Memory] = []
        drafts = {
            name for group in self.cache.kv_cache_groups for name in group.layer_names if name.startswith("draft")
        }
        try:
            with slow_copies(weather, counts):
                for rank in range(kind.world):
                    mine = copy(config)
                    mine.parallel_config = copy(config.parallel_config)
                    mine.parallel_config.rank = rank
                    memory = allocate(theirs, layout, rank, kind, drafts)
                    self.memories.append(memory)
                    if socket is not None:
                        worker = KVConnectorFactory.create_connector(mine, KVConnectorRole.WORKER, theirs)
                        self.workers.append(worker)
                        worker.register_kv_caches(memory.tensors)
            scheduler_block, hash_block = resolve_kv_cache_block_sizes(self.cache, config)
            self.scheduler = Scheduler(
                vllm_config=config,
                kv_cache_config=self.cache,
                structured_output_manager=SimpleNamespace(
                    accept_tokens=lambda request, tokens: True, validate_tokens=lambda request, tokens: tokens
                ),
                block_size=scheduler_block,
                hash_block_size=hash_block,
            )
        except BaseException:
            for worker in self.workers:
                worker.shutdown()
            raise
        self.manager = self.scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        self.connector = self.scheduler.connector
        partial = getattr(self.manager.coordinator, "enable_partial_hash_hits", False)
        assert partial == kind.partial, f"{kind.name}: hits inside of blocks are {partial}"
        algorithm = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(algorithm)
        self._hasher = get_request_block_hasher(hash_block, algorithm)
        self.hash_block = hash_block
        specs = [group.kv_cache_spec for group in self.cache.kv_cache_groups]
        self._recurrent = [(number, spec) for number, spec in enumerate(specs) if isinstance(spec, MambaSpec)]
        self._new_blocks: list[int] = []
        take = self.pool.get_new_blocks

        def taken(count: int, *args: Any, **kwargs: Any) -> Any:
            blocks = take(count, *args, **kwargs)
            self._new_blocks.extend(block.block_id for block in blocks)
            return blocks

        self.pool.get_new_blocks = taken
        if self.connector is not None:
            self._connect()

    def _connect(self) -> None:
        self._aggregator = KVOutputAggregator.from_connector(self.connector, self.kind.world)
        self.connector.set_xfer_handshake_metadata_pp_aware({})
        tell = self.connector.update_state_after_alloc

        def told(request: Request, blocks: Any, external: int) -> None:
            if external > 0 and request.request_id in self.live:
                self.live[request.request_id].external = external
                self.counts["tokens asked to be restored"] += external
            tell(request, blocks, external)

        self.connector.update_state_after_alloc = told

    def _configure(self, base: VllmConfig, socket: str | None) -> VllmConfig:
        kind, shape = self.kind, self.shape
        config = copy(base)
        config.model_config = copy(base.model_config)
        config.model_config.max_model_len = MAX_LEN
        scheduling = config.scheduler_config = copy(base.scheduler_config)
        scheduling.max_num_seqs = shape.seats
        scheduling.max_num_batched_tokens = shape.budget
        scheduling.policy = kind.policy
        scheduling.max_model_len = MAX_LEN
        cache = config.cache_config = copy(base.cache_config)
        cache.block_size = kind.block_size
        cache.num_gpu_blocks = cache.num_gpu_blocks_override = shape.blocks
        cache.prefix_match_unit = kind.unit
        cache.kv_cache_layout = kind.layout
        if kind.recurrent:
            cache.mamba_cache_mode = "align"
            cache.mamba_block_size = kind.block_size
        parallel = config.parallel_config = copy(base.parallel_config)
        parallel.tensor_parallel_size = kind.ranks
        parallel.prefill_context_parallel_size = kind.prefill_ranks
        parallel.decode_context_parallel_size = kind.token_ranks
        parallel.cp_kv_cache_interleave_size = kind.run
        parallel.world_size = kind.world
        if kind.kv_heads is not None:
            config.model_config.hf_text_config = copy(base.model_config.hf_text_config)
            config.model_config.hf_text_config.num_key_value_heads = kind.kv_heads
        if socket is not None:
            config.kv_transfer_config = KVTransferConfig(
                kv_connector="KvHoldConnector",
                kv_connector_module_path="kvhold.engines.vllm.connector",
                kv_role="kv_both",
                kv_connector_extra_config={
                    "socket": socket,
                    "save_decode_cache": kind.decode,
                    "step_budget_ms": shape.step_budget_ms,
                    "answer_deadline_ms": shape.answer_deadline_ms,
                },
            )
        if kind.method:
            config.speculative_config = SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=kind.drafts,
                prompt_lookup_min=1,
                prompt_lookup_max=3,
                target_model_config=config.model_config,
                target_parallel_config=base.parallel_config,
            )
            config.speculative_config.method = kind.method  # a draft model is not needed for what the scheduler does
            if hasattr(config.speculative_config, "disable_lookahead_block_hashes"):
                # vLLM 0.33 alone has hashes of its own for drafters, which it gives up beside any connector.
                config.speculative_config.disable_lookahead_block_hashes = True
        return config

    def _cache_config(self, config: VllmConfig) -> Any:
        cache = get_kv_cache_config_from_groups(config, self.kind.cache_groups(), 1 << 40)
        assert cache.num_blocks == self.shape.blocks
        cache.kv_cache_layout = self.kind.layout
        if self.kind.token_ranks == 1 and all(isinstance(spec, MLAAttentionSpec) for spec in self.kind.groups):
            cache.kv_tp_replicas = self.kind.ranks
        scheduler_block, hash_block = resolve_kv_cache_block_sizes(cache, config)
        cache.hash_block_size = hash_block
        cache.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(
            cache, config, scheduler_block, hash_block
        )
        return cache

    # --- requests -----------------------------------------------------------------------------------------------

    def request(self, name: str, tokens: list[int], want: int, priority: int = 0) -> Request:
        return Request(
            name,
            tokens,
            SamplingParams(max_tokens=want, ignore_eos=True),
            None,
            arrival_time=float(len(self.live) + len(self.finished)),
            priority=priority,
            block_hasher=self._hasher,
        )

    def add(self, name: str, tokens: list[int], want: int, priority: int = 0) -> None:
        request = self.request(name, tokens, want, priority)
        self.live[name] = Live(Tape(tokens), len(tokens), want, request)
        self.counts["tokens of prompts"] += len(tokens)
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        loading = self.live[name].request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        self.counts["aborted while loading" if loading else "aborted"] += 1
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    @property
    def loading(self) -> list[str]:
        """Requests that wait for a restore."""
        waiting = RequestStatus.WAITING_FOR_REMOTE_KVS
        return [name for name, request in self.scheduler.requests.items() if request.status == waiting]

    @property
    def holds_blocks_beside_running_requests(self) -> bool:
        """Whether vLLM would refuse to preempt all requests in order to forget what it has cached."""
        held = Counter({block.block_id: block.ref_cnt for block in self.pool.blocks if not block.is_null})
        for request in self.scheduler.running:
            for blocks in self.manager.get_block_ids(request.request_id):
                held.subtract(block for block in blocks if block)
        return any(held.values())

    # --- a step -------------------------------------------------------------------------------------------------

    def step(self) -> int:
        """One step of the engine; how many tokens it computed."""
        self.steps += 1
        self._new_blocks.clear()
        output = self.scheduler.schedule()
        self.counts["preempted"] += len(output.preempted_req_ids or ())
        for memory in self.memories:
            if self._new_blocks:
                memory.poison(self._new_blocks, self.noise)
        self._update_states(output)
        batch = self._batch(output)
        reports = [self._execute(rank, output, batch) for rank in range(self.kind.world)]
        for item in batch:
            item.live.restored = 0
            if self._recurrent:
                block = self._recurrent[0][1].block_size
                item.live.state_column = math.ceil((item.start + item.count) / block) - 1
        names = [item.name for item in batch]
        outputs = [
            ModelRunnerOutput(
                names,
                {name: at for at, name in enumerate(names)},
                sampled_token_ids=[list(item.sampled) for item in batch],
                kv_connector_output=report,
            )
            for report in reports
        ]
        done = outputs[0] if len(outputs) == 1 or not self.workers else self._aggregator.aggregate(list(outputs))
        self._note_restores(done.kv_connector_output)
        self.scheduler.update_from_output(output, done)
        if self.kind.drafts:
            self._draft(names)
        for memory in self.memories:
            memory.check_null(f"in step {self.steps}")
        self._note_hashes()
        self._take_finished()
        return output.total_num_scheduled_tokens

    def _update_states(self, output: SchedulerOutput) -> None:
        """Block tables, as the worker has them: what is appended, and all of a resumed request's."""
        for new in output.scheduled_new_reqs:
            live = self.live[new.req_id]
            live.tables = [list(blocks) for blocks in new.block_ids]
            live.state_column = None
        cached = output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            live = self.live[name]
            if name in cached.resumed_req_ids:
                assert blocks is not None
                live.tables = [list(new) for new in blocks]
                live.state_column = None
            elif blocks is not None:
                for table, new in zip(live.tables, blocks, strict=True):
                    table.extend(new)
        for name in output.preempted_req_ids or ():
            if name in self.live:
                self.live[name].state_column = None

    def _batch(self, output: SchedulerOutput) -> list[Item]:
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        batch: list[Item] = []
        for name, count in output.num_scheduled_tokens.items():
            live, start, drafts = self.live[name], starts[name], output.scheduled_spec_decode_tokens.get(name, [])
            tape = live.tape
            assert start + count <= len(tape) + len(drafts), (name, start, count, len(tape), drafts)
            if live.hit is None:
                live.hit = start
            item = Item(name, live, start, count, (Tape([*tape.tokens, *drafts]) if drafts else tape).digests)
            if start + count >= len(tape):
                item.sampled.append(tape.next())
                tape.extend(item.sampled)
                for draft in drafts:
                    if draft != item.sampled[-1]:
                        break
                    item.sampled.append(tape.next())
                    tape.extend(item.sampled[-1:])
                self.counts["drafts accepted"] += len(item.sampled) - 1
                self.counts["drafts rejected"] += len(drafts) - len(item.sampled) + 1
            item.later = tape.digests
            self.counts["tokens computed"] += count
            batch.append(item)
        return batch

    def _execute(self, rank: int, output: SchedulerOutput, batch: list[Item]) -> KVConnectorOutput:
        """What a worker does with a step, in the order of vLLM's GPUModelRunner and its connector mixin."""
        worker, memory = self.workers[rank] if self.workers else None, self.memories[rank]
        plan = output.kv_connector_metadata
        if worker is not None:
            worker.handle_preemptions(plan)
        if output.new_block_ids_to_zero:
            memory.zero(output.new_block_ids_to_zero)
        for source, target in output.kv_cache_block_copies or ():
            memory.copy(source, target)
            self.counts["copies on write"] += rank == 0
        self._move_states(rank, batch)
        if worker is None:
            self._forward(rank, batch)
            self._draft_forward(rank, batch)
            return KVConnectorOutput()
        worker.bind_connector_metadata(plan)
        if output.has_sync_kv_loads:
            worker.start_load_kv(None)
        if batch:
            self._forward(rank, batch)
        if not output.has_sync_kv_loads:
            worker.start_load_kv(None)
        deferred = bool(self.kind.drafts and batch)
        if not deferred:
            worker.wait_for_save()
        report = KVConnectorOutput()
        results = worker.get_transfer_results(output.finished_req_ids)
        report.finished_sending = results.finished_sending
        report.finished_recving = results.finished_recving
        report.failed_recving = results.failed_recving
        report.invalid_block_ids = worker.get_block_ids_with_load_errors()
        report.kv_connector_stats = worker.get_kv_connector_stats()
        report.kv_cache_events = worker.get_kv_connector_kv_cache_events()
        report.kv_connector_worker_meta = worker.build_connector_worker_meta()
        if deferred:
            self._draft_forward(rank, batch)
            worker.wait_for_save()
        worker.clear_connector_metadata()
        return report

    def _move_states(self, rank: int, batch: list[Item]) -> None:
        """preprocess_mamba: the state goes from the block of the step before to the one that this step writes."""
        memory = self.memories[rank]
        for item in batch:
            for group, spec in self._recurrent:
                before = item.live.state_column
                if before is None:
                    before = (item.start - 1) // spec.block_size
                now = math.ceil((item.start + item.count) / spec.block_size) - 1
                table = item.live.tables[group]
                if item.start > 0:
                    memory.check_state(group, table[before], item.start, item.digests, self._what(item, rank))
                    self._count_read(item, rank, group, item.start - 1)
                if before not in (-1, now):
                    memory.copy_state(group, table[before], table[now])

    def _what(self, item: Item, rank: int) -> str:
        return f"step {self.steps}, rank {rank}, request {item.name} at token {item.start}"

    def _count_read(self, item: Item, rank: int, group: int, first: int) -> None:
        """Tokens of ``group`` that are read now and came from a restore."""
        if rank == 0 and item.live.restored > 0:
            self.counts[f"restored and read, group {group}"] += min(item.start - first, item.live.restored)

    def _forward(self, rank: int, batch: list[Item]) -> None:
        """All of a step's tokens are kept before any is read: requests may share blocks that this very step fills."""
        worker, memory = self.workers[rank] if self.workers else None, self.memories[rank]
        for item in batch:
            end = item.start + item.count
            for group, made in enumerate(self.cache.kv_cache_groups):
                table, spec = item.live.tables[group], made.kv_cache_spec
                if isinstance(spec, MambaSpec):
                    column = math.ceil(end / spec.block_size) - 1
                    memory.write_state(group, table[column], item.digests[end - 1])
                    self._checkpoint(memory, group, spec, item)
                else:
                    memory.write(group, table, item.start, item.digests[item.start : end])
        for group, made in enumerate(self.cache.kv_cache_groups):
            spec = made.kv_cache_spec
            if isinstance(spec, MambaSpec):
                continue
            for layer in made.layer_names if worker is not None else ():
                worker.wait_for_layer_load(layer)
            for item in batch:
                first, table = first_needed(spec, item.start), item.live.tables[group]
                memory.check(group, table, first, item.start, item.digests, self._what(item, rank))
                self._count_read(item, rank, group, first)
            for layer in made.layer_names if worker is not None else ():
                worker.save_kv_layer(layer, memory.tensors[layer], None)

    def _checkpoint(self, memory: Memory, group: int, spec: MambaSpec, item: Item) -> None:
        """A state inside of a prefill, where the backend can keep one: a GPU's Mamba2 can."""
        if not spec.num_prefill_checkpoint_blocks:
            return
        (offset,), (column,) = compute_mamba_prefill_checkpoints(
            [item.start + item.count],
            [item.count],
            self.hash_block,
            spec.block_size,
            spec.prefill_checkpoint_alignment,
            False,
            self.cache.cache_hit_alignment_tokens,
        )
        if column >= 0 and (block := item.live.tables[group][column]) != 0:
            memory.write_state(group, block, item.digests[item.start + offset - 1])
            self.counts["states inside of a prefill"] += 1

    def _draft_forward(self, rank: int, batch: list[Item]) -> None:
        """EAGLE's head, once tokens were sampled: it keeps KV for all of them but the last, and nonsense behind it."""
        memory = self.memories[rank]
        for group in self.kind.eagle:
            for item in batch:
                end, table = min(item.start + item.count, len(item.later) - 1), item.live.tables[group]
                memory.write(group, table, item.start, item.later[item.start + 1 : end + 1], draft=True)
                memory.scribble(group, table, end, self.kind.drafts, self.noise)
            for item in batch:
                first = first_needed(self.cache.kv_cache_groups[group].kv_cache_spec, item.start)
                table, what = item.live.tables[group], self._what(item, rank)
                memory.check(group, table, first, item.start, item.later, what, draft=True)

    def _draft(self, names: list[str]) -> None:
        drafts: list[list[int]] = []
        for name in names:
            tape = Tape(self.live[name].tape.tokens)
            guess: list[int] = []
            for _ in range(self.kind.drafts):
                guess.append(tape.next() if self.random.random() < 0.6 else 99)
                tape.extend(guess[-1:])
            drafts.append(guess)
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    # --- what must hold -----------------------------------------------------------------------------------------

    def _note_restores(self, report: KVConnectorOutput) -> None:
        for name in report.finished_recving or ():
            live = self.live[name]
            if live.request.is_finished():
                self.counts["restores nobody waits for"] += 1
            elif name in report.failed_recving or any(
                report.invalid_block_ids.intersection(blocks) for blocks in self.manager.get_block_ids(name)
            ):
                self.counts["restores failed"] += 1
            else:
                self.counts["restores"] += 1
                self.counts["tokens restored"] += live.external
                live.restored = live.external

    def _note_hashes(self) -> None:
        for live in self.live.values():
            hashes = live.request.block_hashes
            for at in range(len(hashes) - 1, -1, -1):
                key = bytes(hashes[at])
                if key in self._known:
                    break
                self._known[key] = (live.tape, (at + 1) * self.hash_block)

    def check_cached(self) -> int:
        """Every block that the engine would find holds what its hash says; how many there are."""
        count = 0
        for block in self.pool.blocks:
            if block.block_hash is None or block.is_null:
                continue
            group, key = get_group_id(block.block_hash), bytes(get_block_hash(block.block_hash))
            tape, end = self._known[key]
            spec = self.cache.kv_cache_groups[group].kv_cache_spec
            count += 1
            for rank, memory in enumerate(self.memories):
                what = f"after step {self.steps}, rank {rank}, cached block {block.block_id}"
                if isinstance(spec, MambaSpec):
                    memory.check_state(group, block.block_id, end, tape.digests, what)
                else:
                    size = self.kind.block_tokens(spec)
                    first = (end - 1) // size * size
                    table = [0] * (first // size) + [block.block_id]
                    memory.check(group, table, first, end, tape.digests, what)
                    memory.check(group, table, first, end, tape.digests, what, draft=True)
        return count

    def _take_finished(self) -> None:
        for name, live in list(self.live.items()):
            if not live.request.is_finished():
                continue
            if name in self.scheduler.requests:
                continue  # a restore of it is still under way
            del self.live[name]
            self.finished[name] = live
            tokens = list(live.request.output_token_ids)
            expected = Tape(live.tape.tokens[: live.prompt])
            while len(expected) < live.prompt + len(tokens):
                expected.extend([expected.next()])
            if tokens != expected.tokens[live.prompt :]:
                raise WrongBytes(f"request {name} returned {tokens}, not {expected.tokens[live.prompt :]}")
            if live.request.status == RequestStatus.FINISHED_LENGTH_CAPPED:
                assert len(tokens) == live.want, (name, tokens, live.want)
                self.counts["finished"] += 1
            else:
                assert live.request.status == RequestStatus.FINISHED_ABORTED, (name, live.request.status)

    def story(self) -> str:
        """What the engine and both halves of the connector are waiting for."""
        requests = {name: request.status.name for name, request in self.scheduler.requests.items()}
        copies = [(worker._copies.loads, worker._copies.publishes) for worker in self.workers]
        half = getattr(self.connector, "_scheduler", None)
        restores = half.restores._under_way if half is not None else None
        return (
            f"requests {requests}, copies of the workers {copies}, restores {restores}, "
            f"received {self.scheduler.finished_recving_kv_req_ids}, "
            f"free blocks {self.pool.get_num_free_blocks()} of {self.shape.blocks - 1}, {self.shape}"
        )

    def check_idle(self) -> None:
        """Nothing is lost and nothing is held."""
        assert not self.live, f"requests that never finished: {[live.request for live in self.live.values()]}"
        assert not self.scheduler.requests
        free, all_blocks = self.pool.get_num_free_blocks(), self.shape.blocks - 1
        if free != all_blocks:
            held = {block.block_id: block.ref_cnt for block in self.pool.blocks if block.ref_cnt and not block.is_null}
            raise AssertionError(f"{all_blocks - free} blocks are held by nobody: {held} (references by block)")

    def close(self) -> None:
        self.weather.late = 0.0
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()
