"""Who is here, who is ready, and when what they held is free."""

import itertools

import pytest
from testbed.core.core_world import PAGE, SLOT, World, chain

from kvhold.core import events as ev
from kvhold.core.events import Detach, Gone, Ready, Reason, Refuse, Role
from kvhold.core.limits import Limits


def joined(session: int, role: Role, rank: int, instance: str = "engine", world: int = 2) -> ev.Joined:
    return ev.Joined(session, role, instance, rank, world)


ARRIVALS = [
    joined(1, Role.SCHEDULER, 0),
    joined(2, Role.WORKER, 0),
    joined(3, Role.WORKER, 1),
    ev.Mapped(2),
    ev.Mapped(3),
]


def test_ready_comes_with_the_last_arrival_whatever_the_order():
    orders = [
        order
        for order in itertools.permutations(ARRIVALS)
        if order.index(ARRIVALS[1]) < order.index(ARRIVALS[3]) and order.index(ARRIVALS[2]) < order.index(ARRIVALS[4])
    ]
    for order in orders:
        world = World()
        told = [world.handle(event) for event in order]
        assert not any(isinstance(effect, Ready) for effects in told[:-1] for effect in effects)
        (ready,) = (effect for effect in told[-1] if isinstance(effect, Ready))
        assert ready.session == 1
        assert sorted(ready.workers) == [2, 3]


def test_ready_is_said_once():
    world = World()
    engine = world.engine(world=2)
    assert world.handle(ev.Mapped(engine.workers[0])) == []
    assert sum(isinstance(effect, Ready) for effect in world.told) == 1


def test_queries_before_ready_are_detached_but_credits_come_at_once():
    world = World()
    scheduler = world.session()
    world.handle(joined(scheduler, Role.SCHEDULER, 0, world=1))
    world.engines[scheduler] = engine = world.engine("other", space=False)
    engine.scheduler = scheduler
    engine.open(slots=3)
    assert len(engine.slots[0]) == 3
    assert engine.query(chain(1)).reason is Reason.DETACHED


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (joined(9, Role.SCHEDULER, 0), "already has a live scheduler"),
        (joined(9, Role.SCHEDULER, 1), "already has a live scheduler"),
        (joined(9, Role.WORKER, 1), "already has a live worker"),
        (joined(9, Role.WORKER, 0, world=3), "has 2 ranks, not 3"),
    ],
)
def test_a_second_half_or_another_world_is_refused(event: ev.Joined, why: str):
    world = World()
    world.engine(world=2, space=False)
    (refusal,) = world.handle(event)
    assert isinstance(refusal, Refuse)
    assert why in refusal.reason
    assert 9 not in world.core.sessions


def test_instances_do_not_meet():
    world = World()
    one, two = world.engine("one"), world.engine("two")
    assert [effect.session for effect in world.told if isinstance(effect, Ready)] == [one.scheduler, two.scheduler]


@pytest.mark.parametrize("how", [Gone.DEAD, Gone.UNKNOWN])
def test_a_lost_half_parts_the_others(how: Gone):
    world = World()
    engine = world.engine(world=2)
    effects = world.handle(ev.Left(engine.workers[1], how))
    parted = [effect.session for effect in effects if isinstance(effect, Detach)]
    assert parted == [engine.scheduler, engine.workers[0]]
    assert world.handle(ev.Left(engine.workers[0], Gone.UNKNOWN)) == [], "they are parted once"


def test_a_half_that_says_goodbye_parts_nobody():
    world = World()
    engine = world.engine()
    assert world.handle(ev.Left(engine.workers[0], Gone.SAID)) == []


@pytest.mark.parametrize("how", list(Gone))
def test_a_broken_attachment_is_never_ready_again(how: Gone):
    world = World()
    engine = world.engine()
    engine.store(chain(2))
    world.settle(ev.Left(engine.workers[0], how))
    assert engine.query(chain(2)).reason is Reason.DETACHED
    # The worker that comes again belongs to a new attachment, with whoever comes again beside it.
    worker = world.session()
    world.handle(ev.Joined(worker, Role.WORKER, "engine", 0, 1))
    assert not any(isinstance(effect, Ready) for effect in world.handle(ev.Mapped(worker)))
    assert engine.query(chain(2)).reason is Reason.DETACHED
    scheduler = world.session()
    ready = world.handle(ev.Joined(scheduler, Role.SCHEDULER, "engine", 0, 1))
    assert Ready(scheduler, (worker,)) in ready


