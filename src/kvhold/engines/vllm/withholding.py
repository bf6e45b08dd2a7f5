"""Which restores are held back, because they could stop the engine: the rules are in :mod:`admission`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvhold.engines.common.accounts import Accounts
from kvhold.engines.common.groups import Group, reachable
from kvhold.engines.vllm.admission import Rank, Waiting, all_can_begin, may_ask, most_blocks, order_matters
from kvhold.engines.vllm.reach import Reach
from kvhold.threads import ENGINE, belongs_to

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


@belongs_to(ENGINE)
class Withholding:
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
        self._reach: Reach | None = None
        self._pool_blocks = 0  # as long as it is not known
        self._most_blocks = 0  # of them, for one restore
        self._waiting: dict[str, Waiting] = {}  # kept only where a rule asks about them
        self._withheld: set[str] = set()

    def bind(self, manager: "KVCacheManager", reach: Reach) -> None:
        self._reach = reach
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
        return Waiting(_rank(request), held, self._reach.blocks_to_begin(tokens) if self._reach is not None else 0)

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
