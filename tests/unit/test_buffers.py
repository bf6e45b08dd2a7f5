"""What is copied between an engine's memory and the arena: every byte, once, in as few moves as may be."""

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold.engines.common import buffers
from kvhold.engines.common.buffers import copy_in, copy_out, moves


def test_neighbours_in_both_memories_are_one_move() -> None:
    assert moves([[(100, 8)], [(108, 8)]], [40, 48], 8) == [(100, 40, 16)]
    assert moves([[(100, 8)], [(108, 8)]], [48, 40], 8) == [(100, 48, 8), (108, 40, 8)]
    assert moves([[(100, 4), (104, 4)], [(200, 8)]], [40, 48], 8) == [(100, 40, 8), (200, 48, 8)]
    assert moves([], [], 8) == []


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="buffer 1 has 7 bytes; an object has 8"):
        moves([[(100, 8)], [(108, 4), (120, 3)]], [40, 48], 8)
    with pytest.raises(ValueError, match="1 buffers were given for 2 objects"):
        moves([[(100, 8)]], [40, 48], 8)


@given(st.lists(st.integers(0, 15), unique=True, max_size=16), st.permutations(range(16)), st.integers(1, 7))
def test_every_byte_goes_where_it_belongs(places: list[int], slots: list[int], cut: int) -> None:
    """Objects of eight bytes in two pieces, from any places of the engine to any of the arena, and back."""
    engine, arena = bytes(range(128)), bytearray(128)
    source, kept = (ctypes.create_string_buffer(engine, 128) for _ in range(2))
    middle = ctypes.create_string_buffer(bytes(arena), 128)
    offsets = [8 * slots[number] for number in range(len(places))]

    def pieces(base: int) -> list[list[tuple[int, int]]]:
        return [[(base + 8 * place, cut), (base + 8 * place + cut, 8 - cut)] for place in places]

    copy_in(ctypes.addressof(middle), moves(pieces(ctypes.addressof(source)), offsets, 8))
    for place, offset in zip(places, offsets, strict=True):
        assert middle.raw[offset : offset + 8] == engine[8 * place : 8 * place + 8]
        ctypes.memset(ctypes.addressof(kept) + 8 * place, 0, 8)
    copy_out(ctypes.addressof(middle), moves(pieces(ctypes.addressof(kept)), offsets, 8))
    assert kept.raw == engine, "and nothing beside it was touched"


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(1, 5))
def test_shares_are_the_same_bytes_and_about_as_long(lengths: list[int], count: int) -> None:
    made = [(1000 * number, 100 * number, length) for number, length in enumerate(lengths)]
    parts = buffers.shares(made, count)
    assert len(parts) <= max(1, count)

    def each_byte(moved: list[buffers.Move]) -> list[tuple[int, int]]:
        return [(address + at, offset + at) for address, offset, length in moved for at in range(length)]

    assert [byte for part in parts for byte in each_byte(part)] == each_byte(made)
    sizes = [sum(length for _, _, length in part) for part in parts]
    assert len(set(sizes[:-1])) <= 1, "all but the last have as many"


def test_a_long_copy_is_made_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_THREADS", 4)
    monkeypatch.setattr(buffers, "_SHARE", 64)
    whole = bytes(range(256)) * 4
    source, arena, back = (ctypes.create_string_buffer(data, 1024) for data in (whole, b"", b""))
    addresses = [ctypes.addressof(each) for each in (source, arena, back)]
    copy_in(addresses[1], [(addresses[0], 0, 1024)])
    copy_out(addresses[1], [(addresses[2] + at, at, 128) for at in range(0, 1024, 128)])
    assert arena.raw == back.raw == whole
