"""One test for each rule that the core could break unnoticed by the others: see ``tests/mutations``."""

from dataclasses import replace

import pytest
from core_world import NAMESPACE, PAGE, SLOT, Engine, World, chain, offsets_of

from kvhold.core import events as ev
from kvhold.core.events import Effect, Reason
from kvhold.core.limits import Limits
from kvhold.core.segments import HEADER, Log

LIMITS = Limits(answer_ns=1000, lease_ns=2000, stall_ns=3000, retry_ns=4000)


def answers(effects: list[Effect]) -> list[ev.Answer]:
    return [effect for effect in effects if isinstance(effect, ev.Answer)]


def ask(engine: Engine, keys: list[bytes], op: int = 1, **more: int) -> list[Effect]:
    """Ask without expecting an answer yet."""
    return engine.world_.settle(engine.query_event(keys, op=op, **more))  # type: ignore[arg-type]


def cold(count: int = 2, limits: Limits = LIMITS) -> tuple[World, Engine, list[bytes]]:
    """Objects that are only in the log, and an engine that publishes nothing."""
    keys = chain(count)
    world = World(pages=4, limits=limits)
    world.open_log(keys)
    return world, world.engine(slots=0), keys


def logged(segments: int = 4, records: int = 4, pages: int = 4) -> tuple[World, Engine]:
    """An engine that publishes one by one, and a log whose segments have room for so many records."""
    world = World(pages=pages, limits=LIMITS)
    world.open_log(segments=segments, segment_bytes=2 * HEADER + records * (HEADER + SLOT))
    return world, world.engine(slots=1)


def reads(world: World) -> list[ev.Read]:
    return [io for io in world.flying(ev.Read) if isinstance(io, ev.Read)]


def test_a_lookup_says_where_and_moves_nothing():
    world, engine, keys = cold()
    before = world.core.accounts()
    effects = world.settle(ev.Lookup(engine.scheduler, 1, ((0, b"".join([*keys, b"unknown."])), (9, b""))))
    assert effects == [ev.Residency(engine.scheduler, 1, (bytes([2, 2, 0]), b""))]
    assert world.core.accounts() == before
    assert not world.disk.flying
    ask(engine, keys[:1])
    world.finish()
    assert world.settle(ev.Lookup(engine.scheduler, 1, ((0, b"".join(keys)),))) == [
        ev.Residency(engine.scheduler, 1, (bytes([1, 2]),))
    ]


# --- budgets ----------------------------------------------------------------------------------------------------


def test_all_engines_together_keep_to_the_share_of_prepared_bytes():
    world = World(pages=4, limits=replace(LIMITS, prepared_share=0.5, engine_share=0.5))
    engines = [world.engine("one"), world.engine("two", slots=0)]
    engines[0].store(one := chain(5, "1"))
    engines[0].store(two := chain(5, "2"))
    assert engines[0].query(one).resident == 5
    answer = engines[1].query(two)
    assert (answer.resident, answer.reason) == (3, Reason.BUDGET)


def test_nothing_is_read_for_a_whole_that_there_is_no_room_for():
    world, engine, keys = cold(4, limits=replace(LIMITS, engine_share=4 * SLOT / (4 * PAGE)))
    ask(engine, keys[:1], op=1)
    world.finish()
    (answer,) = engine.prepare((0, [*keys[1:], keys[1]]), op=2)
    assert answer == ev.Answer(engine.scheduler, 2, 1, 0, b"", Reason.BUDGET)
    assert not world.disk.flying


# --- reads ------------------------------------------------------------------------------------------------------


def test_what_is_skipped_is_not_read():
    world, engine, keys = cold(3)
    ask(engine, keys, skip=2)
    (read,) = reads(world)
    assert [stored.key for stored in read.objects] == keys[2:]
    (answer,) = answers(world.complete(ev.Read))
    assert (answer.resident, len(offsets_of(answer))) == (3, 1)
    assert world.content[offsets_of(answer)[0]] == (NAMESPACE, 0, keys[2])


