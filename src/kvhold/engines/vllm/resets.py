"""A reset of the engine's caches: what it makes of what is stored, and of what is under way."""

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvhold.engines.common.batches import Batches
from kvhold.engines.common.doubt import Doubt
from kvhold.engines.common.plans import StepPlan
from kvhold.engines.common.questions import Questions
from kvhold.engines.common.session import SchedulerSession
from kvhold.engines.vllm.events import CacheEvents
from kvhold.engines.vllm.publishing import Publishing
from kvhold.engines.vllm.spaces import RequestSpaces
from kvhold.engines.vllm.worker import worker_here
from kvhold.threads import ENGINE, belongs_to

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

log = init_logger(__name__)


@belongs_to(ENGINE)
class Resets:
    """The resets of the engine ``instance``, of ``world`` ranks."""

    def __init__(
        self,
        instance: str,
        world: int,
        session: SchedulerSession,
        spaces: RequestSpaces,
        doubt: Doubt,
        questions: Questions,
        publishing: Publishing,
        batches: Batches,
        events: CacheEvents | None,
    ) -> None:
        self.doubt = doubt
        self._instance = instance
        self._world = world
        self._session = session
        self._spaces = spaces
        self._questions = questions
        self._publishing = publishing
        self._batches = batches
        self._events = events

    def bind(self, manager: "KVCacheManager") -> None:
        """The engine has its block pool."""
        # No hook tells a connector that the engine is about to clear its cache, which it refuses while a block is held.
        clear = manager.reset_prefix_cache

        def reset_prefix_cache() -> bool:
            self._end_late()
            return clear()

        manager.reset_prefix_cache = reset_prefix_cache  # type: ignore[method-assign]

    def reset(self) -> None:
        """Find and store nothing until it is known what weights are loaded, and nothing computed before now at all."""
        outdated = self._spaces.outdated
        self.doubt.begin()
        if outdated is not None:
            outdated.begin()
        self._questions.drop_all()
        running = self._publishing.forget_all()
        if self._events is not None:
            self._events.cleared()
        self._spaces.adapters.rekeyed()
        if outdated is not None and outdated.mark(running):
            log.warning(
                "kvhold: the engine could not clear its own prefix cache because requests are using it; what they find "
                "there is not stored"
            )

    def finished(self, request: str) -> None:
        """The request is over; what it has from before the last reset may stay in the engine for a while."""
        if self._spaces.outdated is not None:
            self._spaces.outdated.finished(request)

    def _end_late(self) -> None:
        """Let go of blocks that are held for copies which wait for a step, or whose end waits for one to be told.

        A worker in this process copies them now. For workers in others, what they were not told of is not kept.
        """
        try:
            worker = worker_here(self._instance) if self._world == 1 else None
            if worker is not None and worker.copies is not None and self._spaces.ranks is not None:
                step, ranks = self._session.number_step(), self._spaces.ranks
                late = self._batches.take_late()
                plan = StepPlan(step, self._session.control.incarnation, [], late, ranks.starts)
                report = worker.copies.end_publishes(plan)
                if report is not None:
                    self._batches.ended(report, ranks.writes)
            self._batches.drop_late()
        except Exception:
            log.exception("kvhold: copies could not be ended before a reset; the engine may refuse it")
