"""The scheduler half: keys, questions, plans. It never touches KV bytes and never waits beyond the step's budget."""

import hashlib
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvhold.client.budget import Budget
from kvhold.client.channel import Channel
from kvhold.client.control import SILENT_SECONDS, Control, Ticket
from kvhold.engines.common.accounts import Accounts
from kvhold.engines.common.adapters import Adapters
from kvhold.engines.common.attaching import make_keeper
from kvhold.engines.common.groups import reachable
from kvhold.engines.common.lookups import Lookups
from kvhold.engines.common.patience import Patience
from kvhold.engines.common.plans import CopyReport, Load, StepPlan
from kvhold.engines.common.questions import ChainQuestion, GroupsQuestion, Part, Question, tokens_from_disk
from kvhold.engines.common.ranks import agree
from kvhold.engines.common.settings import Settings
from kvhold.engines.common.spaces import Spaces
from kvhold.engines.vllm.adapters import RESET, adapter_of, options_of
from kvhold.engines.vllm.admission import Rank, Waiting, all_can_begin, may_ask, most_blocks, order_matters
from kvhold.engines.vllm.events import CacheEvents
from kvhold.engines.vllm.groups import kept_groups
from kvhold.engines.vllm.hashes import hashing, tell_all
from kvhold.engines.vllm.hits import HitSearch
from kvhold.engines.vllm.names import engine_label, engine_of, instance_of, served_name
from kvhold.engines.vllm.outdated import Outdated
from kvhold.engines.vllm.publishing import Handed, Publishing
from kvhold.engines.vllm.reach import Reach
from kvhold.engines.vllm.stats import KvHoldStats
from kvhold.engines.vllm.topology import Topology
from kvhold.engines.vllm.worker import worker_here
from kvhold.protocol import MAX_KEYS, Hello, Retire

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = init_logger(__name__)

_FIRST_ATTACH_SECONDS = 10.0
"""How long the engine's start waits for the first session."""
_LOOK_STEPS = 256
"""Steps within which workers say what weights they have; until then requests wait, and afterwards they have others."""
_READY_SECONDS = 5.0
"""How long it then waits for the manager's word that all workers are there, so that the first request is served."""


@dataclass(slots=True)
class Restore:
    """A restore that workers were told of: the lease of ``ticket`` lives until they have ended it."""

    ticket: Ticket | None
    attachment: int
    blocks: frozenset[int]
    from_disk: int = 0  # tokens
    failed: bool = False
    orphan: bool = False  # its request is over


