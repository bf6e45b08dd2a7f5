"""A move that is not in the table raises in tests, and in production nothing comes of it."""

from itertools import product

import pytest
from testbed.core.core_world import NAMESPACE, SLOT, World, chain

from kvhold.core import events as ev
from kvhold.core.events import Reason
from kvhold.core.rows import NAMES, STATES, ForbiddenMove, Rows, State

FORBIDDEN = [(former, state) for former, state in product(STATES, STATES) if state not in STATES[former].becomes]


@pytest.fixture
def production(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of tests a move that is not allowed is refused and counted."""
    monkeypatch.setattr(Rows, "strict", False)


def rows_in(state: int) -> tuple[Rows, int]:
    rows = Rows()
    row = rows.new()
    rows.size[row] = SLOT
    rows.state[row] = state
    if STATES[state].slot:
        rows.bytes[state] = SLOT
    return rows, row


def describe(rows: Rows) -> list[object]:
    return [bytes(rows.state), list(rows.bytes), list(rows.spare), list(rows.leases), list(rows.key)]


class TestTheTable:
    def test_every_state_can_be_reached_and_left(self):
        reached = {state for facts in STATES.values() for state in facts.becomes}
        assert reached == STATES.keys()
        assert all(facts.becomes for facts in STATES.values())

    def test_only_what_has_a_slot_and_is_found_may_be_evicted(self):
        assert all(facts.slot and facts.found for facts in STATES.values() if facts.evicted)

    @pytest.mark.parametrize(
        ("former", "state"), [(former, state) for former, facts in STATES.items() for state in facts.becomes]
    )
    def test_a_move_takes_the_bytes_along(self, former: int, state: int):
        rows, row = rows_in(former)
        assert rows.move(row, state)
        assert rows.state[row] == state
        assert rows.bytes == [SLOT if STATES[one].slot and one == state else 0 for one in sorted(STATES)]

    @pytest.mark.parametrize(("former", "state"), FORBIDDEN)
    def test_any_other_move_raises_in_tests(self, former: int, state: int):
        rows, row = rows_in(former)
        before = describe(rows)
        with pytest.raises(ForbiddenMove, match=f"row {row} is {NAMES[former]} and was to become {NAMES[state]}"):
            rows.move(row, state)
        assert describe(rows) == before

    @pytest.mark.usefixtures("production")
    @pytest.mark.parametrize(("former", "state"), FORBIDDEN)
    def test_any_other_move_is_refused_and_counted_in_production(self, former: int, state: int):
        rows, row = rows_in(former)
        before = describe(rows)
        assert not rows.move(row, state)
        assert describe(rows) == before
        assert rows.counters["forbidden_moves"] == 1


@pytest.mark.usefixtures("production")
class TestWhatARefusalMeans:
    """No bytes are served wrong, and nothing is freed under a reader."""

    def test_a_slot_given_back_twice_is_not_granted_to_two(self):
        world = World(pages=1)
        catalogue = world.core.catalogue
        world.engine(slots=0)
        index = catalogue.find(NAMESPACE, 0)
        row = world.core.common.eviction.take(index)
        catalogue.free(row)
        free = world.core.accounts()
        catalogue.free(row)
        assert world.core.counters["forbidden_moves"] == 1
        assert world.core.accounts() == free
        rows = [world.core.common.eviction.take(index) for _ in range(3)]
        assert len(set(rows)) == 3
        assert len({catalogue.offset[row] for row in rows}) == 3

    def test_what_is_read_is_not_freed(self):
        world = World()
        engine = world.engine()
        engine.store(keys := chain(2))
        answer = engine.query(keys, op=1)
        catalogue = world.core.catalogue
        for key in keys:
            catalogue.free(catalogue.find(NAMESPACE, 0).get(key))
        assert world.core.counters["forbidden_moves"] == 2
        assert world.accounts["leased"] == 2 * SLOT
        assert engine.query(keys, op=2).offsets == answer.offsets

    def test_what_has_no_slot_is_a_miss(self):
        """As if the core believed that nothing is in a log alone."""
        world = World()
        world.open_log(keys := chain(3))
        engine = world.engine()
        engine.store(keys[:1])
        world.core.catalogue.cold = 0
        (answer,) = world.handle_unaudited(engine.query_event(keys, op=1))
        assert isinstance(answer, ev.Answer)
        assert (answer.resident, answer.reason, len(answer.offsets)) == (1, Reason.NOT_STORED, 8)
        assert world.core.counters["forbidden_moves"] == 1

    def test_what_a_lost_engine_may_still_write_is_not_found(self):
        world = World()
        engine = world.engine()
        slots = engine.take(2)
        catalogue = world.core.catalogue
        catalogue.move(slots[0].row, State.ORPHANED)
        keys = chain(2)
        world.handle_unaudited(engine.commit_event(keys, slots))
        assert world.resident(keys) == keys[1:]
        assert world.core.counters["forbidden_moves"] == 1
        assert catalogue.state[slots[0].row] == State.ORPHANED
