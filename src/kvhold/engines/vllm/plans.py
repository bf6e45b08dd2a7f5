"""What the two halves tell each other in every step, through the engine."""

from array import array
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(slots=True)
class Load:
    """Restore arena ``offsets`` into ``blocks`` for a request. No offsets: report it as failed."""

    request: str
    blocks: list[int]
    offsets: "array[int]"


@dataclass(slots=True)
class Publish:
    """Copy ``blocks`` to arena ``offsets`` once the step's forward has written them."""

    batch: int
    blocks: list[int]
    offsets: "array[int]"


@dataclass
class StepPlan(KVConnectorMetadata):
    """Scheduler to workers: step ``step``, planned against the manager of ``incarnation``.

    Offsets are those of whole objects; each rank's shard begins ``starts[rank]`` bytes into one.
    """

    step: int
    incarnation: int
    loads: list[Load] = field(default_factory=list)
    publishes: list[Publish] = field(default_factory=list)
    starts: tuple[int, ...] = ()


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
    """A worker's geometry: its identity's digest must be the same on all ranks. Bytes are its part of an object."""

    rank: int
    world: int
    digest: bytes
    shard_bytes: int
    private: bool
    summary: str
