"""What questions may take of the arena and of the manager's memory. Over budget is an answer, never a wait.

Who brings bytes under lease pays for them; what somebody holds already costs nothing.
"""

from collections.abc import Sequence

from kvhold.core.common import Common
from kvhold.core.events import Reason
from kvhold.core.rows import State
from kvhold.core.sessions import Attachment, Operation, Phase


class Budgets:
    """``answering`` counts the questions of all engines that are not answered yet."""

    def __init__(self, common: Common) -> None:
        self.answering = 0
        self._common = common
        self._catalogue = common.catalogue

    def crowded(self, attachment: Attachment, former: Operation | None, keys: int) -> bool:
        """Whether one more question, of so many ``keys`` and instead of the ``former``, would be one too many."""
        limits = self._common.limits
        replaced, pending = former is not None, former is not None and former.phase < Phase.ANSWERED
        crowded = attachment.answering - pending >= limits.queries or self.answering - pending >= limits.all_queries
        named = attachment.asked + keys - (former.asked if former is not None else 0)
        return crowded or len(attachment.operations) - replaced >= limits.operations or named > limits.keys

    def asked(self, operation: Operation, keys: int) -> None:
        """A question is to be answered, and names so many ``keys`` until it is over."""
        operation.asked = keys
        operation.attachment.asked += keys
        operation.attachment.answering += 1
        self.answering += 1

    def answered(self, attachment: Attachment) -> None:
        """A question is not to be answered any more."""
        attachment.answering -= 1
        self.answering -= 1

    @staticmethod
    def charge(operation: Operation, size: int) -> None:
        """The operation has brought ``size`` bytes under lease, or let go of them if that is negative."""
        operation.charged += size
        operation.attachment.prepared += size

    def room(self, attachment: Attachment) -> int:
        """Bytes that an engine may bring under lease beyond what is, by all budgets."""
        limits, total, states = self._common.limits, self._common.arena.total, self._catalogue.bytes
        held = states[State.LEASED] + states[State.DOOMED] + states[State.LOADING]
        return min(int(limits.prepared_share * total) - held, int(limits.engine_share * total) - attachment.prepared)

    def affordable(self, rows: Sequence[int], size: int, room: int) -> int:
        """How many leading ones of ``rows`` may be held for ``room`` bytes beyond what is held by anybody."""
        state = self._catalogue.state
        for position, row in enumerate(rows):
            if state[row] in (State.RESIDENT, State.COLD):
                room -= size
                if room < 0:
                    return position
        return len(rows)

    def too_large(self, demand: int) -> Reason:
        """Why so many bytes can never be had all at once."""
        limits, total = self._common.limits, self._common.arena.total
        return Reason.TOO_LARGE if demand > min(limits.engine_share, limits.prepared_share) * total else Reason.NONE
