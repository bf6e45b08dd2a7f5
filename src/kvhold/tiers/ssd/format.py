"""Version 1 of what is in a log's files, byte by byte; see docs/ssd-format.md. Bytes to values and back, nothing else.

Whatever else a later version changes: a header block is 4096 bytes, begins with a magic and the version, and ends with
a checksum of all before it. So damage and another version can always be told apart.
"""

from collections.abc import Sequence
from enum import StrEnum
from struct import Struct
from typing import Final, NamedTuple

from xxhash import xxh3_128_digest

from kvhold.core.log.segments import BLOCK, HEADER

VERSION: Final = 1
SUM: Final = 16
"""Bytes of a checksum: xxh3-128, in its canonical (big-endian) form."""
NAMESPACE: Final = 32
"""Bytes of a namespace."""
MAX_SHARDS: Final = 128
MAX_KEY: Final = 64
MAX_SHARD: Final = 1 << 40
"""Bytes of a shard; it has at least a block."""
FROM_MANAGER: Final = 0
FROM_WORKER: Final = 1
"""Who computed a record's checksums: the worker knows the bytes as it copied them, the manager as it wrote them."""

_LOG_MAGIC: Final = b"kvholdLG"
_SEGMENT_MAGIC: Final = b"kvholdSG"
_RECORD_MAGIC: Final = b"kvholdRC"

_ZEROS: Final = bytes(BLOCK)
_SUM_AT: Final = BLOCK - SUM
_COMMON: Final = Struct("<8sII16s")  # magic, version, flags, log
_LOG: Final = Struct("<QQQ")  # bytes of a segment, creation time, greatest seq in tombstones
_SEGMENT: Final = Struct("<QI4xQQQ")  # seq, number, bytes of a segment, creation time, greatest seq in tombstones
_RECORD: Final = Struct("<QIIQQQQ32sIHBBBB6x64s64s16s")
_SHARD: Final = Struct("<Q16s")
_SHARDS_AT: Final = 512
_REST: Final = _COMMON.size

Buffer = bytearray | memoryview


class Flaw(StrEnum):
    """Why a block does not count."""

    EMPTY = "empty"  # nothing of ours: never written, or it is in the middle of something older
    DAMAGED = "damaged"
    VERSION = "wrong_version"
    FOREIGN = "foreign"  # of another log, or of another place in this one
    STALE = "stale"  # of another life of its segment


class LogHead(NamedTuple):
    """What the file that names a log says. ``forgotten_seq`` is the greatest seq in tombstones by then, 0 if none."""

    log: bytes
    segment_bytes: int
    created: int
    forgotten_seq: int


class SegmentHead(NamedTuple):
    log: bytes
    seq: int
    number: int
    segment_bytes: int
    created: int
    forgotten_seq: int


class RecordHead(NamedTuple):
    """``at`` and lengths in bytes, ``created`` in ns of wall time; ``sums`` are the shards' checksums."""

    log: bytes
    seq: int
    number: int
    group: int
    at: int
    length: int
    created: int
    namespace: bytes
    depth: int
    origin: int
    key: bytes
    parent: bytes
    shards: tuple[int, ...]
    sums: tuple[bytes, ...]


def checksum(data: bytes | Buffer) -> bytes:
    return xxh3_128_digest(data)


def geometry_digest(shards: Sequence[int]) -> bytes:
    """Digest of how an object is cut: two objects with the same one have shards of the same lengths."""
    return xxh3_128_digest(b"".join(shard.to_bytes(8, "little") for shard in shards))


def proper_shards(shards: Sequence[int]) -> bool:
    """Whether an object may be cut like this."""
    return 0 < len(shards) <= MAX_SHARDS and all(BLOCK <= s <= MAX_SHARD and not s % BLOCK for s in shards)


def encode_log(buffer: Buffer, head: LogHead) -> None:
    _begin(buffer, _LOG_MAGIC, head.log)
    _LOG.pack_into(buffer, _REST, head.segment_bytes, head.created, head.forgotten_seq)
    _finish(buffer)


