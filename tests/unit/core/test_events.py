"""What a session that watches a space is told: which of its keys can be found, and which cannot any more."""

from dataclasses import replace
from typing import Any

import pytest
from testbed.core.core_world import NAMESPACE, SLOT, Engine, World, chain

from kvhold.core import events as ev
from kvhold.core.events import Added, Answer, Gone, Removed
from kvhold.core.limits import Limits, Quota
from kvhold.core.log.events import Read, Reuse, Write
from kvhold.core.log.segments import BLOCK, HEADER, footer_bytes, table_bytes

SMALL = BLOCK + 3 * (HEADER + SLOT) + footer_bytes(3, table_bytes(1))
"""A segment of three records."""


def watched(**world: Any) -> tuple[World, Engine]:
    world_ = World(**world)
    return world_, world_.engine(watch=True)


def split(packed: bytes) -> list[bytes]:
    return [packed[at : at + 8] for at in range(0, len(packed), 8)]


def heard(effects: list[ev.Effect], engine: Engine, space: int = 0) -> list[tuple[str, list[bytes]]]:
    """What a session was told of a space, in order."""
    return [
        ("+" if isinstance(effect, Added) else "-", split(effect.keys))
        for effect in effects
        if isinstance(effect, Added | Removed) and (effect.session, effect.space) == (engine.scheduler, space)
    ]


def gone(effects: list[ev.Effect], engine: Engine) -> list[bytes]:
    return [key for sign, keys in heard(effects, engine) for key in keys if sign == "-"]


class TestStored:
    def test_a_commit_is_told_in_its_order_with_what_was_there_already(self):
        _, engine = watched()
        first, second, third = chain(3)
        assert heard(engine.commit([third]), engine) == [("+", [third])]
        assert heard(engine.commit([first, third, second]), engine) == [("+", [first, third, second])]

    def test_only_who_committed_is_told(self):
        world, engine = watched()
        other = world.engine("other", watch=True)
        told = engine.commit(chain(1))
        assert heard(told, other) == []
        assert heard(other.commit(chain(1)), other) == [("+", chain(1))]

    def test_what_was_not_kept_is_not_told(self):
        world, engine = watched(limits=Limits(max_objects=1, prepared_share=1.0, engine_share=1.0))
        engine.commit(chain(1))
        engine.query(chain(1))
        told = engine.commit(chain(2))
        assert world.core.counters["over_max_objects"] == 1
        assert heard(told, engine) == [("+", chain(1))]

    def test_a_slot_of_another_time_stores_nothing_to_be_told_of(self):
        world, engine = watched()
        (slot,) = engine.take(1)
        stale = engine.commit_event(chain(1), [replace(slot, epoch=slot.epoch - 1)])
        assert heard(world.settle(stale), engine) == []

    def test_what_gives_way_to_a_commit_is_told_before_it(self):
        _, engine = watched(limits=Limits(max_objects=1))
        engine.commit(chain(1, "a"))
        told = engine.commit(chain(2, "b"))
        first, second = chain(2, "b")
        assert heard(told, engine) == [("-", [*chain(1, "a"), first]), ("+", [second])]

    def test_at_most_a_batch_a_message(self, monkeypatch: pytest.MonkeyPatch):
        world, engine = watched()
        monkeypatch.setattr(ev, "MAX_BATCH", 2)
        assert heard(engine.commit(chain(3)), engine) == [("+", chain(3)[:2]), ("+", chain(3)[2:])]
        told = world.settle(ev.Configure(Limits(max_objects=1)))
        assert [len(keys) for _, keys in heard(told, engine)] == [2]

    @pytest.mark.parametrize("how", ["not asked for", "closed"])
    def test_who_does_not_watch_is_told_nothing(self, how: str):
        world, engine = watched()
        if how == "closed":
            world.settle(ev.Close(engine.scheduler, 0))
        else:
            engine = world.engine("other")
        told = engine.commit(chain(2)) + world.settle(ev.Purge())
        assert heard(told, engine) == []


