"""What a value in a store looks like: a header block that says whose bytes these are, then the bytes.

Whatever else a later version changes: a header block is 4096 bytes, begins with a magic and the version, and ends with
a checksum of all before it. So damage and another version can always be told apart.
"""

from enum import StrEnum
from struct import Struct
from typing import Final, NamedTuple

from xxhash import xxh3_128_digest

from kvhold.tiers.checksums import Buffer, agrees, checksums

VERSION: Final = 1
HEADER: Final = 4096
"""Bytes of a header block."""
SUM: Final = 16
"""Bytes of a checksum: xxh3-128, in its canonical (big-endian) form."""
MAX_SHARDS: Final = 128
MAX_NAME: Final = 64
"""Bytes of a namespace, a key and a parent."""

_MAGIC: Final = b"kvholdRV"
_FIXED: Final = Struct("<8sIIIHBBB7xQQ64s64s64s")
_SHARD: Final = Struct("<Q16s")
_SHARDS_AT: Final = 512
_SUM_AT: Final = HEADER - SUM


class Wrong(StrEnum):
    """Why a value is not what was asked for."""

    CHECKSUM = "checksum"  # bytes differ from what was written
    IDENTITY = "identity"  # it is another object's
    LENGTH = "length"  # of the value, or of a shard
    VERSION = "version"  # of another kvhold
    OLD = "old"  # it may have been computed before a purge


class Wanted(NamedTuple):
    """An object, as its header has to name it. ``parent`` b"" and ``depth`` 0 of what is read: not known."""

    namespace: bytes
    group: int
    key: bytes
    parent: bytes
    depth: int
    shards: tuple[int, ...]


def prefix(pool: str, namespace: bytes = b"") -> str:
    """What every name of a namespace begins with; of no namespace: every name of the pool."""
    return f"kvhold-1/{pool}/" + (f"{namespace.hex()}/" if namespace else "")


def name(pool: str, namespace: bytes, group: int, key: bytes) -> str:
    """What an object is called in every store."""
    return f"{prefix(pool, namespace)}{group}/{key.hex()}"


def encode(wanted: Wanted, created: int, payload: Buffer) -> bytearray:
    """The header block of an object that was computed at ``created`` (ns of wall time). ValueError: it has no room."""
    if not 0 < len(wanted.shards) <= MAX_SHARDS or sum(wanted.shards) != len(payload):
        raise ValueError(f"{len(wanted.shards)} shards of {sum(wanted.shards)} bytes are not {len(payload)} bytes")
    names = (wanted.namespace, wanted.key, wanted.parent)
    if max(map(len, names)) > MAX_NAME:
        raise ValueError(f"a name is longer than {MAX_NAME} bytes")
    block = bytearray(HEADER)
    lengths = [len(each) for each in names]
    counts = (wanted.group, wanted.depth, len(wanted.shards), *lengths, len(payload))
    _FIXED.pack_into(block, 0, _MAGIC, VERSION, *counts, created, *names)
    for position, each in enumerate(zip(wanted.shards, checksums(payload, wanted.shards), strict=True)):
        _SHARD.pack_into(block, _SHARDS_AT + position * _SHARD.size, *each)
    block[_SUM_AT:] = xxh3_128_digest(memoryview(block)[:_SUM_AT])
    return block


def check(block: Buffer, payload: Buffer, wanted: Wanted, floor: int) -> int | Wrong:
    """When it was computed (ns of wall time), if every byte is that of ``wanted``; else what is wrong.

    What was computed before ``floor`` is too old.
    """
    if len(block) != HEADER:
        return Wrong.LENGTH
    if bytes(block[_SUM_AT:]) != xxh3_128_digest(memoryview(block)[:_SUM_AT]):
        return Wrong.CHECKSUM
    magic, version, group, depth, shards, *rest = _FIXED.unpack_from(block)
    if magic != _MAGIC:
        return Wrong.IDENTITY
    if version != VERSION:
        return Wrong.VERSION
    of_namespace, of_key, of_parent, length, created, namespace, key, parent = rest
    if (namespace[:of_namespace], group, key[:of_key]) != (wanted.namespace, wanted.group, wanted.key):
        return Wrong.IDENTITY
    if (wanted.parent or wanted.depth) and (parent[:of_parent], depth) != (wanted.parent, wanted.depth):
        return Wrong.IDENTITY
    if shards != len(wanted.shards) or length != len(payload):
        return Wrong.LENGTH
    told = [_SHARD.unpack_from(block, _SHARDS_AT + position * _SHARD.size) for position in range(shards)]
    if tuple(shard for shard, _ in told) != wanted.shards:
        return Wrong.LENGTH
    if created < floor:
        return Wrong.OLD
    return int(created) if agrees(payload, wanted.shards, [digest for _, digest in told]) else Wrong.CHECKSUM
