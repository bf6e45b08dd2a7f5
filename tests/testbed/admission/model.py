"""vLLM 0.32's and 0.33's scheduler as a pure function, as far as blocks, queues and asynchronous restores go.

Each rule names the function of vLLM that it models; without a file that is one of `Scheduler` in
`vllm/v1/core/sched/scheduler.py`. `test_real_scheduler.py` drives that very class through the same events and compares
all of this state after each of them, the order of the free queue and the prefix cache included.

Modelled: one KV-cache group of full attention, chunked prefill, the prefix cache with its evictions, both policies,
preemption, the watermark, `scheduler_reserve_full_isl`, drafts of n-gram speculation (all rejected), and a connector
whose restores are all asynchronous, may fail, and may be asked for again. Not modelled: overlapping steps (async
scheduling), LoRA, multimodal inputs, streaming sessions, pausing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvhold.engines.vllm.admission import Waiting, may_ask, most_blocks, order_matters

ABSENT, WAITING, LOADING, RUNNING, DONE = range(5)
"""Statuses. WAITING is vLLM's WAITING and PREEMPTED, which it treats alike; LOADING is its WAITING_FOR_REMOTE_KVS."""
RECEIVED, FAILED = 1, 2
"""What the connector reported of a transfer that has ended and that the scheduler has not looked at yet."""

Event = tuple[str, int]
"""("step", -1), or ("arrive" | "abort" | "answer" | "restored" | "failed", request)."""
Key = tuple[int, int]
"""A block's contents: (~family, index) where prompts of a family agree, else (request, index)."""


@dataclass(frozen=True)
class Engine:
    """An engine's configuration, and which of its defences are switched off."""

    blocks: int
    """What can be allocated, that is without vLLM's null block."""
    budget: int
    """max_num_batched_tokens"""
    block_tokens: int = 1
    seats: int = 8
    """max_num_seqs"""
    max_len: int = 1 << 20
    policy: Literal["fcfs", "priority"] = "fcfs"
    whole_prompt: bool = True
    """scheduler_reserve_full_isl"""
    watermark: int = 0
    drafts: int = 0
    """num_speculative_tokens of the method ngram"""
    reserve: bool = True
    """Off: _inflight_prefill_reserved_blocks() is 0."""
    holders_first: bool = True
    """Off: requests that hold blocks wait in the one queue with all others, as in older schedulers."""
    passes_over: bool = False
    """Whether a request of the policy "priority" that has preempted itself leaves the others their turn: vLLM 0.33."""
    insists: bool = False
    """A connector that asks for a restore again after one has failed, which kvhold does not."""
    gate: Literal["", "later", "miss"] = ""
    """kvhold's gate: what is said of a request that may not ask. "" is without it."""


@dataclass(frozen=True)
class Ask:
    """A request, as its client sends it, and what the world may do to it. Lengths are tokens."""

    prompt: int
    output: int = 1
    outside: int = 0
    """How much of the prompt the connector could restore."""
    priority: int = 0
    family: int = -1
    shared: int = 0
    """Requests of one family begin with the same ``shared`` tokens; it is the same number for all of them."""
    late: bool = False
    """The connector's answer takes a while."""
    fails: bool = False
    aborts: bool = False


class Request(NamedTuple):
    status: int = ABSENT
    computed: int = 0
    out: int = 0
    blocks: tuple[int, ...] = ()
    cached: int = 0  # leading blocks that are in the prefix cache under its own account (num_cached_block)
    report: int = 0
    prefilling: bool = False  # in _inflight_prefills
    failed: bool = False  # the connector remembers a failed restore
    answered: bool = False
    orphan: bool = False  # aborted, and a transfer still writes to its blocks
    arrival: int = 0


class State(NamedTuple):
    requests: tuple[Request, ...]
    running: tuple[int, ...]
    waiting: tuple[int, ...]
    holding: tuple[int, ...]  # kv_holding_waiting
    free: tuple[int, ...]  # blocks, the first to be taken next
    cache: tuple[tuple[Key, tuple[int, ...]], ...]  # the prefix cache: which blocks have these contents, oldest first


