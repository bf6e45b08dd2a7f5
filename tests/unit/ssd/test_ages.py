"""How old a life is, whatever the clock said when it was begun."""

import pytest

from kvhold.manager.ssd import ages_of


@pytest.mark.parametrize(
    ("created", "ages"),
    [
        ([], []),
        ([10, 20, 90], [90, 80, 10]),
        ([10, 500, 90], [90, 10, 10]),  # the clock was ahead for a while
        ([10, 500, 600], [90, 0, 0]),
        ([40, 0, 50, 1], [60, 60, 50, 50]),  # and was not set yet
        ([500, 0], [100, 100]),
        ([500], [0]),
    ],
)
def test_a_clock_that_was_wrong_makes_nothing_older_than_what_came_before(created: list[int], ages: list[int]) -> None:
    assert ages_of(created, 100) == ages
