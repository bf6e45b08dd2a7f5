"""Which blocks to publish, into which slots, and how long their source is held.

A block is published in the step that completes it, from the engine's own current block table; a Mamba state when the
engine hands it over; what the last step of a request completed, before its blocks are freed. Until every rank's copy
has ended, whatever its outcome, the block is held by a reference in the engine's block pool, so that its request may
finish, be aborted or be preempted meanwhile. A hold never waits for the manager: what a request leaves for want of
slots is not held, but published as they are granted, as far as its blocks were not used for anything else by then.
"""

import time
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvhold.client.control import Control, Slots
from kvhold.engines.common.accounts import Accounts
from kvhold.engines.common.plans import CopyReport, Publish
from kvhold.engines.vllm.events import CacheEvents, Published
from kvhold.engines.vllm.reach import Reach
from kvhold.engines.vllm.tails import MOST_TAILS, Tail

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = init_logger(__name__)

STALL_SECONDS = 60
"""A copy that takes longer is reported."""
HOLD_SHARE = 2
"""At most one in so many of the engine's blocks is held for copies that outlive their step."""

Handed = tuple[int, int, int]
"""A state that the engine hands over: (engine's group, block, tokens after which it is the state)."""


@dataclass(slots=True)
class Source:
    """A request with blocks to publish: of each group, ``done`` leading ones are stored, under way, or never will be.

    ``stored[g]`` are the ends, in tokens, of others that the manager has; None if that is not known yet. All of it is
    about the session ``attachment`` and its ``spaces``.
    """

    request: "Request"
    computing: bool = False  # since it was admitted: until then others may have to bring what counts as computed
    over: bool = False  # the request is: what it has left is a Tail
    attachment: int = 0
    spaces: Sequence[int] = ()
    done: list[int] = field(default_factory=list)
    stored: Sequence[Collection[int]] | None = None

    def has(self, group: int, tokens: int) -> bool:
        return bool(self.stored) and tokens in self.stored[group]  # type: ignore[index]


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


