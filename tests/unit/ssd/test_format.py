"""The bytes of version 1: there and back, and nothing that was changed counts."""

import pytest

from kvhold.core.log.segments import BLOCK, HEADER, footer_bytes, table_bytes
from kvhold.tiers.ssd import footer
from kvhold.tiers.ssd import format as fmt
from kvhold.tiers.ssd.files import blocks
from kvhold.tiers.ssd.format import Flaw

LOG = b"L" * 16
SHARDS = (BLOCK, 3 * BLOCK)
RECORD = fmt.RecordHead(
    LOG, 7, 3, 2, 8 * BLOCK, HEADER + sum(SHARDS), 123, b"n" * 32, 5, fmt.FROM_WORKER, b"k" * 20, b"p" * 64, SHARDS,
    (b"s" * 16, b"t" * 16),
)  # fmt: skip
PLACE = (LOG, 3, 7, 8 * BLOCK)


def record_block() -> memoryview:
    block = blocks(BLOCK)
    fmt.encode_record(block, RECORD)
    return block


def sign(block: memoryview) -> None:
    block[-16:] = fmt.checksum(block[:-16])


def test_blocks_there_and_back() -> None:
    block = blocks(BLOCK)
    fmt.encode_log(block, log := fmt.LogHead(LOG, 1 << 28, 99, 7))
    assert fmt.decode_log(block) == log
    fmt.encode_segment(block, segment := fmt.SegmentHead(LOG, 1 << 40, 3, 1 << 28, 99, 8))
    assert fmt.decode_segment(block) == segment
    assert fmt.decode_record(record_block(), *PLACE) == RECORD


def test_the_largest_record() -> None:
    head = RECORD._replace(shards=(BLOCK,) * 128, sums=(b"s" * 16,) * 128, length=HEADER + 128 * BLOCK, key=b"k" * 64)
    fmt.encode_record(block := blocks(BLOCK), head)
    assert fmt.decode_record(block, *PLACE) == head


@pytest.mark.parametrize("kind", ["record", "segment", "log"])
def test_no_flipped_bit_counts(kind: str) -> None:
    block = blocks(BLOCK)
    if kind == "record":
        fmt.encode_record(block, RECORD)
    elif kind == "segment":
        fmt.encode_segment(block, fmt.SegmentHead(LOG, 7, 3, 1 << 28, 99, 0))
    else:
        fmt.encode_log(block, fmt.LogHead(LOG, 1 << 28, 99, 0))
    for at in range(BLOCK):
        block[at] ^= 1 << at % 8
        if kind == "record":
            found: object = fmt.decode_record(block, *PLACE)
        elif kind == "segment":
            found = fmt.decode_segment(block, LOG)
        else:
            found = fmt.decode_log(block)
        # Damage is told from emptiness even if it hits what says that the block is ours at all.
        assert found is Flaw.DAMAGED or (kind == "log" and at < 8 and found is Flaw.EMPTY), at
        block[at] ^= 1 << at % 8


@pytest.mark.parametrize(
    ("place", "flaw"),
    [
        ((b"M" * 16, 3, 7, 8 * BLOCK), Flaw.FOREIGN),
        ((LOG, 4, 7, 8 * BLOCK), Flaw.FOREIGN),
        ((LOG, 3, 7, 9 * BLOCK), Flaw.FOREIGN),
        ((LOG, 3, 8, 8 * BLOCK), Flaw.STALE),
    ],
)
def test_a_record_counts_only_in_its_place(place: tuple[bytes, int, int, int], flaw: Flaw) -> None:
    assert fmt.decode_record(record_block(), *place) is flaw


def test_emptiness_and_other_versions() -> None:
    assert fmt.decode_record(blocks(BLOCK), *PLACE) is Flaw.EMPTY
    block = record_block()
    block[8] = 2
    assert fmt.decode_record(block, *PLACE) is Flaw.DAMAGED  # nobody signed that
    sign(block)
    assert fmt.decode_record(block, *PLACE) is Flaw.VERSION
    assert fmt.decode_record(block[:100], *PLACE) is Flaw.DAMAGED


@pytest.mark.parametrize(
    ("at", "value"), [(116, 129), (120, 65), (121, 65), (56, 1), (64, 1), (512, 1), (256, 0), (120, 0)]
)
def test_signed_nonsense_is_damage(at: int, value: int) -> None:
    """Numbers of shards, lengths of keys, lengths that do not add up, a geometry that is another one."""
    block = record_block()
    block[at] = value
    sign(block)
    assert fmt.decode_record(block, *PLACE) is Flaw.DAMAGED


@pytest.mark.parametrize(
    "shards", [(), (0,), (BLOCK, 0), (BLOCK + 1, BLOCK - 1), ((1 << 40) + BLOCK,), (1 << 63, 1 << 63)]
)
def test_shards_that_no_object_has_are_damage(shards: tuple[int, ...]) -> None:
    total = sum(shards) % (1 << 62)
    head = RECORD._replace(shards=shards, sums=(b"s" * 16,) * len(shards), length=HEADER + total)
    fmt.encode_record(block := blocks(BLOCK), head)
    assert fmt.decode_record(block, *PLACE) is Flaw.DAMAGED
    assert footer_of((b"n" * 32, 0, 8, shards)) is Flaw.DAMAGED