def test_a_worker_lost_before_ready_does_not_count():
    """Whichever comes last: the lost one is not waited for, nor counted."""
    lost = ev.Left(2, Gone.UNKNOWN)
    for order in itertools.permutations([*ARRIVALS[:4], lost]):
        if order.index(ARRIVALS[1]) < order.index(ARRIVALS[3]) < order.index(lost):
            world = World()
            told = [effect for event in order for effect in world.handle(event)]
            told += world.handle(ev.Mapped(3)) + world.handle(ev.Mapped(2))
            assert not any(isinstance(effect, Ready) for effect in told)


def test_credits_are_orphaned_until_every_half_is_proved_gone():
    world = World()
    engine = world.engine(world=2, shards=(SLOT, 1), slots=3)
    assert world.accounts["credit"] == 6 * SLOT
    world.settle(ev.Left(engine.scheduler, Gone.UNKNOWN))
    assert (world.accounts["orphaned"], world.accounts.get("credit")) == (6 * SLOT, None)
    for session in engine.workers:
        world.settle(ev.Left(session, Gone.UNKNOWN))
    for session in [engine.workers[1], engine.scheduler]:
        world.settle(ev.Left(session, Gone.DEAD))
        assert world.accounts["orphaned"] == 6 * SLOT, "one half may still be copying"
    world.settle(ev.Left(engine.workers[0], Gone.SAID))
    assert world.accounts == {"free_pages": world.core.arena.total}


def test_a_lost_engines_slots_are_granted_to_nobody_and_then_to_another():
    world = World(pages=2)
    lost = world.engine("lost", slots=1)
    held = lost.slots[0][0]
    world.settle(ev.Left(lost.workers[0], Gone.UNKNOWN))
    other = world.engine("other")
    other.store(chain(20, "o"))
    assert held.offset not in {slot.offset for slot in other.slots[0]}
    assert len(world.resident(chain(20, "o"))) <= 7
    lost.leave()
    other.store(chain(20, "p"))
    assert len(world.resident(chain(20, "p"))) == 7


def test_leases_last_until_every_half_is_proved_gone():
    world = World(pages=2)
    engine, other = world.engine("one", slots=1), world.engine("two", slots=1)
    engine.store(chain(4))
    engine.query(chain(4))
    for session in (engine.scheduler, engine.workers[0]):
        world.settle(ev.Left(session, Gone.UNKNOWN))
    world.settle(ev.Left(engine.scheduler, Gone.DEAD))
    other.store(chain(20, "b"))
    assert world.resident(chain(4)) == chain(4)
    assert world.accounts["leased"] == 4 * SLOT
    world.settle(ev.Left(engine.workers[0], Gone.DEAD))
    assert "leased" not in world.accounts
    other.store(chain(20, "c"))
    assert world.resident(chain(4)) == []


