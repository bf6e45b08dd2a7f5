"""Whether what was read is what was asked for. Nothing from a disk is used before this has said so."""

from typing import NamedTuple

from kvhold.tiers.checksums import agrees
from kvhold.tiers.ssd.format import Flaw, RecordHead, decode_record


class Place(NamedTuple):
    """Where a record lies: log, number of the segment's file, seq of its life, byte offset."""

    log: bytes
    number: int
    seq: int
    at: int


class Identity(NamedTuple):
    """What a record must be."""

    namespace: bytes
    group: int
    key: bytes
    shards: tuple[int, ...]


def check_head(block: memoryview, place: Place, wanted: Identity | None = None) -> RecordHead | str:
    """A record's header, or the reason why it is not the one that belongs here."""
    head = decode_record(block, *place)
    if isinstance(head, Flaw):
        return f"header_{head.value}"
    if wanted is not None and (head.namespace, head.group, head.key, head.shards) != wanted:
        return "identity"
    return head


def check_payload(head: RecordHead, payload: memoryview) -> str | None:
    """Why ``payload`` is not what was stored under ``head``; None if it is."""
    if len(payload) != sum(head.shards):
        return "length"
    if not agrees(payload, head.shards, head.sums):
        return "checksum"
    return None
