"""The worker half: maps the arena and copies. It decides nothing, and never asks on the engine's thread."""

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger

from kvhold import protocol as wire
from kvhold.client.arena import ArenaMapping
from kvhold.client.channel import Channel
from kvhold.client.control import padded
from kvhold.copy.engine import Copier, make_copier
from kvhold.copy.job import Job
from kvhold.copy.layout import PagedLayout
from kvhold.engines.common.accounts import Accounts
from kvhold.engines.common.attaching import make_keeper
from kvhold.engines.common.groups import Group
from kvhold.engines.common.identity import digest
from kvhold.engines.common.plans import CopyReport, Load, Publish, StepPlan
from kvhold.engines.common.ranks import WorkerReport
from kvhold.engines.common.settings import Settings
from kvhold.engines.vllm import identity
from kvhold.engines.vllm.groups import kept_groups
from kvhold.engines.vllm.layout import read_layout
from kvhold.engines.vllm.loaded import Loaded
from kvhold.engines.vllm.names import engine_label, engine_of, instance_of
from kvhold.engines.vllm.stats import KvHoldStats
from kvhold.engines.vllm.topology import Topology, attention_alone, replicas

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = init_logger(__name__)

_FIRST_ATTACH_SECONDS = 30.0
"""How long the engine's start waits for the first session: a manager is started, and the arena pinned, within it."""
_LAST_COPY_SECONDS = 30.0
"""How long an end waits for copies that were begun; they need nobody but this process."""
_RESET_SECONDS = 0.25
"""How long a reset waits for the copies of blocks that keep the engine from it."""

_here: "WeakValueDictionary[str, WorkerHalf]" = WeakValueDictionary()
"""This process's worker halves by the engine's id; of several ranks in one process the last."""


@dataclass(slots=True)
class Session:
    """One session's mapping of an arena."""

    token: int
    arena: ArenaMapping


@dataclass(slots=True)
class Copies:
    """Copies that were begun and not yet reported, by request or batch: the step in which they were planned, the job,

    and the blocks that wait for it, or the group that it is about.
    """

    loads: dict[str, tuple[int, Job, list[int]]] = field(default_factory=dict)
    publishes: dict[int, tuple[int, Job, int]] = field(default_factory=dict)

    def running(self, step: int) -> bool:
        """Whether a copy planned in ``step`` or earlier has not ended."""
        copies = [*self.loads.values(), *self.publishes.values()]
        return any(planned <= step and not job.ended for planned, job, _ in copies)