def test_what_a_dead_engine_held_is_freed_in_slices(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ev, "MAX_BATCH", 4)
    world = World()
    engine = world.engine(slots=6)
    engine.store(chain(10))
    engine.query(chain(10))
    world.handle(ev.Left(engine.workers[0], Gone.DEAD))
    world.handle(ev.Left(engine.scheduler, Gone.DEAD))
    held = [(world.accounts.get("leased", 0) // SLOT, world.accounts.get("orphaned", 0) // SLOT)]
    while world.core.has_work:
        world.step()
        held.append((world.accounts.get("leased", 0) // SLOT, world.accounts.get("orphaned", 0) // SLOT))
    assert held[0] == (6, 6)
    assert held[-1] == (0, 0)
    assert all(sum(before) - sum(after) <= 4 for before, after in itertools.pairwise(held))
    assert world.accounts.keys() == {"free_pages", "free_slots", "resident"}


def test_new_sessions_are_refused_while_too_much_is_orphaned():
    world = World(pages=2)
    engine = world.engine(slots=1)
    engine.store(chain(5))
    engine.query(chain(5))
    world.settle(ev.Left(engine.workers[0], Gone.UNKNOWN))
    assert world.core.orphaned_bytes == 6 * SLOT
    (refusal,) = world.handle(joined(98, Role.WORKER, 0, "new"))
    assert isinstance(refusal, Refuse)
    assert "kvhold status" in refusal.reason
    engine.leave()
    assert not isinstance(world.handle(joined(99, Role.WORKER, 0, "new"))[0], Refuse)


def test_the_engine_whose_bytes_are_orphaned_may_come_back():
    world = World(pages=2)
    engine = world.engine("one", slots=1)
    engine.store(chain(5))
    engine.query(chain(5))
    for session in [*engine.workers, engine.scheduler]:
        world.settle(ev.Left(session, Gone.UNKNOWN))
    assert isinstance(world.handle(joined(98, Role.WORKER, 0, "other"))[0], Refuse)
    assert not isinstance(world.handle(joined(99, Role.WORKER, 0, "one"))[0], Refuse)


def test_what_is_still_being_freed_refuses_nobody(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ev, "MAX_BATCH", 4)
    world = World(pages=3)
    engine = world.engine(slots=1)
    for space in range(1, 7):
        engine.open(space, group=space, slots=1)
    engine.leave(Gone.UNKNOWN)
    world.settle(ev.Left(engine.scheduler, Gone.DEAD))
    assert isinstance(world.handle(joined(98, Role.WORKER, 0, "new"))[0], Refuse)
    world.handle(ev.Left(engine.workers[0], Gone.DEAD))
    assert world.core.has_work
    assert not isinstance(world.handle(joined(99, Role.WORKER, 0, "new"))[0], Refuse)


def test_orphaned_bytes_are_counted_once_however_many_leases_share_them():
    world = World(pages=2)
    engine = world.engine(slots=1)
    engine.store(chain(2))
    for _ in range(10):
        engine.query(chain(2))
    world.settle(ev.Left(engine.scheduler, Gone.UNKNOWN))
    assert world.core.orphaned_bytes == 3 * SLOT


def test_goodbye_from_all_frees_everything_but_objects():
    world = World()
    engine = world.engine(world=2, size=2 * SLOT)
    engine.store(chain(2))
    engine.query(chain(2))
    engine.leave(Gone.SAID)
    assert world.accounts.keys() == {"free_pages", "resident"}
    assert not world.core.attachments
    assert not world.core.sessions


def test_events_of_sessions_that_are_gone_or_only_workers_change_nothing():
    world = World()
    engine = world.engine()
    slots = engine.take(2)
    before = world.core.accounts()
    keys = chain(1)
    worker = engine.workers[0]
    for session in (worker, 777):
        for event in (
            ev.Open(session, 5, b"n" * 32, 0, 8, (SLOT,), 3),
            ev.Close(session, 0),
            ev.Release(session, ((1, 1),)),
            ev.Return(session, b"", b""),
        ):
            assert world.settle(event) == []
        engine.scheduler, real = session, engine.scheduler
        assert world.settle(engine.commit_event(keys, slots[:1])) == []
        assert engine.query(keys).reason is Reason.DETACHED
        engine.scheduler = real
    assert world.settle(ev.Mapped(777)) == []
    assert world.settle(ev.Left(777, Gone.DEAD)) == []
    assert world.core.accounts() == before
    assert world.core.counters["stale"] == 2


@pytest.mark.parametrize(
    "change", [{"shards": (SLOT,) * 3}, {"shards": ()}, {"key_bytes": 0}, {"space": 0}, {"shards": (0, 0)}]
)
def test_a_space_opened_twice_or_without_geometry_is_refused(change: dict[str, object]):
    world = World()
    engine = world.engine(world=2)
    fields = {"space": 1, "namespace": b"m" * 32, "group": 0, "key_bytes": 8, "shards": (SLOT, SLOT), "slots": 1}
    (refusal,) = world.handle(ev.Open(engine.scheduler, **(fields | change)))  # type: ignore[arg-type]
    assert isinstance(refusal, Refuse)


def test_spaces_are_bounded():
    world = World(limits=Limits(spaces=2))
    engine = world.engine()
    engine.open(space=1, group=1)
    assert isinstance(engine.open(space=2, group=2)[0], Refuse)


def test_one_namespace_has_one_geometry_while_it_is_in_use():
    world = World()
    one, two = world.engine("one"), world.engine("two", space=False)
    (refusal,) = two.open(size=2 * SLOT)
    assert isinstance(refusal, Refuse)
    assert "another geometry" in refusal.reason
    one.leave()
    assert isinstance(two.open(size=2 * SLOT)[0], ev.Opened)


def test_an_object_larger_than_the_arena_is_noted_and_granted_nothing():
    world = World(pages=2)
    engine = world.engine(space=False)
    (opened,) = engine.open(size=3 * PAGE)
    assert (opened.credit, "more than the whole arena" in opened.note) == (0, True)
    assert engine.query(chain(2)).reason is Reason.NOT_STORED


def test_a_space_that_wants_no_credits_can_still_be_asked():
    world = World()
    reader = world.engine("reader", slots=0)
    assert reader.query(chain(2)) == ev.Answer(reader.scheduler, 1000, 1, 0, b"", Reason.NOT_STORED)
    writer = world.engine("writer")
    writer.store(chain(2))
    assert reader.query(chain(2)).resident == 2


def test_credits_stop_at_a_share_of_the_arena_and_wait_for_pages():
    world = World(pages=16, populated=0)
    engine = world.engine()
    opened = next(effect for effect in world.told if isinstance(effect, ev.Opened))
    assert opened.credit == 16 * 4 // 8
    assert engine.slots == {}
    world.settle(ev.Populated(1))
    assert len(engine.slots[0]) == 4
    world.settle(ev.Populated(15))
    assert len(engine.slots[0]) == 8


def test_grants_of_one_event_are_bounded():
    world = World(pages=2048)
    engine = world.engine(space=False)
    told = world.handle(ev.Open(engine.scheduler, 0, b"n" * 32, 0, 8, (SLOT,), 1000))
    engine.shards[0] = (SLOT,)
    assert len(engine.slots[0]) == ev.MAX_BATCH
    assert [type(effect) for effect in told] == [ev.Opened, ev.Grant]
    world.run()
    assert len(engine.slots[0]) == 1000


def test_grants_of_one_event_cost_a_bounded_number_of_objects(monkeypatch: pytest.MonkeyPatch):
    world = World(pages=64)
    small = world.engine("small", slots=8)
    small.store(chain(240))
    monkeypatch.setattr(ev, "MAX_BATCH", 6)
    large = world.engine("large", space=False)
    large.shards[0] = (PAGE,)
    before = world.core.objects
    world.handle(ev.Open(large.scheduler, 0, b"n" * 32, 1, 8, (PAGE,), 8))
    assert before - world.core.objects <= 6 + 4
    assert 0 < len(large.slots[0]) < 8
    world.run()
    assert len(large.slots[0]) == 8


def test_work_for_credits_ends_while_everything_is_held(monkeypatch: pytest.MonkeyPatch):
    """A space that gets nothing, whatever is looked at, must not be tried for ever on behalf of one that does."""
    world = World(pages=16)
    engine = world.engine(slots=8)
    keys = chain(56)
    engine.store(keys)
    monkeypatch.setattr(ev, "MAX_BATCH", 4)
    engine.query(keys[:48], op=1)
    large = world.engine("large", space=False)
    large.open(space=0, group=1, size=2 * PAGE, slots=2)
    large.open(space=1, group=2, size=SLOT, slots=8)
    engine.back(engine.take(8))
    assert world.accounts["leased"] == 48 * SLOT
    assert len(large.slots[1]) == 5  # its share: a twelfth


def test_a_closed_space_is_gone_with_its_last_credit():
    world = World()
    engine = world.engine(slots=3)
    slots = engine.take(3)
    world.settle(ev.Close(engine.scheduler, 0))
    engine.back(slots[:1])
    world.settle(engine.commit_event(chain(1), slots[1:2]))
    assert engine.query(chain(1)).resident == 1
    assert engine.slots[0] == [], "nothing is granted to a closed space"
    engine.back(slots[2:])
    assert engine.query(chain(1)).reason is Reason.DETACHED
    engine.open(slots=3)
    assert engine.query(chain(1), op=50).resident == 1
