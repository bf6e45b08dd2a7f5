"""What the two halves tell each other in every step, through the engine. Groups are numbered among those kept."""

from array import array
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

Copies = tuple[int, list[int], "array[int]"]
"""(group, blocks of it, the arena offset of each block's object)."""


@dataclass(slots=True)
class Load:
    """Restore ``parts`` for a request; ``blocks`` are all that it waits for. No parts: report it as failed."""

    request: str
    parts: list[Copies]
    blocks: list[int]


@dataclass(slots=True)
class Publish:
    """Copy ``blocks`` of a group to arena ``offsets`` once the step's forward has written them."""

    batch: int
    group: int
    blocks: list[int]
    offsets: "array[int]"


@dataclass
class StepPlan(KVConnectorMetadata):
    """Scheduler to workers: step ``step``, planned against the manager of ``incarnation``.

    Offsets are those of whole objects; the shard of a rank begins ``starts[group][rank]`` bytes into one.
    """

    step: int
    incarnation: int
    loads: list[Load] = field(default_factory=list)
    publishes: list[Publish] = field(default_factory=list)
    starts: tuple[tuple[int, ...], ...] = ()


@dataclass
class CopyReport(KVConnectorWorkerMetadata):
    """Workers to scheduler: of each publish batch that ended, the bytes per object by rank; -1 where it failed."""

    ended: dict[int, dict[int, int]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "CopyReport":
        assert isinstance(other, CopyReport)
        merged = {batch: dict(ranks) for batch, ranks in self.ended.items()}
        for batch, ranks in other.ended.items():
            merged.setdefault(batch, {}).update(ranks)
        return CopyReport(merged)