class Publishing:
    """Publishing of one engine.

    ``spaces`` says where a request's blocks go, None for nowhere; ``stored`` which the manager has, by group and end;
    ``sure`` whether what was computed for a space until a time is what the space is for, None while that is not known;
    ``events`` are told of what is published, if anybody wants to know.
    """

    def __init__(
        self,
        control: Control,
        accounts: Accounts,
        decode: bool,
        spaces: Callable[["Request"], Sequence[int] | None],
        stored: Callable[[str], Sequence[Collection[int]] | None],
        sure: Callable[[int, float], bool | None],
        events: CacheEvents | None,
    ) -> None:
        self._control = control
        self._accounts = accounts
        self._decode = decode
        self._spaces = spaces
        self._stored = stored
        self._sure = sure
        self._events = events
        self._pool: BlockPool | None = None
        self._reach: Reach | None = None
        self._sources: dict[str, Source] = {}
        self._complete: dict[str, Source] = {}  # their prompts are stored; a session's prompt may still grow
        self._batches: dict[int, Batch] = {}
        self._held = 0  # blocks of all batches
        self._copied: list[tuple[Batch, Mapping[int, int], float]] = []  # with what was expected, and since when
        self._late: list[Publish] = []  # begun between two steps; the next one carries them
        self._tails: list[tuple[Source, Tail]] = []
        self._under_way: set[tuple[int, bytes]] = set()  # (space, key)
        self._next_batch = 1

    def bind(self, pool: "BlockPool", reach: Reach) -> None:
        self._pool, self._reach = pool, reach

    @property
    def holding(self) -> bool:
        """Whether there is something to do without any request.

        Copies are under way, for which blocks of the engine are held, or have ended and nobody was told, or slots are
        awaited for what a request has left.
        """
        mine = self._control.attachment
        awaited = any(source.attachment == mine and tail.waits for source, tail in self._tails)
        return bool(self._batches) or awaited or any(batch.attachment == mine for batch, _, _ in self._copied)

    def admit(self, request: "Request") -> None:
        """``request`` has been given blocks, for the first time or to go on with what it has."""
        name = request.request_id
        former = self._complete.pop(name, None) or self._sources.get(name)
        self._sources[name] = former if former and request.num_computed_tokens > 0 else Source(request)

    def forget(self, request: str) -> None:
        self._sources.pop(request, None)
        self._complete.pop(request, None)

    def forget_all(self) -> "list[Request]":
        """Publish no more blocks that were computed before now; which requests had any."""
        for batch in (*self._batches.values(), *(copied for copied, _, _ in self._copied)):
            batch.distrusted = True
        running = [source.request for source in (*self._sources.values(), *self._complete.values())]
        self._sources.clear()
        self._complete.clear()
        self._tails.clear()
        return running

    # --- in a step ----------------------------------------------------------------------------------------------

    def plan(self, output: "SchedulerOutput", plans: list[Publish]) -> None:
        """Add to ``plans`` what the workers shall copy after this step's forward."""
        self._watch()
        self._conclude()
        scheduled, state = output.num_scheduled_tokens, output.kv_connector_block_state
        if state is None or self._reach is None:
            return
        handed = state.boundary_state_offloads
        preempted, finished = output.preempted_req_ids or (), output.finished_req_ids
        for name in [name for name in self._sources if name in scheduled or name in handed]:
            source = self._sources[name]
            source.computing = source.computing or name in scheduled
            tables = state.get_block_ids(name)
            if tables is None or name in preempted or name in finished or not self._is_known(source):
                continue
            computed = source.request.num_computed_tokens + scheduled.get(name, 0)
            over = self._publish_complete(source, tables, computed, plans)
            self._publish_handed(source, tables, handed.get(name, ()), computed, plans)
            if over and not self._decode and computed > source.request.num_prompt_tokens:
                self._complete[name] = self._sources.pop(name)
        self._publish_tails(plans)

    def _is_known(self, source: Source, last: bool = False) -> bool:
        """Whether it is known where the source's blocks go and which are there; a new session begins anew.

        The ``last`` time that this can be asked, what is not known counts as not there.
        """
        spaces = self._spaces(source.request)
        if spaces is None:
            return False
        if source.attachment != self._control.attachment or source.spaces != spaces:
            again = source.attachment > 0
            source.attachment, source.spaces = self._control.attachment, spaces
            source.done = [0] * len(spaces)
            source.stored = () if again else None
        if source.stored is None:
            source.stored = self._stored(source.request.request_id)
        if source.stored is None and last:
            source.stored = ()
        return source.stored is not None

    def take_late(self) -> list[Publish]:
        """What was begun since the last step; what was begun in a session that is over is let go instead."""
        late, self._late = self._late, []
        current = []
        for publish in late:
            if self._batches[publish.batch].attachment == self._control.attachment:
                current.append(publish)
            else:
                self._let_go(publish.batch)
        return current

    def _watch(self) -> None:
        """Say so when a copy takes very long. Its blocks and slots stay: a time is no proof that nobody writes."""
        oldest = next(iter(self._batches.values()), None)
        if oldest is None or oldest.stalled or time.monotonic() - oldest.since < STALL_SECONDS:
            return
        oldest.stalled = True
        self._accounts.add("publishes_stalled")
        text = "kvhold: publishing %d blocks takes longer than %d s; ended so far are ranks %s"
        log.warning(text, len(oldest.blocks), STALL_SECONDS, sorted(oldest.ended))

    def _limit(self, request: "Request") -> int:
        """Tokens of a request that may ever be published: their values are final."""
        assert self._reach is not None
        known = len(request.block_hashes) * self._reach.hash_tokens
        return known if self._decode else min(known, request.num_prompt_tokens)

    def _end(self, request: "Request", at: int, table: Sequence[int], computed: int) -> int:
        """How many blocks of a group ``computed`` tokens complete that may be published."""
        reach = self._reach
        assert reach is not None
        tokens = reach.groups[at].block_tokens
        return min(self._limit(request) // tokens, reach.settled(at, computed) // tokens, len(table))

    def _publish_complete(
        self,
        source: Source,
        tables: Sequence[Sequence[int]],
        computed: int,
        plans: list[Publish],
        resumed_at: Sequence[int] = (),
    ) -> bool:
        """Publish blocks that ``computed`` tokens complete; whether none of this request is left to."""
        reach, limit, over = self._reach, self._limit(source.request), True
        assert reach is not None
        for at, group in enumerate(reach.groups):
            if group.handed:
                continue
            final = limit // group.block_tokens
            end = self._end(source.request, at, tables[group.index], computed)
            start = source.done[at]
            if start < end:
                useful = reach.useful(at, start, end, source.request, resumed_at)
                source.done[at] = self._publish_range(source, at, tables[group.index], start, end, useful, plans)
            over = over and source.done[at] >= final
        return over

    def _publish_range(
        self,
        source: Source,
        at: int,
        table: Sequence[int],
        start: int,
        end: int,
        useful: Sequence[bool] | None,
        plans: list[Publish],
    ) -> int:
        """Publish what is worth it of a group's blocks [start, end), run by run; up to where that is done."""
        reach, space, request = self._reach, source.spaces[at], source.request
        assert reach is not None
        origin, tokens = start, reach.groups[at].block_tokens

        def wanted(block: int) -> bool:
            return (
                table[block] != 0
                and (useful is None or useful[block - origin])
                and not source.has(at, (block + 1) * tokens)
                and (space, reach.key(request, (block + 1) * tokens)) not in self._under_way
            )

        while start < end:
            if not wanted(start):
                start += 1
                continue
            stop = start + 1
            while stop < end and wanted(stop):
                stop += 1
            keys = [reach.key(request, (block + 1) * tokens) for block in range(start, stop)]
            taken = self._begin(source, at, (start + 1) * tokens, keys, list(table[start:stop]), plans)
            start += taken
            if start < stop:
                break
        return start

    def _publish_handed(
        self,
        source: Source,
        tables: Sequence[Sequence[int]],
        handed: Iterable[Handed],
        computed: int,
        plans: list[Publish],
    ) -> None:
        """Publish states, and where one stands inside of a block of another group, that block as far as it goes."""
        reach, limit = self._reach, self._limit(source.request)
        assert reach is not None
        for index, block, tokens in handed:
            at = reach.by_index.get(index)
            if at is None or block == 0 or not 0 < tokens <= min(limit, computed) or tokens % reach.hash_tokens:
                continue
            if not reach.is_state(at, source.request, block, tokens, computed):
                continue
            self._publish_state(source, at, block, tokens, plans)
            for other, group in enumerate(reach.groups):
                inside = tokens // group.block_tokens
                table = tables[group.index]
                if not group.handed and tokens % group.block_tokens and inside < len(table) and table[inside]:
                    self._publish_state(source, other, table[inside], tokens, plans)

    def _publish_state(self, source: Source, at: int, block: int, tokens: int, plans: list[Publish]) -> None:
        """Publish a block under the hash of its first ``tokens``."""
        reach = self._reach
        assert reach is not None
        key = reach.key(source.request, tokens)
        if (source.spaces[at], key) not in self._under_way and not source.has(at, tokens):
            self._begin(source, at, tokens, [key], [block], plans)

    def _begin(
        self, source: Source, at: int, end: int, keys: list[bytes], blocks: list[int], plans: list[Publish]
    ) -> int:
        """Begin to publish ``keys``, a piece of a chain whose first ends after ``end`` tokens.

        Returns how many there were slots and holds for.
        """
        pool, reach, space, wanted = self._pool, self._reach, source.spaces[at], len(keys)
        assert pool is not None
        assert reach is not None
        credit = self._control.credit.get(space)
        room = pool.num_gpu_blocks // HOLD_SHARE - self._held
        count = min(wanted, len(credit) if credit is not None else 0)
        if not source.over:
            self._accounts.add("blocks_without_credit", wanted - count, group=at)
        if count > room:
            self._accounts.add("blocks_over_hold_budget", count - max(0, room))
            count = max(0, room)
        if count == 0 or credit is None:
            return 0
        blocks, keys = blocks[:count], keys[:count]
        tokens = reach.groups[at].block_tokens
        depth = (end - 1) // tokens
        parent = reach.key(source.request, depth * tokens) if depth else b""
        attachment, now = self._control.attachment, time.monotonic()
        batch = Batch(space, at, attachment, parent, keys, credit.take(count), blocks, depth, now)
        pool.touch([pool.blocks[block] for block in blocks])
        self._batches[self._next_batch] = batch
        self._held += count
        self._under_way.update((space, key) for key in keys)
        plans.append(Publish(self._next_batch, at, blocks, array("Q", batch.slots.offsets)))
        if self._events is not None:
            for number, key in enumerate(keys):
                start = (depth + number) * tokens
                before = keys[number - 1] if number else parent
                self._events.expect(space, key, Published(source.request, before, start, end + number * tokens))
        self._accounts.add("blocks_published", count, group=at)
        self._next_batch += 1
        return count

    # --- at a request's end -------------------------------------------------------------------------------------

    def finish(self, request: "Request", tables: Sequence[Sequence[int]], handed: Iterable[Handed] = ()) -> None:
        """Publish what the last step of ``request`` completed; its blocks are still its own."""
        source = self._sources.get(request.request_id)
        if source is None or self._reach is None or not source.computing or not self._is_known(source, last=True):
            return
        # The last token was sampled, and nothing was computed from it.
        settled = min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens - 1)
        resumed_at: tuple[int, ...] = ()
        if self._decode:  # a conversation goes on where this one ends: what its window needs is still here
            resumed_at = (settled,)
            for at, group in enumerate(self._reach.groups):
                if not group.whole and not group.handed:
                    source.done[at] = 0
        self._publish_complete(source, tables, settled, self._late, resumed_at)
        self._publish_handed(source, tables, handed, settled, self._late)
        if self._left(source, tables, settled) and not source.over and self._pool is not None:
            source.over = True
            self._tails = self._tails[1 - MOST_TAILS :]
            self._tails.append((source, Tail.of(self._pool, tables, settled, resumed_at)))

    def _left(self, source: Source, tables: Sequence[Sequence[int]], settled: int) -> bool:
        """Whether something of the first ``settled`` tokens is not published."""
        reach = self._reach
        assert reach is not None
        return any(
            source.done[at] < self._end(source.request, at, tables[group.index], settled)
            for at, group in enumerate(reach.groups)
            if not group.handed
        )

    def _publish_tails(self, plans: list[Publish]) -> None:
        """Go on with what requests that are over have left, as far as there are slots and their blocks are theirs."""
        waiting, self._tails = self._tails, []
        for source, tail in waiting:
            current = source.attachment == self._control.attachment and source.spaces == self._spaces(source.request)
            if not current or self._control.silent or not tail.waits:
                continue
            if any(self._control.credit.get(space) for space in source.spaces):
                assert self._pool is not None
                assert self._reach is not None
                done = list(source.done)
                tables = tail.present(self._pool, self._reach.groups, done)
                self._publish_complete(source, tables, tail.settled, plans, tail.resumed_at)
                if not self._left(source, tables, tail.settled):
                    continue
                if source.done != done:
                    tail.go_on()
            self._tails.append((source, tail))

    def drop_late(self) -> None:
        """Let go of what was begun since the last step: nobody copies it yet."""
        late, self._late = self._late, []
        for publish in late:
            batch = self._batches[publish.batch]
            self._let_go(publish.batch)
            if batch.attachment == self._control.attachment:
                self._give_back(batch)

    def distrust(self) -> None:
        """What this step has computed may rest on blocks that were not filled: keep none of it."""
        for batch in self._batches.values():
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
        self._conclude()

    def _conclude(self) -> None:
        """Tell the manager of what was copied, as soon as it is sure that it was what its space is for."""
        copied, self._copied = self._copied, []
        for batch, wanted, since in copied:
            if batch.attachment != self._control.attachment:
                continue
            sure = self._sure(batch.space, since)
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
        if self._events is not None:
            self._events.expect_no_more(batch.space, batch.keys)

    def _let_go(self, number: int) -> None:
        batch = self._batches.pop(number)
        self._held -= len(batch.blocks)
        self._under_way.difference_update((batch.space, key) for key in batch.keys)
        if self._pool is not None:
            self._pool.free_blocks([self._pool.blocks[block] for block in reversed(batch.blocks)])
