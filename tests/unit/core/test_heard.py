"""What was heard of keys: so many answers, each for so long."""

from hypothesis import given
from hypothesis import strategies as st

from kvhold.core.heard import ABSENT, NOT_GOT, THERE, UNKNOWN, Heard

LASTS = {THERE: 5, ABSENT: 1, NOT_GOT: 30}
ROOM = 4096

marks = st.integers(0, 40).map(lambda number: number << 58 | number)
deeds = st.lists(st.tuples(marks, st.sampled_from(sorted(LASTS)), st.integers(0, 4)), max_size=60)


@given(deeds)
def test_the_last_word_counts_for_its_time_and_what_was_not_got_before_any_other(
    deeds: list[tuple[int, int, int]],
) -> None:
    """With more room than there are keys nothing is lost: a dictionary would say the same."""
    heard, known, now = Heard(), dict[int, tuple[int, int]](), 1
    for mark, word, wait in deeds:
        now += wait
        heard.note(mark, word, now, LASTS[word], ROOM)
        former, until = known.get(mark, (UNKNOWN, 0))
        if former != NOT_GOT or word == NOT_GOT or now >= until:
            known[mark] = word, now + LASTS[word]
        for one, (said, end) in known.items():
            assert heard.of(one, now) == (said if now < end else UNKNOWN)


@given(st.lists(st.integers(0, (1 << 64) - 1), max_size=200))
def test_it_never_takes_more_room_and_never_says_what_was_not_said(many: list[int]) -> None:
    heard = Heard()
    assert len(heard) == 0
    for now, mark in enumerate(many):
        heard.note(mark, THERE, now, 1000, 16)
        assert heard.of(mark, now) == THERE
        assert len(heard) == 16
    there = [mark for mark in {*many, 1, 2, 3} if heard.of(mark, len(many)) == THERE]
    assert len(there) <= 16
    assert set(there) <= set(many)


def test_another_size_and_a_purge_forget_all() -> None:
    heard = Heard()
    heard.note(1, THERE, 0, 10, 16)
    heard.note(2, THERE, 0, 10, 32)
    assert [heard.of(mark, 1) for mark in (1, 2)] == [UNKNOWN, THERE]
    heard.clear()
    assert heard.of(2, 1) == UNKNOWN
    assert heard.cleared == 1
