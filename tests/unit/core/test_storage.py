"""What is read from logs and written to them, when, for whom, and what becomes of it when a disk fails."""

from array import array
from dataclasses import replace
from typing import Any

import pytest
from testbed.core.core_world import NAMESPACE, SLOT, Engine, Slot, World, chain, offsets_of, segment_of

from kvhold.core import events as ev
from kvhold.core.events import Answer, Cancel, Gone, Reason, Waiting
from kvhold.core.limits import SECOND, Limits
from kvhold.core.log import events as lev
from kvhold.core.log.events import Forget, Read, Reuse, Seal, Write
from kvhold.core.log.segments import HEADER
from kvhold.core.rows import State

RECORD = HEADER + SLOT
SMALL = HEADER + 3 * RECORD + HEADER
"""A segment of three records and their footer."""


def logged(length: int = 4, credits: int = 2, **world: Any) -> tuple[World, Engine, list[bytes]]:
    """A chain that is in a log alone."""
    world_ = World(**world)
    keys = chain(length)
    world_.open_log(keys)
    return world_, world_.engine(slots=credits), keys


def writing(segments: int = 4, segment_bytes: int = 1 << 20, **world: Any) -> tuple[World, Engine]:
    """An empty log that is ready to be written, but for what is stored first."""
    world_ = World(**world)
    world_.open_log(segments=segments, segment_bytes=segment_bytes)
    return world_, world_.engine(slots=2)


def state_of(world: World, key: bytes) -> int:
    index = world.core.catalogue.find(NAMESPACE, 0)
    row = index.get(key) if index is not None else None
    return State.FREE if row is None else world.core.catalogue.state[row]


def places(world: World, keys: list[bytes]) -> list[int]:
    index = world.core.catalogue.find(NAMESPACE, 0)
    assert index is not None
    return [world.core.catalogue.place[index.get(key)] for key in keys]


def keys_of(io: ev.Write | ev.Read | Any) -> list[bytes]:
    return [stored.key for stored in io.objects]


def answers(effects: list[ev.Effect]) -> list[Answer]:
    return [effect for effect in effects if isinstance(effect, Answer)]


