"""The scheduler half: keys, questions, plans. It never touches KV bytes and never waits beyond the step's budget."""

import os
import time
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvhold.client.channel import Channel
from kvhold.client.control import Control, Geometry, Ticket, padded
from kvhold.engines.vllm.admission import Rank, Waiting, may_ask, most_blocks, order_matters
from kvhold.engines.vllm.attach import engine_label, instance_of, make_keeper
from kvhold.engines.vllm.config import Settings
from kvhold.engines.vllm.identity import hashes_are_private, namespace
from kvhold.engines.vllm.lookups import Lookups
from kvhold.engines.vllm.plans import CopyReport, Load, StepPlan, WorkerReport
from kvhold.engines.vllm.publishing import Publishing
from kvhold.engines.vllm.stats import KvHoldStats
from kvhold.protocol import MAX_KEYS, Hello, Retire

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = init_logger(__name__)

_FIRST_ATTACH_SECONDS = 10.0
"""How long the engine's start waits for the first session."""
_READY_SECONDS = 5.0
"""How long it then waits for the manager's word that all workers are there, so that the first request is served."""


@dataclass(slots=True)
class Restore:
    """A restore that workers were told of: the lease of ``ticket`` lives until they have ended it."""

    ticket: Ticket | None
    attachment: int
    orphan: bool = False  # its request is over


