"""The cache groups of an engine that are kept, and how much of each a request needs."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Group:
    """A cache group that is kept. ``index`` is the engine's number of it, ``block_tokens`` what one block covers.

    ``handed`` groups (Mamba in "align" mode) have no append-only block table: their states are stored only when the
    engine hands one over, and are valid at exactly one boundary. In ``whole`` ones a hit needs all blocks before it.
    ``window`` is the sliding window in tokens, 0 for none.
    """

    index: int
    kind: str
    block_tokens: int
    handed: bool
    whole: bool
    window: int

    def blocks_between(self, start: int, end: int) -> int:
        """At most so many blocks hold what the group needs to compute tokens ``start`` to ``end`` of a request."""
        if self.handed:
            return 2
        first = max(0, start - self.window) if self.window else 0
        return -(-end // self.block_tokens) - first // self.block_tokens


def reachable(groups: Sequence[Group], tokens: int, unit: int, blocks: int) -> int:
    """The largest multiple of ``unit`` up to ``tokens`` that a restore into at most ``blocks`` blocks can reach."""
    tokens -= tokens % unit
    while tokens > 0 and sum(group.blocks_between(tokens, tokens) for group in groups) > blocks:
        tokens -= unit
    return max(0, tokens)
