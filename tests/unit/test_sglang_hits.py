"""For which lengths of a prefix a pool can be resumed from: the words of SGLang's policies, taken literally."""

from hypothesis import given
from hypothesis import strategies as st

from kvhold.engines.sglang.hits import ends_of


@given(st.lists(st.booleans(), max_size=12), st.integers(1, 13))
def test_a_window_needs_its_last_pages_alone(there: list[bool], window: int) -> None:
    wanted = [end for end in range(1, len(there) + 1) if all(there[max(0, end - window) : end])]
    assert ends_of(bytes(there), window) == wanted


@given(st.lists(st.booleans(), max_size=12))
def test_all_pages_are_needed_without_a_window(there: list[bool]) -> None:
    assert ends_of(bytes(there), None) == [end for end in range(1, len(there) + 1) if all(there[:end])]
