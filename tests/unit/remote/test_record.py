"""A value says whose bytes it has: whatever differs is told from what was asked for."""

import os
import struct

import pytest
from xxhash import xxh3_128_digest

from kvhold.tiers.remote.record import HEADER, Wanted, Wrong, check, encode, name, prefix

SHARDS = (4096, 8192)
WANTED = Wanted(b"n" * 32, 3, b"k" * 16, b"p" * 16, 7, SHARDS)
CREATED = 1_000_000
PAYLOAD = os.urandom(sum(SHARDS))


def resealed(block: bytes, at: int, value: bytes) -> bytes:
    """The block with other bytes, as somebody writes it who means them."""
    changed = block[:at] + value + block[at + len(value) : HEADER - 16]
    return changed + xxh3_128_digest(changed)


@pytest.fixture
def block() -> bytes:
    return bytes(encode(WANTED, CREATED, PAYLOAD))


def test_what_was_written_is_right(block: bytes) -> None:
    assert check(block, PAYLOAD, WANTED, 0) == CREATED
    assert check(block, PAYLOAD, WANTED._replace(parent=b"", depth=0), CREATED) == CREATED


def test_every_byte_of_the_header_counts(block: bytes) -> None:
    for at in range(HEADER):
        assert check(block[:at] + bytes([block[at] ^ 1]) + block[at + 1 :], PAYLOAD, WANTED, 0) == Wrong.CHECKSUM, at


@pytest.mark.parametrize("at", [0, 4095, 4096, len(PAYLOAD) - 1])
def test_every_shard_of_the_payload_counts(block: bytes, at: int) -> None:
    flipped = PAYLOAD[:at] + bytes([PAYLOAD[at] ^ 128]) + PAYLOAD[at + 1 :]
    assert check(block, flipped, WANTED, 0) == Wrong.CHECKSUM


@pytest.mark.parametrize(
    "other",
    [
        WANTED._replace(namespace=b"m" * 32),
        WANTED._replace(namespace=b"n" * 31),
        WANTED._replace(group=4),
        WANTED._replace(key=b"K" * 16),
        WANTED._replace(parent=b"q" * 16),
        WANTED._replace(depth=8),
        WANTED._replace(parent=b"", depth=8),
    ],
)
def test_another_object_is_told(block: bytes, other: Wanted) -> None:
    assert check(block, PAYLOAD, other, 0) == Wrong.IDENTITY


def test_another_cut_is_told(block: bytes) -> None:
    assert check(block, PAYLOAD, WANTED._replace(shards=(8192, 4096)), 0) == Wrong.LENGTH
    assert check(block, PAYLOAD, WANTED._replace(shards=(12288,)), 0) == Wrong.LENGTH
    assert check(block, PAYLOAD[:-1], WANTED, 0) == Wrong.LENGTH
    assert check(block[:-1], PAYLOAD, WANTED, 0) == Wrong.LENGTH


def test_what_may_be_from_before_a_purge_is_told(block: bytes) -> None:
    assert check(block, PAYLOAD, WANTED, CREATED + 1) == Wrong.OLD


def test_another_version_is_told_from_damage(block: bytes) -> None:
    assert check(resealed(block, 8, struct.pack("<I", 2)), PAYLOAD, WANTED, 0) == Wrong.VERSION
    assert check(resealed(block, 0, b"somebody"), PAYLOAD, WANTED, 0) == Wrong.IDENTITY


def test_what_has_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match="64 bytes"):
        encode(WANTED._replace(key=bytes(65)), 0, PAYLOAD)
    with pytest.raises(ValueError, match="shards"):
        encode(WANTED._replace(shards=()), 0, b"")


def test_names_of_a_namespace_begin_with_its_prefix() -> None:
    assert name("p", b"\x01", 2, b"\x03") == "kvhold-1/p/01/2/03"
    assert name("p", b"\x01", 2, b"\x03").startswith(prefix("p", b"\x01"))
    assert not name("p", b"\x01\x02", 2, b"\x03").startswith(prefix("p", b"\x01"))
    assert not name("pp", b"\x01", 2, b"\x03").startswith(prefix("p"))