def test_a_failed_read_is_a_miss_and_its_object_is_gone():
    world, engine, keys = cold()
    (waiting,) = [effect for effect in ask(engine, keys) if isinstance(effect, ev.Waiting)]
    assert waiting.objects == 2
    effects = world.complete(ev.Read, [1])
    (answer,) = answers(effects)
    assert (answer.resident, len(offsets_of(answer)), answer.reason) == (1, 1, Reason.READ_FAILED)
    (forget,) = [effect for effect in effects if isinstance(effect, ev.Forget)]
    assert forget.names == ((NAMESPACE, 0, keys[1]),)
    assert world.resident(keys) == keys[:1]
    assert world.core.storage.read_bytes == 0
    world.complete(ev.Forget)
    engine.release(1)
    assert "leased" not in world.accounts
    assert "loading" not in world.accounts


def test_a_second_completion_is_counted_and_ignored():
    world, engine, keys = cold()
    ask(engine, keys)
    (number,) = [read.io for read in reads(world)]
    assert len(answers(world.complete(ev.Read))) == 1
    before = world.core.accounts()
    for failed in ((), (0, 1)):
        assert world.settle(ev.Done(number, failed)) == []
    assert world.core.counters["stale_io"] == 2
    assert world.core.accounts() == before
    assert world.core.storage.read_bytes == 0


@pytest.mark.parametrize("queued", [False, True])
def test_a_cancel_touches_nobody_elses_read(queued: bool):
    world, engine, keys = cold(2, limits=replace(LIMITS, read_bytes=1 if queued else 1 << 20))
    other = world.engine("other", slots=0)
    if queued:
        ask(other, chain(1, "x"), op=9)
        world.settle(ev.Populated(0))
    ask(engine, keys)
    ask(other, keys, op=2)
    assert not [effect for effect in engine.release(1) if isinstance(effect, ev.Cancel)]
    told = []
    while world.flying(ev.Read):
        told += world.complete(ev.Read)
    (answer,) = answers(told)
    assert (answer.session, answer.resident) == (other.scheduler, 2)


def test_what_waits_for_its_read_is_not_read_once_its_last_owner_has_gone():
    world, engine, keys = cold(4, replace(LIMITS, read_bytes=1))
    other = world.engine("other", slots=0)
    ask(engine, keys[:1])
    ask(engine, keys[1:2], op=2)
    ask(other, keys[1:2], op=3)
    engine.release(2)
    assert world.accounts["loading"] == 2 * SLOT, "another one waits for it"
    other.release(3)
    assert world.accounts["loading"] == SLOT
    world.finish()
    (number,) = [effect.op for effect in answers(world.told)]
    assert number == 1
    ask(engine, keys[1:2], op=4)
    assert len(world.flying(ev.Read)) == 1, "it can be read again"


def test_a_cancelled_read_stays_charged_until_it_ends():
    world, engine, keys = cold()
    ask(engine, keys)
    (cancel,) = [effect for effect in engine.release(1) if isinstance(effect, ev.Cancel)]
    assert world.accounts["loading"] == 2 * SLOT
    assert world.core.storage.read_bytes == 2 * SLOT
    assert [cancel.io] == [read.io for read in reads(world)]
    assert not answers(world.complete(ev.Read, [0, 1]))
    assert "loading" not in world.accounts
    assert world.core.storage.read_bytes == 0
    assert world.resident(keys) == keys, "a cancelled read is no bad record"


