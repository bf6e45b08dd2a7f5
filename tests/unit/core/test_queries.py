"""How far can this chain be restored: what an answer says, what it leases, and when that ends."""

from typing import Any

import pytest
from testbed.core.core_world import PAGE, SLOT, Engine, World, chain, offsets_of

from kvhold.core import events as ev
from kvhold.core.events import Gone, Reason, Refuse
from kvhold.core.limits import Limits


def stored(length: int = 6, **world: Any) -> tuple[World, Engine, list[bytes]]:
    world_ = World(**world)
    engine = world_.engine()
    keys = chain(length)
    engine.store(keys)
    return world_, engine, keys


def test_the_answer_is_the_longest_prefix():
    _, engine, keys = stored(6)
    assert engine.query(keys).resident == 6
    assert engine.query(keys[:4]).resident == 4
    answer = engine.query([*keys, *chain(2, "b")])
    assert (answer.resident, answer.reason) == (6, Reason.NOT_STORED)
    assert engine.query(keys).reason is Reason.NONE


def test_a_gap_ends_the_prefix():
    world, engine, keys = stored(6)
    answer = engine.query([*keys[:2], b"unknown.", *keys[2:]])
    assert (answer.resident, len(offsets_of(answer))) == (2, 2)
    assert world.accounts["leased"] == 2 * SLOT


def test_an_unknown_chain_leases_nothing_and_leaves_its_operation_free():
    world, engine, keys = stored(2)
    before = world.core.accounts()
    answer = engine.query(chain(3, "b"), op=7)
    assert answer == ev.Answer(engine.scheduler, 7, 1, 0, b"", Reason.NOT_STORED)
    assert world.core.accounts() == before
    assert engine.query(keys, op=7).resident == 2


def test_an_empty_chain_is_answered():
    _, engine, _ = stored(1)
    assert engine.query([]) == ev.Answer(engine.scheduler, 1000, 1, 0, b"", Reason.NONE)


def test_the_answer_names_each_objects_own_slot():
    world = World()
    engine = world.engine()
    keys, slots = chain(4), engine.take(4)
    world.settle(engine.commit_event(keys, slots))
    assert offsets_of(engine.query(keys)) == [slot.offset for slot in slots]
    assert offsets_of(engine.query(keys, skip=1)) == [slot.offset for slot in slots[1:]]
    assert offsets_of(engine.query([keys[2], keys[0]])) == [slots[2].offset, slots[0].offset]


def test_what_is_skipped_is_counted_but_not_leased():
    world, engine, keys = stored(6)
    answer = engine.query(keys, skip=4, op=1)
    assert (answer.resident, len(offsets_of(answer))) == (6, 2)
    assert world.accounts["leased"] == 2 * SLOT
    engine.release(1)
    assert "leased" not in world.accounts
    answer = engine.query(keys, skip=6)
    assert (answer.resident, answer.offsets, answer.reason) == (6, b"", Reason.NONE)
    assert engine.query(keys[:3], skip=9).resident == 3
    assert "leased" not in world.accounts


def test_many_operations_lease_the_same_objects():
    world, engine, keys = stored(6)
    for op in (1, 2, 3):
        engine.query(keys, op=op)
    assert world.accounts["leased"] == 6 * SLOT
    engine.release(1, 3)
    assert world.accounts["leased"] == 6 * SLOT
    engine.release(2)
    assert "leased" not in world.accounts


def test_a_release_ends_what_it_names_and_no_more():
    world, engine, keys = stored(6)
    other = world.engine("other")
    engine.query(keys, op=1)
    other.query(keys[:2], op=2)
    other.release(1)
    engine.release(2, 99)
    assert world.accounts["leased"] == 6 * SLOT
    engine.release(1, 1)
    assert world.accounts["leased"] == 2 * SLOT


def test_a_leased_object_outlives_any_pressure():
    _, engine, keys = stored(6, pages=4)
    offsets = offsets_of(engine.query(keys, op=1))
    engine.store(chain(100, "b"))
    assert offsets_of(engine.query(keys, op=2)) == offsets
    engine.release(1, 2)
    engine.store(chain(100, "c"))
    assert engine.query(keys).resident == 0


def test_what_was_asked_for_last_is_kept_longest():
    world = World(pages=4)
    engine = world.engine()
    one, two = chain(6, "1"), chain(6, "2")
    engine.store(one)
    engine.store(two)
    engine.query(one, skip=len(one))
    engine.store(chain(6, "3"))
    assert world.resident(one) == one
    assert len(world.resident(two)) < 6


