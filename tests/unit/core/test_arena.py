"""The arena: what is where, to the byte."""

import random

import pytest

from kvhold.core.arena import ALIGN, Arena, align

PAGE = 4 * ALIGN


def accounted(arena: Arena, used: int) -> bool:
    return arena.free_pages * arena.page + arena.free_slot_bytes + arena.slack_bytes + used == arena.total


def test_sizes_are_rounded_up_to_the_alignment():
    assert [align(size) for size in (0, 1, ALIGN, ALIGN + 1)] == [0, ALIGN, ALIGN, 2 * ALIGN]
    with pytest.raises(ValueError, match="multiple"):
        Arena(ALIGN + 1)


def test_slots_of_a_page_do_not_overlap_and_fill_it():
    arena = Arena(PAGE)
    arena.grow(1)
    assert sorted(arena.take(ALIGN, row) for row in range(4)) == [0, ALIGN, 2 * ALIGN, 3 * ALIGN]
    assert arena.take(ALIGN, 9) is None
    assert (arena.free_pages, arena.free_slot_bytes, arena.slack_bytes) == (0, 0, 0)


def test_nothing_can_be_taken_before_pages_are_there():
    arena = Arena(PAGE)
    assert arena.take(ALIGN, 0) is None
    arena.grow(1)
    assert arena.take(ALIGN, 0) == 0


def test_tail_slack_is_accounted_while_its_run_exists():
    arena = Arena(PAGE)
    arena.grow(2)
    offset = arena.take(3 * ALIGN, 0)
    assert (arena.free_pages, arena.free_slot_bytes, arena.slack_bytes) == (1, 0, ALIGN)
    arena.give(offset)
    assert (arena.free_pages, arena.free_slot_bytes, arena.slack_bytes) == (2, 0, 0)


def test_an_object_larger_than_a_page_spans_adjacent_pages():
    arena = Arena(PAGE)
    arena.grow(5)
    first, second = arena.take(2 * PAGE, 0), arena.take(2 * PAGE, 1)
    assert (first, second) == (0, 2 * PAGE)
    assert arena.take(2 * PAGE, 2) is None, "one page alone is not enough"
    assert arena.take(PAGE, 2) == 4 * PAGE
    assert accounted(arena, 5 * PAGE)
    arena.give(first)
    assert arena.free_pages == 2


def test_a_span_is_long_enough_to_waste_little_but_never_most_of_a_small_arena():
    arena = Arena(PAGE)
    size = PAGE + ALIGN  # 5 units in pages of 4: two pages waste 3 of 8, five waste nothing
    arena.grow(4)
    assert arena.span_of(size) == 2
    arena.grow(36)
    assert arena.span_of(size) == 4  # 1 of 16 wasted: an eighth at most is good enough
    assert arena.take(size, 0) is not None
    assert (arena.slack_bytes, arena.free_slot_bytes) == (ALIGN, 2 * size)


def test_adjacent_pages_are_found_between_used_ones():
    arena = Arena(PAGE)
    arena.grow(6)
    offsets = [arena.take(PAGE, row) for row in range(6)]
    for page in (1, 3, 4):
        arena.give(offsets[page])
    assert arena.take(2 * PAGE, 7) == 3 * PAGE
    assert arena.take(2 * PAGE, 8) is None
    assert arena.take(PAGE, 8) == PAGE
    assert accounted(arena, 6 * PAGE)


def test_an_empty_page_returns_and_changes_size():
    arena = Arena(PAGE)
    arena.grow(1)
    small = [arena.take(ALIGN, row) for row in range(4)]
    for offset in small[:3]:
        arena.give(offset)
    assert arena.take(2 * ALIGN, 4) is None, "one small slot still holds the page"
    arena.give(small[3])
    assert arena.free_pages == 1
    assert sorted(arena.take(2 * ALIGN, row) for row in (0, 1)) == [0, 2 * ALIGN]


def test_a_draining_run_gives_out_nothing_and_still_returns_its_page():
    arena = Arena(PAGE)
    arena.grow(2)
    held = arena.take(ALIGN, 0)
    arena.drain(arena.run_at(held))
    arena.drain(arena.run_at(held))
    assert arena.draining_pages == 1
    other = arena.take(ALIGN, 1)
    assert other // PAGE != held // PAGE
    arena.give(held)
    assert (arena.free_pages, arena.draining_pages) == (1, 0)
    assert arena.take(PAGE, 2) == held // PAGE * PAGE


def test_a_slot_is_given_back_once():
    arena = Arena(PAGE)
    arena.grow(1)
    first, _ = arena.take(ALIGN, 0), arena.take(ALIGN, 1)
    arena.give(first)
    with pytest.raises(ValueError, match="free already"):
        arena.give(first)
    arena.grow(1)
    with pytest.raises(ValueError, match="no slot"):
        arena.give(PAGE)


def test_a_run_knows_the_rows_that_use_it():
    arena = Arena(PAGE)
    arena.grow(1)
    offsets = [arena.take(ALIGN, row) for row in (7, 8, 9)]
    arena.give(offsets[1])
    assert sorted(arena.run_at(0).used_rows()) == [7, 9]


def test_any_order_of_takes_and_gives_accounts_to_the_byte():
    choose = random.Random(1)
    arena = Arena(PAGE)
    arena.grow(12)
    held: dict[int, int] = {}
    for row in range(5000):
        if choose.random() < 0.5 and held:
            offset = choose.choice(list(held))
            arena.give(offset)
            del held[offset]
        else:
            size = choose.choice((1, 1, 2, 3, 4, 5, 11)) * ALIGN
            offset = arena.take(size, row)
            if offset is not None:
                assert offset % ALIGN == 0
                assert 0 <= offset <= arena.total - size
                assert all(offset + size <= other or other + held[other] <= offset for other in held)
                held[offset] = size
        assert accounted(arena, sum(held.values()))
        assert arena.free_pages == arena.runs.count(None)
    for offset in held:
        arena.give(offset)
    assert arena.free_pages == 12
