"""Batches of blocks on their way to the manager: the slots they go into, the hold on their source, and what ends both.

Until every rank's copy has ended, whatever its outcome, the source is held, so that its request may finish, be aborted
or be preempted meanwhile. A hold never waits for the manager: it ends before the manager is told.
"""

import logging
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvhold.client.control import Control, Slots
from kvhold.engines.common.accounts import Accounts
from kvhold.engines.common.plans import CopyReport, Publish
from kvhold.threads import ENGINE, belongs_to

log = logging.getLogger(__name__)

STALL_SECONDS = 60
"""A copy that takes longer is reported."""
HOLD_SHARE = 2
"""At most one in so many of the engine's blocks is held for copies that outlive their step."""


@dataclass(slots=True)
class Batch:
    """Blocks of one chain of one group on their way: ``keys[i]`` from ``blocks[i]`` into the i-th slot."""

    space: int
    group: int
    attachment: int
    parent: bytes
    keys: list[bytes]
    slots: Slots
    blocks: list[int]
    depth: int
    since: float
    distrusted: bool = False  # computed from what nobody vouches for
    stalled: bool = False  # and reported
    ended: dict[int, int] = field(default_factory=dict)  # bytes per object by rank, of ranks whose copy has ended


class Source(Protocol):
    """Where blocks come from: the engine's own pool, of ``blocks`` in all."""

    blocks: int

    def hold(self, blocks: Sequence[int]) -> None:
        """Keep ``blocks`` as they are, once more for each time that they are named."""

    def let_go(self, blocks: Sequence[int]) -> None:
        """Undo one :meth:`hold`. They follow each other in a chain, whose end the engine shall use for others first."""


class Certainty(Protocol):
    """Who knows whether what was computed is what it is stored as."""

    def sure(self, space: int, since: float) -> bool | None:
        """Whether what was computed for ``space`` until ``since`` is what it stands for; None: ask again."""


class Listener(Protocol):
    """Who waits for the word that something is stored."""

    def expect_no_more(self, space: int, keys: Sequence[bytes]) -> None:
        """These will not be."""


