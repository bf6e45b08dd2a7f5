"""One test for each rule that the core could break unnoticed by the others: see ``tests/mutations``."""

from dataclasses import replace

import pytest
from testbed.core.core_world import NAMESPACE, PAGE, SLOT, Engine, World, chain

from kvhold.core import events as ev
from kvhold.core.events import Reason
from kvhold.core.limits import Limits
from kvhold.core.log.segments import HEADER, Log

LIMITS = Limits(answer_ns=1000, hung_ns=1000, lease_ns=2000, stall_ns=3000, retry_ns=4000)


def logged(segments: int = 4, records: int = 4, pages: int = 4) -> tuple[World, Engine]:
    """An engine that publishes one by one, and a log whose segments have room for so many records."""
    world = World(pages=pages, limits=LIMITS)
    world.open_log(segments=segments, segment_bytes=2 * HEADER + records * (HEADER + SLOT))
    return world, world.engine(slots=1)


def test_all_engines_together_keep_to_the_share_of_prepared_bytes():
    world = World(pages=4, limits=replace(LIMITS, prepared_share=0.5, engine_share=0.5))
    engines = [world.engine("one"), world.engine("two", slots=0)]
    engines[0].store(one := chain(5, "1"))
    engines[0].store(two := chain(5, "2"))
    assert engines[0].query(one).resident == 5
    answer = engines[1].query(two)
    assert (answer.resident, answer.reason) == (3, Reason.BUDGET)


def test_what_a_failed_restore_leased_is_forgotten_on_disk_too():
    world, engine = logged()
    engine.store(keys := chain(2))
    world.finish()
    engine.query(keys, op=1)
    world.settle(ev.Started(engine.scheduler, (1,)))
    effects = world.settle(ev.RestoreFailed(engine.scheduler, 1))
    assert [name for effect in effects if isinstance(effect, ev.Forget) for name in effect.names] == [
        (NAMESPACE, 0, key) for key in keys
    ]
    assert world.resident(keys) == []
    assert world.accounts["doomed"] == 2 * SLOT
    engine.store(keys)
    assert world.resident(keys) == keys
    engine.release(1)
    assert "doomed" not in world.accounts


def cold(limits: Limits = LIMITS) -> tuple[World, Engine, Engine, list[bytes]]:
    """Two objects that are only in the log, and two engines that publish nothing."""
    world = World(pages=4, limits=limits)
    world.open_log(keys := chain(2))
    return world, world.engine("one", slots=0), world.engine("two", slots=0), keys


def test_a_read_goes_on_for_one_of_its_objects():
    world, one, two, keys = cold()
    world.settle(one.query_event(keys, op=1))
    world.settle(two.query_event(keys, op=1, skip=1))
    assert len(world.flying(ev.Read)) == 1
    one.release(1)
    assert not [effect for effect in world.told if isinstance(effect, ev.Cancel)]
    two.release(1)
    assert len([effect for effect in world.told if isinstance(effect, ev.Cancel)]) == 1
    world.finish()
    assert not {"leased", "loading"} & world.accounts.keys()


def test_what_waits_for_its_turn_to_be_read_is_not_given_up_while_another_wants_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ev, "MAX_BATCH", 1)
    world, one, two, keys = cold(replace(LIMITS, read_bytes=1))
    for engine in (one, two):
        world.settle(engine.query_event(keys, op=1))
    assert len(world.flying(ev.Read)) == 1, "the second has to wait"
    one.release(1)
    assert world.accounts["loading"] == 2 * SLOT
    world.finish()
    (answer,) = [effect for effect in world.told if isinstance(effect, ev.Answer)]
    assert (answer.session, answer.resident, answer.reason) == (two.scheduler, 2, Reason.NONE)


def test_a_segment_is_not_given_up_while_it_is_read():
    log = Log(0, 3, 1 << 20)
    log.adopt(0, 1, 0)
    log.adopt(1, 2, 0)
    for segment in log.sealed:
        segment.live = 1 << 19
    log.sealed[0].readers = 1
    assert log.to_reclaim() is log.sealed[1]
    log.sealed[1].readers = 1
    assert log.to_reclaim() is None
    log.sealed[0].readers = 0
    assert log.to_reclaim() is log.sealed[0]


def test_what_waits_to_be_written_and_lost_its_slot_is_not_written_under_anothers_parent():
    world, engine = logged(pages=1)
    for number in range(6):  # more than fit, before the first segment is ready
        engine.store(chain(2, str(number)))
    world.finish()
    assert world.core.counters["write_gone"] > 0
    written = [stored for effect in world.told if isinstance(effect, ev.Write) for stored in effect.objects]
    assert 1 < len(written) <= PAGE // SLOT
    for stored in written:
        first, second = chain(2, stored.key[:1].decode())
        assert stored.parent == (b"" if stored.key == first else first)
        assert stored.key in (first, second)
