"""What becomes an object, what does not, and where its slot goes."""

from array import array

import pytest
from testbed.core.core_world import NAMESPACE, PAGE, SLOT, Slot, World, chain, offsets_of, pack, slots_of

from kvhold.core import events as ev
from kvhold.core.events import Reason, Refuse
from kvhold.core.limits import Limits
from kvhold.core.rows import State


def test_a_commit_makes_objects_and_the_credits_are_topped_up():
    world = World()
    engine = world.engine(slots=3)
    slots = engine.take(3)
    (grant,) = world.settle(engine.commit_event(chain(3), slots))
    assert offsets_of(engine.query(chain(3))) == [slot.offset for slot in slots]
    fresh = slots_of(grant)
    assert len(fresh) == 3
    assert not {slot.offset for slot in fresh} & {slot.offset for slot in slots}
    assert not {slot.epoch for slot in fresh} & {slot.epoch for slot in slots}


def test_nothing_is_visible_before_its_commit():
    world = World()
    engine = world.engine()
    assert engine.query(chain(1)).resident == 0
    engine.commit(chain(1))
    assert engine.query(chain(1)).resident == 1


def test_a_commit_with_a_wrong_epoch_is_counted_and_ignored():
    world = World()
    engine = world.engine(slots=2)
    (good, bad) = engine.take(2)
    forged = Slot(bad.row, bad.offset, bad.epoch + 1)
    world.settle(engine.commit_event(chain(2), [good, forged]))
    assert engine.query(chain(2)).resident == 1
    assert world.core.counters["stale"] == 1
    world.settle(engine.commit_event(chain(2)[1:], [bad], parent=chain(1)[0]))
    assert engine.query(chain(2)).resident == 2, "the credit was not lost"


def test_a_commit_of_a_row_that_never_was_is_counted_and_ignored():
    world = World()
    engine = world.engine(slots=1)
    before = world.core.accounts()
    head = len(world.core.catalogue.state) + 5
    world.settle(engine.commit_event(chain(2), [Slot(head, 0, 1), Slot(2**32 - 1, 0, 1)]))
    assert world.core.counters["stale"] == 2
    assert world.core.accounts() == before


def test_a_commit_of_anothers_slot_is_counted_and_ignored():
    world = World()
    one, two = world.engine("one", slots=1), world.engine("two", slots=1)
    world.settle(one.commit_event(chain(1), two.slots[0]))
    assert world.core.counters["stale"] == 1
    assert world.core.objects == 0
    two.commit(chain(1))
    assert world.core.objects == 1


def test_a_commit_of_another_spaces_slot_is_counted_and_ignored():
    world = World()
    engine = world.engine(slots=1)
    engine.open(space=1, group=1, slots=1)
    world.settle(engine.commit_event(chain(1), engine.slots[1], space=0))
    assert world.core.counters["stale"] == 1
    assert world.core.objects == 0
    engine.commit(chain(1), space=1)
    assert world.core.objects == 1


def test_a_slot_is_committed_once():
    world = World()
    engine = world.engine(slots=1)
    slots = engine.take(1)
    world.settle(engine.commit_event(chain(2), slots * 2))
    world.settle(engine.commit_event(chain(2), slots * 2))
    assert world.core.counters["stale"] == 3
    assert world.resident(chain(2)) == chain(1)


def test_the_epoch_of_an_earlier_use_is_stale():
    world = World(pages=1)
    engine = world.engine(slots=1)
    (old,) = engine.take(1)
    engine.back([old])
    (new,) = engine.slots[0]
    assert (new.row, new.offset) == (old.row, old.offset)
    world.settle(engine.commit_event(chain(1), [old]))
    engine.back([old])
    assert world.core.counters["stale"] == 2
    assert (world.accounts["credit"], world.core.objects) == (SLOT, 0)
    engine.commit(chain(1))
    assert world.core.objects == 1
    world.settle(engine.commit_event(chain(1, "b"), [new]))
    engine.back([new])
    assert world.core.counters["stale"] == 4
    assert world.resident([*chain(1), *chain(1, "b")]) == chain(1)


def test_the_epoch_of_an_earlier_engine_is_stale():
    world = World(pages=1)
    lost = world.engine("lost", slots=1)
    (old,) = lost.take(1)
    lost.leave()
    heir = world.engine("heir", slots=1)
    assert heir.slots[0][0].row == old.row
    world.settle(heir.commit_event(chain(1), [old]))
    assert (world.core.counters["stale"], world.core.objects) == (1, 0)