def decode_log(block: bytes | Buffer) -> LogHead | Flaw:
    flaw = _check(block, _LOG_MAGIC, None)
    return flaw or LogHead(bytes(block[16:32]), *_LOG.unpack_from(block, _REST))


def encode_segment(buffer: Buffer, head: SegmentHead) -> None:
    _begin(buffer, _SEGMENT_MAGIC, head.log)
    _SEGMENT.pack_into(buffer, _REST, head.seq, head.number, head.segment_bytes, head.created, head.forgotten_seq)
    _finish(buffer)


def decode_segment(block: bytes | Buffer, log: bytes | None = None) -> SegmentHead | Flaw:
    """The header of a segment of any log; knowing the ``log``, damage to the magic can be told from emptiness."""
    flaw = _check(block, _SEGMENT_MAGIC, log)
    return flaw or SegmentHead(bytes(block[16:32]), *_SEGMENT.unpack_from(block, _REST))


def encode_record(buffer: Buffer, head: RecordHead) -> None:
    _begin(buffer, _RECORD_MAGIC, head.log)
    _RECORD.pack_into(
        buffer,
        _REST,
        head.seq,
        head.number,
        head.group,
        head.at,
        head.length,
        head.length - HEADER,
        head.created,
        head.namespace,
        head.depth,
        len(head.shards),
        head.origin,
        0,  # codec: none
        len(head.key),
        len(head.parent),
        head.key,
        head.parent,
        geometry_digest(head.shards),
    )
    at = _SHARDS_AT
    for shard, digest in zip(head.shards, head.sums, strict=True):
        _SHARD.pack_into(buffer, at, shard, digest)
        at += _SHARD.size
    _finish(buffer)


def decode_record(block: bytes | Buffer, log: bytes, number: int, seq: int, at: int) -> RecordHead | Flaw:
    """The header of the record that begins at this very place in this life of a segment, or why it does not count."""
    flaw = _check(block, _RECORD_MAGIC, log)
    if flaw:
        return flaw
    (
        its_seq,
        its_number,
        group,
        its_at,
        length,
        payload,
        created,
        namespace,
        depth,
        shards,
        origin,
        codec,
        key_bytes,
        parent_bytes,
        key,
        parent,
        geometry,
    ) = _RECORD.unpack_from(block, _REST)
    if block[16:32] != log or its_number != number or its_at != at:
        return Flaw.FOREIGN
    if its_seq != seq:
        return Flaw.STALE
    if codec:
        return Flaw.VERSION
    if not 0 < shards <= MAX_SHARDS or not 0 < key_bytes <= MAX_KEY or parent_bytes > MAX_KEY:
        return Flaw.DAMAGED
    cut = _SHARD.iter_unpack(block[_SHARDS_AT : _SHARDS_AT + shards * _SHARD.size])
    lengths, sums = zip(*cut, strict=True)
    if (
        sum(lengths) != payload
        or payload != length - HEADER
        or not proper_shards(lengths)
        or geometry != geometry_digest(lengths)
    ):
        return Flaw.DAMAGED
    return RecordHead(
        log, seq, number, group, at, length, created, namespace, depth, origin,
        key[:key_bytes], parent[:parent_bytes], lengths, sums,
    )  # fmt: skip


def _begin(buffer: Buffer, magic: bytes, log: bytes) -> None:
    buffer[:] = _ZEROS
    _COMMON.pack_into(buffer, 0, magic, VERSION, 0, log)


def _finish(buffer: Buffer) -> None:
    buffer[_SUM_AT:] = xxh3_128_digest(memoryview(buffer)[:_SUM_AT])


def _check(block: bytes | Buffer, magic: bytes, log: bytes | None) -> Flaw | None:
    if len(block) != BLOCK:
        return Flaw.DAMAGED
    if block[:8] != magic:
        return Flaw.DAMAGED if log is not None and block[16:32] == log else Flaw.EMPTY
    if block[_SUM_AT:] != xxh3_128_digest(memoryview(block)[:_SUM_AT]):
        return Flaw.DAMAGED
    return Flaw.VERSION if int.from_bytes(block[8:12], "little") != VERSION else None
