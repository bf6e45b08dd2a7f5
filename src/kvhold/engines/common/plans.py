"""What the two halves tell each other in every step, through the engine. Groups are numbered among those kept."""

from array import array
from dataclasses import dataclass, field
from typing import TypeVar

GroupCopy = tuple[int, list[int], "array[int]"]
"""(group, blocks of it, the arena offset of each block's object)."""


@dataclass(slots=True)
class Load:
    """Restore ``copies`` for a request; ``blocks`` are all that it waits for. No copies: report it as failed."""

    request: str
    copies: list[GroupCopy]
    blocks: list[int]


@dataclass(slots=True)
class Publish:
    """Copy ``blocks`` of a group to arena ``offsets`` once the step's forward has written them."""

    batch: int
    group: int
    blocks: list[int]
    offsets: "array[int]"


@dataclass
class StepPlan:
    """Scheduler to workers: step ``step``, planned against the manager of ``incarnation``.

    Offsets are those of whole objects; the shard of a rank begins ``starts[group][rank]`` bytes into one.
    """

    step: int
    incarnation: int
    loads: list[Load] = field(default_factory=list)
    publishes: list[Publish] = field(default_factory=list)
    starts: tuple[tuple[int, ...], ...] = ()
    look: int = 0
    """If not 0: look at what is loaded, before the forward, and report it under this number."""


@dataclass
class CopyReport:
    """Workers to scheduler: of each publish batch that ended, the bytes per object by rank; -1 where it failed.

    ``loaded`` are digests of what is loaded, by the number of the look and by rank; empty where that is not known.
    """

    ended: dict[int, dict[int, int]] = field(default_factory=dict)
    loaded: dict[int, dict[int, bytes]] = field(default_factory=dict)

    def aggregate(self, other: "CopyReport") -> "CopyReport":
        """This report and that of other ranks as one."""
        return CopyReport(_merged(self.ended, other.ended), _merged(self.loaded, other.loaded))


T = TypeVar("T")


def _merged(some: dict[int, dict[int, T]], others: dict[int, dict[int, T]]) -> dict[int, dict[int, T]]:
    merged = {number: dict(ranks) for number, ranks in some.items()}
    for number, ranks in others.items():
        merged.setdefault(number, {}).update(ranks)
    return merged
