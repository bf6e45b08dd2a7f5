"""Whether a store is of use follows from how calls end; what was purged stays so whatever clocks say."""

from hypothesis import given
from hypothesis import strategies as st

from kvhold.tiers.remote.breaker import FIRST, IN_A_ROW, LONGEST, Breaker
from kvhold.tiers.remote.floors import MARGIN, Floors

HOUR = 3600 * 10**9


def served() -> Breaker:
    breaker = Breaker(0.0)
    assert not breaker.serving
    assert breaker.probe_at == 0.0
    breaker.probing()
    breaker.serves(0.0)
    return breaker


@given(st.lists(st.booleans(), max_size=30))
def test_it_serves_until_so_many_bad_calls_in_a_row(calls: list[bool]) -> None:
    breaker, row = served(), 0
    for now, good in enumerate(calls, 1):
        row = row if row >= IN_A_ROW else 0 if good else row + 1
        breaker.ended(float(now), "" if good else "no answer")
        assert breaker.serving == (row < IN_A_ROW)
        assert (breaker.probe_at is None) == breaker.serving


@given(st.integers(1, 12))
def test_pauses_grow_and_begin_anew(failures: int) -> None:
    breaker, now = served(), 100.0
    pauses = []
    for _ in range(failures):
        breaker.stop(now, "down")
        assert breaker.probe_at is not None
        pauses.append(breaker.probe_at - now)
        now = breaker.probe_at
        breaker.probing()
    assert pauses == [min(LONGEST, FIRST * 2**count) for count in range(failures)]
    assert breaker.since == 100.0
    breaker.serves(now)
    assert breaker.since == now
    breaker.stop(now, "again")
    assert breaker.probe_at == now + FIRST


def test_a_store_that_refuses_is_not_said_to_be_down() -> None:
    breaker = served()
    breaker.stop(5.0, "no such bucket", "refusing")
    assert (breaker.state, breaker.since, breaker.why, breaker.serving) == ("refusing", 5.0, "no such bucket", False)


class Clock:
    def __init__(self) -> None:
        self.wall = self.steady = 100 * HOUR

    def floors(self) -> Floors:
        return Floors(lambda: self.wall, lambda: self.steady)


def test_nothing_from_before_a_purge_is_believed_whichever_clock_is_ahead() -> None:
    clock = Clock()
    floors = clock.floors()
    floors.saw(b"n", clock.wall + HOUR)  # its host's clock is an hour ahead
    floors.purged(b"n")
    assert floors.of(b"n") == clock.wall + HOUR + MARGIN
    assert floors.of(b"m") == 0
    floors.purged(b"")
    assert floors.of(b"m") == clock.wall + HOUR + MARGIN


def test_a_clock_that_is_set_back_lowers_no_floor() -> None:
    clock = Clock()
    floors = clock.floors()
    clock.wall -= HOUR
    clock.steady += 5
    floors.purged(b"n")
    assert floors.of(b"n") == 100 * HOUR + 5 + MARGIN


def test_a_host_whose_clock_is_years_ahead_does_not_end_all_belief() -> None:
    clock = Clock()
    floors = clock.floors()
    floors.saw(b"n", clock.wall + 10_000 * HOUR)
    floors.purged(b"n")
    assert floors.of(b"n") == clock.wall + 24 * HOUR + MARGIN


def test_floors_are_bounded_and_none_is_forgotten() -> None:
    clock = Clock()
    floors = clock.floors()
    names = [number.to_bytes(32, "little") for number in range(5000)]
    for each in names:
        floors.purged(each)
    assert min(map(floors.of, names)) == clock.wall + MARGIN
