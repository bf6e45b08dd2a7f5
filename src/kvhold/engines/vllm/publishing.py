"""Which blocks of which requests to publish.

A block is published in the step that completes it, from the engine's own current block table; a Mamba state when the
engine hands it over; what the last step of a request completed, before its blocks are freed. What a request leaves for
want of slots is not held, but published as they are granted, as far as its blocks were not used for anything else by
then.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvhold.client.control import Control
from kvhold.engines.common.announcements import Published
from kvhold.engines.common.batches import Batches
from kvhold.engines.common.plans import Publish
from kvhold.engines.common.questions import Questions
from kvhold.engines.vllm.events import CacheEvents
from kvhold.engines.vllm.retention import Retention
from kvhold.engines.vllm.spaces import RequestSpaces
from kvhold.engines.vllm.tails import MOST_TAILS, Tail
from kvhold.threads import ENGINE, belongs_to

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

Handed = tuple[int, int, int]
"""A state that the engine hands over: (engine's group, block, tokens after which it is the state)."""


class HeldBlocks:
    """vLLM's block pool as the source of what is published: a hold is a reference."""

    def __init__(self, pool: "BlockPool") -> None:
        self.blocks: int = pool.num_gpu_blocks
        self._pool = pool

    def hold(self, blocks: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def let_go(self, blocks: Sequence[int]) -> None:
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])


@dataclass(slots=True)
class Progress:
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