@belongs_to(ENGINE)
class Batches:
    """The batches of one engine, on the scheduler's thread. Nothing is begun until there is a ``source``."""

    def __init__(
        self, control: Control, accounts: Accounts, certainty: Certainty, listener: Listener | None = None
    ) -> None:
        self.source: Source | None = None
        self.late: list[Publish] = []  # begun between two steps; the next one carries them
        self._control = control
        self._accounts = accounts
        self._certainty = certainty
        self._listener = listener
        self._batches: dict[int, Batch] = {}
        self._held = 0  # blocks of all batches
        self._copied: list[tuple[Batch, Mapping[int, int], float]] = []  # with what was expected, and since when
        self._under_way: set[tuple[int, bytes]] = set()  # (space, key)
        self._next = 1

    @property
    def holding(self) -> bool:
        """Whether copies are under way, for which blocks are held, or have ended and nobody was told."""
        mine = self._control.attachment
        return bool(self._batches) or any(batch.attachment == mine for batch, _, _ in self._copied)

    def under_way(self, space: int, key: bytes) -> bool:
        """Whether a copy of it has not ended."""
        return (space, key) in self._under_way

    # --- at a copy's beginning ----------------------------------------------------------------------------------

    def begin(
        self,
        space: int,
        group: int,
        parent: bytes,
        depth: int,
        keys: list[bytes],
        blocks: list[int],
        plans: list[Publish],
        again: bool = False,
    ) -> int:
        """Begin to publish ``keys``, which follow ``parent`` and each other, the first at ``depth``, from ``blocks``.

        Returns how many there were slots and holds for. ``again`` says that it was tried before, and counted.
        """
        assert self.source is not None
        credit, wanted = self._control.credit.get(space), len(keys)
        room = self.source.blocks // HOLD_SHARE - self._held
        count = min(wanted, len(credit) if credit is not None else 0)
        if not again:
            self._accounts.add("blocks_without_credit", wanted - count, group=group)
        if count > room:
            self._accounts.add("blocks_over_hold_budget", count - max(0, room))
            count = max(0, room)
        if count == 0 or credit is None:
            return 0
        blocks, keys = blocks[:count], keys[:count]
        attachment, now = self._control.attachment, time.monotonic()
        batch = Batch(space, group, attachment, parent, keys, credit.take(count), blocks, depth, now)
        self.source.hold(blocks)
        self._batches[self._next] = batch
        self._held += count
        self._under_way.update((space, key) for key in keys)
        plans.append(Publish(self._next, group, blocks, array("Q", batch.slots.offsets)))
        self._accounts.add("blocks_published", count, group=group)
        self._next += 1
        return count

    def take_late(self) -> list[Publish]:
        """What was begun since the last step; what was begun in a session that is over is let go instead."""
        late, self.late = self.late, []
        current = []
        for publish in late:
            if self._batches[publish.batch].attachment == self._control.attachment:
                current.append(publish)
            else:
                self._let_go(publish.batch)
        return current

    def drop_late(self) -> None:
        """Let go of what was begun since the last step: nobody copies it yet."""
        late, self.late = self.late, []
        for publish in late:
            batch = self._batches[publish.batch]
            self._let_go(publish.batch)
            if batch.attachment == self._control.attachment:
                self._give_back(batch)

    # --- meanwhile ----------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Say so when a copy takes very long. Its blocks and slots stay: a time is no proof that nobody writes."""
        oldest = next(iter(self._batches.values()), None)
        if oldest is None or oldest.stalled or time.monotonic() - oldest.since < STALL_SECONDS:
            return
        oldest.stalled = True
        self._accounts.add("publishes_stalled")
        text = "kvhold: publishing %d blocks takes longer than %d s; ended so far are ranks %s"
        log.warning(text, len(oldest.blocks), STALL_SECONDS, sorted(oldest.ended))

    def distrust(self) -> None:
        """What is under way may rest on blocks that were not filled: keep none of it."""
        for batch in self._batches.values():
            batch.distrusted = True

    def distrust_all(self) -> None:
        """Keep nothing of what is under way or waits for its word."""
        self.distrust()
        for batch, _, _ in self._copied:
            batch.distrusted = True

    # --- at a copy's end ----------------------------------------------------------------------------------------

    def ended(self, report: CopyReport, expected: Sequence[Mapping[int, int]]) -> None:
        """Copies have ended on some ranks. Where on all: let go of their source, then tell the manager.

        ``expected[g]`` are the bytes that each rank which has a part of its own writes per object of the g-th group.
        Ranks may end in different steps; until the last one has, it still reads the source and writes the slots.
        """
        for number, ranks in report.ended.items():
            batch = self._batches.get(number)
            if batch is None:
                continue
            batch.ended.update(ranks)
            if batch.ended.keys() >= expected[batch.group].keys():
                self._let_go(number)
                self._copied.append((batch, expected[batch.group], time.monotonic()))
        self.conclude()

    def conclude(self) -> None:
        """Tell the manager of what was copied, as soon as it is sure that it was what its space is for."""
        copied, self._copied = self._copied, []
        for batch, wanted, since in copied:
            if batch.attachment != self._control.attachment:
                continue
            sure = self._certainty.sure(batch.space, since)
            if sure is None:
                self._copied.append((batch, wanted, since))
                continue
            whole = all(batch.ended[rank] == size for rank, size in wanted.items())
            if sure and whole and not batch.distrusted and batch.space in self._control.credit:
                shards = tuple(wanted.values())
                self._control.commit(batch.space, batch.parent, batch.depth, batch.keys, batch.slots, shards)
            else:
                self._give_back(batch)

    def _give_back(self, batch: Batch) -> None:
        self._control.give_back(batch.space, batch.slots)
        if self._listener is not None:
            self._listener.expect_no_more(batch.space, batch.keys)

    def _let_go(self, number: int) -> None:
        batch = self._batches.pop(number)
        self._held -= len(batch.blocks)
        self._under_way.difference_update((batch.space, key) for key in batch.keys)
        if self.source is not None:
            self.source.let_go(batch.blocks)
