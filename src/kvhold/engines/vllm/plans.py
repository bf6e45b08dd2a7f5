"""What the two halves tell each other in every step, through the engine. Groups are numbered among those kept."""

from array import array
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

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


@dataclass
class WorkerReport(KVConnectorHandshakeMetadata):
    """A worker's geometry. ``digest`` must be the same on all ranks, ``stage_digest`` on those of one pipeline stage.

    ``shard_bytes`` are its part of an object, by group; 0 where it has no layer. ``owner`` is the rank whose part its
    own is a copy of: itself, unless ranks hold the same KV.
    """

    rank: int
    world: int
    stage: int
    owner: int
    digest: bytes
    stage_digest: bytes
    shard_bytes: tuple[int, ...]
    private: bool
    summary: str