class WorkerHalf:
    """One rank's worker half, on vLLM's worker thread but for what :class:`Keeper` calls."""

    def __init__(self, config: "VllmConfig", cache: "KVCacheConfig", settings: Settings) -> None:
        _here[instance_of(config)] = self
        self._config = config
        self._cache = cache
        parallel = config.parallel_config
        self._topology = Topology.of(parallel)
        self._rank = parallel.rank % self._topology.world
        self._weights_id = settings.weights_id
        self._groups = kept_groups(config, cache)
        self._failed_blocks: set[int] = set()
        self.accounts = Accounts()
        self.accounts.begin("rank", [self._rank])
        self._keeper = make_keeper(self, engine_of(instance_of(config)), settings, reads=True)
        self._copier: Copier | None = None
        self._caches: dict[str, torch.Tensor] = {}
        self._taken = False  # whether the engine has taken the memory of its caches away
        self._report: WorkerReport | None = None
        self._copies = Copies()
        self._weights = Loaded()
        self._looked: dict[int, bytes] = {}  # what was loaded, by number of the look
        self._saved = -1  # the last step whose publishes were begun
        # Shared with the keeper's thread, which brings and takes mappings away; never held across a copy or a call.
        self._lock = threading.Lock()
        self._sessions: list[Session] = []  # the newest last; older ones until nothing may use them any more
        self._done_step = 0  # the last step all of whose copies were begun
        self._retired: deque[int] = deque(maxlen=64)  # tokens of sessions that were let go
        self._settled_step: int | None = None  # older sessions are used by plans up to this step only

    # --- for the keeper, on its thread --------------------------------------------------------------------------

    def hello(self) -> wire.Hello:
        assert self._report is not None, "the keeper starts after it"
        label, report = engine_label(self._config), self._report.packed()
        return wire.Hello("worker", instance_of(self._config), self._rank, self._topology.world, label, report=report)

    def attached(self, channel: Channel) -> None:
        for token in self._retired:  # the word may have been lost with the session that carried it
            channel.send(wire.Retire(token))
        try:
            arena = ArenaMapping(channel.arena_fd, channel.welcome.arena_bytes, channel.welcome.incarnation)
            try:
                if self._copier is not None:
                    self._copier.register(arena)
            except Exception:
                arena.close()
                raise
        except Exception:
            self._retired.append(channel.welcome.token)  # nothing of it was ever in use: the next session says so
            raise
        with self._lock:
            self._sessions.append(Session(channel.welcome.token, arena))
            self._settled_step = None
        channel.send(wire.Mapped())

    def readable(self, channel: Channel) -> None:
        for message in channel.receive():
            match message:
                case wire.Settled(step):
                    with self._lock:
                        self._settled_step = step
                case wire.Refused(reason):
                    log.warning("kvhold: the manager ended the session: %s", reason)
                    channel.abandon()
                case _:
                    pass

    def tick(self, channel: Channel) -> bool:
        """Let go of older sessions' arenas once no plan and no copy can name them; True while there are any."""
        with self._lock:
            settled = self._settled_step
            if len(self._sessions) < 2:
                return False
            if settled is None or self._done_step < settled or self._copies.running(settled):
                return True
            *old, newest = self._sessions
            self._sessions = [newest]
        for session in old:
            self._unmap(session)
            self._retired.append(session.token)
            channel.send(wire.Retire(session.token))
        return False

    def _unmap(self, session: Session) -> None:
        if self._copier is not None:
            self._copier.unregister(session.arena)
        session.arena.close()

    # --- start and end ------------------------------------------------------------------------------------------

    def register(self, caches: "dict[str, torch.Tensor]") -> None:
        """Read the layout, and attach. Raises Unsupported for a layout that cannot be served."""
        self._caches = caches
        layouts = self._read_layouts()
        same = replicas(self._config, self._cache), attention_alone(self._cache)
        parts = self._topology.parts(*same)
        common, stage = identity.describe(self._config, self._cache, self._groups, layouts, parts, self._weights_id)
        self._copier = make_copier(layouts)
        sizes = tuple(layout.shard_bytes for layout in layouts)
        kinds = ", ".join(
            f"{len(self._layers(group))} layers of {group.kind} with {size} bytes a block"
            for group, size in zip(self._groups, sizes, strict=True)
        )
        self._report = WorkerReport(
            self._rank,
            self._topology.world,
            self._topology.stage(self._rank),
            self._topology.owner(self._rank, *same),
            digest(common),
            digest(stage),
            sizes,
            identity.is_private(common),
            f"{kinds}, weights {common['weights'][:22]}",
            loaded=self._weights.digest(),
        )
        self._keeper.start(_FIRST_ATTACH_SECONDS)

    def _layers(self, group: Group) -> list[str]:
        return list(self._cache.kv_cache_groups[group.index].layer_names)

    def _read_layouts(self) -> list[PagedLayout]:
        return [read_layout(self._caches, self._layers(group), self._cache.num_blocks) for group in self._groups]

    def unregister(self) -> None:
        """End copies and forget the caches, which are about to lose their memory. Arenas stay mapped and pinned."""
        if self._copier is not None and not self._taken:
            self._taken = True
            self._drain()
            self._copier.unbind()

    def restore(self) -> None:
        """Copy from and to the registered caches again, wherever their memory is now.

        Raises ValueError if their blocks are not what they were; then they stay unregistered, and copies fail.
        """
        if self._copier is None or not self._taken:
            return
        layouts = self._read_layouts()
        sizes = tuple(layout.shard_bytes for layout in layouts)
        if sizes != self._sizes:
            raise ValueError(f"blocks have {sizes} bytes by group after the engine's sleep, and had {self._sizes}")
        self._copier.bind(layouts)
        self._taken = False

    def shutdown(self) -> None:
        """End copies, say goodbye, unmap."""
        drained = self._drain()
        channel = self._keeper.channel
        self._keeper.stop(channel.bye if channel is not None and drained else lambda: None)
        if self._copier is not None and drained:
            self._copier.close()
            for session in self._sessions:
                self._unmap(session)
            self._sessions = []
        self._caches = {}

    def _drain(self) -> bool:
        """Let the copies that were begun end, within a time; whether all have."""
        jobs = [job for _, job, _ in (*self._copies.loads.values(), *self._copies.publishes.values())]
        return self._wait_for(jobs, _LAST_COPY_SECONDS)

    def _wait_for(self, jobs: list[Job], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self._copier is not None and time.monotonic() < end and not all(job.wait(0.001) for job in jobs):
            self._copier.advance()
        return all(job.ended for job in jobs)

    # --- steps --------------------------------------------------------------------------------------------------

    def start_loads(self, plan: StepPlan) -> None:
        """Begin this step's restores."""
        if plan.look:
            self._looked[plan.look] = self._weights.digest()
        for load in plan.loads:
            self._copies.loads[load.request] = plan.step, self._begin_load(plan, load), load.blocks
        if self._copier is not None:
            self._copier.advance()

    def start_publishes(self, plan: StepPlan) -> None:
        """Begin this step's publishes; once per step, however often it is called."""
        if plan.step == self._saved:
            return
        self._saved = plan.step
        for publish in plan.publishes:
            if self._report is not None and self._report.owner == self._rank and self._sizes[publish.group]:
                self._copies.publishes[publish.batch] = plan.step, self._begin_publish(plan, publish), publish.group
        with self._lock:
            self._done_step = plan.step
            old = len(self._sessions) > 1
        if old:
            self._keeper.wake()

    # A copy that cannot be begun is a failed one, because somebody waits for its end.

    def _begin_load(self, plan: StepPlan, load: Load) -> Job:
        if not load.parts:
            return _failed("what was promised cannot be had any more")
        try:
            arena = self._arena(plan.incarnation)
            if arena is None or self._copier is None:
                return _failed("its arena is gone")
            if self._taken:
                return _failed("the engine has taken its KV cache away")
            parts = [
                (group, blocks, [offset + plan.starts[group][self._rank] for offset in offsets])
                for group, blocks, offsets in load.parts
                if self._sizes[group]
            ]
            return self._copier.begin_restore(arena, parts)
        except Exception as error:  # noqa: BLE001 - see above
            return _failed(f"{type(error).__name__}: {error}")

    def _begin_publish(self, plan: StepPlan, publish: Publish) -> Job:
        try:
            arena = self._arena(plan.incarnation)
            if arena is None or self._copier is None:
                return _failed("its arena is gone")
            if self._taken:
                return _failed("the engine has taken its KV cache away")
            start = plan.starts[publish.group][self._rank]
            offsets = [offset + start for offset in publish.offsets]
            return self._copier.begin_publish(arena, publish.group, publish.blocks, offsets)
        except Exception as error:  # noqa: BLE001 - see above
            return _failed(f"{type(error).__name__}: {error}")

    @property
    def _sizes(self) -> tuple[int, ...]:
        """This rank's part of an object, by group."""
        return self._report.shard_bytes if self._report is not None else (0,) * len(self._groups)

    def _arena(self, incarnation: int) -> ArenaMapping | None:
        with self._lock:
            found = [session.arena for session in self._sessions if session.arena.incarnation == incarnation]
        return found[-1] if found else None

    def take_results(self) -> KVConnectorTransferResults:
        """Restores that have ended since the last call; failed ones are also among the received."""
        results = KVConnectorTransferResults()
        for request, (_, job, blocks) in list(self._copies.loads.items()):
            if not job.ended:
                continue
            del self._copies.loads[request]
            results.finished_recving.add(request)
            self.accounts.add("loads")
            if job.error is not None:
                log.warning("kvhold: a restore failed, what it should have brought is computed: %s", job.error)
                # What came before the failure is kept where the engine can tell whose a block is, and where a shorter
                # prefix needs no other blocks.
                if len(self._cache.kv_cache_groups) == 1 and self._groups[0].whole:
                    self._failed_blocks.update(blocks[job.done :])
                else:
                    results.failed_recving.add(request)
                self.accounts.add("load_failures")
            else:
                self.accounts.add("load_bytes", job.size, rank=self._rank)
                self.accounts.add("load_seconds", job.seconds, rank=self._rank)
        return results

    def end_copies(self, plan: StepPlan) -> CopyReport | None:
        """Copy what is to be published, and wait a moment for that; the report that is due then.

        On the scheduler's thread, where a copy that takes longer means that the engine refuses its reset.
        """
        self.start_publishes(plan)
        self._wait_for([job for _, job, _ in self._copies.publishes.values()], _RESET_SECONDS)
        return self.take_report()

    def take_failed_blocks(self) -> set[int]:
        """Blocks that restores which have ended since the last call did not fill."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> CopyReport | None:
        """Publishes that have ended, and what was looked at, since the last call."""
        report = CopyReport(loaded={number: {self._rank: found} for number, found in self._looked.items()})
        self._looked.clear()
        for batch, (_, job, group) in list(self._copies.publishes.items()):
            if not job.ended:
                continue
            del self._copies.publishes[batch]
            self.accounts.add("publishes")
            if job.error is None:
                report.ended[batch] = {self._rank: padded(self._sizes[group])}
                self.accounts.add("publish_bytes", job.size, rank=self._rank)
                self.accounts.add("publish_seconds", job.seconds, rank=self._rank)
            else:
                log.warning("kvhold: a publish failed, its blocks are not kept: %s", job.error)
                report.ended[batch] = {self._rank: -1}
                self.accounts.add("publish_failures")
        return report if report.ended or report.loaded else None

    def take_stats(self) -> KvHoldStats | None:
        """Counts since the last call."""
        return KvHoldStats.taken(self.accounts)


def worker_here(instance: str) -> WorkerHalf | None:
    """The worker half of an engine of one rank, if that is in this process."""
    return _here.get(instance)


def _failed(reason: str) -> Job:
    job = Job(0)
    job.end(reason)
    return job
