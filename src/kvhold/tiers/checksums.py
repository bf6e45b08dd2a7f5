"""Checksums of an object's shards, which tiers keep beside its bytes: xxh3-128, in its canonical (big-endian) form."""

from collections.abc import Iterator, Sequence

from xxhash import xxh3_128_digest

Buffer = bytes | bytearray | memoryview


def checksums(payload: Buffer, shards: Sequence[int]) -> tuple[bytes, ...]:
    """One of each shard; ``shards`` are their bytes, one after the other in ``payload``."""
    return tuple(_each(payload, shards))


def agrees(payload: Buffer, shards: Sequence[int], sums: Sequence[bytes]) -> bool:
    """Whether every shard has its checksum. The first that has another ends it."""
    return all(found == told for found, told in zip(_each(payload, shards), sums, strict=True))


def _each(payload: Buffer, shards: Sequence[int]) -> Iterator[bytes]:
    view, at = memoryview(payload), 0
    for shard in shards:
        yield xxh3_128_digest(view[at : at + shard])
        at += shard