@pytest.mark.parametrize("width", [0, 65, 255])
def test_keys_that_no_object_has_are_damage(width: int) -> None:
    assert footer_of((b"n" * 32, 0, width, SHARDS)) is Flaw.DAMAGED
    assert not isinstance(footer_of((b"n" * 32, 0, 64, SHARDS)), Flaw)


def footer_of(geometry: footer.Geometry) -> list[footer.Record] | Flaw:
    whole = blocks(footer_bytes(1, table_bytes(len(geometry[3]))))
    footer.encode_footer(whole, LOG, 3, 7, 2 * BLOCK, [footer.Entry(geometry, b"k", HEADER, 0, 0)])
    return read_footer(whole, 1 << 26)


def test_fields_are_where_the_document_says() -> None:
    block = record_block()
    assert block[0:8] == b"kvholdRC"
    assert block[16:32] == LOG
    assert int.from_bytes(block[32:40], "little") == 7  # seq
    assert int.from_bytes(block[40:44], "little") == 3  # number
    assert int.from_bytes(block[44:48], "little") == 2  # group
    assert int.from_bytes(block[48:56], "little") == 8 * BLOCK
    assert int.from_bytes(block[56:64], "little") == HEADER + sum(SHARDS)
    assert int.from_bytes(block[64:72], "little") == sum(SHARDS)
    assert int.from_bytes(block[72:80], "little") == 123
    assert block[80:112] == b"n" * 32
    assert int.from_bytes(block[112:116], "little") == 5  # depth
    assert int.from_bytes(block[116:118], "little") == 2  # shards
    assert tuple(block[118:122]) == (fmt.FROM_WORKER, 0, 20, 64)
    assert block[128:148] == b"k" * 20
    assert block[192:256] == b"p" * 64
    assert int.from_bytes(block[512:520], "little") == BLOCK
    assert block[520:536] == b"s" * 16


# --- footers


def made_footer(count: int, kinds: int = 3) -> tuple[memoryview, list[footer.Record], int]:
    entries = []
    end = HEADER
    for index in range(count):
        kind = index % kinds
        shards = (BLOCK,) * (kind + 1)
        geometry = (bytes([kind]) * 32, kind, 8 + kind % 2, shards)
        key = index.to_bytes(8 + kind % 2, "big")
        entries.append(footer.Entry(geometry, key, end, index % 5, 1000 + index))
        end += HEADER + sum(shards)
    tables = sum(table_bytes(kind + 1) for kind in range(min(kinds, count)))
    size = 1 << 26
    whole = blocks(footer_bytes(count, tables))
    footer.encode_footer(whole, LOG, 3, 7, end, entries)
    expected = [
        (entry.geometry[0], entry.geometry[1], entry.key, entry.geometry[3], entry.depth, 0, 7, entry.at, entry.created)
        for entry in entries
    ]
    return whole, expected, size


def read_footer(whole: memoryview, size: int) -> list[footer.Record] | Flaw:
    head = footer.decode_head(whole[-BLOCK:], LOG, 3, 7, size)
    if isinstance(head, Flaw):
        return head
    assert head.size == len(whole)
    batches = footer.decode_body(head, whole, 0)
    return batches if isinstance(batches, Flaw) else [record for batch in batches for record in batch]


@pytest.mark.parametrize("count", [0, 1, 2, 40, 511, 512, 513, 1500])
@pytest.mark.parametrize("kinds", [1, 2, 3])
def test_a_footer_there_and_back(count: int, kinds: int) -> None:
    whole, expected, size = made_footer(count, kinds)
    assert read_footer(whole, size) == expected


def test_no_flipped_bit_in_a_footer_counts() -> None:
    whole, expected, size = made_footer(20)
    for at in range(len(whole)):
        whole[at] ^= 1 << at % 8
        found = read_footer(whole, size)
        assert isinstance(found, Flaw) or found == expected, at  # padding says nothing
        assert found is not Flaw.EMPTY
        whole[at] ^= 1 << at % 8
    assert read_footer(whole, size) == expected


def test_a_footer_counts_only_in_its_place() -> None:
    whole, _, size = made_footer(2)
    assert footer.decode_head(whole[-BLOCK:], LOG, 3, 8, size) is Flaw.STALE
    assert footer.decode_head(whole[-BLOCK:], LOG, 4, 7, size) is Flaw.FOREIGN
    assert footer.decode_head(whole[-BLOCK:], b"M" * 16, 3, 7, size) is Flaw.FOREIGN
    assert footer.decode_head(whole[-BLOCK:], LOG, 3, 7, BLOCK) is Flaw.DAMAGED
    assert footer.decode_head(blocks(BLOCK), LOG, 3, 7, size) is Flaw.EMPTY
