"""What requests that are over have left to publish, for want of slots, and where it still is."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvhold.engines.common.groups import Group

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

TAIL_SECONDS = 1.0
"""How long such a rest waits for the next slots, for which the engine is kept stepping."""
MOST_TAILS = 64
"""Requests whose rest waits; of more, the one that has waited longest is given up."""


@dataclass(slots=True)
class Tail:
    """Blocks of one request that is over: its ``tables`` up to token ``settled``.

    They are free. Each is what it was as long as it has the hash, in ``hashes``, that the engine gave it.
    """

    tables: list[list[int]]
    hashes: dict[int, object]
    settled: int
    resumed_at: tuple[int, ...]
    since: float = field(default_factory=time.monotonic)

    @classmethod
    def of(
        cls, pool: "BlockPool", tables: Sequence[Sequence[int]], settled: int, resumed_at: tuple[int, ...]
    ) -> "Tail":
        hashes: dict[int, object] = {block: pool.blocks[block].block_hash for table in tables for block in table}
        return cls([list(table) for table in tables], hashes, settled, resumed_at)

    @property
    def waits(self) -> bool:
        return time.monotonic() - self.since <= TAIL_SECONDS

    def go_on(self) -> None:
        """Some of it was published: the rest may wait as long again."""
        self.since = time.monotonic()

    def present(self, pool: "BlockPool", groups: Sequence[Group], done: Sequence[int]) -> list[list[int]]:
        """The tables without blocks that were used for others since; a chain ends at the first of them.

        ``done`` are the leading blocks of each group that do not matter any more.
        """
        tables = [list(table) for table in self.tables]
        for group, first in zip(groups, done, strict=True):
            table = tables[group.index]
            for number in range(first, len(table)):
                block = table[number]
                known = self.hashes[block]
                if block and (known is None or pool.blocks[block].block_hash != known):
                    table[number] = 0
                    if group.whole:
                        del table[number:]
                        break
        return tables
