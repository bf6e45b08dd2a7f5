"""A sealed segment's footer: its index, packed, in the segment's last bytes; see docs/ssd-format.md.

    geometries, entries, zeros, head         the head is the segment's last 128 bytes: it is found without a search

Its size is core's rule, because core leaves the room for it.
"""

from collections.abc import Iterable, Iterator
from struct import Struct, unpack_from
from typing import Final, NamedTuple

from xxhash import xxh3_128_digest

from kvhold.core.log.segments import BLOCK, FOOTER_ENTRY, FOOTER_HEAD, HEADER, footer_bytes, table_bytes
from kvhold.tiers.ssd.format import MAX_KEY, SUM, VERSION, Flaw, proper_shards

BATCH: Final = 256
"""Records that are handed on at once."""

Record = tuple[bytes, int, bytes, tuple[int, ...], int, int, int, int, int]
"""(namespace, group, key, shards, depth, segment, seq, at, created)."""

_MAGIC: Final = b"kvholdFT"
_HEAD: Final = Struct("<8sII16sQIIQII16s")
_ENTRY: Final = Struct("<64sQIII12x")
_GEOMETRY: Final = Struct("<32sIHB17x")
assert _ENTRY.size == FOOTER_ENTRY
assert _GEOMETRY.size == table_bytes(0)

Geometry = tuple[bytes, int, int, tuple[int, ...]]
"""(namespace, group, bytes of a key, shards)."""


class Entry(NamedTuple):
    """What a footer says of one record; ``at`` in bytes, ``created`` in ns."""

    geometry: Geometry
    key: bytes
    at: int
    depth: int
    created: int


class FooterHead(NamedTuple):
    """``end`` is where the last record ends, in bytes; ``size`` the whole footer's bytes."""

    log: bytes
    seq: int
    number: int
    records: int
    end: int
    geometries: int
    table: int
    body_sum: bytes

    @property
    def size(self) -> int:
        return footer_bytes(self.records, self.table)


def encode_footer(buffer: memoryview, log: bytes, number: int, seq: int, end: int, entries: Iterable[Entry]) -> None:
    """Fill ``buffer``, which is zeroed and of exactly the footer's size."""
    tables: dict[Geometry, int] = {}
    packed = bytearray()
    records = 0
    for entry in entries:
        index = tables.setdefault(entry.geometry, len(tables))
        packed += _ENTRY.pack(entry.key, entry.created, index, entry.at // BLOCK, entry.depth)
        records += 1
    table = bytearray()
    for namespace, group, key_bytes, shards in tables:
        table += _GEOMETRY.pack(namespace, group, len(shards), key_bytes)
        table += b"".join(shard.to_bytes(8, "little") for shard in shards)
    body = len(table) + len(packed)
    buffer[:body] = table + packed
    head_at = len(buffer) - FOOTER_HEAD
    _HEAD.pack_into(
        buffer, head_at, _MAGIC, VERSION, 0, log, seq, number, records, end, len(tables), len(table),
        xxh3_128_digest(buffer[:body]),
    )  # fmt: skip
    buffer[-SUM:] = xxh3_128_digest(buffer[head_at:-SUM])


def decode_head(block: memoryview, log: bytes, number: int, seq: int, segment_bytes: int) -> FooterHead | Flaw:
    """The head of the footer whose last block this is."""
    head = block[-FOOTER_HEAD:]
    if len(block) != BLOCK:
        return Flaw.DAMAGED
    magic, version, _, its_log, its_seq, its_number, records, end, geometries, table, body_sum = _HEAD.unpack_from(head)
    if magic != _MAGIC:
        return Flaw.DAMAGED if its_log == log and its_seq == seq else Flaw.EMPTY
    if head[-SUM:] != xxh3_128_digest(head[:-SUM]):
        return Flaw.DAMAGED
    if version != VERSION:
        return Flaw.VERSION
    if its_log != log or its_number != number:
        return Flaw.FOREIGN
    if its_seq != seq:
        return Flaw.STALE
    found = FooterHead(its_log, its_seq, its_number, records, end, geometries, table, body_sum)
    return found if HEADER <= end <= segment_bytes - found.size else Flaw.DAMAGED


def decode_body(head: FooterHead, body: memoryview, segment: int) -> Iterator[list[Record]] | Flaw:
    """The records of a footer, at most :data:`BATCH` at a time; ``segment`` is what the segment is called in them."""
    used = head.table + head.records * FOOTER_ENTRY
    if len(body) < used or head.body_sum != xxh3_128_digest(body[:used]):
        return Flaw.DAMAGED
    tables = _geometries(body[: head.table])
    if len(tables) != head.geometries:
        return Flaw.DAMAGED
    return _batches(head, body[head.table : used], tables, segment)


def _geometries(table: memoryview) -> list[Geometry]:
    """Those before the first that no record can have."""
    found: list[Geometry] = []
    at = 0
    while at + _GEOMETRY.size <= len(table):
        namespace, group, count, key_bytes = _GEOMETRY.unpack_from(table, at)
        at += _GEOMETRY.size
        if at + 8 * count > len(table):
            break
        shards = unpack_from(f"<{count}Q", table, at)
        if not 0 < key_bytes <= MAX_KEY or not proper_shards(shards):
            break
        found.append((namespace, group, key_bytes, shards))
        at += 8 * count
    return found


def _batches(head: FooterHead, entries: memoryview, tables: list[Geometry], segment: int) -> Iterator[list[Record]]:
    seq, count = head.seq, len(tables)
    widths = {key_bytes for _, _, key_bytes, _ in tables}
    for start in range(0, len(entries), BATCH * FOOTER_ENTRY):
        piece = entries[start : start + BATCH * FOOTER_ENTRY]
        if count == 1:  # by far the most common, and it is what a start waits for
            namespace, group, width, shards = tables[0]
            yield [
                (namespace, group, key, shards, depth, segment, seq, at * BLOCK, created)
                for key, created, at, depth in _entry_of(width).iter_unpack(piece)
            ]
            continue
        cut = _entry_with_index(widths.pop() if len(widths) == 1 else MAX_KEY)
        yield [
            (*tables[index][:2], key[: tables[index][2]], tables[index][3], depth, segment, seq, at * BLOCK, created)
            for key, created, index, at, depth in cut.iter_unpack(piece)
            if index < count
        ]


def _entry_of(width: int) -> Struct:
    return Struct(f"<{width}s{MAX_KEY - width}xQ4xII12x")


def _entry_with_index(width: int) -> Struct:
    return Struct(f"<{width}s{MAX_KEY - width}xQIII12x")