class TestRemoved:
    def test_an_eviction_without_a_log(self):
        world, engine = watched(pages=4)
        engine.commit(chain(2, "a"))
        before = len(world.told)
        engine.store(chain(20, "b"))
        left = gone(world.told[before:], engine)
        assert left[:2] == chain(2, "a")[::-1], "the end of a chain goes first"
        assert set(left).isdisjoint(world.resident([*chain(2, "a"), *chain(20, "b")]))
        assert len(left) == world.core.catalogue.evicted

    def test_everybody_who_watches_is_told_whoever_stored_it(self):
        world, engine = watched()
        others = [world.engine(name, watch=True) for name in ("two", "three")]
        deaf = world.engine("deaf")
        deaf.commit(chain(2))
        told = world.settle(ev.Purge())
        for one in (engine, *others):
            assert heard(told, one) == [("-", chain(2))]
        assert heard(told, deaf) == []

    def test_only_of_its_own_group_and_namespace(self):
        world, engine = watched()
        engine.open(1, group=1)
        engine.open(2, namespace=b"o" * 32, watch=True)
        for space in range(3):
            engine.commit(chain(1), space)
        assert gone(world.settle(ev.Purge(b"o" * 32)), engine) == []
        told = world.settle(ev.Purge(NAMESPACE))
        assert heard(told, engine, 0) == [("-", chain(1))]
        assert heard(told, engine, 1) == heard(told, engine, 2) == []

    def test_a_purge_tells_slice_by_slice(self, monkeypatch: pytest.MonkeyPatch):
        world, engine = watched()
        engine.commit(chain(4))
        monkeypatch.setattr(ev, "MAX_BATCH", 2)
        told = [heard(world.handle(ev.Purge()), engine)]
        while world.core.has_work:
            told.append(heard(world.step(), engine))
        assert max(sum(len(keys) for _, keys in slice_) for slice_ in told) <= 2
        assert sorted(key for slice_ in told for _, keys in slice_ for key in keys) == chain(4)

    def test_what_failed_to_be_restored(self):
        world, engine = watched()
        engine.commit(chain(3))
        engine.query(chain(2), op=1)
        assert heard(world.settle(ev.RestoreFailed(engine.scheduler, 1)), engine) == [("-", chain(2))]

    def test_quotas_and_limits_that_are_lowered(self):
        world, engine = watched()
        engine.commit(chain(3))
        told = world.settle(ev.Configure(Limits(max_objects=2)))
        assert gone(told, engine) == chain(3)[2:]
        spared = (len(engine.slots[0]) + 1) * SLOT
        told = world.settle(ev.Configure(Limits(quotas={NAMESPACE: Quota(limit=spared)})))
        assert gone(told, engine) == chain(3)[1:2]

    def test_a_page_that_changes_its_size(self):
        world, engine = watched(pages=1)
        engine.open(1, group=1, size=2 * SLOT, slots=0)
        engine.commit(chain(1))
        world.settle(ev.Close(engine.scheduler, 0))  # also the end of its watch
        other = world.engine("other", slots=0, watch=True)
        engine.back(engine.take(len(engine.slots[0])))
        large = world.engine("large", group=2, size=4 * SLOT, slots=1)
        assert len(large.slots[0]) == 1
        assert gone(world.told, other) == chain(1)
        assert gone(world.told, engine) == []

    def test_stored_again_it_is_told_again(self):
        world, engine = watched()
        told = engine.commit(chain(1)) + world.settle(ev.Purge()) + engine.commit(chain(1))
        assert heard(told, engine) == [("+", chain(1)), ("-", chain(1)), ("+", chain(1))]

    @pytest.mark.parametrize("how", [Gone.SAID, Gone.DEAD, Gone.UNKNOWN])
    @pytest.mark.parametrize("half", ["scheduler", "worker"])
    def test_nobody_is_told_after_a_half_was_lost(self, how: Gone, half: str):
        world, engine = watched()
        engine.commit(chain(1))
        world.settle(ev.Left(engine.scheduler if half == "scheduler" else engine.workers[0], how))
        assert gone(world.settle(ev.Purge()), engine) == []


class TestLogs:
    def test_going_to_a_log_alone_is_no_removal(self):
        world, engine = watched(pages=2)
        world.open_log()
        engine.commit(chain(1))
        world.finish()
        engine.store(chain(8, "b"))
        world.finish()
        assert engine.world_.core.catalogue.cold
        assert not set(chain(1)) & set(gone(world.told, engine))
        assert heard(engine.commit(chain(1)), engine)[-1] == ("+", chain(1)), "its bytes were stored anew"

    def test_a_segment_that_is_given_up_takes_what_is_in_no_dram(self):
        world, engine = watched(pages=2)
        world.open_log(segments=2, segment_bytes=SMALL)
        announced: set[bytes] = set()
        for name in "abcd":
            engine.store(chain(3, name))
            world.finish()
        assert sum(isinstance(effect, Reuse) for effect in world.told) > 2
        for sign, keys in heard(world.told, engine):
            announced = announced | set(keys) if sign == "+" else announced - set(keys)
        every = [key for name in "abcd" for key in chain(3, name)]
        assert announced == set(world.resident(every)) != set(every)

    def test_a_failed_read_is_told_before_what_is_answered_of_it(self):
        world = World()
        world.open_log(chain(3))
        engine = world.engine(slots=2, watch=True)
        world.settle(engine.query_event(chain(3), op=1))
        told = world.complete(Read, failing=(1,))
        (at,) = [at for at, effect in enumerate(told) if isinstance(effect, Answer)]
        assert heard(told[:at], engine) == [("-", chain(3)[1:2])]
        assert heard(told[at:], engine) == []

    def test_a_record_that_could_not_be_looked_at_is_no_removal(self):
        world = World()
        world.open_log(chain(2))
        engine = world.engine(slots=2, watch=True)
        world.settle(engine.query_event(chain(2), op=1))
        world.settle(ev.Done(world.disk.finish(world.flying(Read)[0].io, range(2)).io, (0, 1), kept=True))
        assert world.resident(chain(2)) == chain(2)
        assert gone(world.told, engine) == []

    def test_a_failed_write_is_no_removal(self):
        world, engine = watched()
        world.open_log()
        engine.commit(chain(2))
        world.complete(Reuse)
        world.complete(Write, failing=(0, 1))
        assert heard(world.told, engine) == [("+", chain(2))]