class SchedulerHalf:
    """One engine's scheduler half, on vLLM's scheduler thread but for what :class:`Keeper` calls."""

    def __init__(self, config: "VllmConfig", cache: "KVCacheConfig", settings: Settings) -> None:
        transfer, parallel = config.kv_transfer_config, config.parallel_config
        assert transfer is not None
        self._config = config
        self._world = parallel.tensor_parallel_size
        self._block_tokens = cache.kv_cache_groups[0].kv_cache_spec.block_size
        self._restores_wanted = transfer.is_kv_consumer
        self._publishes_wanted = transfer.is_kv_producer
        self._credit_wanted = 2 * max(1, config.scheduler_config.max_num_batched_tokens // self._block_tokens)
        self.stats = KvHoldStats()
        self._keeper = make_keeper(self, config, settings, reads=False)
        self.control = Control(
            self._keeper,
            settings.step_budget_ms / 1e3,
            settings.answer_deadline_ms / 1e3,
            settings.read_deadline_ms / 1e3,
        )
        patient = parallel.data_parallel_size == 1  # a deferred request keeps idle data-parallel ranks busy
        self._lookups = Lookups(self.control, self.stats, self._block_tokens, patient)
        self._publishing = Publishing(
            self.control, self.stats, self._block_tokens, settings.save_decode_cache, self._lookups.resident
        )
        self._pool_blocks = 0  # as long as it is not known
        self._drafts = config.speculative_config.num_speculative_tokens if config.speculative_config else 0
        scheduling = config.scheduler_config
        self._ordered = order_matters(scheduling.policy, scheduling.scheduler_reserve_full_isl)
        self._waiting: dict[str, Waiting] = {}  # given blocks and not computing yet; kept only where order matters
        self._withheld: set[str] = set()
        self._reports: dict[int, WorkerReport] = {}
        self._salt = b""
        self._geometry: Geometry | None = None
        self._space = 0
        self._space_attachment = 0
        self._loads: list[Load] = []
        self._restores: dict[str, Restore] = {}
        self._failed: set[str] = set()
        self._step = 0
        self._in_step = False
        self._old_tokens: deque[int] = deque(maxlen=64)
        self._reported: tuple[float, int] = (0.0, 0)
        self._keeper.start(_FIRST_ATTACH_SECONDS)

    # --- for the keeper, on its thread --------------------------------------------------------------------------

    def hello(self) -> Hello:
        # The keeper has taken the old session away before it asks; a step that is under way may still use it.
        step = self._step + 1 if self._in_step else self._step
        return Hello("scheduler", instance_of(self._config), 0, self._world, engine_label(self._config), step)

    def attached(self, channel: Channel) -> None:
        for token in self._old_tokens:  # all of them: the word may have been lost with the session that carried it
            channel.send(Retire(token))
        self._old_tokens.append(channel.welcome.token)

    def readable(self, channel: Channel) -> None:
        raise AssertionError("the scheduler's thread reads")

    def tick(self, channel: Channel) -> bool:
        return False

    # --- binding ------------------------------------------------------------------------------------------------

    def bind_reports(self, reports: Iterable[WorkerReport]) -> None:
        """Take the workers' word on geometry and identity. Raises ValueError, listing them, when they disagree."""
        by_rank = {report.rank: report for report in reports}
        if len({(report.digest, report.world, report.private) for report in by_rank.values()}) > 1:
            listed = "; ".join(f"rank {rank}: {report.summary}" for rank, report in sorted(by_rank.items()))
            raise ValueError(f"kvhold: the workers of this engine disagree about their KV cache: {listed}")
        if len(by_rank) < self._world:
            log.warning("kvhold: %d of %d workers reported; nothing is cached", len(by_rank), self._world)
            return
        self._reports = by_rank
        if by_rank[0].private:
            self._salt = os.urandom(16)
        end = time.monotonic() + _READY_SECONDS
        while self._keeper.channel is not None and time.monotonic() < end:
            self.control.new_step()
            if self.control.attachment:
                break
            self.control.pump(0.01)

    def bind_pool(self, pool: "BlockPool") -> None:
        self._publishing.bind(pool)
        self._pool_blocks = pool.num_gpu_blocks - 1

    def _ready(self) -> int | None:
        """The space to speak of in this step, opened if it is not; None while there is nobody to speak to."""
        if not self._in_step:
            self._in_step = True  # before the session is looked at: see hello()
            self.control.new_step()
        attachment = self.control.attachment
        if not attachment or not self._reports:
            return None
        if self._space_attachment != attachment:
            self._space_attachment = attachment
            self._space += 1
            self._geometry = self._new_geometry()
            self.control.open(self._space, self._geometry, self._credit_wanted if self._publishes_wanted else 0)
        return self._space

    def _new_geometry(self) -> Geometry:
        # vLLM settles the seed of its block hashes after it has built the scheduler, so it is read at first use.
        from vllm.v1.core import kv_cache_utils

        algorithm = self._config.cache_config.prefix_caching_hash_algo
        if hashes_are_private(algorithm):
            log.warning_once(
                "kvhold: block hashes by %s have a random seed, so this engine shares with no other; "
                "set PYTHONHASHSEED or use sha256",
                algorithm,
            )
        name = namespace(self._reports[0].digest, algorithm, kv_cache_utils.get_none_hash_seed(), self._salt)
        shards = tuple(padded(self._reports[rank].shard_bytes) for rank in range(self._world))
        return Geometry(name, 0, len(kv_cache_utils.NONE_HASH), shards)

    # --- questions ----------------------------------------------------------------------------------------------

    def matched_tokens(self, request: "Request", computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond ``computed`` can be restored, leaving the last one to compute; None: ask again."""
        name = request.request_id
        first = computed // self._block_tokens
        last = min((request.num_tokens - 1) // self._block_tokens, len(request.block_hashes), MAX_KEYS)
        if self._pool_blocks:
            last = min(last, most_blocks(self._pool_blocks, self._block_tokens, self._drafts))
        space = self._ready()
        if not self._restores_wanted or request.skip_reading_prefix_cache:
            first = last  # nothing to restore, but what is resident must not be published again
        elif request.lora_request is not None:
            # Block hashes name an adapter, they do not tell a retrained one of the same name from the old one.
            self._lookups.miss(name, first, last, "lora")
            return 0, False
        elif name in self._failed:
            self._lookups.miss(name, first, last, "load_failed")
            return 0, False
        if last == 0:
            return 0, False
        if space is None:
            self._lookups.miss(name, min(first, last), last, "detached")
            return 0, False
        found = self._lookups.find(name, space, min(first, last), last, request.block_hashes)
        if found is None:
            return None, False
        if found and self._ordered and not self._may_restore(request, computed + found * self._block_tokens):
            if name not in self._withheld:
                self._withheld.add(name)
                self.stats.add("tokens_withheld", found * self._block_tokens)
            return 0, False
        return found * self._block_tokens, found > 0

    def _may_restore(self, request: "Request", end: int) -> bool:
        """Whether a restore of ``request`` up to token ``end`` cannot stop the engine: docs/admission.md."""
        scheduling, model = self._config.scheduler_config, self._config.model_config
        tokens = min(request.num_tokens, end + scheduling.max_num_batched_tokens) + self._drafts
        start = -(-min(tokens, model.max_model_len) // self._block_tokens)
        others = [waiting for name, waiting in self._waiting.items() if name != request.request_id]
        return may_ask(_rank(request), start, others, self._pool_blocks)

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external: int) -> None:
        """The engine has given ``request`` blocks, and wants ``external`` tokens of them restored."""
        name = request.request_id
        load = None
        if self._ordered:
            self._waiting.pop(name, None)
            if external > 0:
                self._waiting[name] = Waiting(_rank(request), len(blocks.get_block_ids()[0]))
        try:
            if self._publishes_wanted and request.lora_request is None:
                self._publishing.admit(request)
            if external <= 0:
                self._lookups.settle(name)
            else:
                load = self._begin_restore(name, blocks.get_block_ids()[0], external)
        finally:
            # What was promised and cannot be had any more is a load all the same: one that workers report as failed,
            # so that the request is recomputed. Without one it would wait for ever.
            if external > 0:
                if load is None:
                    self._restores[name] = Restore(None, 0)
                self._loads.append(load or Load(name, [], array("Q")))

    def _begin_restore(self, name: str, table: list[int], external: int) -> Load | None:
        blocks, rest = divmod(external, self._block_tokens)
        taken = self._lookups.take(name, blocks) if not rest else None
        if taken is None:
            return None
        ticket, first, offsets = taken
        self._restores[name] = Restore(ticket, self.control.attachment)
        return Load(name, list(table[first : first + blocks]), offsets)

    def finished(self, request: "Request") -> None:
        """The request is over, however; a restore of it may still run, and is waited for."""
        name = request.request_id
        self._lookups.drop(name)
        self._publishing.forget(name)
        self._failed.discard(name)
        self._waiting.pop(name, None)
        self._withheld.discard(name)
        if name in self._restores:
            self._restores[name].orphan = True

    # --- steps --------------------------------------------------------------------------------------------------

    def plan(self, output: "SchedulerOutput") -> StepPlan:
        """What the workers do in this step."""
        loads, self._loads = self._loads, []
        plan = StepPlan(self._step + 1, 0, loads)
        try:
            space = self._ready()
            if space is not None and self._publishes_wanted:
                self._publishing.plan(output, space, plan.publishes)
        except Exception:
            log.exception("kvhold: planning failed; blocks of this step are not published")
        self._step += 1
        plan.incarnation = self.control.incarnation
        plan.starts = self._geometry.starts if self._geometry is not None else ()
        self._in_step = False
        return plan

    def took_output(self, output: "KVConnectorOutput") -> None:
        """Workers have ended restores and publishes."""
        ended: list[Ticket] = []
        for name in output.finished_recving or ():
            restore = self._restores.pop(name, None)
            if restore is None:
                continue
            if restore.ticket is not None and restore.attachment == self.control.attachment:
                ended.append(restore.ticket)
                if name in output.failed_recving:
                    self.control.spoiled(restore.ticket)
            if name in output.failed_recving and not restore.orphan:
                self._failed.add(name)
        report = output.kv_connector_worker_meta
        if isinstance(report, CopyReport) and self._geometry is not None:
            self._publishing.ended(report, self._geometry.shards)
        self.control.release(ended)

    @property
    def holding(self) -> bool:
        return self._publishing.holding

    def reset(self) -> None:
        """Re-key this engine: it finds nothing of what was stored before, and publishes nothing computed before."""
        self._lookups.drop_all()
        self._publishing.forget_all()
        self._salt = os.urandom(16)
        self.control.close(self._space)
        self._space_attachment = 0

    def take_stats(self) -> KvHoldStats | None:
        """Counts since the last call."""
        waited, exhausted = self._reported
        self._reported = self.control.waited, self.control.exhausted
        self.stats.add("scheduler_wait_seconds", self.control.waited - waited)
        self.stats.add("step_budget_exhausted", self.control.exhausted - exhausted)
        return self.stats.take()

    def shutdown(self) -> None:
        self._keeper.stop(self.control.bye)


def _rank(request: "Request") -> Rank:
    return request.priority, request.arrival_time, request.request_id
