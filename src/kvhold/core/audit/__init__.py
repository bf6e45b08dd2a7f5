"""What holds of the core's collections between any two events, in words that can be checked.

Whoever adds a collection or a count adds its rule here: the stateful model and the small worlds check all of them after
every event, and ``kvhold serve --audit`` while it serves. A rule is about the core's own books alone: whether they are
right is for the models in the tests to say.

``rules`` says what a rule is; ``memory``, ``objects``, ``recency``, ``owners``, ``backings`` and ``elsewhere`` have
them.
"""

from kvhold.core.audit import backings, elsewhere, memory, objects, owners, recency
from kvhold.core.audit.rules import Finding, Rules

RULES = Rules(memory, objects, recency, owners, backings, elsewhere)

__all__ = ["RULES", "Finding"]
