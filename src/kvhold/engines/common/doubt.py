"""What weights are loaded after a reset: asked of the workers, as soon as a request wants to be scheduled.

A reset says neither that weights have changed nor that they have not; they may change after it. So workers look at what
they have when the first request wants to be scheduled. Until they have said what that is, nothing is found or stored.
"""

import hashlib
import logging
from collections.abc import Mapping

from kvhold.engines.common.session import SchedulerSession
from kvhold.engines.common.spaces import Spaces
from kvhold.threads import ENGINE, belongs_to

log = logging.getLogger(__name__)

_LOOK_STEPS = 256
"""Steps within which workers say what weights they have; until then requests wait, and afterwards they have others."""


@belongs_to(ENGINE)
class Doubt:
    """The doubt about the weights of an engine of ``world`` ranks, whose ``spaces`` go by them."""

    def __init__(self, session: SchedulerSession, spaces: Spaces, world: int) -> None:
        self._session = session
        self._spaces = spaces
        self._world = world
        self._look = 0  # the number of the last look that was wanted
        self._wanted = False  # by a request
        self._told = 0  # the step in which workers were told of it; 0: they were not
        self._seen: dict[int, bytes] = {}  # what they have said, by rank

    def begin(self) -> None:
        """Other weights may be loaded from now on."""
        self._spaces.doubt()
        self._look, self._wanted, self._told = self._look + 1, False, 0
        self._seen.clear()

    def awaits_look(self) -> bool:
        """Whether a request has to wait until it is known what weights are loaded; if so, workers will be asked."""
        if self._spaces.weights is not None or not self._session.control.attachment or self._spaces.agreed() is None:
            return False
        self._wanted = True
        if self._told and self._session.step - self._told > _LOOK_STEPS:
            log.warning("kvhold: the workers do not say which weights they have; this engine starts cold")
            self._spaces.settle(None)
        return self._spaces.weights is None

    def take_question(self, step: int) -> int:
        """The number of the look that workers are to be asked for in ``step``; 0 for none."""
        if not self._wanted or self._told:
            return 0
        self._told = step
        return self._look

    def take_answers(self, loaded: Mapping[int, Mapping[int, bytes]]) -> None:
        """Workers have said, by look and rank, what weights they have: the same as at the start, or others."""
        self._seen.update(loaded.get(self._look, {}))
        ranks = self._spaces.ranks
        if self._spaces.weights is not None or ranks is None or len(self._seen) < self._world:
            return
        seen = tuple(found for _, found in sorted(self._seen.items()))
        if not all(seen):
            log.warning(
                "kvhold: it cannot be told which weights are loaded; this engine starts cold and shares its "
                "cache with no other"
            )
            self._spaces.settle(None)
        elif seen == ranks.loaded:
            self._spaces.settle(b"")
        else:
            log.info(
                "kvhold: other weights are loaded than at the start; engines that have loaded the same ones share "
                "their cache"
            )
            self._spaces.settle(hashlib.sha256(b"".join(seen)).digest())