def test_a_question_that_waits_is_answered_at_its_deadline_with_what_is_there():
    world, engine, keys = cold()
    assert not answers(ask(engine, keys))
    assert not answers(world.tick(LIMITS.answer_ns // 2))
    (answer,) = answers(world.tick(LIMITS.answer_ns))
    assert (answer.resident, answer.reason) == (0, Reason.DEADLINE)
    assert world.accounts["loading"] == 2 * SLOT, "the disk may still write there"
    assert not answers(world.complete(ev.Read))
    assert "loading" not in world.accounts


def test_identical_reads_are_one():
    world, engine, keys = cold()
    other = world.engine("other", slots=0)
    ask(engine, keys)
    ask(other, keys)
    assert len(world.flying(ev.Read)) == 1
    assert {answer.session for answer in answers(world.complete(ev.Read))} == {engine.scheduler, other.scheduler}


# --- logs -------------------------------------------------------------------------------------------------------


def test_what_a_failed_restore_leased_is_forgotten_on_disk_too():
    world, engine = logged()
    engine.store(keys := chain(2))
    world.finish()
    engine.query(keys, op=1)
    world.settle(ev.Started(engine.scheduler, (1,)))
    effects = world.settle(ev.Spoiled(engine.scheduler, 1))
    assert [name for effect in effects if isinstance(effect, ev.Forget) for name in effect.names] == [
        (NAMESPACE, 0, key) for key in keys
    ]
    assert world.resident(keys) == []
    assert world.accounts["doomed"] == 2 * SLOT
    engine.store(keys)
    assert world.resident(keys) == keys
    engine.release(1)
    assert "doomed" not in world.accounts


def test_a_segment_is_not_given_up_while_it_is_read():
    log = Log(0, 3, 1 << 20)
    log.adopt(0, 1)
    log.adopt(1, 2)
    for segment in log.sealed:
        segment.live = 1 << 19
    log.sealed[0].readers = 1
    assert log.to_reclaim() is log.sealed[1]
    log.sealed[1].readers = 1
    assert log.to_reclaim() is None
    log.sealed[0].readers = 0
    assert log.to_reclaim() is log.sealed[0]


def test_what_was_only_in_a_reclaimed_segment_is_known_no_more():
    world, engine = logged(segments=2, records=1, pages=1)
    keys = chain(12)
    for key in keys:
        engine.store([key])
        world.finish()
    assert world.core.counters["reclaimed"] > 0
    known = world.resident(keys)
    assert len(known) <= 2 + PAGE // SLOT
    assert keys[0] not in known
    for op, key in enumerate(known):
        ask(engine, [key], op=op)
        world.finish()
        engine.release(op)


def test_what_is_being_written_is_not_evicted():
    world, engine = logged(pages=1)
    engine.store(keys := chain(1))
    world.complete(ev.Reuse)
    assert world.accounts["leased"] == SLOT
    for number in range(8):
        engine.store(chain(1, str(number)))
    assert world.resident(keys) == keys
    world.complete(ev.Write)
    assert world.core.catalogue.place[world.core.catalogue.find(NAMESPACE, 0).get(keys[0])]  # type: ignore[union-attr,index]


def test_what_waits_to_be_written_and_lost_its_slot_is_not_written():
    world, engine = logged(pages=1)
    for number in range(12):  # more than fit, before the first segment is ready
        engine.store(chain(1, str(number)))
    world.finish()  # the disk compares what it is given with what lies there
    assert world.core.counters["write_gone"] > 0
    assert 0 < world.core.counters["write_objects"] <= PAGE // SLOT


def test_a_failed_write_is_done_again_in_the_same_place():
    world, engine = logged()
    engine.store(chain(1))
    world.complete(ev.Reuse)
    (first,) = world.flying(ev.Write)
    world.complete(ev.Write, [0])
    (second,) = world.flying(ev.Write)
    assert isinstance(first, ev.Write)
    assert isinstance(second, ev.Write)
    assert second.objects == first.objects
    world.complete(ev.Write)
    assert world.core.counters["write_objects"] == 1


def test_what_is_purged_while_it_is_written_is_in_no_log():
    world, engine = logged()
    engine.store(keys := chain(1))
    world.complete(ev.Reuse)
    world.settle(ev.Purge())
    assert world.accounts["doomed"] == SLOT
    world.finish()
    assert world.resident(keys) == []
    assert "doomed" not in world.accounts
    assert world.core.catalogue.logs[0].live == 0


def test_a_purge_reaches_what_is_read_from_a_log_meanwhile(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ev, "MAX_BATCH", 1)
    world, engine, keys = cold()
    world.handle(ev.Purge())
    world.handle(engine.query_event(keys, op=1))
    world.run()
    world.finish()
    assert world.resident(keys) == []
    engine.release(1)
    assert "doomed" not in world.accounts
