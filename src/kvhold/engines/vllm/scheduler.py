"""The scheduler half: it conducts those who ask, restore, publish and reset, on vLLM's scheduler thread.

It never touches KV bytes and never waits beyond the step's budget.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvhold.client.control import Control
from kvhold.engines.common.accounts import Accounts
from kvhold.engines.common.adapters import Adapters
from kvhold.engines.common.attaching import make_attacher
from kvhold.engines.common.batches import Batches
from kvhold.engines.common.doubt import Doubt
from kvhold.engines.common.patience import Patience
from kvhold.engines.common.plans import CopyReport, StepPlan
from kvhold.engines.common.question import Asker
from kvhold.engines.common.questions import Questions
from kvhold.engines.common.session import SchedulerSession
from kvhold.engines.common.settings import Settings
from kvhold.engines.vllm.adapters import RESET, options_of
from kvhold.engines.vllm.admission import Admission
from kvhold.engines.vllm.events import CacheEvents
from kvhold.engines.vllm.groups import kept_groups
from kvhold.engines.vllm.hashes import hashing
from kvhold.engines.vllm.hits import HitSearch
from kvhold.engines.vllm.names import engine_label, engine_of, instance_of, served_name
from kvhold.engines.vllm.publishing import Handed, Publishing
from kvhold.engines.vllm.resets import Resets
from kvhold.engines.vllm.restores import Restores
from kvhold.engines.vllm.retention import Retention
from kvhold.engines.vllm.spaces import RequestSpaces
from kvhold.engines.vllm.stats import KvHoldStats
from kvhold.engines.vllm.topology import Topology
from kvhold.threads import ENGINE, belongs_to

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = init_logger(__name__)


@belongs_to(ENGINE)
class SchedulerHalf:
    """One engine's scheduler half. ``restores`` says which tokens can be restored, ``resets`` takes resets."""

    def __init__(self, config: "VllmConfig", cache: "KVCacheConfig", settings: Settings) -> None:
        transfer, instance, told = config.kv_transfer_config, instance_of(config), config.kv_events_config
        assert transfer is not None
        world = Topology.of(config.parallel_config).world
        attach = partial(make_attacher, engine=engine_of(instance), settings=settings, reads=False)
        self._config = config
        self._cache = cache
        self._groups = groups = kept_groups(config, cache)
        self.accounts = Accounts()
        self.accounts.begin("group", range(len(groups)))
        self.session = SchedulerSession(instance, world, engine_label(config), attach, settings)
        control = self.session.control
        watched = told is not None and told.enable_kv_cache_events
        self.events = CacheEvents(control, cache, groups) if watched else None
        deadline = settings.answer_deadline_ms
        self._patience = Patience(None if deadline is None else deadline / 1e3)
        self._spaces = RequestSpaces(
            control,
            groups,
            Adapters(options_of(config.lora_config), RESET),
            partial(hashing, config.cache_config.prefix_caching_hash_algo),
            served_name(config),
            settings.epoch or "",
            config.scheduler_config.max_num_batched_tokens if transfer.is_kv_producer else 0,
            self.events,
        )
        doubt = Doubt(self.session, self._spaces, world)
        asker = Asker(control, groups)
        self._questions = Questions(control, self.session.budget, self.accounts, asker, self._patience.of)
        self._batches = Batches(control, self.accounts, self._spaces, self.events)
        self._publishing = Publishing(
            control,
            self._batches,
            self._spaces,
            self._questions,
            self.events,
            settings.save_decode_cache,
            transfer.is_kv_producer,
        )
        self.restores = Restores(
            self.session,
            groups,
            self._spaces,
            doubt,
            asker,
            self._questions,
            Admission(config, groups, self.accounts),
            self.events,
            transfer.is_kv_consumer,
        )
        self.resets = Resets(
            instance,
            world,
            self.session,
            self._spaces,
            doubt,
            self._questions,
            self._publishing,
            self._batches,
            self.events,
        )
        self.session.start()

    @property
    def control(self) -> Control:
        """The session's side of the protocol."""
        return self.session.control

    def bind_manager(self, manager: "KVCacheManager") -> None:
        """The engine has its block pool."""
        retention = Retention(manager, self._groups)
        dtype = self._config.model_config.dtype
        self._spaces.bind(manager.block_pool, len(self._cache.kv_cache_groups), dtype)
        self.restores.bind(manager, HitSearch(self._config, self._cache, manager, self._groups), retention)
        self._publishing.bind(manager.block_pool, retention)
        self.resets.bind(manager)

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external: int) -> None:
        """The engine has given ``request`` blocks, and wants ``external`` tokens of them restored."""
        try:
            self._publishing.admit(request)
        finally:
            self.restores.begin(request, blocks, external)

    def plan(self, output: "SchedulerOutput") -> StepPlan:
        """What the workers do in this step."""
        self._patience.step_begins(output.total_num_scheduled_tokens)
        loads, self.restores.loads = self.restores.loads, []
        plan = StepPlan(0, 0, loads)
        try:
            self.session.begin_step()
            served = self._spaces.plain is not None
            plan.publishes += self._batches.take_late()
            if served:
                self._publishing.plan(output, plan.publishes)
        except Exception:
            log.exception("kvhold: planning failed; blocks of this step are not published")
        plan.step = self.session.number_step()
        plan.incarnation = self.control.incarnation
        plan.starts = self._spaces.ranks.starts if self._spaces.ranks is not None else ()
        plan.look = self.resets.doubt.take_question(plan.step)
        self.session.end_step()
        return plan

    def took_output(self, output: "KVConnectorOutput") -> None:
        """Workers have ended restores and publishes."""
        distrusted = True
        try:
            # Another connector's, beside which this one runs; what was computed from them is worth nothing.
            distrusted = bool(self.restores.ended(output))
        finally:  # whatever becomes of restores, blocks that were copied are let go
            if distrusted:
                self._batches.distrust()
            report, ranks = output.kv_connector_worker_meta, self._spaces.ranks
            if isinstance(report, CopyReport) and ranks is not None:
                self.resets.doubt.take_answers(report.loaded)
                self._batches.ended(report, ranks.writes)

    def finished_tables(
        self, request: "Request", tables: Sequence[Sequence[int]], handed: Iterable[Handed] = ()
    ) -> None:
        """The request is over, and its blocks are still its own: publish what its last step completed."""
        # What a restore should have brought is counted as computed, whether or not it has come.
        if not self.restores.has(request.request_id):
            self._publishing.finish(request, tables, handed)

    def finished(self, request: "Request") -> None:
        """The request is over, however; a restore of it may still run, and is waited for."""
        name = request.request_id
        self._questions.drop(name)
        self._spaces.adapters.drop(name)
        self._publishing.forget(name)
        self.restores.finished(name)
        self.resets.finished(name)

    @property
    def holding(self) -> bool:
        """Whether the engine has to go on stepping: blocks are held for copies, or somebody is to be told of them."""
        told = self.events is None or not self.events.awaited
        return self._batches.holding or self._publishing.awaiting or not told

    def take_stats(self) -> KvHoldStats | None:
        """Counts since the last call; the engine asks for them when a step's output is here."""
        self._patience.step_ends()
        self.session.count_waits(self.accounts)
        return KvHoldStats.taken(self.accounts)

    def shutdown(self) -> None:
        self.session.stop()
        self._spaces.adapters.stop()