def test_a_duplicate_gives_its_slot_back_and_another_is_granted():
    world = World()
    one, two = world.engine("one", slots=2), world.engine("two", slots=2)
    one.commit(chain(2))
    kept = offsets_of(one.query(chain(2), op=1))
    (grant,) = two.commit(chain(2))
    assert (grant.session, len(slots_of(grant))) == (two.scheduler, 2)
    assert world.core.counters["duplicates"] == 2
    assert offsets_of(two.query(chain(2), op=2)) == kept
    assert world.accounts["credit"] == 4 * SLOT


def test_a_key_twice_in_one_batch_is_stored_once():
    world = World()
    engine = world.engine()
    slots = engine.take(3)
    world.settle(engine.commit_event([b"same key", b"same key", b"after it"], slots))
    assert (world.core.objects, world.core.counters["duplicates"]) == (2, 1)
    assert offsets_of(engine.query([b"same key", b"after it"])) == [slots[0].offset, slots[2].offset]


@pytest.mark.parametrize("shards", [(SLOT,), (SLOT, SLOT, SLOT), (SLOT, SLOT - 1), (SLOT - 1, SLOT + 1)])
def test_a_commit_without_every_shard_in_full_is_refused(shards: tuple[int, ...]):
    world = World()
    engine = world.engine(world=2, size=2 * SLOT, slots=1)
    (refusal,) = world.settle(engine.commit_event(chain(1), engine.slots[0], shards=shards))
    assert isinstance(refusal, Refuse)
    assert world.core.objects == 0
    engine.commit(chain(1))
    assert world.core.objects == 1


def test_a_commit_whose_keys_do_not_fit_its_slots_is_refused():
    world = World()
    engine = world.engine(slots=2)
    for keys in ([], chain(1), [*chain(1), b"half"], chain(3)):
        (refusal,) = world.settle(engine.commit_event(keys, engine.slots[0]))
        assert isinstance(refusal, Refuse)
    assert isinstance(world.settle(engine.commit_event(chain(2), engine.slots[0], space=7, shards=(SLOT,)))[0], Refuse)
    assert world.core.objects == 0


def test_one_key_in_two_namespaces_and_groups_is_three_objects():
    world = World()
    engine = world.engine()
    engine.open(space=1, group=1)
    engine.open(space=2, namespace=b"m" * 32)
    key = chain(1)
    where = {}
    for space in (0, 1, 2):
        assert engine.query(key, space=space).reason is Reason.NOT_STORED
        slots = engine.take(1, space)
        world.settle(engine.commit_event(key, slots, space))
        where[space] = [slots[0].offset]
    for space in (0, 1, 2):
        assert offsets_of(engine.query(key, space=space)) == where[space]
    world.settle(ev.Purge(b"m" * 32))
    assert [engine.query(key, space=space).resident for space in (0, 1, 2)] == [1, 1, 0]


def test_engines_of_one_namespace_share_its_objects():
    world = World()
    one, two = world.engine("one"), world.engine("two")
    one.store(chain(3))
    assert two.query(chain(3)).resident == 3


def test_a_returned_slot_is_free_and_granted_again():
    world = World()
    engine = world.engine(slots=3)
    told = engine.back(engine.take(2))
    assert [len(slots_of(grant)) for grant in told if isinstance(grant, ev.Grant)] == [2]
    assert (world.accounts["credit"], world.core.counters["returns"]) == (3 * SLOT, 2)
    slot = engine.take(1)
    engine.back(slot * 2)
    assert world.core.counters["stale"] == 1
    assert world.accounts["credit"] == 3 * SLOT


def test_another_engines_slot_cannot_be_returned():
    world = World()
    one, two = world.engine("one", slots=1), world.engine("two", slots=1)
    one.back(two.slots[0])
    assert world.core.counters["stale"] == 1
    two.commit(chain(1))
    assert world.core.objects == 1


def test_slots_of_several_spaces_return_together():
    world = World()
    engine = world.engine(slots=1)
    engine.open(space=1, group=1, size=2 * SLOT, slots=1)
    world.settle(ev.Close(engine.scheduler, 1))
    told = engine.back([*engine.take(1, 0), *engine.take(1, 1)])
    assert [effect.space for effect in told if isinstance(effect, ev.Grant)] == [0], "space 1 is closed"
    assert world.accounts["credit"] == SLOT