class TestReads:
    def test_what_is_in_a_log_alone_is_read_and_then_leased(self):
        world, engine, keys = logged()
        told = world.settle(engine.query_event(keys, op=1))
        assert [type(effect) for effect in told] == [Waiting, Read]
        assert world.accounts["loading"] == 4 * SLOT
        (answer,) = answers(world.finish())
        assert (answer.resident, answer.reason) == (4, Reason.NONE)
        assert [world.content[offset][2] for offset in offsets_of(answer)] == keys
        assert world.core.counters["keys_read"] == 4

    def test_a_lookup_reads_nothing(self):
        world, engine, keys = logged()
        engine.commit(chain(1, "b"))
        (told,) = world.settle(ev.Lookup(engine.scheduler, 1, ((0, b"".join([*keys, b"unknown.", *chain(1, "b")])),)))
        assert told == ev.Residency(engine.scheduler, 1, (b"\2\2\2\2\0\1",))
        assert not world.flying(Read)

    def test_what_is_skipped_is_not_read(self):
        world, engine, keys = logged()
        world.settle(engine.query_event(keys, skip=2))
        assert [keys_of(io) for io in world.flying(Read)] == [keys[2:]]

    def test_what_was_not_chosen_is_not_read(self):
        world, engine, keys = logged()
        engine.prepare((0, [keys[1], keys[3]]), op=1)
        assert [keys_of(io) for io in world.flying(Read)] == [[keys[1], keys[3]]]

    @pytest.mark.parametrize("how", ["missing", "budget"])
    def test_nothing_is_read_for_what_cannot_be_had_whole(self, how: str):
        world, engine, keys = logged(14, pages=4)
        if how == "budget":
            engine.commit(chain(1, "b"))
            engine.query(chain(1, "b"))
        (answer,) = engine.prepare((0, [*keys[:3], b"unknown."] if how == "missing" else keys[:12]), op=1)
        assert isinstance(answer, Answer)
        assert answer.reason is (Reason.NOT_STORED if how == "missing" else Reason.BUDGET)
        assert not world.flying(Read)

    def test_an_object_named_twice_is_read_once(self):
        world, engine, keys = logged()
        world.settle(engine.query_event([keys[0], keys[0], keys[1]]))
        assert [keys_of(io) for io in world.flying(Read)] == [keys[:2]]
        (answer,) = answers(world.finish())
        assert answer.resident == 3

    def test_dram_log_and_miss_make_up_what_was_asked(self):
        world, engine, keys = logged()
        world.settle(engine.query_event(keys[:2], op=1))
        world.finish()
        world.settle(engine.query_event([*keys, *chain(3, "b")], op=2))
        world.finish()
        counters = world.core.counters
        dram, log, miss = counters["keys_resident"] - counters["keys_read"], counters["keys_read"], 3
        assert (dram, log) == (2, 4)
        assert dram + log + miss == counters["keys_asked"] == 9
        assert counters["keys_not_stored"] == miss

    def test_no_room_to_read_into_is_an_answer(self):
        world, engine, keys = logged(8, pages=2, limits=Limits(prepared_share=1.0, engine_share=1.0))
        world.settle(engine.query_event(keys, op=1))
        (answer,) = answers(world.finish())
        assert (answer.resident, answer.reason) == (7, Reason.BUDGET), "one slot is granted"

    def test_reads_keep_to_their_budget_in_the_order_they_were_asked_for(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(ev, "MAX_BATCH", 2)
        world, engine, keys = logged(6, limits=Limits(read_bytes=1))
        world.settle(engine.query_event(keys, op=1))
        order = []
        while world.flying(Read):
            (read,) = world.flying(Read)
            order += keys_of(read)
            world.complete(Read)
        assert order == keys


class TestSharing:
    def test_any_number_of_operations_cause_one_read(self):
        world, engine, keys = logged()
        other = world.engine("other")
        world.settle(engine.query_event(keys, op=1))
        world.settle(other.query_event(keys[:3], op=1))
        other.prepare((0, keys[1:]), op=2)
        assert len(world.flying(Read)) == 1
        told = {(answer.session, answer.op): answer.resident for answer in answers(world.finish())}
        assert told == {(engine.scheduler, 1): 4, (other.scheduler, 1): 3, (other.scheduler, 2): 3}

    @pytest.mark.parametrize("how", ["release", "revision", "death", "deadline"])
    def test_ones_end_does_not_stop_anothers(self, how: str):
        world, engine, keys = logged(limits=Limits(answer_ns=SECOND))
        other = world.engine("other")
        world.settle(other.query_event(keys, op=1))
        world.now += SECOND // 2
        world.settle(engine.query_event(keys, op=1))
        match how:
            case "release":
                other.release(1)
            case "revision":
                other.query([b"unknown."], op=1, revision=2)
            case "death":
                other.leave(Gone.DEAD)
            case "deadline":
                (late,) = answers(world.tick(SECOND // 2))
                assert (late.session, late.resident, late.reason) == (other.scheduler, 0, Reason.DEADLINE)
        assert not any(isinstance(effect, Cancel) for effect in world.told)
        (answer,) = answers(world.finish())
        assert (answer.session, answer.resident) == (engine.scheduler, 4)
        engine.release(1)
        assert not {"leased", "loading", "doomed"} & world.accounts.keys()

    def test_who_joins_a_read_that_was_cancelled_gets_it(self):
        world, engine, keys = logged()
        world.settle(engine.query_event(keys, op=1))
        engine.release(1)
        assert isinstance(world.told[-1], Cancel)
        world.settle(engine.query_event(keys, op=2))
        assert len(world.flying(Read)) == 1
        world.complete(Read, failing=range(4))  # as a cancelled one may end
        (answer,) = answers(world.finish())
        assert (answer.resident, world.core.counters["read_failed"]) == (4, 0)


class TestCancel:
    def test_what_was_not_begun_is_never_read(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(ev, "MAX_BATCH", 4)
        world, engine, keys = logged(8, limits=Limits(read_bytes=1))
        world.settle(engine.query_event(keys[:4], op=1))
        world.settle(engine.query_event(keys[4:], op=2))
        engine.release(2)
        assert world.accounts["loading"] == 4 * SLOT
        world.finish()
        assert [state_of(world, key) for key in keys[4:]] == [State.COLD] * 4
        assert sum(isinstance(effect, Read) for effect in world.told) == 1

    def test_what_was_not_begun_is_read_when_it_is_asked_for_again(self):
        world, engine, keys = logged(8, limits=Limits(read_bytes=1))
        world.settle(engine.query_event(keys[:4], op=1))
        world.settle(engine.query_event(keys[4:], op=2))
        engine.release(2)
        world.settle(engine.query_event(keys[4:], op=3))
        told = answers(world.finish())
        assert [(answer.op, answer.resident) for answer in told] == [(1, 4), (3, 4)]
        assert not world.core.operations._waiters

    def test_what_was_begun_stays_charged_until_it_ends(self):
        world, engine, keys = logged()
        world.settle(engine.query_event(keys, op=1))
        engine.release(1)
        assert [effect for effect in world.told if isinstance(effect, Cancel)] == [Cancel(1, 0)]
        assert (world.accounts["loading"], world.core.storage.reading.bytes) == (4 * SLOT, 4 * SLOT)
        world.finish()
        assert "loading" not in world.accounts
        assert (world.core.storage.reading.bytes, world.core.storage.pending) == (0, 0)
        assert world.accounts["resident"] == 4 * SLOT, "read for nobody, but read"

    def test_an_answer_of_an_io_comes_once(self):
        world, engine, keys = logged()
        world.settle(engine.query_event(keys, op=1))
        world.finish()
        before = world.core.accounts()
        assert world.settle(ev.Done(1, (0, 1))) == []
        assert world.settle(ev.Done(999)) == []
        assert world.core.counters["stale_io"] == 2
        assert world.core.accounts() == before


class TestFailedReads:
    def test_it_is_a_miss_and_the_object_is_quarantined(self):
        world, engine, keys = logged()
        world.settle(engine.query_event(keys, op=1))
        told = world.complete(Read, failing=[2])
        (answer,) = answers(told)
        assert (answer.resident, answer.reason) == (2, Reason.READ_FAILED)
        assert [effect.names for effect in told if isinstance(effect, Forget)] == [((NAMESPACE, 0, keys[2]),)]
        assert world.resident(keys) == [*keys[:2], keys[3]]
        engine.release(1)
        assert not {"leased", "loading", "doomed"} & world.accounts.keys()

    def test_a_later_store_replaces_it(self):
        world, engine, keys = logged(2)
        world.settle(engine.query_event(keys, op=1))
        world.complete(Read, failing=[0])
        engine.commit(keys[:1])
        answer = engine.query(keys, op=2)
        assert (answer.resident, answer.reason) == (2, Reason.NONE)

    def test_an_exact_demand_has_none(self):
        world, engine, keys = logged()
        engine.prepare((0, keys), op=1)
        (answer,) = answers(world.complete(Read, failing=[3]))
        assert answer == Answer(engine.scheduler, 1, 1, 0, b"", Reason.READ_FAILED)
        assert not {"leased", "loading", "doomed"} & world.accounts.keys()

    def test_a_deadline_cuts_the_answer_while_the_slots_stay_charged(self):
        world, engine, keys = logged(limits=Limits(answer_ns=SECOND))
        world.settle(engine.query_event(keys[:2], op=1))
        world.finish()
        world.settle(engine.query_event(keys, op=2))
        (answer,) = answers(world.tick(SECOND))
        assert (answer.resident, answer.reason) == (2, Reason.DEADLINE)
        assert (world.accounts["leased"], world.accounts["loading"]) == (2 * SLOT, 2 * SLOT)
        assert answers(world.finish()) == [], "it is answered once"
        assert "loading" not in world.accounts

    def test_who_hurries_gets_what_is_there(self):
        """Of a chain what has arrived, of a hit over several groups nothing; what is read goes on."""
        world, engine, keys = logged()
        world.settle(engine.query_event(keys[:2], op=1))
        world.finish()
        world.settle(engine.query_event(keys, op=2))
        assert answers(world.settle(ev.AnswerNow(engine.scheduler, 2, 0))) == [], "of another revision"
        (answer,) = answers(world.settle(ev.AnswerNow(engine.scheduler, 2, 1)))
        assert (answer.resident, answer.reason) == (2, Reason.DEADLINE)
        assert answers(world.settle(ev.AnswerNow(engine.scheduler, 2, 1))) == [], "it is answered once"
        assert answers(world.finish()) == []
        engine.release(1, 2)
        world, engine, keys = logged()
        assert answers(engine.prepare((0, keys), op=1)) == []
        (answer,) = answers(world.settle(ev.AnswerNow(engine.scheduler, 1, 1)))
        assert (answer.resident, answer.offsets, answer.reason) == (0, b"", Reason.DEADLINE)
        assert answers(world.settle(ev.AnswerNow(engine.scheduler, 99, 1))) == []

    def test_an_answer_says_what_was_read_for_it(self):
        world, engine, keys = logged()
        world.settle(engine.query_event(keys[1:2], op=1))
        assert [answer.read for answer in answers(world.finish())] == [array("I", [0]).tobytes()]
        world.settle(engine.query_event(keys, op=2))
        assert [answer.read for answer in answers(world.finish())] == [array("I", [0, 2, 3]).tobytes()]
        assert engine.query(keys).read == b""

    def test_a_log_that_only_fails_is_left_alone_for_a_while(self):
        world, engine, keys = logged(5, limits=Limits(retry_ns=SECOND))
        for key in keys[:3]:
            world.settle(engine.query_event([key]))
            world.complete(Read, failing=[0])
            world.finish()
        assert engine.query(keys[3:4]).reason is Reason.OUT_OF_SERVICE
        assert not world.flying(Read)
        world.now += SECOND
        world.settle(engine.query_event(keys[3:4], op=9))
        assert [answer.resident for answer in answers(world.finish())] == [1]

    def test_a_log_that_does_not_answer_is_not_asked_more(self):
        world, engine, keys = logged(limits=Limits(answer_ns=SECOND, hung_ns=SECOND))
        world.settle(engine.query_event(keys[:1], op=1))
        world.tick(2 * SECOND)
        assert engine.query(keys[1:]).reason is Reason.OUT_OF_SERVICE
        world.finish()
        world.settle(engine.query_event(keys[1:], op=3))
        assert [answer.resident for answer in answers(world.finish())] == [3]


class TestPurge:
    def test_while_it_is_read(self):
        world, engine, keys = logged()
        world.settle(engine.query_event(keys, op=1))
        (forget,) = world.settle(ev.Purge())
        assert isinstance(forget, Forget)
        assert world.accounts["doomed"] == 4 * SLOT
        (answer,) = answers(world.finish())
        assert (answer.resident, answer.reason) == (0, Reason.READ_FAILED)
        assert "doomed" not in world.accounts
        assert world.core.objects == 0

    def test_while_it_waits_to_be_read(self):
        world, engine, keys = logged(8, limits=Limits(read_bytes=1))
        world.settle(engine.query_event(keys[:4], op=1))
        world.settle(engine.query_event(keys[4:], op=2))
        world.settle(ev.Purge())
        assert sorted(answer.op for answer in answers(world.finish())) == [1, 2]
        assert sum(isinstance(effect, Read) for effect in world.told) == 1
        assert "doomed" not in world.accounts

    def test_while_it_is_written(self):
        world, engine = writing()
        engine.commit(chain(2))
        world.complete(Reuse)
        assert world.flying(Write)
        world.settle(ev.Purge())
        assert world.accounts["doomed"] == 2 * SLOT, "a device reads it"
        world.finish()
        assert "doomed" not in world.accounts
        assert world.core.objects == 0
        assert world.core.storage.backings[0].device.log.live == 0

    def test_while_it_is_leased_and_in_a_log(self):
        world, engine, keys = logged()
        world.settle(engine.query_event(keys, op=1))
        world.finish()
        world.settle(ev.Purge())
        assert world.accounts["doomed"] == 4 * SLOT
        assert engine.query(keys, op=2).reason is Reason.NOT_STORED
        engine.release(1)
        assert "doomed" not in world.accounts

    def test_what_is_read_while_the_purge_goes_on_does_not_outlive_it(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(ev, "MAX_BATCH", 2)
        world, engine, keys = logged(8)
        world.handle(ev.Purge())
        world.handle(engine.query_event(keys[6:], op=1))
        world.finish()
        assert world.resident(keys) == []

    def test_what_is_stored_after_it_is_not_forgotten_with_it(self):
        """A purge's mark on disk ends before the next record, whichever segment that goes to."""
        world, engine = writing()
        engine.commit(chain(1))
        (forget,) = [effect for effect in world.settle(ev.Purge()) if isinstance(effect, Forget)]
        engine.commit(chain(1, "b"))
        world.complete(Reuse)
        (write,) = world.flying(Write)
        assert isinstance(write, Write)
        assert (write.seq, write.objects[0].at) >= (forget.seq, forget.at)

    def test_records_that_come_after_it_are_left_out(self):
        world = World()
        engine = world.engine()
        world.handle(lev.LogOpened(0, 4, 1 << 20, 1))
        world.handle(lev.Segments(0, ((0, 1, 0),)))
        world.settle(ev.Purge(NAMESPACE))
        found = tuple(
            (name, 0, b"recorded", (SLOT,), HEADER + i * RECORD) for i, name in enumerate((NAMESPACE, b"o" * 32))
        )
        world.handle(lev.Recovered(0, 0, found))
        assert world.resident([b"recorded"]) == []
        assert world.resident([b"recorded"], namespace=b"o" * 32) == [b"recorded"]
        assert engine.query([b"recorded"]).resident == 0


class TestWrites:
    def test_what_is_stored_is_written_in_order_one_write_at_a_time(self):
        world, engine = writing(limits=Limits(write_batch=1))
        keys = chain(6)
        engine.store(keys)
        order: list[bytes] = []
        world.complete(Reuse)
        while world.flying(Write):
            (write,) = world.flying(Write)
            order += keys_of(write)
            world.complete(Write)
        assert order == keys
        assert all(places(world, keys))
        assert world.core.storage.queued_writes == 0

    def test_an_object_is_not_evicted_while_it_is_written(self):
        world, engine = writing(pages=8)
        engine.commit(chain(2))
        world.complete(Reuse)
        assert keys_of(world.flying(Write)[0]) == chain(2)
        engine.store(chain(40, "b"))
        assert world.resident(chain(2)) == chain(2)
        world.complete(Write)
        engine.store(chain(40, "c"))
        assert [state_of(world, key) for key in chain(2)] == [State.COLD] * 2, "evicted, but known"

    def test_an_object_that_is_stored_twice_is_written_once(self):
        world, engine = writing()
        engine.commit(chain(1))
        engine.commit(chain(1))
        world.finish()
        assert sum(len(effect.objects) for effect in world.told if isinstance(effect, Write)) == 1

    def test_what_failed_is_written_again_to_the_same_place_and_then_dropped(self):
        world, engine = writing()
        engine.commit(chain(2))
        world.complete(Reuse)
        (first,) = world.flying(Write)
        world.complete(Write, failing=[1])
        (second,) = world.flying(Write)
        assert (keys_of(first), keys_of(second)) == (chain(2), chain(2)[1:])
        assert isinstance(first, Write)
        assert isinstance(second, Write)
        assert second.objects[0].at == first.objects[1].at
        world.complete(Write, failing=[0])
        assert not world.flying(Write)
        assert world.core.counters["write_dropped_errors"] == 1
        assert [bool(place) for place in places(world, chain(2))] == [True, False]
        engine.commit(chain(1, "b"))
        (third,) = world.flying(Write)
        assert isinstance(third, Write)
        assert third.objects[0].at == first.objects[1].at, "records are without gaps"

    def test_a_log_that_only_fails_is_not_written_for_a_while(self):
        world, engine = writing(limits=Limits(retry_ns=SECOND))
        engine.commit(chain(1))
        world.complete(Reuse)
        for _ in range(2):
            world.complete(Write, failing=[0])
        engine.commit(chain(1, "b"))
        world.complete(Write, failing=[0])
        assert not world.flying(Write)
        assert world.core.storage.queued_writes == 1
        due = world.core.next_deadline
        assert due is not None
        world.tick(due - world.now)
        assert keys_of(world.flying(Write)[0]) == chain(1, "b")

    def test_too_many_waiting_are_dropped(self):
        world, engine = writing(limits=Limits(write_queue=3))
        engine.store(chain(8))
        assert world.core.storage.queued_writes == 3
        assert world.core.counters["write_dropped_queue"] == 5

    def test_only_what_is_stored_again_is_written_if_so_wanted(self):
        world, engine = writing(limits=Limits(second_touch=True))
        engine.commit(chain(1))
        world.finish()
        assert places(world, chain(1)) == [0]
        engine.commit(chain(1))
        world.finish()
        assert all(places(world, chain(1)))


class TestSegments:
    def test_a_full_one_is_sealed_and_the_oldest_given_up_for_the_next(self):
        world, engine = writing(segments=2, segment_bytes=SMALL, pages=4)
        for name in "abcd":
            engine.store(chain(3, name))
            world.finish()
        seqs = [effect.seq for effect in world.told if isinstance(effect, Reuse)]
        assert seqs == sorted(set(seqs))
        assert len(seqs) > 2, "segments were used again"
        assert any(isinstance(effect, Seal) for effect in world.told)
        assert world.core.counters["reclaimed"] > 0

    def test_an_old_life_is_never_found(self):
        """What was in a segment that was given up is not known any more; the disk checks that nothing else is read."""
        world, engine = writing(segments=5, segment_bytes=SMALL, pages=2)
        keys = [key for name in "abcdefgh" for key in chain(3, name)]
        for key in keys:
            engine.commit([key])
            world.finish()
        cold = [key for key in keys if state_of(world, key) == State.COLD]
        gone = [key for key in keys if state_of(world, key) == State.FREE]
        assert cold
        assert gone
        for op, key in enumerate(keys):
            world.settle(engine.query_event([key], op=op))
            world.finish()
            (answer,) = [answer for answer in answers(world.told) if answer.op == op]
            assert answer.resident == (key not in gone)
            engine.release(op)

    def test_one_is_made_ready_at_a_time(self, monkeypatch: pytest.MonkeyPatch):
        """While one is being given up, one that could not be had before is not tried: two would be next."""
        monkeypatch.setattr(ev, "MAX_BATCH", 1)
        world, engine = writing(segments=2, segment_bytes=SMALL, pages=4)
        engine.store(chain(5))
        world.complete(Reuse)
        while not world.flying(Seal):
            if world.flying(Reuse):
                world.complete(Reuse, failing=[0])
            else:
                world.complete(Write)
        world.handle(world.disk.finish(world.flying(Seal)[0].io))
        assert world.core.storage.backings[0].device.reclaiming
        world.handle(ev.Tick())
        world.run()
        assert len(world.flying(Reuse)) == 1

    def test_one_that_is_read_is_not_given_up(self):
        world, engine, keys = logged()
        log = world.core.storage.backings[0].device.log
        world.settle(engine.query_event(keys, op=1))
        assert log.to_reclaim() is None
        world.finish()
        assert log.to_reclaim() is not None

    def test_what_is_in_dram_is_written_again_but_not_for_ever(self):
        """A log smaller than the arena: giving up a segment must not keep the disk busy for all time."""
        world, engine = writing(segments=2, segment_bytes=SMALL)
        engine.store(chain(20))
        world.finish()
        assert world.core.counters["rewritten"] > 0
        assert world.core.storage.queued_writes == 0
        assert world.resident(chain(20)) == chain(20)

    def test_one_that_cannot_be_had_is_tried_again_later(self):
        world, engine = writing(limits=Limits(retry_ns=SECOND))
        engine.commit(chain(1))
        for _ in range(3):
            world.complete(Reuse, failing=[0])
        assert not world.flying(Reuse)
        world.tick(SECOND)
        world.finish()
        assert all(places(world, chain(1)))


def test_a_release_of_an_old_operation_after_its_slots_were_used_again_changes_nothing():
    world, engine, keys = logged(pages=2)
    world.settle(engine.query_event(keys, op=1))
    world.finish()
    engine.release(1)
    engine.store(chain(12, "b"))
    engine.query(world.resident(chain(12, "b"))[:2], op=2)
    before = world.core.accounts()
    engine.release(1)
    assert world.core.accounts() == before


def test_a_return_with_an_old_epoch_after_reuse_is_ignored():
    world, engine = writing()
    (old, *_) = engine.slots[0]
    engine.back(engine.take(1))
    (again,) = [slot for slot in engine.slots[0] if slot.row == old.row]
    assert again.epoch != old.epoch
    before = world.core.accounts()
    engine.back([Slot(old.row, old.offset, old.epoch)])
    assert world.core.accounts() == before
    assert world.core.counters["stale"] == 1


def test_a_store_of_what_is_in_a_log_alone_gives_it_its_bytes_back():
    world, engine, keys = logged(2)
    engine.commit(keys)
    answer = engine.query(keys)
    assert (answer.resident, answer.reason) == (2, Reason.NONE)
    assert not any(isinstance(effect, Read | Write) for effect in world.told)
    assert world.core.objects == 2


def test_shards_that_are_no_multiple_of_a_block_take_whole_blocks_after_a_restart():
    world = World()
    world.handle(lev.LogOpened(0, 4, 1 << 20, 1))
    world.handle(lev.Segments(0, ((0, 1, 0),)))
    world.handle(lev.Recovered(0, 0, ((NAMESPACE, 0, b"recorded", (SLOT - 1,), HEADER),)))
    engine = world.engine(shards=(SLOT - 1,), slots=3)
    assert [slot.offset % SLOT for slot in engine.slots[0]] == [0, 0, 0]


def test_of_two_records_of_an_object_the_younger_counts():
    world = World()
    world.handle(lev.LogOpened(0, 4, 1 << 20, 2))
    world.handle(lev.Segments(0, ((0, 1, 0), (1, 2, 0))))
    record = (NAMESPACE, 0, b"recorded", (SLOT,), HEADER)
    for segment in (1, 0):
        world.handle(lev.Recovered(0, segment, (record,)))
    live = {number: segment.live for number, segment in world.core.storage.backings[0].device.log.segments.items()}
    assert live == {0: 0, 1: RECORD}
    assert world.core.objects == 1


def test_the_same_key_in_two_groups_is_two_objects():
    world, engine, keys = logged(2)
    engine.open(1, group=1, slots=2)
    assert engine.query(keys, 1).resident == 0
    engine.commit(keys, 1)
    (answer,) = engine.prepare((1, keys), op=1)
    assert isinstance(answer, Answer)
    assert answer.resident == 2
    assert not world.flying(Read)


def test_what_hangs_for_others_is_not_waited_for_again():
    """A later question does not wait in vain for a read that an earlier one has waited too long for."""
    world, engine, keys = logged(limits=Limits(answer_ns=2 * SECOND))
    world.settle(engine.query_event(keys[:2], op=1))
    assert answers(world.tick(3 * SECOND))[0].reason is Reason.DEADLINE
    assert engine.query(keys[:2], op=2).reason is Reason.OUT_OF_SERVICE
    assert world.accounts["loading"] == 2 * SLOT, "the hung read may still write there"
    world.finish()
    assert engine.query(keys[:2], op=3).resident == 2


def test_a_write_takes_little_of_the_arena_at_once():
    """What is being written is leased, and is not there for anybody else's room."""
    world, engine = writing(pages=64, limits=Limits(write_batch=1 << 30))
    engine.open(space=1, group=1, slots=20)
    engine.store(chain(100), space=1)
    while world.flying(Reuse):
        world.complete(Reuse)
    (write,) = world.flying(Write)
    assert len(keys_of(write)) * RECORD == world.core.arena.total // 8
    assert world.accounts["leased"] == 16 * SLOT


class TestFlush:
    def test_it_is_answered_once_all_that_waited_is_written_and_synced(self):
        world, engine = writing()
        engine.commit(chain(2))
        assert world.settle(ev.Flush(99)) == []
        world.complete(Reuse)
        engine.commit(chain(1, "b"))  # later: the flush does not wait for it
        told = world.complete(Write)
        assert [type(effect) for effect in told] == [lev.Sync, Write]
        assert ev.Flushed(99, True) in world.complete(lev.Sync)

    def test_a_sync_that_failed_is_told(self):
        world, engine = writing()
        engine.commit(chain(1))
        world.handle(ev.Flush(99))
        world.complete(Reuse)
        world.complete(Write)
        assert ev.Flushed(99, False) in world.complete(lev.Sync, failing=(0,))

    def test_without_a_log_there_is_nothing_to_wait_for(self):
        assert World().settle(ev.Flush(99)) == [ev.Flushed(99, True)]

    def test_what_is_dropped_does_not_hold_it_up(self):
        world, engine = writing()
        engine.commit(chain(1))
        world.handle(ev.Flush(99))
        world.settle(ev.Purge())
        told = world.finish()
        assert ev.Flushed(99, True) in told


def test_a_failed_write_behind_what_could_not_be_looked_at_takes_only_its_own_record_back():
    """Both in the segment that is being filled: else that object's place would be of the segment's next life."""
    world = World(pages=4)
    world.open_log(segments=4, segment_bytes=224 << 10)
    engine = world.engine(slots=4)
    for name in "abc":  # DRAM has room for the last two; all of them are in one segment
        engine.store(chain(4 if name != "b" else 12, name))
        world.finish()
    key = chain(1, "a")
    world.settle(engine.query_event(key, op=1))
    engine.commit(chain(1, "d"))
    world.settle(replace(world.disk.finish(world.flying(Read)[0].io, (0,)), kept=True))
    world.settle(world.disk.finish(world.flying(Write)[0].io, (0,)))
    index = world.core.catalogue.find(NAMESPACE, 0)
    assert index is not None
    row = index.get(key[0])
    assert row is not None
    assert segment_of(world.core, row)[1].rows.count(row) == 1
    world.settle(engine.query_event(key, op=2))
    told = world.finish()
    assert answers(told)[-1].resident == 1


def test_a_purge_finds_what_changes_its_row_meanwhile():
    """A record that could not be looked at makes an object move to a row that the purge has looked at before."""
    world = World(pages=200)
    keys = chain(600)
    world.open_log(keys, segment_bytes=8 << 20)
    engine = world.engine(slots=8)
    world.settle(engine.query_event(keys[3:4], op=1))  # its row, one of the first, is spare afterwards
    world.finish()
    world.settle(ev.RestoreFailed(engine.scheduler, 1))
    engine.release(1)
    world.finish()
    world.settle(engine.query_event(keys[500:501], op=2))
    io = world.flying(Read)[0].io
    world.handle(ev.Purge(session=engine.scheduler))
    world.handle(replace(world.disk.finish(io, (0,)), kept=True))
    world.run()
    told = world.finish()
    assert any(isinstance(effect, ev.Purged) for effect in world.told), told
    assert world.resident(keys) == []


def test_word_of_what_was_forgotten_is_something_to_write():
    world, engine, keys = logged()
    world.settle(engine.query_event(keys[:1], op=1))
    world.finish()
    world.settle(ev.RestoreFailed(engine.scheduler, 1))
    assert world.core.storage.writing
    world.finish()
    assert not world.core.storage.writing


def test_what_could_not_be_looked_at_is_a_miss_and_stays():
    """A disk that was not there for a moment says nothing about its records."""
    world, engine, keys = logged()
    world.settle(engine.query_event(keys, op=1))
    io = world.flying(Read)[0].io
    told = world.settle(ev.Done(world.disk.finish(io, range(4)).io, (0, 1, 2, 3), kept=True))
    assert [(answer.resident, answer.reason) for answer in answers(told)] == [(0, Reason.READ_FAILED)]
    assert not [effect for effect in told if isinstance(effect, Forget)]
    assert [state_of(world, key) for key in keys] == [State.COLD] * 4
    world.settle(engine.query_event(keys, op=3))
    assert [answer.resident for answer in answers(world.finish())] == [4]


def test_what_one_log_lost_is_forgotten_there_alone():
    world = World()
    world.open_log(chain(2), log=0)
    world.open_log(log=1)
    engine = world.engine(slots=2)
    world.settle(engine.query_event(chain(2), op=1))
    told = world.complete(Read, failing=(0,))
    assert [effect.backing for effect in told if isinstance(effect, Forget)] == [0]


def test_a_rate_that_is_corrected_holds_at_once():
    world, engine = writing(limits=Limits(write_rate=1))
    engine.commit(chain(1))
    world.complete(Reuse)
    world.complete(Write)
    engine.commit(chain(1, "b"))
    assert not world.flying(Write)
    world.handle(ev.Configure(Limits()))
    assert len(world.flying(Write)) == 1


def test_finding_what_was_given_up_again_and_again_writes_little_of_it():
    """A log that is smaller than DRAM: questions alone must not keep its disk busy for ever."""
    world, engine = writing(segments=3, segment_bytes=SMALL, limits=Limits(second_touch=True), pages=16)
    keys = chain(20)
    engine.store(keys)
    for op in range(1, 60):
        engine.query(keys, op=op)
        engine.release(op)
        world.finish()
    written = sum(len(effect.objects) for effect in world.told if isinstance(effect, Write))
    assert written <= 2 * len(keys)