def test_the_budget_cuts_an_answer_and_says_so():
    world, engine, keys = stored(14, pages=4)
    answer = engine.query(keys, op=1)
    assert (answer.resident, answer.reason) == (12, Reason.BUDGET)  # three quarters of 16 slots
    assert len(offsets_of(answer)) == 12
    assert engine.query(keys[12:]) == ev.Answer(engine.scheduler, 1000, 1, 0, b"", Reason.BUDGET)
    assert world.core.counters["keys_budget"] == 2 + 2
    engine.release(1)
    assert engine.query(keys[12:]).resident == 2


def test_the_budget_does_not_count_what_is_skipped():
    _, engine, keys = stored(14, pages=4)
    answer = engine.query(keys, skip=5)
    assert (answer.resident, len(offsets_of(answer)), answer.reason) == (14, 9, Reason.NONE)


def test_what_is_leased_already_costs_no_budget():
    world, engine, keys = stored(14, pages=4)
    assert engine.query(keys[:12]).reason is Reason.NONE
    again = engine.query(keys)
    assert (again.resident, again.reason) == (12, Reason.BUDGET)
    assert engine.query(keys[6:12], skip=1).resident == 6
    assert world.accounts["leased"] == 12 * SLOT


def test_the_budget_includes_what_was_purged_under_its_reader():
    world, engine, keys = stored(12, pages=4)
    engine.query(keys)
    world.settle(ev.Purge())
    engine.store(keys[:2])
    assert engine.query(keys[:2]).reason is Reason.BUDGET


def test_an_unknown_space_is_detached():
    _, engine, keys = stored(2)
    assert engine.query(keys, space=5).reason is Reason.DETACHED


@pytest.mark.parametrize("how", ["torn", "long"])
def test_what_cannot_be_meant_is_refused(how: str, monkeypatch: pytest.MonkeyPatch):
    world, engine, keys = stored(3)
    engine.query(keys, op=1)
    before = world.core.accounts()
    monkeypatch.setattr(ev, "MAX_QUERY_KEYS", 3)
    event = {
        "torn": engine.query_event([*keys[:2], b"half"]),
        "long": engine.query_event([*keys, b"one more"]),
    }[how]
    (refusal,) = world.settle(event)
    assert isinstance(refusal, Refuse)
    assert world.core.accounts() == before
    engine.release(1)
    assert "leased" not in world.accounts


def test_a_key_named_twice_is_leased_twice_and_released_twice():
    world, engine, keys = stored(3)
    twice = [keys[0], keys[1], keys[1], keys[0], keys[2]]
    assert engine.query(twice, op=1).resident == 5
    world.settle(ev.Purge())
    assert world.accounts["doomed"] == 3 * SLOT
    engine.release(1)
    assert "doomed" not in world.accounts