def test_a_branch_whose_parent_is_known_goes_with_it():
    """The parent of a batch may be an object of an earlier one, a duplicate in this one, or a slot that was stale."""
    world = World(pages=2)
    engine = world.engine()
    trunk = chain(2)
    engine.store(trunk)
    engine.store(chain(3, "z"))
    slots = engine.take(1)
    world.settle(engine.commit_event([*trunk, b"leaf 1.."], [Slot(900, 0, 0), Slot(901, 0, 0), *slots]))
    engine.query(trunk, skip=2)  # the branch stays behind
    engine.store(chain(3, "y"))
    assert world.resident([*trunk, b"leaf 1.."]) == trunk


def test_a_stored_chain_loses_its_end_first_however_it_was_committed():
    world = World(pages=8)
    engine = world.engine()
    keys = chain(24)
    engine.store(keys[:10])
    engine.store(chain(4, "z"))
    for start in range(10, 24, 2):
        engine.commit(keys[start : start + 2], parent=keys[start - 1])
    kept = len(keys)
    for i in range(8):
        engine.store(chain(3, f"n{i}"))
        resident = world.resident(keys)
        assert resident == keys[: len(resident)]
        assert len(resident) <= kept
        kept = len(resident)
    assert kept < 10


def test_purge_while_leased_keeps_the_bytes_and_forgets_the_object():
    world = World(pages=2)
    engine = world.engine(slots=1)
    engine.store(chain(3))
    read = offsets_of(engine.query(chain(2), op=1))
    world.settle(ev.Purge())
    assert world.accounts["doomed"] == 2 * SLOT
    assert engine.query(chain(3)).resident == 0
    engine.store(chain(3))
    engine.store(chain(20, "b"))
    again = engine.query(chain(3), op=2)
    assert not set(read) & {*offsets_of(again), *(slot.offset for slot in engine.slots[0])}
    engine.release(1)
    assert "doomed" not in world.accounts


def test_purge_of_one_namespace_leaves_the_others_and_the_credits():
    world = World()
    one, two = world.engine("one", slots=2), world.engine("two", namespace=b"m" * 32, slots=2)
    one.store(chain(4))
    two.store(chain(4))
    credit = world.accounts["credit"]
    world.settle(ev.Purge(b"m" * 32))
    assert world.resident(chain(4)) == chain(4)
    assert world.resident(chain(4), namespace=b"m" * 32) == []
    assert world.accounts["credit"] == credit
    assert world.core.counters["purged"] == 4


def test_purge_goes_in_slices_and_spares_what_is_granted_meanwhile(monkeypatch: pytest.MonkeyPatch):
    world = World()
    engine = world.engine(slots=8)
    engine.store(chain(12))
    monkeypatch.setattr(ev, "MAX_BATCH", 4)
    rows = len(world.core.catalogue.state)
    world.handle(ev.Purge())
    assert 0 < world.core.objects < 12
    slots = engine.take(8)  # together, so that not all of them come back as rows that the purge has passed
    for half in (slots[:4], slots[4:]):
        world.handle(ev.Return(engine.scheduler, *pack(half)))
    late, slots = chain(4, "late"), [slot for slot in engine.take(8) if slot.row >= ev.MAX_BATCH][:4]
    assert len(slots) == 4
    world.handle(engine.commit_event(late, slots))
    assert world.core.objects > 4
    world.run()
    assert max(slot.row for slot in slots) < rows
    assert world.resident(chain(12)) == []
    assert world.resident(late) == late


def test_purge_reaches_the_last_row():
    world = World()
    engine = world.engine(slots=2)
    engine.commit(chain(2))
    world.settle(ev.Close(engine.scheduler, 0))
    engine.commit(chain(4)[2:])
    assert world.core.catalogue.state[-1] == State.RESIDENT
    world.settle(ev.Purge())
    assert world.core.objects == 0


@pytest.mark.parametrize(("size", "share"), [(2 * SLOT, 0.9), (PAGE, 0.9), (3 * SLOT, 0.8)])  # the last spans pages
def test_a_class_shift_leaves_most_to_the_newcomer_once_the_leases_end(size: int, share: float):
    world = World(pages=32)
    old = world.engine("old", slots=2)
    keys = chain(120)
    old.store(keys)
    old.query(keys[::3], op=1)
    held = world.accounts["leased"]
    assert held > world.core.arena.total // 4
    new = world.engine("new", size=size, group=1)
    fresh = chain(200, "b")
    for start in range(0, len(fresh), 2):
        if batch := fresh[start : start + min(2, len(new.slots.get(0, [])))]:
            new.commit(batch, parent=fresh[start - 1])
    assert world.accounts["leased"] == held, "what is held stays"
    old.release(1)
    fresh = chain(200, "c")
    new.store(fresh)
    index = world.core.catalogue._by_name[b"n" * 32, 1]
    assert (len(index) + len(new.slots[0])) * size >= share * world.core.arena.total