@belongs_to(ENGINE)
class Publishing:
    """Publishing of one engine, if it is ``wanted``, of what prompts fill, and with ``decode`` of what answers fill.

    ``spaces`` says where a request's blocks go, ``questions`` which of them the manager has; ``events`` are told of
    what is published, if anybody wants to know.
    """

    def __init__(
        self,
        control: Control,
        batches: Batches,
        spaces: RequestSpaces,
        questions: Questions,
        events: CacheEvents | None,
        decode: bool,
        wanted: bool,
    ) -> None:
        self._control = control
        self._batches = batches
        self._spaces = spaces
        self._questions = questions
        self._events = events
        self._decode = decode
        self._wanted = wanted
        self._pool: BlockPool | None = None
        self._retention: Retention | None = None
        self._open: dict[str, Progress] = {}
        self._complete: dict[str, Progress] = {}  # their prompts are stored; a session's prompt may still grow
        self._tails: list[tuple[Progress, Tail]] = []

    def bind(self, pool: "BlockPool", retention: Retention) -> None:
        self._pool, self._retention = pool, retention
        self._batches.source = HeldBlocks(pool)

    @property
    def awaiting(self) -> bool:
        """Whether slots are awaited for what a request that is over has left."""
        mine = self._control.attachment
        return any(progress.attachment == mine and tail.waits for progress, tail in self._tails)

    def admit(self, request: "Request") -> None:
        """``request`` has been given blocks, for the first time or to go on with what it has."""
        if not self._wanted:
            return
        name = request.request_id
        former = self._complete.pop(name, None) or self._open.get(name)
        self._open[name] = former if former and request.num_computed_tokens > 0 else Progress(request)

    def forget(self, request: str) -> None:
        self._open.pop(request, None)
        self._complete.pop(request, None)

    def forget_all(self) -> "list[Request]":
        """Publish no more blocks that were computed before now; which requests had any."""
        self._batches.distrust_all()
        running = [progress.request for progress in (*self._open.values(), *self._complete.values())]
        self._open.clear()
        self._complete.clear()
        self._tails.clear()
        return running

    # --- in a step ----------------------------------------------------------------------------------------------

    def plan(self, output: "SchedulerOutput", plans: list[Publish]) -> None:
        """Add to ``plans`` what the workers shall copy after this step's forward."""
        self._batches.watch()
        self._batches.conclude()
        scheduled, state = output.num_scheduled_tokens, output.kv_connector_block_state
        if state is None or self._retention is None:
            return
        handed = state.boundary_state_offloads
        preempted, finished = output.preempted_req_ids or (), output.finished_req_ids
        for name in [name for name in self._open if name in scheduled or name in handed]:
            progress = self._open[name]
            progress.computing = progress.computing or name in scheduled
            tables = state.get_block_ids(name)
            if tables is None or name in preempted or name in finished or not self._is_known(progress):
                continue
            computed = progress.request.num_computed_tokens + scheduled.get(name, 0)
            over = self._publish_complete(progress, tables, computed, plans)
            self._publish_handed(progress, tables, handed.get(name, ()), computed, plans)
            if over and not self._decode and computed > progress.request.num_prompt_tokens:
                self._complete[name] = self._open.pop(name)
        self._publish_tails(plans)

    def _is_known(self, progress: Progress, last: bool = False) -> bool:
        """Whether it is known where the progress's blocks go and which are there; a new session begins anew.

        The ``last`` time that this can be asked, what is not known counts as not there.
        """
        spaces = self._spaces.to_store(progress.request)
        if spaces is None:
            return False
        if progress.attachment != self._control.attachment or progress.spaces != spaces:
            again = progress.attachment > 0
            progress.attachment, progress.spaces = self._control.attachment, spaces
            progress.done = [0] * len(spaces)
            progress.stored = () if again else None
        if progress.stored is None:
            progress.stored = self._questions.stored(progress.request.request_id)
        if progress.stored is None and last:
            progress.stored = ()
        return progress.stored is not None

    def _limit(self, request: "Request") -> int:
        """Tokens of a request that may ever be published: their values are final."""
        assert self._retention is not None
        known = len(request.block_hashes) * self._retention.hash_tokens
        return known if self._decode else min(known, request.num_prompt_tokens)

    def _end(self, request: "Request", at: int, table: Sequence[int], computed: int) -> int:
        """How many blocks of a group ``computed`` tokens complete that may be published."""
        retention = self._retention
        assert retention is not None
        tokens = retention.groups[at].block_tokens
        return min(self._limit(request) // tokens, retention.settled(at, computed) // tokens, len(table))

    def _publish_complete(
        self,
        progress: Progress,
        tables: Sequence[Sequence[int]],
        computed: int,
        plans: list[Publish],
        resumed_at: Sequence[int] = (),
    ) -> bool:
        """Publish blocks that ``computed`` tokens complete; whether none of this request is left to."""
        retention, limit, over = self._retention, self._limit(progress.request), True
        assert retention is not None
        for at, group in enumerate(retention.groups):
            if group.handed:
                continue
            final = limit // group.block_tokens
            end = self._end(progress.request, at, tables[group.index], computed)
            start = progress.done[at]
            if start < end:
                useful = retention.useful(at, start, end, progress.request, resumed_at)
                progress.done[at] = self._publish_range(progress, at, tables[group.index], start, end, useful, plans)
            over = over and progress.done[at] >= final
        return over

    def _publish_range(
        self,
        progress: Progress,
        at: int,
        table: Sequence[int],
        start: int,
        end: int,
        useful: Sequence[bool] | None,
        plans: list[Publish],
    ) -> int:
        """Publish what is worth it of a group's blocks [start, end), run by run; up to where that is done."""
        retention, space, request = self._retention, progress.spaces[at], progress.request
        assert retention is not None
        origin, tokens = start, retention.groups[at].block_tokens

        def wanted(block: int) -> bool:
            return (
                table[block] != 0
                and (useful is None or useful[block - origin])
                and not progress.has(at, (block + 1) * tokens)
                and not self._batches.under_way(space, retention.key(request, (block + 1) * tokens))
            )

        while start < end:
            if not wanted(start):
                start += 1
                continue
            stop = start + 1
            while stop < end and wanted(stop):
                stop += 1
            keys = [retention.key(request, (block + 1) * tokens) for block in range(start, stop)]
            taken = self._begin(progress, at, (start + 1) * tokens, keys, list(table[start:stop]), plans)
            start += taken
            if start < stop:
                break
        return start

    def _publish_handed(
        self,
        progress: Progress,
        tables: Sequence[Sequence[int]],
        handed: Iterable[Handed],
        computed: int,
        plans: list[Publish],
    ) -> None:
        """Publish states, and where one stands inside of a block of another group, that block as far as it goes."""
        retention, limit = self._retention, self._limit(progress.request)
        assert retention is not None
        for index, block, tokens in handed:
            at = retention.by_index.get(index)
            if at is None or block == 0 or not 0 < tokens <= min(limit, computed) or tokens % retention.hash_tokens:
                continue
            if not retention.is_state(at, progress.request, block, tokens, computed):
                continue
            self._publish_state(progress, at, block, tokens, plans)
            for other, group in enumerate(retention.groups):
                inside = tokens // group.block_tokens
                table = tables[group.index]
                if not group.handed and tokens % group.block_tokens and inside < len(table) and table[inside]:
                    self._publish_state(progress, other, table[inside], tokens, plans)

    def _publish_state(self, progress: Progress, at: int, block: int, tokens: int, plans: list[Publish]) -> None:
        """Publish a block under the hash of its first ``tokens``."""
        retention = self._retention
        assert retention is not None
        key = retention.key(progress.request, tokens)
        if not self._batches.under_way(progress.spaces[at], key) and not progress.has(at, tokens):
            self._begin(progress, at, tokens, [key], [block], plans)

    def _begin(
        self, progress: Progress, at: int, end: int, keys: list[bytes], blocks: list[int], plans: list[Publish]
    ) -> int:
        """Begin to publish ``keys``, a piece of a chain whose first ends after ``end`` tokens; how many were begun."""
        retention, space, request = self._retention, progress.spaces[at], progress.request
        assert retention is not None
        tokens = retention.groups[at].block_tokens
        depth = (end - 1) // tokens
        parent = retention.key(request, depth * tokens) if depth else b""
        count = self._batches.begin(space, at, parent, depth, keys, blocks, plans, again=progress.over)
        if self._events is not None:
            for number, key in enumerate(keys[:count]):
                start = (depth + number) * tokens
                before = keys[number - 1] if number else parent
                self._events.expect(space, key, Published(request, before, start, end + number * tokens))
        return count

    # --- at a request's end -------------------------------------------------------------------------------------

    def finish(self, request: "Request", tables: Sequence[Sequence[int]], handed: Iterable[Handed] = ()) -> None:
        """Publish what the last step of ``request`` completed; its blocks are still its own."""
        progress = self._open.get(request.request_id)
        if progress is None or self._retention is None or not progress.computing:
            return
        if not self._is_known(progress, last=True):
            return
        # The last token was sampled, and nothing was computed from it.
        settled = min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens - 1)
        resumed_at: tuple[int, ...] = ()
        if self._decode:  # a conversation goes on where this one ends: what its window needs is still here
            resumed_at = (settled,)
            for at, group in enumerate(self._retention.groups):
                if not group.whole and not group.handed:
                    progress.done[at] = 0
        self._publish_complete(progress, tables, settled, self._batches.late, resumed_at)
        self._publish_handed(progress, tables, handed, settled, self._batches.late)
        if self._left(progress, tables, settled) and not progress.over and self._pool is not None:
            progress.over = True
            self._tails = self._tails[1 - MOST_TAILS :]
            self._tails.append((progress, Tail.of(self._pool, tables, settled, resumed_at)))

    def _left(self, progress: Progress, tables: Sequence[Sequence[int]], settled: int) -> bool:
        """Whether something of the first ``settled`` tokens is not published."""
        retention = self._retention
        assert retention is not None
        return any(
            progress.done[at] < self._end(progress.request, at, tables[group.index], settled)
            for at, group in enumerate(retention.groups)
            if not group.handed
        )

    def _publish_tails(self, plans: list[Publish]) -> None:
        """Go on with what requests that are over have left, as far as there are slots and their blocks are theirs."""
        waiting, self._tails = self._tails, []
        for progress, tail in waiting:
            spaces = self._spaces.to_store(progress.request)
            current = progress.attachment == self._control.attachment and progress.spaces == spaces
            if not current or self._control.silent or not tail.waits:
                continue
            if any(self._control.credit.get(space) for space in progress.spaces):
                assert self._pool is not None
                assert self._retention is not None
                done = list(progress.done)
                tables = tail.present(self._pool, self._retention.groups, done)
                self._publish_complete(progress, tables, tail.settled, plans, tail.resumed_at)
                if not self._left(progress, tables, tail.settled):
                    continue
                if progress.done != done:
                    tail.go_on()
            self._tails.append((progress, tail))