class TestLong:
    """Chains longer than one slice."""

    @pytest.fixture(autouse=True)
    def _slices(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(ev, "MAX_BATCH", 4)

    def test_one_event_does_one_slice(self):
        world, engine, keys = stored(10)
        assert world.handle(engine.query_event(keys)) == []
        assert world.accounts["leased"] == 4 * SLOT
        assert world.step() == []
        (answer,) = world.step()
        assert answer.resident == 10
        assert world.core.has_work, "the chain has yet to be marked as used"

    @pytest.mark.parametrize("skip", [0, 1, 4, 5, 9, 10, 11])
    @pytest.mark.parametrize("length", [3, 4, 5, 8, 10])
    def test_slices_make_no_difference(self, skip: int, length: int, monkeypatch: pytest.MonkeyPatch):
        _, engine, keys = stored(10)
        asked = [*keys[:length], b"unknown."]
        sliced = engine.query(asked, skip=skip, op=1)
        assert sliced.resident == length
        assert len(offsets_of(sliced)) == max(0, length - skip)
        engine.release(1)
        monkeypatch.setattr(ev, "MAX_BATCH", 512)
        assert engine.query(asked, skip=skip, op=1) == sliced

    def test_the_budget_cuts_in_a_later_slice(self):
        world, engine, keys = stored(14, pages=4)
        answer = engine.query(keys, skip=1)
        assert (answer.resident, answer.reason) == (13, Reason.BUDGET)
        assert world.accounts["leased"] == 12 * SLOT

    def test_work_takes_turns(self):
        world, engine, keys = stored(12)
        world.handle(engine.query_event(keys, op=1))
        world.handle(engine.query_event(keys[:4], op=2))
        world.handle(engine.query_event(keys[:5], op=3))
        assert [effect.op for effect in world.told if isinstance(effect, ev.Answer)] == [2]
        assert [effect.op for effect in world.run() if isinstance(effect, ev.Answer)] == [3, 1]

    def test_released_before_its_answer_it_is_never_answered_and_holds_nothing(self):
        world, engine, keys = stored(10)
        world.handle(engine.query_event(keys, op=1))
        assert engine.release(1) == []
        assert "leased" not in world.accounts

    def test_an_operation_released_before_its_answer_can_be_used_again(self):
        world, engine, keys = stored(10)
        world.handle(engine.query_event(keys, op=1))
        world.handle(ev.Release(engine.scheduler, ((1, 1),)))
        world.handle(engine.query_event(keys[:9], op=1))
        answers = [effect for effect in world.run() if isinstance(effect, ev.Answer)]
        assert [answer.resident for answer in answers] == [9]
        assert world.accounts["leased"] == 9 * SLOT
        engine.release(1)
        assert "leased" not in world.accounts

    @pytest.mark.parametrize("how", list(Gone))
    def test_its_owner_lost_before_the_answer_it_goes_on_for_nobody(self, how: Gone):
        world, engine, keys = stored(10)
        world.handle(engine.query_event(keys))
        world.handle(ev.Left(engine.scheduler, how))
        told = world.run()
        assert not any(isinstance(effect, ev.Answer) for effect in told)
        assert world.accounts["leased"] == 4 * SLOT
        engine.leave()
        assert "leased" not in world.accounts

    def test_what_goes_between_slices_is_not_found(self):
        world, engine, keys = stored(10)
        world.handle(engine.query_event(keys))
        catalogue = world.core.catalogue
        (index,) = catalogue.indexes.values()
        catalogue.remove(index.get(keys[6]))
        (answer,) = world.run()
        assert (answer.resident, answer.reason) == (6, Reason.NOT_STORED)
        assert world.accounts["leased"] == 6 * SLOT

    def test_a_purge_meets_a_query_under_way(self):
        world, engine, keys = stored(10)
        world.handle(engine.query_event(keys, op=1))
        world.handle(ev.Purge())
        answered = len(offsets_of(next(effect for effect in world.run() if isinstance(effect, ev.Answer))))
        assert world.core.objects == 0
        assert world.accounts["doomed"] == answered * SLOT
        engine.release(1)
        assert "doomed" not in world.accounts

    def test_the_end_of_a_long_chain_still_goes_first(self):
        world = World(pages=16)
        engine = world.engine()
        keys = chain(40)
        engine.store(keys)
        engine.query(keys, skip=len(keys))
        kept = len(keys)
        for i in range(8):
            engine.store(chain(6, f"n{i}"))
            resident = world.resident(keys)
            assert resident == keys[: len(resident)]
            assert len(resident) <= kept
            kept = len(resident)
        assert kept < len(keys)

    def test_a_long_release_frees_slice_by_slice(self):
        world, engine, keys = stored(10)
        engine.query(keys, op=1)
        world.handle(ev.Release(engine.scheduler, ((1, 1),)))
        assert world.accounts["leased"] == 6 * SLOT
        world.step()
        assert world.accounts["leased"] == 2 * SLOT
        world.run()
        assert "leased" not in world.accounts


def test_a_slot_that_waits_for_a_release_is_granted_when_it_comes():
    world = World(pages=2)
    engine = world.engine()
    engine.store(chain(6))
    engine.query(chain(6), op=1)
    engine.take(len(engine.slots[0]))
    other = world.engine("other", group=1, size=PAGE)
    assert other.slots == {}
    engine.release(1)
    assert len(other.slots[0]) == 1


def test_questions_beyond_what_one_engine_may_have_open_are_answered_with_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ev, "MAX_BATCH", 1)
    world, engine, keys = stored(6, limits=Limits(queries=2))
    asked = [ev.Query(engine.scheduler, op, 1, 0, 0, b"".join(keys)) for op in range(3)]
    told = [effect for event in asked for effect in world.handle(event)]
    assert [(a.op, a.resident, a.reason) for a in told if isinstance(a, ev.Answer)] == [(2, 0, Reason.BUDGET)]
    world.settle(ev.Release(engine.scheduler, ((0, 1), (1, 1))))
    assert engine.query(keys).resident == 6
    assert world.core.attachments[1].answering == 0


def test_leases_are_counted():
    world, engine, keys = stored(2, limits=Limits(operations=1))
    assert engine.query(keys, op=1).resident == 2
    assert engine.query(keys, op=2).reason is Reason.BUDGET
    world.settle(ev.Release(engine.scheduler, ((1, 1),)))
    assert engine.query(keys, op=2).resident == 2


def test_a_new_revision_about_an_unknown_space_releases_what_the_former_one_leased():
    world, engine, keys = stored(2)
    engine.query(keys, op=1)
    assert engine.query(keys, space=9, op=1, revision=2).reason is Reason.DETACHED
    assert "leased" not in world.accounts