class SchedulerHalf:
    """One engine's scheduler half, on vLLM's scheduler thread but for what :class:`Keeper` calls."""

    def __init__(self, config: "VllmConfig", cache: "KVCacheConfig", settings: Settings) -> None:
        transfer, parallel = config.kv_transfer_config, config.parallel_config
        assert transfer is not None
        self._config = config
        self._cache = cache
        self._world = Topology.of(parallel).world
        self._groups = kept_groups(config, cache)
        self._adapters = Adapters(options_of(config.lora_config), RESET)
        self._restores_wanted = transfer.is_kv_consumer
        self._publishes_wanted = transfer.is_kv_producer
        self.accounts = Accounts()
        self.accounts.begin("group", range(len(self._groups)))
        self._keeper = make_keeper(self, engine_of(instance_of(config)), settings, reads=False)
        deadline = None if settings.answer_deadline_ms is None else settings.answer_deadline_ms / 1e3
        self._patience = Patience(deadline)
        silent = max(SILENT_SECONDS, deadline or 0.0)
        self.control = Control(self._keeper, settings.read_deadline_ms / 1e3, silent)
        self.budget = Budget(settings.step_budget_ms / 1e3)
        told = config.kv_events_config
        self.events = None
        if told is not None and told.enable_kv_cache_events:
            self.events = CacheEvents(self.control, cache, self._groups)
        self._spaces = Spaces(
            self.control,
            self._groups,
            self._adapters,
            partial(hashing, config.cache_config.prefix_caching_hash_algo),
            served_name(config),
            settings.epoch or "",
            config.scheduler_config.max_num_batched_tokens if self._publishes_wanted else 0,
            self.events,
        )
        self._lookups = Lookups(self.control, self.budget, self.accounts, self._patience.of)
        self._publishing = Publishing(
            self.control,
            self.accounts,
            settings.save_decode_cache,
            self._spaces_of,
            self._lookups.stored,
            self._spaces.sure,
            self.events,
        )
        self._manager: KVCacheManager | None = None
        self._search: HitSearch | None = None
        self._reach: Reach | None = None
        self._pool_blocks = 0  # as long as it is not known
        self._most_blocks = 0  # of them, for one restore
        self._outdated: Outdated | None = None
        self._look = 0  # the number of the last look at the loaded weights that was wanted
        self._look_wanted = False  # by a request
        self._looked_at = 0  # the step in which workers were told of it; 0: they were not
        self._seen: dict[int, bytes] = {}  # what they have said, by rank
        self._drafts = config.num_speculative_tokens + config.num_lookahead_tokens
        scheduling = config.scheduler_config
        whole_prompt_must_fit = scheduling.scheduler_reserve_full_isl and not config.num_lookahead_tokens
        self._ordered = order_matters(scheduling.policy, whole_prompt_must_fit)
        self._together = len(self._groups) > 1 or not self._groups[0].whole
        self._waiting: dict[str, Waiting] = {}  # given blocks and not computing yet; kept only where that is asked
        self._withheld: set[str] = set()
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

    def await_workers(self) -> None:
        """Wait a while for the workers' word on their KV. Raises ValueError, listing them, when they disagree."""
        end = time.monotonic() + _READY_SECONDS
        while self._keeper.channel is not None and time.monotonic() < end:
            self.control.take_up()
            if self.control.attachment:
                agree(self.control.reports)
                break
            self.control.pump(0.01)

    def bind_manager(self, manager: "KVCacheManager") -> None:
        self._manager = manager
        self._search = HitSearch(self._config, self._cache, manager, self._groups)
        self._reach = Reach(manager, self._groups)
        self._publishing.bind(manager.block_pool, self._reach)
        self._outdated = Outdated(manager.block_pool, range(len(self._cache.kv_cache_groups)))
        # No hook tells a connector that the engine is about to clear its cache, which it refuses while a block is held.
        clear = manager.reset_prefix_cache

        def reset_prefix_cache() -> bool:
            self._end_late()
            return clear()

        manager.reset_prefix_cache = reset_prefix_cache  # type: ignore[method-assign]
        self._pool_blocks = manager.block_pool.num_gpu_blocks - 1
        sizes = [group.block_tokens for group in self._groups if not group.handed]
        self._most_blocks = most_blocks(self._pool_blocks, sizes, self._drafts)

    @property
    def _chain(self) -> bool:
        """Whether a hit is the longest prefix of one chain, so that one question finds and leases it."""
        return len(self._groups) == 1 and self._groups[0].whole and not (self._manager and self._manager.use_eagle)

    def _ready(self) -> tuple[int, ...] | None:
        """The groups' spaces to speak of in this step, opened if they are not; None if there is nobody to speak to."""
        if not self._in_step:
            self._in_step = True  # before the session is looked at: see hello()
            self.budget.renew()
            self.control.take_up()
        return self._spaces.plain

    def _spaces_of(self, request: "Request") -> tuple[int, ...] | None:
        """Where what is computed for ``request`` may be published; None as long as that is nowhere."""
        if not self._spaces.opened or (self._outdated is not None and self._outdated.has(request.request_id)):
            return None
        if not tell_all(request, self._config.model_config.dtype):
            return None
        return self._spaces.of(adapter_of(request.lora_request))

    # --- questions ----------------------------------------------------------------------------------------------

    def matched_tokens(self, request: "Request", computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond ``computed`` can be restored, leaving the last one to compute; None: ask again."""
        name = request.request_id
        search, spaces = self._search, self._ready()
        if search is None or self._outdated is None:
            return 0, False
        self._outdated.admits(request)
        awaits_look = self._awaits_look()
        known = min(len(request.block_hashes), MAX_KEYS // len(self._groups)) * search.hash_tokens
        limit = min(request.num_tokens - 1, known)
        limit = reachable(self._groups, limit, search.unit, self._most_blocks)
        local = min(computed, limit)
        if not self._restores_wanted or request.skip_reading_prefix_cache:
            local = limit  # nothing to restore, but what is there must not be published again
        elif name in self._failed:
            self._lookups.miss(name, local, limit, "load_failed")
            return 0, False
        if limit == 0:
            return 0, False
        if not tell_all(request, self._config.model_config.dtype):
            self._lookups.miss(name, local, limit, "ambiguous")
            return 0, False
        if awaits_look:
            return None, False
        if spaces is None:
            self._lookups.miss(name, local, limit, "detached")
            return 0, False
        adapter = adapter_of(request.lora_request)
        if adapter is not None:
            sure = self._adapters.look(name, adapter)
            if sure is None and local < limit:
                self.budget.spend(self._adapters.wait)
                sure = self._adapters.look(name, adapter)
                if sure is None:
                    return None, False
            own = self._spaces.of(adapter) if sure else None
            if own is None:
                self._lookups.miss(name, local, limit, "lora")
                return 0, False
            spaces = own

        def ask(former: Ticket | None) -> Question:
            if self._chain:
                block_tokens = self._groups[0].block_tokens
                return ChainQuestion(self.control, spaces[0], block_tokens, local, limit, request.block_hashes, former)
            if former is not None:
                self.control.release((former,))
            return GroupsQuestion(self.control, search, spaces, local, limit, request.block_hashes)

        found = self._lookups.find(name, local, limit, ask)
        if found is None:
            return None, False
        # The engine keeps windows and states where it sees prompts part. It sees its own memory only, so it is told.
        request.shared_prefix_boundary = max(request.shared_prefix_boundary, self._lookups.junction(name))
        if found and not self._may_restore(request, computed + found):
            if name not in self._withheld:
                self._withheld.add(name)
                self.accounts.add("tokens_withheld", found)
            return 0, False
        return found, found > 0

    def _may_restore(self, request: "Request", end: int) -> bool:
        """Whether a restore of ``request`` up to token ``end`` cannot stop the engine: docs/admission.md."""
        others = [waiting for name, waiting in self._waiting.items() if name != request.request_id]
        if self._together:
            held = sum(group.blocks_between(end, end) for group in self._groups)
            if not all_can_begin([*others, self._waits(request, held)], self._pool_blocks):
                return False
        if not self._ordered:
            return True
        scheduling, model = self._config.scheduler_config, self._config.model_config
        tokens = min(request.num_tokens, end + scheduling.max_num_batched_tokens) + self._drafts
        start = sum(group.blocks_between(end, min(tokens, model.max_model_len)) for group in self._groups)
        return may_ask(_rank(request), start, others, self._pool_blocks)

    def _waits(self, request: "Request", held: int) -> Waiting:
        tokens = min(request.num_tokens + self._drafts, self._config.model_config.max_model_len)
        return Waiting(_rank(request), held, self._reach.blocks_to_begin(tokens) if self._reach is not None else 0)

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external: int) -> None:
        """The engine has given ``request`` blocks, and wants ``external`` tokens of them restored."""
        name = request.request_id
        load = None
        tables = blocks.get_block_ids()
        if self._ordered or self._together:
            self._waiting.pop(name, None)
            if external > 0:
                held = sum(1 for table in tables for block in table if block)
                self._waiting[name] = self._waits(request, held)
        try:
            if self._publishes_wanted:
                self._publishing.admit(request)
            if external <= 0:
                self._lookups.settle(name)
            else:
                load = self._begin_restore(request, tables, external)
        finally:
            # What was promised and cannot be had any more is a load all the same: one that workers report as failed,
            # so that the request is recomputed. Without one it would wait for ever.
            if external > 0:
                if load is None:
                    # Without those of its own that others share: they are not what was to be restored.
                    mine = [block for table in blocks.get_unhashed_block_ids_all_groups() for block in table]
                    load = Load(name, [], mine)
                    self._restores[name] = Restore(None, 0, frozenset(load.blocks))
                self._loads.append(load)

    def _begin_restore(self, request: "Request", tables: Sequence[list[int]], external: int) -> Load | None:
        name = request.request_id
        taken = self._lookups.take(name, external)
        if taken is None:
            return None
        question, local, parts = taken
        if not self._covers(parts, tables, local, local + external):
            log.error("kvhold: the engine's blocks for a restore are not those of its hit; the request is computed")
            self.control.release((question.ticket,))
            return None
        copies = [
            (part.group, [tables[self._groups[part.group].index][at] for at in part.blocks], part.offsets)
            for part in parts
        ]
        blocks = [block for _, mine, _ in copies for block in mine]
        sizes = [group.block_tokens for group in self._groups]
        from_disk = tokens_from_disk(parts, sizes, question.read, local, local + external)
        self._restores[name] = Restore(question.ticket, self.control.attachment, frozenset(blocks), from_disk)
        if self.events is not None and self._reach is not None:
            spaces = self._spaces.of(adapter_of(request.lora_request))
            if spaces is not None:
                self.events.restored(request, spaces, parts, local + external, self._reach.key)
        return Load(name, copies, blocks)

    def tokens_from_disk(self, request: str) -> int:
        """Tokens of the restore that ``request`` was given blocks for which the manager read from SSD."""
        return self._restores[request].from_disk if request in self._restores else 0

    def _covers(self, parts: Sequence[Part], tables: Sequence[list[int]], local: int, end: int) -> bool:
        """Whether ``parts`` fill just the blocks that the engine has given for tokens ``local`` to ``end``."""
        filled = {part.group: set(part.blocks) for part in parts}
        for at, group in enumerate(self._groups):
            table, mine = tables[group.index], filled.get(at, set())
            given = {
                block
                for block in range(local // group.block_tokens, min(-(-end // group.block_tokens), len(table)))
                # A few blocks before the window are kept for a drafter; nothing attends to them.
                if table[block] and not (group.window and (block + 1) * group.block_tokens <= end - group.window + 1)
            }
            if given != mine:
                return False
        return True

    def finished(self, request: "Request") -> None:
        """The request is over, however; a restore of it may still run, and is waited for."""
        name = request.request_id
        self._lookups.drop(name)
        self._adapters.drop(name)
        self._publishing.forget(name)
        self._failed.discard(name)
        self._waiting.pop(name, None)
        if self._outdated is not None:
            self._outdated.finished(name)
        self._withheld.discard(name)
        if name in self._restores:
            self._restores[name].orphan = True

    def finished_tables(
        self, request: "Request", tables: Sequence[Sequence[int]], handed: Iterable[Handed] = ()
    ) -> None:
        """The request is over, and its blocks are still its own: publish what its last step completed."""
        # What a restore should have brought is counted as computed, whether or not it has come.
        if request.request_id not in self._restores:
            self._publishing.finish(request, tables, handed)

    # --- steps --------------------------------------------------------------------------------------------------

    def plan(self, output: "SchedulerOutput") -> StepPlan:
        """What the workers do in this step."""
        self._patience.step_begins(output.total_num_scheduled_tokens)
        loads, self._loads = self._loads, []
        plan = StepPlan(self._step + 1, 0, loads)
        try:
            served = self._ready() is not None
            plan.publishes += self._publishing.take_late()
            if served and self._publishes_wanted:
                self._publishing.plan(output, plan.publishes)
        except Exception:
            log.exception("kvhold: planning failed; blocks of this step are not published")
        self._step += 1
        plan.incarnation = self.control.incarnation
        ranks = self._spaces.ranks
        plan.starts = tuple(shards.starts for shards in ranks.shards) if ranks is not None else ()
        if self._look_wanted and not self._looked_at:
            plan.look, self._looked_at = self._look, self._step
        self._in_step = False
        return plan

    def took_output(self, output: "KVConnectorOutput") -> None:
        """Workers have ended restores and publishes."""
        ended: list[Ticket] = []
        if output.invalid_block_ids:  # the ranks of one restore may end, and fail, in different steps
            others = set(output.invalid_block_ids)
            for each in self._restores.values():
                each.failed = each.failed or not each.blocks.isdisjoint(output.invalid_block_ids)
                others -= each.blocks
            if others:  # another connector's, beside which this one runs; what was computed from them is worth nothing
                self._publishing.distrust()
        for name in output.finished_recving or ():
            restore = self._restores.pop(name, None)
            if restore is None:
                continue
            failed = restore.failed or name in output.failed_recving
            if restore.ticket is not None and restore.attachment == self.control.attachment:
                ended.append(restore.ticket)
                if failed:
                    self.control.spoiled(restore.ticket)
            if failed and not restore.orphan:
                self._failed.add(name)
                if self._together and name in self._waiting:  # the engine keeps nothing of it
                    self._waiting[name] = replace(self._waiting[name], held=0)
        report = output.kv_connector_worker_meta
        if isinstance(report, CopyReport) and self._spaces.ranks is not None:
            self._take_look(report.loaded.get(self._look, {}))
            self._publishing.ended(report, [shards.writes for shards in self._spaces.ranks.shards])
        self.control.release(ended)

    @property
    def holding(self) -> bool:
        """Whether the engine has to go on stepping: blocks are held for copies, or somebody is to be told of them."""
        return self._publishing.holding or (self.events is not None and self.events.awaited)

    # --- resets -------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Find and store nothing until it is known what weights are loaded, and nothing computed before now at all.

        A reset says neither that weights have changed nor that they have not; they may change after it. So workers look
        at what they have when the first request wants to be scheduled.
        """
        self._spaces.doubt()
        self._look, self._look_wanted, self._looked_at = self._look + 1, False, 0
        self._seen.clear()
        if self._outdated is not None:
            self._outdated.begin()
        self._lookups.drop_all()
        running = self._publishing.forget_all()
        if self.events is not None:
            self.events.cleared()
        self._adapters.rekeyed()
        if self._outdated is not None and self._outdated.mark(running):
            log.warning(
                "kvhold: the engine could not clear its own prefix cache because requests are using it; what they find "
                "there is not stored"
            )

    def _awaits_look(self) -> bool:
        """Whether a request has to wait until it is known what weights are loaded; if so, workers will be asked."""
        if self._spaces.weights is not None or not self.control.attachment or self._spaces.agreed() is None:
            return False
        self._look_wanted = True
        if self._looked_at and self._step - self._looked_at > _LOOK_STEPS:
            log.warning("kvhold: the workers do not say what weights they have; this engine starts cold")
            self._spaces.settle(None)
        return self._spaces.weights is None

    def _take_look(self, loaded: Mapping[int, bytes]) -> None:
        """Workers have said what weights they have: the same as at the start, or others."""
        self._seen.update(loaded)
        ranks = self._spaces.ranks
        if self._spaces.weights is not None or ranks is None or len(self._seen) < self._world:
            return
        seen = tuple(found for _, found in sorted(self._seen.items()))
        if not all(seen):
            log.warning(
                "kvhold: what weights are loaded cannot be told; this engine starts cold and shares with no other"
            )
            self._spaces.settle(None)
        elif seen == ranks.loaded:
            self._spaces.settle(b"")
        else:
            log.info("kvhold: other weights are loaded than at the start; engines that have the same share their cache")
            self._spaces.settle(hashlib.sha256(b"".join(seen)).digest())

    def _end_late(self) -> None:
        """Let go of blocks that are held for copies which wait for a step, or whose end waits for one to be told.

        A worker in this process copies them now. For workers in others, what they were not told of is not kept.
        """
        try:
            worker = worker_here(instance_of(self._config)) if self._world == 1 else None
            if worker is not None and worker.copies is not None and self._spaces.ranks is not None:
                self._step += 1
                starts = tuple(shards.starts for shards in self._spaces.ranks.shards)
                late = self._publishing.take_late()
                report = worker.copies.end_publishes(StepPlan(self._step, self.control.incarnation, [], late, starts))
                if report is not None:
                    self._publishing.ended(report, [shards.writes for shards in self._spaces.ranks.shards])
            self._publishing.drop_late()
        except Exception:
            log.exception("kvhold: copies could not be ended before a reset; the engine may refuse it")

    def take_stats(self) -> KvHoldStats | None:
        """Counts since the last call; the engine asks for them when a step's output is here."""
        self._patience.step_ends()
        waited, exhausted = self._reported
        self._reported = self.budget.waited, self.budget.exhausted
        self.accounts.add("scheduler_wait_seconds", self.budget.waited - waited)
        self.accounts.add("step_budget_exhausted", self.budget.exhausted - exhausted)
        return KvHoldStats.taken(self.accounts)

    def shutdown(self) -> None:
        self._keeper.write_out()
        self._keeper.stop(self.control.bye)
        self._adapters.stop()


def _rank(request: "Request") -> Rank:
    return request.priority, request.arrival_time, request.request_id
