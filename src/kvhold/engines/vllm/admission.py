"""May a request ask for a restore now, or could that stop the engine for good? Pure; docs/admission.md has the proof.

vLLM 0.32 itself keeps asynchronous restores of a group of full attention from blocking each other, but for two corners,
and each has a function here. Neither refuses anything that is harmless. For all other groups there is a third.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

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
