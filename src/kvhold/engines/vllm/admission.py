"""May a request ask for a restore now, or could that stop the engine for good? docs/admission.md has the proof.

vLLM 0.32 itself keeps asynchronous restores of a group of full attention from blocking each other, but for two corners,
and each has a function here. Neither refuses anything that is harmless. For all other groups there is a third. The
functions are pure; :class:`Admission` asks them about one engine's requests.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvhold.engines.common.accounts import Accounts
from kvhold.engines.common.groups import Group, reachable
from kvhold.threads import ENGINE, belongs_to

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    from kvhold.engines.vllm.retention import Retention

Rank = tuple[int, float, str]
"""Where vLLM's priority queue puts a request: its priority, arrival time and id; the smallest is served first."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that was given ``held`` blocks for a restore and does not compute yet.

    To begin without what should be restored it needs ``anew`` blocks: where a restore brings a window or a state alone,
    that is more than it holds.
    """

    rank: Rank
    held: int
    anew: int = 0


def order_matters(policy: str, whole_prompt_must_fit: bool) -> bool:
    """Whether :func:`may_ask` has to be asked.

    With the policy ``fcfs`` restored requests are visited in the order in which they were given blocks, and the engine
    keeps enough free for all but the last. With ``scheduler_reserve_full_isl`` it keeps enough for the last, too.
    """
    return policy != "fcfs" and not whole_prompt_must_fit


def may_ask(rank: Rank, start: int, waiting: Iterable[Waiting], pool: int) -> bool:
    """Whether a request that needs ``start`` of the engine's ``pool`` blocks to begin to compute may ask for a restore.

    Those of ``waiting`` that are served after it are never visited while it is stuck, so it must be able to begin
    beside the blocks they hold. All others let go of theirs first: the engine kept enough free for them. A request that
    may not ask is asked about again in the next step: others are served meanwhile, and it may as soon as none of those
    holds anything.
    """
    held = sum(each.held for each in waiting if each.rank > rank)
    return not held or start + held <= pool


def all_can_begin(waiting: Collection[Waiting], pool: int) -> bool:
    """Whether each of ``waiting`` could begin anew beside what the others hold, so that none stops another.

    vLLM keeps free what a restored request still needs. After a failed restore it needs more than that, unless its only
    cache group is of full attention; and while the first of those that wait does not fit, none behind it is visited.
    With this it fits as soon as nothing runs any more, whatever became of any restore.
    """
    held = sum(each.held for each in waiting)
    return len(waiting) <= 1 or all(held - each.held + each.anew <= pool for each in waiting)


def most_blocks(pool: int, block_tokens: Iterable[int], speculative_tokens: int) -> int:
    """How many blocks of a prompt, those in the engine's own cache included, a restore may reach to.

    With speculative decoding vLLM gives blocks to a restore only if those of one more decoding step are free besides,
    in each cache group of ``block_tokens`` (Mamba's excepted), even when nothing else runs. A restore that reaches
    further is never admitted, and neither is anything behind it.
    """
    step = sum(-(-(1 + speculative_tokens) // tokens) for tokens in block_tokens) if speculative_tokens else 0
    return max(0, pool - step)


@belongs_to(ENGINE)
class Admission:
    """The requests of one engine that were given blocks for a restore and do not compute yet, and those held back."""

    def __init__(self, config: "VllmConfig", groups: Sequence[Group], accounts: Accounts) -> None:
        scheduling = config.scheduler_config
        self._scheduling, self._max_tokens = scheduling, config.model_config.max_model_len
        self._groups = groups
        self._accounts = accounts
        self._drafts = config.num_speculative_tokens + config.num_lookahead_tokens
        whole_prompt_must_fit = scheduling.scheduler_reserve_full_isl and not config.num_lookahead_tokens
        self._ordered = order_matters(scheduling.policy, whole_prompt_must_fit)
        self._together = len(groups) > 1 or not groups[0].whole
        self._retention: Retention | None = None
        self._pool_blocks = 0  # as long as it is not known
        self._most_blocks = 0  # of them, for one restore
        self._waiting: dict[str, Waiting] = {}  # kept only where a rule asks about them
        self._withheld: set[str] = set()

    def bind(self, manager: "KVCacheManager", retention: "Retention") -> None:
        self._retention = retention
        self._pool_blocks = manager.block_pool.num_gpu_blocks - 1
        sizes = [group.block_tokens for group in self._groups if not group.handed]
        self._most_blocks = most_blocks(self._pool_blocks, sizes, self._drafts)

    def reachable(self, tokens: int, unit: int) -> int:
        """How many of a request's ``tokens``, a multiple of ``unit``, a restore can reach at most."""
        return reachable(self._groups, tokens, unit, self._most_blocks)

    def withholds(self, request: "Request", found: int, end: int) -> bool:
        """Whether a restore of ``found`` tokens of ``request``, up to token ``end``, is held back, and counted once."""
        if self._may_restore(request, end):
            return False
        if request.request_id not in self._withheld:
            self._withheld.add(request.request_id)
            self._accounts.add("tokens_withheld", found)
        return True

    def _may_restore(self, request: "Request", end: int) -> bool:
        """Whether a restore of ``request`` up to token ``end`` cannot stop the engine: docs/admission.md."""
        others = [waiting for name, waiting in self._waiting.items() if name != request.request_id]
        if self._together:
            held = sum(group.blocks_between(end, end) for group in self._groups)
            if not all_can_begin([*others, self._waits(request, held)], self._pool_blocks):
                return False
        if not self._ordered:
            return True
        tokens = min(request.num_tokens, end + self._scheduling.max_num_batched_tokens) + self._drafts
        start = sum(group.blocks_between(end, min(tokens, self._max_tokens)) for group in self._groups)
        return may_ask(_rank(request), start, others, self._pool_blocks)

    def _waits(self, request: "Request", held: int) -> Waiting:
        tokens = min(request.num_tokens + self._drafts, self._max_tokens)
        return Waiting(
            _rank(request), held, self._retention.blocks_to_begin(tokens) if self._retention is not None else 0
        )

    def admitted(self, request: "Request", tables: Sequence[Sequence[int]], restores: bool) -> None:
        """``request`` was given the blocks of ``tables``, to compute or, if it ``restores``, to wait for that."""
        if self._ordered or self._together:
            self._waiting.pop(request.request_id, None)
            if restores:
                held = sum(1 for table in tables for block in table if block)
                self._waiting[request.request_id] = self._waits(request, held)

    def failed(self, request: str) -> None:
        """The restore of ``request`` has failed: where others must be able to begin, the engine keeps nothing of it."""
        if self._together and request in self._waiting:
            self._waiting[request] = replace(self._waiting[request], held=0)

    def finished(self, request: str) -> None:
        self._waiting.pop(request, None)
        self._withheld.discard(request)


def _rank(request: "Request") -> Rank:
    return request.priority, request.arrival_time, request.request_id
