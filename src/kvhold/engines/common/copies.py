"""One rank's copies between its KV cache and the arena, as the steps' plans have them."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvhold import protocol as wire
from kvhold.client.arena import ArenaMapping
from kvhold.client.attacher import Attacher, Half
from kvhold.client.control import padded
from kvhold.copy.engine import Copier
from kvhold.copy.job import Job
from kvhold.copy.layout import PagedLayout
from kvhold.engines.common.accounts import Accounts
from kvhold.engines.common.mappings import Mappings
from kvhold.engines.common.plans import CopyReport, Load, Publish, StepPlan
from kvhold.engines.common.ranks import WorkerReport
from kvhold.threads import ANY, ATTACHER, ENGINE, belongs_to

log = logging.getLogger(__name__)

_LAST_COPY_SECONDS = 30.0
"""How long an end waits for copies that were begun; they need nobody but this process."""
_RESET_SECONDS = 0.25
"""How long a reset waits for the copies of blocks that keep the engine from it."""


@dataclass(slots=True)
class EndedLoads:
    """Requests whose restores have ended; ``failed`` ones, of which nothing is of use, are also among the ``ended``."""

    ended: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


@belongs_to(ENGINE, but={ATTACHER: ("register", "ended"), ANY: ("unregister",)})
class Copies:
    """The copies of one rank, whose KV cache is as ``report`` says, on the thread on which the engine's steps run.

    It introduces itself with ``hello`` to the managers that what ``attach`` makes finds. ``loaded`` is a digest of the
    weights that are loaded now. ``keeps_prefix`` says that the engine can use what a failed restore has filled before
    it failed.
    """

    def __init__(
        self,
        report: WorkerReport,
        copier: Copier,
        hello: wire.Hello,
        attach: Callable[[Half], Attacher],
        accounts: Accounts,
        loaded: Callable[[], bytes],
        keeps_prefix: bool,
    ) -> None:
        # By request or batch: the step in which a copy was planned, the job, and the blocks that wait for it, or the
        # group that it is about.
        self.loads: dict[str, tuple[int, Job, list[int]]] = {}
        self.publishes: dict[int, tuple[int, Job, int]] = {}
        self.mappings = Mappings(hello, self)
        self.attacher = attach(self.mappings)
        self._report = report
        self._copier = copier
        self._accounts = accounts
        self._loaded = loaded
        self._keeps_prefix = keeps_prefix
        self._bound = True  # as long as the engine leaves its caches their memory
        self._unfilled: set[int] = set()
        self._looked: dict[int, bytes] = {}  # what was loaded, by number of the look
        self._saved = -1  # the last step whose publishes were begun
        self._begun = 0  # the last step all of whose copies were

    # --- for the attacher, on its thread --------------------------------------------------------------------------

    def register(self, arena: ArenaMapping) -> None:
        self._copier.register(arena)

    def unregister(self, arena: ArenaMapping) -> None:
        self._copier.unregister(arena)

    def ended(self, plan: int) -> bool:
        if self._begun < plan:
            return False  # and only then look at the copies: the engine's thread may begin some meanwhile
        copies = [*self.loads.values(), *self.publishes.values()]
        return all(job.ended for planned, job, _ in copies if planned <= plan)

    # --- steps --------------------------------------------------------------------------------------------------

    def start_loads(self, plan: StepPlan) -> None:
        """Begin this step's restores."""
        if plan.look:
            self._looked[plan.look] = self._loaded()
        for load in plan.loads:
            self.loads[load.request] = plan.step, self._begin_load(plan, load), load.blocks
        self._copier.advance()

    def start_publishes(self, plan: StepPlan) -> None:
        """Begin this step's publishes; once per step, however often it is called."""
        if plan.step == self._saved:
            return
        self._saved = plan.step
        for publish in plan.publishes:
            if self._report.owner == self._report.rank and self._report.shard_bytes[publish.group]:
                self.publishes[publish.batch] = plan.step, self._begin_publish(plan, publish), publish.group
        self._begun = plan.step
        if self.mappings.has_old:
            self.attacher.wake()

    def _begin_load(self, plan: StepPlan, load: Load) -> Job:
        if not load.copies:
            return _failed("what was promised cannot be had any more")

        def begin(arena: ArenaMapping) -> Job:
            copies = [
                (group, blocks, [offset + plan.starts[group][self._report.rank] for offset in offsets])
                for group, blocks, offsets in load.copies
                if self._report.shard_bytes[group]
            ]
            return self._copier.begin_restore(arena, copies)

        return self._begin(plan, begin)

    def _begin_publish(self, plan: StepPlan, publish: Publish) -> Job:
        def begin(arena: ArenaMapping) -> Job:
            start = plan.starts[publish.group][self._report.rank]
            offsets = [offset + start for offset in publish.offsets]
            return self._copier.begin_publish(arena, publish.group, publish.blocks, offsets)

        return self._begin(plan, begin)

    def _begin(self, plan: StepPlan, begin: Callable[[ArenaMapping], Job]) -> Job:
        """A copy that cannot be begun is a failed one, because somebody waits for its end."""
        try:
            arena = self.mappings.arena(plan.incarnation)
            if arena is None:
                return _failed("its arena is gone")
            if not self._bound:
                return _failed("the engine has taken its KV cache away")
            return begin(arena)
        except Exception as error:  # noqa: BLE001 - see above
            return _failed(f"{type(error).__name__}: {error}")

    def take_loads(self) -> EndedLoads:
        """Restores that have ended since the last call."""
        taken = EndedLoads()
        for request, (_, job, blocks) in list(self.loads.items()):
            if not job.ended:
                continue
            del self.loads[request]
            taken.ended.add(request)
            self._accounts.add("loads")
            if job.error is not None:
                log.warning("kvhold: a restore failed, so its blocks are computed instead: %s", job.error)
                if self._keeps_prefix:
                    self._unfilled.update(blocks[job.done :])
                else:
                    taken.failed.add(request)
                self._accounts.add("load_failures")
            else:
                self._accounts.add("load_bytes", job.size, rank=self._report.rank)
                self._accounts.add("load_seconds", job.seconds, rank=self._report.rank)
        return taken

    def take_unfilled(self) -> set[int]:
        """Blocks that restores which have ended since the last call did not fill, where those before them are kept."""
        taken, self._unfilled = self._unfilled, set()
        return taken

    def take_report(self) -> CopyReport | None:
        """Publishes that have ended, and what was looked at, since the last call."""
        rank = self._report.rank
        report = CopyReport(loaded={number: {rank: found} for number, found in self._looked.items()})
        self._looked.clear()
        for batch, (_, job, group) in list(self.publishes.items()):
            if not job.ended:
                continue
            del self.publishes[batch]
            self._accounts.add("publishes")
            if job.error is None:
                report.ended[batch] = {rank: padded(self._report.shard_bytes[group])}
                self._accounts.add("publish_bytes", job.size, rank=rank)
                self._accounts.add("publish_seconds", job.seconds, rank=rank)
            else:
                log.warning("kvhold: a publish failed, so its blocks are not kept: %s", job.error)
                report.ended[batch] = {rank: -1}
                self._accounts.add("publish_failures")
        return report if report.ended or report.loaded else None

    # --- between steps ------------------------------------------------------------------------------------------

    def end_publishes(self, plan: StepPlan) -> CopyReport | None:
        """Copy what is to be published, and wait a moment for that; the report that is due then.

        On the scheduler's thread, where a copy that takes longer means that the engine refuses its reset.
        """
        self.start_publishes(plan)
        self._wait_for([job for _, job, _ in self.publishes.values()], _RESET_SECONDS)
        return self.take_report()

    def unbind(self) -> None:
        """End copies and forget the caches, which are about to lose their memory. Arenas stay mapped and pinned."""
        if self._bound:
            self._bound = False
            self._drain()
            self._copier.unbind()

    @property
    def bound(self) -> bool:
        """Whether the caches have their memory, as far as this half was told."""
        return self._bound

    def bind(self, layouts: Sequence[PagedLayout]) -> None:
        """Copy from and to ``layouts`` again, after :meth:`unbind`.

        Raises ValueError if their blocks are not what they were; then copies go on failing.
        """
        sizes, before = tuple(layout.shard_bytes for layout in layouts), self._report.shard_bytes
        if sizes != before:
            raise ValueError(f"blocks have {sizes} bytes by group after the engine's sleep, and had {before}")
        self._copier.bind(layouts)
        self._bound = True

    def shutdown(self) -> None:
        """End copies, say goodbye, unmap."""
        drained = self._drain()
        channel = self.attacher.channel
        self.attacher.stop(channel.bye if channel is not None and drained else lambda: None)
        if drained:
            self._copier.close()
            self.mappings.close()

    def _drain(self) -> bool:
        """Let the copies that were begun end, within a time; whether all have."""
        return self._wait_for(
            [job for _, job, _ in (*self.loads.values(), *self.publishes.values())], _LAST_COPY_SECONDS
        )

    def _wait_for(self, jobs: list[Job], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not all(job.wait(0.001) for job in jobs):
            self._copier.advance()
        return all(job.ended for job in jobs)


def _failed(reason: str) -> Job:
    job = Job(0)
    job.end(reason)
    return job