def test_a_shift_to_larger_objects_works_while_both_are_in_use():
    world = World(pages=16)
    small, large = world.engine("small", slots=4), world.engine("large", size=PAGE, group=1, slots=1)
    for i in range(60):
        small.store(chain(4, f"s{i}"))
        large.store(chain(1, f"l{i}"))
    by_group = {index.group: index.size * len(index) for index in world.core.catalogue.indexes.values()}
    assert min(by_group.values()) >= 2 * PAGE


def test_the_same_log_has_the_same_effects():
    world = World(pages=8)
    engines = [world.engine("one"), world.engine("two", world=2, group=1, size=3 * SLOT)]
    for i in range(12):
        for engine in engines:
            engine.store(chain(5, f"k{i}"))
            engine.query(chain(5, f"k{i // 2}"), op=i)
            if i % 3 == 2:
                engine.release(i, i - 1, i - 2)
    engines[0].leave(ev.Gone.UNKNOWN)
    engines[0].leave()
    world.settle(ev.Purge())
    engines[1].leave()
    replayed = World(pages=8)
    told = []
    for event, now in world.log[1:]:
        told += replayed.core.step() if event is None else replayed.core.handle(event, now)
    assert told == world.told
    assert replayed.core.accounts() == world.core.accounts()
    assert any(isinstance(effect, ev.Grant) for effect in told)


def test_packed_fields_are_little_endian_arrays_of_the_sizes_that_events_state():
    world = World()
    engine = world.engine(slots=2)
    rows, epochs = pack(engine.slots[0])
    assert (array("I").itemsize, array("Q").itemsize) == (4, 8)
    assert [int.from_bytes(rows[i : i + 4], "little") for i in (0, 4)] == [slot.row for slot in engine.slots[0]]
    assert int.from_bytes(epochs[8:], "little") == engine.slots[0][1].epoch


def test_of_a_chain_that_does_not_fit_its_beginning_is_kept_however_often_it_is_stored():
    world = World(pages=8)  # of four slots each
    engine = world.engine(slots=8, chain=True)
    keys = chain(46)
    kept: list[int] = []
    for _ in range(4):
        resident = engine.query(keys).resident
        parent, done = keys[resident - 1] if resident else b"", resident
        while done < len(keys):
            batch = keys[done : done + len(engine.slots[0])]
            engine.commit(batch, parent=parent)
            parent, done = batch[-1], done + len(batch)
        here = world.resident(keys)
        assert here == keys[: len(here)], "what nobody can use is kept"
        kept.append(len(here))
    assert kept == [28] * 4, "but for the slots that are granted"
    assert world.core.counters["unreachable"] > 0


def test_objects_without_what_comes_before_them_are_kept_where_each_is_of_use():
    world = World()
    engine = world.engine(slots=4)
    engine.commit(chain(8)[6:], parent=chain(8)[5])
    assert world.resident(chain(8)) == chain(8)[6:]


def test_a_chain_may_be_continued_where_only_a_log_has_what_comes_before():
    world = World()
    world.open_log(chain(2))
    engine = world.engine(slots=4, chain=True)
    engine.commit(chain(3)[2:], parent=chain(2)[1])
    assert world.resident(chain(3)) == chain(3)


def test_what_follows_an_object_that_is_gone_is_the_next_to_go():
    world = World(pages=4)  # sixteen slots
    engine = world.engine(slots=2, chain=True)
    engine.store(chain(6, "a"))
    engine.store(chain(6, "b"))
    engine.query(chain(6, "a"), op=1)
    world.settle(ev.Release(engine.scheduler, ((1, 1),)))
    index = world.core.catalogue.find(NAMESPACE, 0)
    world.core.catalogue.remove(index.get(chain(6, "a")[2]))  # as a page does that objects of another size need
    for number in range(6):
        engine.commit(chain(1, f"c{number}"))
    assert world.resident(chain(6, "b")) == chain(6, "b"), "older, but of use"
    assert world.resident(chain(6, "a")) == chain(6, "a")[:2]


@pytest.mark.parametrize("limit", [3, 4, 5])
def test_a_chain_of_too_many_objects_keeps_its_beginning(limit: int):
    world = World(limits=Limits(max_objects=limit))
    engine = world.engine(slots=8, chain=True)
    for _ in range(2):
        engine.commit(chain(8))
        here = world.resident(chain(8))
        assert here == chain(limit)[: len(here)]
        assert len(here) >= limit - 1
