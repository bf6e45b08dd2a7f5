"""One operation's life: revisions, exact demands, budgets and quotas, expiry, and what is told of it afterwards."""

from typing import Any

import pytest
from testbed.core.core_world import NAMESPACE, PAGE, SLOT, Engine, World, chain, offsets_of

from kvhold.core import events as ev
from kvhold.core.events import Answer, Gone, Reason, Refuse
from kvhold.core.limits import SECOND, Limits, Quota

OTHER = b"o" * 32


def stored(length: int = 6, **world: Any) -> tuple[World, Engine, list[bytes]]:
    world_ = World(**world)
    engine = world_.engine()
    keys = chain(length)
    engine.store(keys)
    return world_, engine, keys


def answers(effects: list[ev.Effect]) -> list[Answer]:
    return [effect for effect in effects if isinstance(effect, Answer)]


class TestRevisions:
    @pytest.mark.parametrize("revision", [2, 1])
    def test_the_same_or_an_older_one_is_ignored_and_counted(self, revision: int):
        world, engine, keys = stored()
        engine.query(keys[:4], op=1, revision=2)
        assert world.settle(engine.query_event(keys, op=1, revision=revision)) == []
        assert world.core.counters["stale"] == 1
        assert world.accounts["leased"] == 4 * SLOT

    def test_changed_inputs_release_what_the_former_ones_leased(self):
        world, engine, keys = stored()
        engine.query(keys, op=1)
        assert engine.query(keys[:2], op=1, revision=2).resident == 2
        assert world.accounts["leased"] == 2 * SLOT

    def test_the_answer_of_a_former_one_never_comes(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(ev, "MAX_BATCH", 2)
        world, engine, keys = stored()
        world.handle(engine.query_event(keys, op=1))
        told = world.settle(engine.query_event(keys[:3], op=1, revision=2))
        assert [(answer.revision, answer.resident) for answer in answers(told)] == [(2, 3)]
        assert world.accounts["leased"] == 3 * SLOT

    def test_what_is_being_restored_cannot_be_asked_anew(self):
        world, engine, keys = stored()
        engine.query(keys, op=1)
        world.settle(ev.Started(engine.scheduler, (1,)))
        (refusal,) = world.settle(engine.query_event(keys, op=1, revision=2))
        assert isinstance(refusal, Refuse)
        assert world.accounts["leased"] == 6 * SLOT

    def test_a_release_of_a_former_one_is_ignored(self):
        world, engine, keys = stored()
        engine.query(keys, op=1)
        engine.query(keys, op=1, revision=2)
        engine.release(1, revision=1)
        assert world.accounts["leased"] == 6 * SLOT
        assert world.core.counters["stale"] == 1

    def test_a_new_one_takes_the_place_of_the_former_within_every_limit(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(ev, "MAX_BATCH", 2)
        world, engine, keys = stored(6, limits=Limits(queries=1, operations=1))
        world.handle(engine.query_event(keys, op=1))
        told = world.settle(engine.query_event(keys, op=1, revision=2))
        assert [(answer.revision, answer.resident) for answer in answers(told)] == [(2, 6)]


class TestExact:
    def test_all_are_leased_in_the_order_they_are_named(self):
        _, engine, keys = stored(4)
        engine.open(1, group=1)
        engine.commit(chain(2), 1)
        one, two = offsets_of(engine.query(keys)), offsets_of(engine.query(chain(2), 1))
        (answer,) = engine.prepare((1, chain(2)), (0, [keys[3], keys[0]]), op=1)
        assert isinstance(answer, Answer)
        assert (answer.resident, answer.reason) == (4, Reason.NONE)
        assert offsets_of(answer) == [*two, one[3], one[0]]

    def test_one_that_is_missing_leaves_nothing_leased(self):
        world, engine, keys = stored(4)
        (answer,) = engine.prepare((0, [*keys, b"unknown."]), op=1)
        assert answer == Answer(engine.scheduler, 1, 1, 0, b"", Reason.NOT_STORED)
        assert "leased" not in world.accounts

    def test_over_budget_is_an_answer(self):
        world, engine, keys = stored(14, pages=4)  # at most 12 slots
        engine.query(keys[:8], op=1)
        (answer,) = engine.prepare((0, keys[2:12]), op=2)
        assert answer.resident == 10, "what is leased already costs nothing"
        engine.release(2)
        (answer,) = engine.prepare((0, keys[9:14]), op=3)
        assert (answer.resident, answer.reason) == (0, Reason.BUDGET)
        assert world.accounts["leased"] == 8 * SLOT

    def test_too_large_is_said_at_once_whatever_else_goes_on(self):
        world, engine, keys = stored(14, pages=4)
        event = ev.Prepare(engine.scheduler, 1, 1, ((0, b"".join(keys[:13])),))
        (answer,) = world.handle(event)
        assert answer == Answer(engine.scheduler, 1, 1, 0, b"", Reason.TOO_LARGE)
        assert "leased" not in world.accounts

    def test_two_that_want_each_others_bytes_both_get_an_answer(self):
        """Either holds half of what may be held; neither waits for the other."""
        world, one, keys = stored(12, pages=4)
        two = world.engine("two")
        one.query(keys[:6], op=1)
        two.query(keys[6:], op=2)
        # Both want all the rest: it is leased, so that it costs nothing; and more, which cannot be had.
        (first,) = one.prepare((0, keys[6:]), op=3)
        (second,) = two.prepare((0, keys[:6]), op=4)
        assert [first.resident, second.resident] == [6, 6]
        one.release(1, 3)
        two.release(2, 4)
        assert "leased" not in world.accounts

    def test_two_that_compete_for_the_last_bytes_are_answered_one_way_each(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(ev, "MAX_BATCH", 2)
        world, one, keys = stored(14, pages=4)
        two = world.engine("two")
        for engine, named in ((one, keys[:8]), (two, keys[6:])):
            world.handle(ev.Prepare(engine.scheduler, 1, 1, ((0, b"".join(named)),)))
        told = sorted((answer.resident, answer.reason) for answer in answers(world.run()))
        assert len(told) == 2
        assert not world.core.has_work
        assert world.accounts.get("leased", 0) == sum(resident for resident, _ in told) * SLOT


class TestUsed:
    """What the engine has itself of a chain is not asked for, and must not age meanwhile."""

    def pressed(self, world: World, engine: Engine, keys: list[bytes]) -> list[bytes]:
        """Which of ``keys`` outlive that room is made for one object."""
        before = world.core.catalogue.evicted
        while world.core.catalogue.evicted == before:
            engine.commit([f"p{world.now:07}".encode()])
        return world.resident(keys)

    def test_it_counts_as_used_and_nothing_of_it_is_leased(self):
        world, engine, keys = stored(6, pages=4)
        engine.store(chain(3, "b"))
        (answer,) = engine.prepare((0, chain(1, "b")), op=1, used=[(0, keys)])
        assert isinstance(answer, Answer)
        assert (answer.resident, len(offsets_of(answer)), answer.reason) == (1, 1, Reason.NONE)
        assert world.accounts["leased"] == SLOT
        assert self.pressed(world, engine, keys) == keys
        assert world.resident(chain(3, "b")) == chain(2, "b")

    @pytest.mark.parametrize("batch", [2, 256])
    def test_its_end_is_older_than_its_start(self, batch: int, monkeypatch: pytest.MonkeyPatch):
        world, engine, keys = stored(6)
        engine.query(keys[3:])
        monkeypatch.setattr(ev, "MAX_BATCH", batch)
        engine.prepare(op=1, used=[(0, keys)])
        index = world.core.catalogue.find(NAMESPACE, 0)
        assert index is not None
        catalogue = world.core.catalogue
        assert [catalogue.key[row] for row in catalogue.recency.rows_of(index.recency)] == keys[::-1]

    @pytest.mark.parametrize("parts", [[b"unknown."], []], ids=["missing", "empty"])
    def test_it_counts_whatever_becomes_of_the_rest(self, parts: list[bytes]):
        world, engine, keys = stored(6, pages=4)
        engine.store(chain(3, "b"))
        named = [(0, parts)] if parts else []
        (answer,) = engine.prepare(*named, op=1, used=[(0, [*keys, b"not here"])])
        reason = Reason.NOT_STORED if parts else Reason.NONE
        assert answer == Answer(engine.scheduler, 1, 1, 0, b"", reason)
        assert self.pressed(world, engine, keys) == keys

    def test_what_of_it_is_in_a_log_alone_is_not_read(self):
        world = World()
        world.open_log(chain(3))
        engine = world.engine(slots=2)
        engine.prepare(op=1, used=[(0, chain(3))])
        assert not world.disk.flying
        assert world.core.catalogue.cold == 3

    def test_it_is_a_second_touch_of_what_is_to_be_written(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(ev, "MAX_BATCH", 2)
        world = World(limits=Limits(second_touch=True))
        engine = world.engine()
        keys = [f"{i}{i}{i}{i}{i}{i}{i}{i}".encode() for i in range(5)]  # each of a mark of its own
        engine.store(keys)
        world.open_log()
        engine.prepare(op=1, used=[(0, keys)])
        world.finish()
        assert not [effect for effect in world.told if isinstance(effect, ev.Write)]
        engine.prepare(op=2, used=[(0, [keys[0], b"not here", *keys[1:]])])
        world.finish()
        written = [one for effect in world.told if isinstance(effect, ev.Write) for one in effect.objects]
        told = {one.key: (one.parent, one.depth) for one in written}
        assert told == {
            keys[0]: (b"", 0),
            keys[1]: (b"not here", 2),
            **{keys[at]: (keys[at - 1], at + 1) for at in range(2, 5)},
        }

    def test_it_is_marked_although_the_answer_waits_for_a_read(self):
        world = World()
        world.open_log(chain(1, "cold"))
        engine = world.engine(slots=2)
        engine.store(chain(4))
        clock = world.core.catalogue.recency.clock.count
        told = engine.prepare((0, chain(1, "cold")), op=1, used=[(0, chain(4))])
        assert ev.Waiting in map(type, told)
        index = world.core.catalogue.find(NAMESPACE, 0)
        assert index is not None
        assert all(world.core.catalogue.stamp[index.get(key)] > clock for key in chain(4))

    @pytest.mark.parametrize("wrong", ["torn", "many", "unknown"])
    def test_it_has_the_limits_of_what_is_asked_for(self, wrong: str, monkeypatch: pytest.MonkeyPatch):
        world, engine, keys = stored(4)
        monkeypatch.setattr(ev, "MAX_QUERY_KEYS", 6)
        used = {"torn": (0, [*keys, b"half"]), "many": (0, keys), "unknown": (7, keys)}[wrong]
        (told,) = engine.prepare((0, keys[:3]), op=1, used=[used])
        if wrong == "unknown":
            assert told == Answer(engine.scheduler, 1, 1, 0, b"", Reason.DETACHED)
        else:
            assert isinstance(told, Refuse)
        assert "leased" not in world.accounts


class TestBudgets:
    def test_one_engine_is_kept_to_its_share(self):
        world, one, keys = stored(14, pages=4, limits=Limits(engine_share=0.25))
        two = world.engine("two")
        assert one.query(keys, op=1).resident == 4
        assert two.query(keys[4:], op=1).resident == 4
        assert one.query(keys[4:10]).resident == 4, "what another holds costs nothing"

    def test_a_budget_below_what_is_in_use_takes_nothing_away(self):
        world, engine, keys = stored(14, pages=4)
        engine.query(keys[:10], op=1)
        world.settle(ev.Configure(Limits(prepared_share=0.25)))
        assert world.accounts["leased"] == 10 * SLOT
        assert engine.query(keys[10:], op=2).reason is Reason.BUDGET
        engine.release(1)
        assert engine.query(keys, op=3).resident == 4
        world.settle(ev.Configure(Limits()))
        assert engine.query(keys, op=4).resident == 12

    def test_a_lower_share_of_credits_is_asked_back_and_a_higher_one_granted(self):
        world = World(pages=4)
        engine = world.engine()
        assert len(engine.slots[0]) == 2
        told = world.settle(ev.Configure(Limits(credit_share=0.125)))
        assert told == [ev.Recall(engine.scheduler, 0, 1)]
        (grant,) = world.settle(ev.Configure(Limits(credit_share=0.5)))
        assert isinstance(grant, ev.Grant)
        assert len(engine.slots[0]) == 4

    def test_more_objects_than_may_be_known_are_not(self):
        world, engine, keys = stored(3, limits=Limits(max_objects=4))
        engine.store(chain(2, "b"))
        assert world.resident(keys) == keys[:2], "the end of the chain that was used longest ago went"
        assert world.resident(chain(2, "b")) == chain(2, "b")
        world.settle(ev.Configure(Limits(max_objects=2)))
        assert world.resident(chain(2, "b")) == chain(2, "b")
        assert world.core.objects == 2

    def test_held_objects_are_not_given_up_for_new_ones(self):
        world, engine, keys = stored(4, limits=Limits(max_objects=4))
        engine.query(keys, op=1)
        engine.commit(chain(1, "b"))
        assert world.resident(keys) == keys
        assert world.core.counters["over_max_objects"] == 1


class TestQuotas:
    def world(self, **limits: Any) -> tuple[World, Engine]:
        world = World(pages=4, limits=Limits(quotas=limits.pop("quotas"), **limits))
        engine = world.engine(slots=1)
        engine.open(1, namespace=OTHER, slots=1)
        return world, engine

    def test_a_namespace_keeps_within_its_limit(self):
        world, engine = self.world(quotas={NAMESPACE: Quota(limit=5 * SLOT)})
        engine.store(chain(8))
        assert world.core.catalogue.namespaces[NAMESPACE].used <= 5 * SLOT
        assert len(world.resident(chain(8))) == 4
        assert world.accounts["free_pages"] > 0

    def test_a_namespace_within_its_floor_loses_nothing_to_others(self):
        world, engine = self.world(quotas={NAMESPACE: Quota(floor=5 * SLOT)})
        engine.store(chain(4))
        engine.store(chain(40, "b"), 1)
        assert world.resident(chain(4)) == chain(4)
        world.settle(ev.Configure(Limits()))
        engine.store(chain(40, "c"), 1)
        assert world.resident(chain(4)) == []

    def test_every_namespace_over_a_lower_limit_gives_up_what_is_not_held(self):
        world, engine = self.world(quotas={})
        engine.store(chain(4))
        engine.store(chain(4, "b"), 1)
        engine.query(chain(4), op=1)
        world.settle(ev.Configure(Limits(quotas=dict.fromkeys((NAMESPACE, OTHER), Quota(limit=2 * SLOT)))))
        assert world.resident(chain(4)) == chain(4), "held"
        assert len(world.resident(chain(4, "b"), namespace=OTHER)) == 1
        engine.release(1)

    def test_a_higher_limit_is_used_at_once(self):
        world, engine = self.world(quotas={NAMESPACE: Quota(limit=2 * SLOT)})
        engine.commit(chain(1))
        engine.query(chain(1), op=1)
        world.settle(ev.Configure(Limits(quotas={NAMESPACE: Quota(limit=SLOT)})))
        engine.back(engine.take(1))
        assert engine.slots[0] == []
        world.settle(ev.Configure(Limits()))
        assert len(engine.slots[0]) == 1


class TestTime:
    def test_an_answer_that_is_not_used_in_time_expires(self):
        world, engine, keys = stored(limits=Limits(lease_ns=SECOND))
        engine.query(keys, op=1, revision=3)
        due = world.core.next_deadline
        assert due is not None
        assert world.tick(due - world.now - 2) == []
        assert world.tick() == [ev.Expired(engine.scheduler, 1, 3)]
        assert "leased" not in world.accounts
        assert world.core.next_deadline is None

    def test_a_restore_that_has_begun_never_expires_but_is_reported_once(self):
        world, engine, keys = stored(limits=Limits(lease_ns=SECOND, stall_ns=2 * SECOND))
        engine.query(keys, op=1)
        world.settle(ev.Started(engine.scheduler, (1,)))
        assert world.tick(2 * SECOND) == [ev.Stalled(engine.scheduler, 1, 2)]
        assert world.tick(100 * SECOND) == []
        assert world.accounts["leased"] == 6 * SLOT
        engine.release(1)
        assert "leased" not in world.accounts

    def test_a_restore_that_begins_after_the_expiry_is_counted_and_ignored(self):
        world, engine, keys = stored()
        engine.query(keys, op=1)
        world.tick(1000 * SECOND)
        world.settle(ev.Started(engine.scheduler, (1,)))
        assert world.core.counters["stale"] == 1
        assert world.core.next_deadline is None

    def test_what_is_said_and_not_taken_in_yet_keeps_a_lease(self):
        """It may be that a restore has begun. Others' leases end all the same."""
        world, engine, keys = stored(limits=Limits(lease_ns=SECOND, hear_ns=SECOND))
        other = world.engine("other")
        engine.query(keys[:3], op=1)
        other.query(keys[3:], op=2)
        world.now += 2 * SECOND
        behind = frozenset([engine.scheduler])
        assert world.settle(ev.Tick(behind)) == [ev.Expired(other.scheduler, 2, 1)]
        for _ in range(3):
            due = world.core.next_deadline
            assert due is not None
            assert due > world.now
            world.now = due
            assert world.settle(ev.Tick(behind)) == []
        assert world.accounts["leased"] == 3 * SLOT
        world.settle(ev.Started(engine.scheduler, (1,)))
        assert world.tick(30 * SECOND) == []
        assert world.accounts["leased"] == 3 * SLOT

    def test_what_was_not_a_restore_after_all_expires(self):
        world, engine, keys = stored(limits=Limits(lease_ns=SECOND, hear_ns=SECOND))
        engine.query(keys, op=1)
        world.now += 2 * SECOND
        world.settle(ev.Tick(frozenset([engine.scheduler])))
        assert world.tick(SECOND) == [ev.Expired(engine.scheduler, 1, 1)]
        assert "leased" not in world.accounts
        assert world.core.next_deadline is None

    def test_what_a_lost_engine_leased_does_not_expire(self):
        world, engine, keys = stored()
        engine.query(keys, op=1)
        world.settle(ev.Left(engine.workers[0], Gone.UNKNOWN))
        assert world.tick(1000 * SECOND) == []
        assert world.accounts["leased"] == 6 * SLOT

    def test_a_clock_that_goes_back_is_counted_and_held(self):
        world, engine, keys = stored(limits=Limits(lease_ns=SECOND))
        engine.query(keys, op=1)
        due = world.core.next_deadline
        assert world.core.handle(ev.Tick(), 0) == []
        assert world.core.counters["clock_went_back"] == 1
        assert world.core.next_deadline == due


def test_a_failed_restore_is_not_found_again_and_its_key_can_be_stored_anew():
    world, engine, keys = stored(4)
    other = world.engine("other")
    before = offsets_of(engine.query(keys[:2], op=1))
    other.query(keys, op=1)
    world.settle(ev.Started(engine.scheduler, (1,)))
    world.settle(ev.RestoreFailed(engine.scheduler, 1))
    assert world.resident(keys) == keys[2:]
    assert world.accounts["doomed"] == 2 * SLOT, "whoever reads it reads on"
    engine.store(keys[:2])
    again = engine.query(keys, op=2)
    assert again.resident == 4
    assert set(before).isdisjoint(offsets_of(again))


def test_a_failed_restore_is_not_found_again_even_if_it_is_released_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ev, "MAX_BATCH", 2)
    world, engine, keys = stored(7)
    engine.query(keys, op=1)
    world.handle(ev.RestoreFailed(engine.scheduler, 1))
    engine.release(1)
    assert world.resident(keys) == []
    assert "doomed" not in world.accounts


@pytest.mark.parametrize("torn", [b"half", b""])
def test_a_lookup_of_torn_keys_is_refused(torn: bytes):
    world, engine, keys = stored(4)
    told = world.settle(ev.Lookup(engine.scheduler, 5, ((0, b"".join(keys) + torn), (3, b"any"))))
    assert [type(effect) for effect in told] == [Refuse if torn else ev.Residency]


def test_a_class_shift_is_complete_once_leases_end():
    """A fills everything, then only B comes: B gets at least 90% once A's leases end."""
    world, engine, keys = stored(60, pages=16, limits=Limits(prepared_share=1.0, engine_share=1.0))
    kept = world.resident(keys)
    engine.query(kept, op=1)
    world.settle(ev.Close(engine.scheduler, 0))
    engine.back(engine.take(len(engine.slots[0])))
    engine.open(1, size=PAGE, group=1, slots=1)
    assert world.accounts["leased"] == len(kept) * SLOT > 0.5 * world.core.arena.total
    engine.release(1)
    for name in ("b", "c"):
        engine.store(chain(16, name), 1)
    large = sum(len(world.resident(chain(16, name), group=1)) for name in ("b", "c")) + len(engine.slots[1])
    assert large * PAGE >= 0.9 * world.core.arena.total


class TestManyKeys:
    def test_the_keys_of_one_engines_questions_are_bounded_together(self):
        world, engine, keys = stored(12, limits=Limits(keys=20))
        assert engine.query(keys, op=1).resident == 12
        (answer,) = engine.prepare((0, keys[:9]), op=2)
        assert (answer.resident, answer.reason) == (0, Reason.BUDGET)
        assert engine.query(keys[:8], op=3).resident == 8
        assert world.engine("other").query(keys, op=4).resident == 12
        engine.release(1)
        assert engine.query(keys, op=5).resident == 12
        engine.release(3, 5)
        assert engine.query(keys[:4], op=6).resident == 4
        assert engine.query(keys, op=6, revision=2).resident == 12
        assert engine.query(keys[:9], op=7).reason is Reason.BUDGET, "a revision's keys take the place of the former's"

    def test_a_question_that_ends_while_it_replaces_another_names_no_keys_any_more(
        self, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(ev, "MAX_BATCH", 2)
        world, engine, keys = stored(6)
        engine.query(keys, op=1)
        named = ((0, b"".join(keys)),)
        world.handle(ev.Prepare(engine.scheduler, 1, 2, named))
        engine.release(1, revision=2)
        assert world.core.attachments[1].asked == 0
        assert "leased" not in world.accounts


class TestExplain:
    def explain(self, world: World, session: int = 1, **what: Any) -> str:
        (told,) = [effect for effect in world.settle(ev.Explain(session, **what)) if isinstance(effect, ev.Explained)]
        return "\n".join(told.lines)

    def test_who_holds_a_key(self):
        world, engine, keys = stored(2)
        engine.query(keys, op=7)
        text = self.explain(world, key=keys[1])
        assert "now: leased" in text
        assert f"held by operation {engine.scheduler}/7 of instance engine (answered)" in text
        assert "stored" in text

    def test_why_a_key_was_missed(self):
        world, engine, keys = stored(2)
        engine.query([*keys, b"unknown."], op=7)
        told = f"operation {engine.scheduler}/7 found it missing, at position 2 of its chain"
        assert told in self.explain(world, key=b"unknown.")
        told = f"{engine.scheduler}/7: fell short for the reason not_stored (revision 1), at key ...{b'unknown.'.hex()}"
        assert f"{told}, position 2 of group 0" in self.explain(world)
        assert told in self.explain(world, op=7)

    def test_what_became_of_an_operation(self):
        world, engine, keys = stored(2)
        engine.query([*keys, b"unknown."], op=7)
        text = self.explain(world, op=7)
        assert "asked for 3 keys" in text
        assert "fell short for the reason not_stored" in text
        assert "answered: 2 keys" in text
        assert f"now: operation {engine.scheduler}/7 answered in instance engine, revision 1, 2 objects leased" in text
        engine.release(7)
        assert "released" in self.explain(world, op=7)
        assert "now:" not in self.explain(world, op=7)

    def test_operations_of_one_number_are_told_apart(self):
        world, engine, keys = stored(2)
        other = world.engine("other")
        engine.query(keys, op=7)
        other.query([b"unknown."], op=7)
        one, two = (self.explain(world, op=7, of=each.scheduler) for each in (engine, other))
        assert f"operation {engine.scheduler}/7: answered: 2 keys" in one
        assert "now:" in one
        assert f"operation {other.scheduler}/7: fell short for the reason not_stored" in two
        assert "now:" not in two
        assert len(self.explain(world, op=7).splitlines()) == len(one.splitlines()) + len(two.splitlines())
        assert self.explain(world, op=7, of=99) == ""

    def test_a_key_by_its_end(self):
        world = World()
        engine = world.engine(key_bytes=16)
        keys = [b"the same" + key for key in chain(3)]
        engine.store(keys)
        assert self.explain(world, key=keys[1][:8]) == ""
        text = self.explain(world, key=keys[1][8:])
        assert "now: resident" in text
        assert f"key {keys[1].hex()}" in text
        assert keys[0].hex() not in text

    def test_which_key_was_not_there_for_an_exact_question(self):
        world, engine, keys = stored(2)
        engine.prepare((0, [keys[1], b"unknown.", b"nowhere."]), op=7)
        assert f"at key ...{b'unknown.'.hex()}, position 1 of group 0" in self.explain(world)

    def test_which_key_was_one_too_many(self):
        world, engine, keys = stored(4, limits=Limits(prepared_share=2 * SLOT / (16 * PAGE)))
        engine.query(keys, op=7)
        told = f"fell short for the reason budget (revision 1), at key ...{keys[2].hex()}, position 2 of group 0"
        assert told in self.explain(world)

    def test_which_key_did_not_come_in_time(self):
        world = World()
        keys = chain(4)
        world.open_log(keys)
        engine = world.engine()
        world.settle(engine.query_event(keys, op=7))
        assert self.explain(world) == ""
        world.settle(ev.AnswerNow(engine.scheduler, 7, 1))
        assert f"for the reason deadline (revision 1), at key ...{keys[0].hex()}, position 0" in self.explain(world)

    def test_what_was_too_much_lacked_no_key(self):
        world, engine, keys = stored(4, limits=Limits(engine_share=2 * SLOT / (16 * PAGE)))
        engine.prepare((0, keys), op=7)
        assert self.explain(world).endswith("fell short for the reason too_large (revision 1)")

    def test_the_latest_misses_are_whole(self):
        world, engine, _ = stored(1)
        for op in range(1, 31):
            engine.query([b"unknown."], op=op)
        lines = self.explain(world).splitlines()
        assert len(lines) == 20
        assert [f"{engine.scheduler}/{op}: fell short" in line for op, line in enumerate(lines, 11)] == [True] * 20
        assert all(f"at key ...{b'unknown.'.hex()}" in line for line in lines)

    @pytest.mark.parametrize("over", [False, True])
    def test_what_cut_a_hit(self, over: bool):
        world, engine, keys = stored(2)
        engine.open(5, group=2)
        if not over:
            engine.query(keys, op=7)
        assert world.settle(ev.Cut(engine.scheduler, 7, 5, b"unknown.", 14)) == []
        name = b"unknown.".hex()
        assert f"hit cut by group 2 at block 14: key ...{name} was not stored" in self.explain(world, op=7)
        told = f"cut the hit of operation {engine.scheduler}/7: group 2 at block 14"
        assert told in self.explain(world, key=b"unknown.")
        assert f"operation {engine.scheduler}/7: hit cut by group 2" in self.explain(world)

    def test_a_cut_that_means_nothing(self):
        world, engine, _ = stored(1)
        worker = engine.workers[0]
        for session, space in ((engine.scheduler, 9), (worker, 0), (12345, 0)):
            assert world.settle(ev.Cut(session, 7, space, b"unknown.", 14)) == []
        assert self.explain(world, op=7) == ""
        (told,) = world.settle(ev.Cut(engine.scheduler, 7, 0, b"short", 14))
        assert isinstance(told, Refuse)

    def test_nothing_is_known_of_what_never_was(self):
        world, _, _ = stored(1)
        assert self.explain(world, op=99) == self.explain(world, key=b"unknown.") == self.explain(world) == ""


def test_credits_leave_a_namespace_room_to_keep_what_it_stores():
    """A quota is for objects: its namespace's granted slots are a part of it, not all."""
    world = World(pages=16, limits=Limits(quotas={NAMESPACE: Quota(limit=16 * SLOT)}))
    engine = world.engine()
    engine.store(chain(12))
    assert len(engine.slots[0]) <= 4
    assert engine.query(chain(12)).resident >= 8