def fits(engine: Engine, ask: Ask) -> bool:
    """Whether a request could run to its end if it were alone."""
    most = min(ask.prompt + ask.output - 1 + engine.drafts, engine.max_len)
    return most <= engine.blocks * engine.block_tokens and ask.prompt < engine.max_len


def start(engine: Engine, asks: Sequence[Ask]) -> State:
    """An idle engine before its first request. Refuses requests that could not run even alone."""
    if not all(fits(engine, ask) for ask in asks):
        raise ValueError(f"of {asks} some do not fit into {engine}")
    return State(tuple(Request() for _ in asks), (), (), (), tuple(range(engine.blocks)), ())


def events(asks: Sequence[Ask], state: State) -> Iterator[Event]:
    """All that may happen next. Transfers and answers end some time; arrivals and aborts need not come."""
    yield "step", -1
    for index, (ask, request) in enumerate(zip(asks, state.requests, strict=True)):
        if request.status == ABSENT:
            yield "arrive", index
            continue
        if in_flight(request):
            yield "restored", index
            if ask.fails and not request.orphan:
                yield "failed", index
        if awaited(ask, request):
            yield "answer", index
        if ask.aborts and request.status != DONE:
            yield "abort", index


def apply(engine: Engine, asks: Sequence[Ask], state: State, event: Event) -> State:
    """The state after ``event``, in canonical form."""
    scheduler = _Scheduler(engine, asks, state)
    what, index = event
    if what == "step":
        scheduler.step()
    elif what == "arrive":
        scheduler.arrive(index)
    elif what == "answer":
        scheduler.requests[index].answered = True
    elif what == "abort":
        scheduler.abort(index)
    else:
        scheduler.transfer_ended(index, failed=what == "failed")
    return scheduler.state()


def in_flight(request: Request) -> bool:
    """Whether a transfer writes to its blocks."""
    return request.orphan or (request.status == LOADING and not request.report)


def awaited(ask: Ask, request: Request) -> bool:
    """Whether the connector still owes an answer about it."""
    return ask.late and request.status == WAITING and not request.answered


def unfinished(state: State) -> bool:
    return any(request.status not in (ABSENT, DONE) for request in state.requests)


def is_deadlock(engine: Engine, asks: Sequence[Ask], state: State) -> bool:
    """Whether requests wait, nothing is under way that could help, and a step changes nothing, hence no step ever."""
    pairs = zip(asks, state.requests, strict=True)
    if not unfinished(state) or any(in_flight(request) or awaited(ask, request) for ask, request in pairs):
        return False
    return apply(engine, asks, state, ("step", -1)) == state


class _Mutable:
    """A request while the scheduler works on it; fields as in :class:`Request`."""

    def __init__(self, ask: Ask, request: Request) -> None:
        self.ask = ask
        (self.status, self.computed, self.out, blocks, self.cached, self.report) = request[:6]
        (self.prefilling, self.failed, self.answered, self.orphan, self.arrival) = request[6:]
        self.blocks = list(blocks)

    @property
    def tokens(self) -> int:
        return self.ask.prompt + self.out

    def frozen(self, number: dict[int, int]) -> Request:
        blocks = tuple(number[block] for block in self.blocks)
        head = (self.status, self.computed, self.out, blocks, self.cached, self.report)
        return Request(*head, self.prefilling, self.failed, self.answered, self.orphan, self.arrival)


