"""May a request ask for a restore now, or could that stop the engine for good? Pure; docs/admission.md has the proof.

vLLM 0.32 itself keeps asynchronous restores from blocking each other, but for two corners, and each has a function
here. Neither refuses anything that is harmless.
"""

from collections.abc import Iterable
from dataclasses import dataclass

Rank = tuple[int, float, str]
"""Where vLLM's priority queue puts a request: its priority, arrival time and id; the smallest is served first."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that was given ``held`` blocks for a restore and does not compute yet."""

    rank: Rank
    held: int


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


def most_blocks(pool: int, block_tokens: int, speculative_tokens: int) -> int:
    """How many blocks of a prompt, those in the engine's own cache included, a restore may reach to.

    With speculative decoding vLLM gives blocks to a restore only if those of one more decoding step are free besides,
    even when nothing else runs. A restore that reaches further is never admitted, and neither is anything behind it.
    """
    step = -(-(1 + speculative_tokens) // block_tokens) if speculative_tokens else 0
    return max(0, pool - step)
