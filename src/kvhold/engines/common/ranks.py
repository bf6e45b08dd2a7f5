"""What the ranks of one engine hold of an object: who writes which shard of it, and where each reads its own.

Each worker half packs a :class:`WorkerReport` for its scheduler half, and the manager hands it on: the engine's own
handshake between the two has room for one connector alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from kvhold.client.control import padded
from kvhold.protocol import MAX_REPORT


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker's geometry. ``digest`` must be the same on all ranks, ``stage_digest`` on those of one pipeline stage.

    ``shard_bytes`` are its part of an object, by group; 0 where it has no layer. ``owner`` is the rank whose part its
    own is a copy of: itself, unless ranks hold the same KV. ``summary`` is for a person, ``loaded``
    a digest of the weights that the engine has started with; empty where that is not known.
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
    loaded: bytes = b""

    def packed(self) -> bytes:
        """For the way through the manager."""
        return msgspec.msgpack.encode(replace(self, summary=self.summary[: MAX_REPORT // 8]))


@dataclass(frozen=True, slots=True)
class Shards:
    """One group's objects: ``writes`` are the padded bytes of each rank that has a part of its own, in rank order.

    A rank's part begins ``starts[rank]`` bytes into an object; ranks that hold the same KV have the same start.
    """

    writes: dict[int, int]
    starts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ranks:
    """All ranks of an engine. ``digests`` are what makes their KV incompatible with that of others.

    ``loaded`` are digests of the weights they have started with, in rank order.
    """

    shards: tuple[Shards, ...]
    digests: tuple[bytes, ...]
    private: bool
    loaded: tuple[bytes, ...] = ()

    @property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        """Where the part of each rank begins in an object, by group and rank."""
        return tuple(shards.starts for shards in self.shards)

    @property
    def writes(self) -> list[dict[int, int]]:
        """The padded bytes that each rank with a part of its own writes of an object, by group."""
        return [shards.writes for shards in self.shards]


_decoder = msgspec.msgpack.Decoder(WorkerReport)


def agree(packed: Iterable[bytes]) -> Ranks:
    """The word of all ranks' reports. Raises ValueError, listing them, when they disagree."""
    try:
        by_rank = {report.rank: report for report in map(_decoder.decode, packed)}
    except msgspec.MsgspecError as error:
        raise ValueError(f"kvhold: a worker's report cannot be read: {error}") from None
    world = next((report.world for report in by_rank.values()), 0)
    if not world or set(by_rank) != set(range(world)):
        raise ValueError(f"kvhold: of {world} workers, only ranks {sorted(by_rank)} have said what their KV cache is")
    stages: dict[int, bytes] = {}
    common = {(report.digest, report.world, report.private, len(report.shard_bytes)) for report in by_rank.values()}
    agreed = len(common) == 1 and all(
        stages.setdefault(report.stage, report.stage_digest) == report.stage_digest
        and report.owner in by_rank
        and by_rank[report.owner].shard_bytes == report.shard_bytes
        for report in by_rank.values()
    )
    if not agreed:
        listed = "; ".join(f"rank {rank}: {report.summary}" for rank, report in sorted(by_rank.items()))
        raise ValueError(f"kvhold: the workers of this engine disagree about their KV cache: {listed}")
    first = by_rank[min(by_rank)]
    return Ranks(
        tuple(_shards(by_rank, group) for group in range(len(first.shard_bytes))),
        (first.digest, *(digest for _, digest in sorted(stages.items()))),
        first.private,
        tuple(report.loaded for _, report in sorted(by_rank.items())),
    )


def _shards(by_rank: dict[int, WorkerReport], group: int) -> Shards:
    writes: dict[int, int] = {}
    starts: dict[int, int] = {}
    at = 0
    for rank, report in sorted(by_rank.items()):
        size = padded(report.shard_bytes[group])
        if report.owner == rank:
            starts[rank] = at
            if size:
                writes[rank] = size
            at += size
    return Shards(writes, tuple(starts[report.owner] for _, report in sorted(by_rank.items())))