class _Scheduler:
    def __init__(self, engine: Engine, asks: Sequence[Ask], state: State) -> None:
        self.engine = engine
        self.requests = [_Mutable(ask, request) for ask, request in zip(asks, state.requests, strict=True)]
        self.running = list(state.running)
        self.waiting = list(state.waiting)
        self.holding = list(state.holding)
        self.free = list(state.free)
        self.cache = {key: list(blocks) for key, blocks in state.cache}
        self.contents = {block: key for key, blocks in state.cache for block in blocks}

    def state(self) -> State:
        """Canonical: blocks numbered as they are met, contents forgotten that nobody can ask for any more."""
        number: dict[int, int] = {}
        for request in self.requests:
            for block in request.blocks:
                number.setdefault(block, len(number))
        for block in self.free:
            number[block] = len(number)
        live = [index for index, request in enumerate(self.requests) if request.status != DONE or request.orphan]
        families = {~self.requests[index].ask.family for index in live if self.requests[index].ask.shared}
        wanted = families.union(live)
        kept = [
            (key, tuple(number[block] for block in blocks)) for key, blocks in self.cache.items() if key[0] in wanted
        ]
        ranks = {arrival: rank for rank, arrival in enumerate(sorted(self.requests[i].arrival for i in self._queued()))}
        for request in self.requests:
            request.arrival = ranks.get(request.arrival, 0) if request.status not in (ABSENT, DONE) else 0
            if request.status == DONE and not request.orphan:
                request.computed = request.out = request.cached = 0
                request.failed = request.answered = False
        return State(
            tuple(request.frozen(number) for request in self.requests),
            tuple(self.running),
            tuple(self.waiting),
            tuple(self.holding),
            tuple(number[block] for block in self.free),
            tuple(sorted(kept)),
        )

    def _queued(self) -> list[int]:
        return self.running + self.waiting + self.holding

    # --- blocks -------------------------------------------------------------------------------------------------

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.engine.block_tokens)

    def _key(self, index: int, block: int) -> Key:
        """Request.block_hashes"""
        ask = self.requests[index].ask
        shared = (block + 1) * self.engine.block_tokens <= ask.shared
        return (~ask.family, block) if shared else (index, block)

    def _take(self, count: int) -> list[int]:
        """BlockPool.get_new_blocks: from the front of the free queue; what they held is no longer in the cache."""
        taken = self.free[:count]
        assert len(taken) == count
        del self.free[:count]
        for block in taken:
            key = self.contents.pop(block, None)
            if key is not None:
                self.cache[key].remove(block)
                if not self.cache[key]:
                    del self.cache[key]
        return taken

    def _release(self, request: _Mutable) -> None:
        """KVCacheManager.free, BlockPool.free_blocks: last block first, uncached ones to the front."""
        blocks, request.blocks, request.cached = request.blocks, [], 0
        held = {block for other in self.requests for block in other.blocks}
        dropped = [block for block in reversed(blocks) if block not in held]
        first = [block for block in dropped if block not in self.contents]
        last = [block for block in dropped if block in self.contents]
        self.free = first + self.free + last

    def _cache_blocks(self, index: int, tokens: int) -> None:
        """SingleTypeKVCacheManager.cache_blocks"""
        request = self.requests[index]
        full = tokens // self.engine.block_tokens
        for block in range(request.cached, full):
            key = self._key(index, block)
            self.cache.setdefault(key, []).append(request.blocks[block])
            self.contents[request.blocks[block]] = key
        request.cached = max(request.cached, full)

    def _hits(self, index: int) -> list[int]:
        """KVCacheManager.get_computed_blocks: all but the last token at most."""
        found: list[int] = []
        for block in range((self.requests[index].tokens - 1) // self.engine.block_tokens):
            blocks = self.cache.get(self._key(index, block))
            if not blocks:
                break
            found.append(blocks[0])
        return found

    def _needed(self, request: _Mutable, tokens: int, hits: Sequence[int] = ()) -> int:
        """SingleTypeKVCacheManager.get_num_blocks_to_allocate: a hit that nobody holds leaves the free queue, too."""
        new = max(self._blocks(tokens) - len(hits) - len(request.blocks), 0)
        return new + sum(block in self.free for block in hits)

    def _allocate(
        self,
        index: int,
        new: int,
        *,
        hits: Sequence[int] = (),
        outside: int = 0,
        admits: bool = False,
        reserved: int = 0,
    ) -> bool:
        """KVCacheManager.allocate_slots. ``admits`` is said for waiting requests, not for running ones."""
        engine, request = self.engine, self.requests[index]
        computed = request.computed + len(hits) * engine.block_tokens + outside
        headroom = engine.watermark if admits and self.running else 0
        if admits and engine.whole_prompt:
            whole = self._needed(request, min(request.tokens, engine.max_len), hits)
            if whole + headroom > len(self.free):
                return False
        slots = min(computed + new, engine.max_len)
        if self._needed(request, slots, hits) + headroom > len(self.free) - reserved:
            return False
        for block in hits:
            if block in self.free:
                self.free.remove(block)
        if hits:
            request.blocks = list(hits)
            request.cached = len(hits)
        request.blocks += self._take(max(self._blocks(slots) - len(request.blocks), 0))
        if not outside:  # delay_cache_blocks
            self._cache_blocks(index, min(computed + new, request.tokens))
        return True

    def _reserved(self) -> int:
        """_inflight_prefill_reserved_blocks, _request_remaining_blocks and the _spec_decode_step_blocks on top"""
        drafts = 1 + self.engine.drafts if self.engine.drafts else 0
        others = sum(
            self._needed(request, min(request.tokens, self.engine.max_len) + drafts)
            for request in self.requests
            if request.prefilling
        )
        return (others if self.engine.reserve else 0) + self._blocks(drafts)

    # --- queues -------------------------------------------------------------------------------------------------

    def _rank(self, index: int) -> tuple[int, int]:
        """Request.__lt__, for the policy `priority` alone"""
        return self.requests[index].ask.priority, self.requests[index].arrival

    def _put(self, queue: list[int], front: list[int]) -> None:
        """RequestQueue.prepend_request(s): in a priority queue there is no front."""
        queue[:0] = front
        if self.engine.policy == "priority":
            queue.sort(key=self._rank)

    def arrive(self, index: int) -> None:
        """add_request"""
        request = self.requests[index]
        request.status = WAITING
        request.arrival = len(self.requests)  # later than all; see state()
        self.waiting.append(index)
        self._put(self.waiting, [])

    def abort(self, index: int) -> None:
        """finish_requests, _free_request: blocks that a transfer still writes to are kept until it has ended."""
        request = self.requests[index]
        for queue in (self.running, self.waiting, self.holding):
            if index in queue:
                queue.remove(index)
        request.orphan = request.status == LOADING and not request.report
        request.status, request.report, request.prefilling = DONE, 0, False
        if not request.orphan:
            self._release(request)

    def transfer_ended(self, index: int, failed: bool) -> None:
        """_update_from_kv_xfer_finished, _handle_failed_recving"""
        request = self.requests[index]
        if request.orphan:
            request.orphan = False
            self._release(request)
            return
        request.report = FAILED if failed else RECEIVED
        if failed:
            request.computed = 0
            request.failed = True

    def _promote(self, index: int) -> None:
        """_update_waiting_for_remote_kv"""
        request = self.requests[index]
        if request.report == FAILED:
            self._release(request)  # and it stays in _inflight_prefills
        else:
            self._cache_blocks(index, request.computed)
        if request.computed == request.tokens:
            request.computed -= 1
        request.status, request.report = WAITING, 0

    def _preempt(self, index: int) -> None:
        """_preempt_request"""
        request = self.requests[index]
        self._release(request)
        request.status, request.computed, request.prefilling = WAITING, 0, False
        self._put(self.waiting, [index])

    # --- the connector ------------------------------------------------------------------------------------------

    def _restorable(self, index: int, local: int) -> int | None:
        """get_num_new_matched_tokens: whole blocks, all but the last token at most; None defers by a step."""
        request = self.requests[index]
        if request.ask.late and not request.answered:
            return None
        if request.failed and not self.engine.insists:
            return 0
        size = self.engine.block_tokens
        end = min(request.ask.outside, request.tokens - 1) // size
        if self.engine.gate:
            end = min(end, most_blocks(self.engine.blocks, [size], self.engine.drafts))
        found = end * size - local
        if found > 0 and self.engine.gate and order_matters(self.engine.policy, self.engine.whole_prompt):
            first = min(request.tokens, end * size + self.engine.budget) + self.engine.drafts
            begin = self._blocks(min(first, self.engine.max_len))
            if not may_ask(self._named(index), begin, self._loading(), self.engine.blocks):
                return None if self.engine.gate == "later" else 0
        return max(found, 0)

    def _named(self, index: int) -> tuple[int, float, str]:
        return (*self._rank(index), "")

    def _loading(self) -> Iterator[Waiting]:
        for index, request in enumerate(self.requests):
            if request.status == LOADING:
                yield Waiting(self._named(index), len(request.blocks))

    # --- a step -------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """schedule, and update_from_output of a model that samples one token wherever it can"""
        scheduled: dict[int, int] = {}
        budget, prefills = self._schedule_running(scheduled)
        if budget >= 0:
            self._schedule_waiting(scheduled, budget, prefills)
        for index, new in scheduled.items():
            request = self.requests[index]
            request.computed += new
            if request.computed < request.tokens:
                continue
            request.prefilling = False
            request.computed = request.tokens  # drafts are rejected
            request.out += 1
            if request.out == request.ask.output or request.tokens >= self.engine.max_len:
                request.status = DONE
                self.running.remove(index)
                self._release(request)

    def _schedule_running(self, scheduled: dict[int, int]) -> tuple[int, bool]:
        """The first loop of schedule(): what is left of the budget, -1 after a preemption; whether prompts are in."""
        engine, budget, prefills, preempted = self.engine, self.engine.budget, False, False
        at = 0
        while at < len(self.running) and budget > 0:
            index = self.running[at]
            request = self.requests[index]
            drafts = 0 if request.prefilling else engine.drafts
            new = min(request.tokens + drafts - request.computed, budget, engine.max_len - request.computed - 1)
            if new == 0:
                at += 1
                continue
            fits = self._allocate(index, new)
            while not fits:
                victim = self.running[-1] if engine.policy == "fcfs" else max(self.running, key=self._rank)
                place = self.running.index(victim)
                del self.running[place]
                if place < at:
                    at -= 1
                budget += scheduled.pop(victim, 0)
                self._preempt(victim)
                preempted = True
                if victim == index:
                    break
                fits = self._allocate(index, new)
            if not fits and engine.passes_over and engine.policy == "priority":
                continue  # it has preempted itself, and the next one is in its place
            if not fits:
                break
            scheduled[index] = new
            budget -= new
            prefills |= request.prefilling
            at += 1
        return (-1 if preempted else budget), prefills

    def _schedule_waiting(self, scheduled: dict[int, int], budget: int, prefills: bool) -> None:
        """The second loop of schedule(). What holds blocks comes first; the first that does not fit ends it."""
        engine = self.engine
        ran = bool(scheduled)
        skipped_waiting: list[int] = []
        skipped_holding: list[int] = []
        while budget > 0 and len(self.running) < engine.seats:
            queue = self.holding or self.waiting
            if not queue:
                break
            index = queue[0]
            request = self.requests[index]

            def skip(queue: list[int] = queue, index: int = index, request: _Mutable = request) -> None:
                holds = request.computed > 0 or request.status == LOADING  # _holds_kv_blocks
                del queue[0]
                (skipped_holding if holds and engine.holders_first else skipped_waiting).append(index)

            if request.status == LOADING:  # _handle_blocked_waiting_request
                if not request.report:
                    skip()
                    continue
                self._promote(index)
            hits: list[int] = []
            outside: int | None = 0
            if request.computed == 0:
                hits = self._hits(index)
                outside = self._restorable(index, len(hits) * engine.block_tokens)
                if outside is None:
                    skip()
                    continue
            if outside:
                reserved = self._reserved()
                if not self._allocate(index, 0, hits=hits, outside=outside, admits=True, reserved=reserved):
                    break
                request.status, request.prefilling = LOADING, True
                request.computed = len(hits) * engine.block_tokens + outside
                skip()
                continue
            computed = request.computed + len(hits) * engine.block_tokens
            new = request.tokens - computed
            if engine.drafts and new == 1 and not prefills and (ran or computed) and self._pads(computed):
                new += engine.drafts
                if new > budget:
                    break
            new = min(new, budget)
            if not self._allocate(index, new, hits=hits, admits=True):
                break
            del queue[0]
            self.running.append(index)
            scheduled[index] = new
            budget -= new
            request.status, request.computed = RUNNING, computed
            if computed + new < request.tokens:
                request.prefilling = True
        self._put(self.holding, skipped_holding)
        self._put(self.waiting, skipped_waiting)

    def _pads(self, computed: int) -> bool:
        return computed + 1 + self.engine.drafts + 1 <= self.engine.max_len


def canonical(engine: Engine, asks: Sequence[Ask], state: State) -> State:
    """``state`` with its blocks numbered as they are met, and without what can no longer matter."""
    return _Scheduler(engine, asks, state).state()
