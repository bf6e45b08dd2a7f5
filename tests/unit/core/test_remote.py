"""What a remote store is given, what becomes of that, and how long anybody waits for what it gives."""

from testbed.core.core_world import NAMESPACE, SLOT, Engine, World, chain
from testbed.core.shared_store import opened

from kvhold.core import events as ev
from kvhold.core.events import Gone, Reason
from kvhold.core.limits import Limits
from kvhold.core.remote.backing import PUTS, RemoteBacking
from kvhold.core.remote.events import RemoteOpened, Serves
from kvhold.core.rows import State

STORE = 8
SECOND = 1_000_000_000


def world_of(*there: bytes, pages: int = 8, **limits: int) -> tuple[World, Engine, RemoteBacking]:
    world = World(pages=pages, limits=Limits(prepared_share=1, engine_share=1, **limits))  # type: ignore[arg-type]
    engine = world.engine(slots=3, chain=True)
    world.disk.stores[STORE] = {(NAMESPACE, 0, key) for key in there}
    for event in opened(STORE):
        world.handle(event)
    backing = world.core.storage.backings[STORE]
    assert isinstance(backing, RemoteBacking)
    return world, engine, backing


def finish(world: World, kind: type[ev.ToBacking], bad: list[int] | None = None) -> list[ev.Effect]:
    """End what is under way of one kind."""
    effects: list[ev.Effect] = []
    for io in world.flying(kind):
        effects += world.settle(world.disk.finish(io.io, bad or []))
    return effects


def answers(effects: list[ev.Effect]) -> list[ev.Answer]:
    return [effect for effect in effects if isinstance(effect, ev.Answer)]


def hit(engine: Engine, keys: list[bytes]) -> int:
    """How many of ``keys`` can be had."""
    (answer,) = answers(engine.world_.settle(engine.query_event(keys)))
    engine.release(engine.next_op - 1)
    return answer.resident


def later(world: World, nanoseconds: int) -> list[ev.Effect]:
    world.now += nanoseconds
    return world.settle(ev.Tick())


# --- putting ----------------------------------------------------------------------------------------------------


def test_what_is_stored_is_given_with_its_chain_and_age() -> None:
    world, engine, _ = world_of()
    keys = chain(2)
    then = world.now
    engine.commit(keys)
    assert [[(one.key, one.parent, one.depth) for one in io.objects] for io in world.flying(ev.Write)] == [
        [(keys[0], b"", 0), (keys[1], keys[0], 1)]
    ]
    assert all(0 <= one.age <= world.now - then for one in world.flying(ev.Write)[0].objects)


def test_so_much_is_under_way_at_most() -> None:
    """What is put is leased: the store must not hold the arena."""
    world, engine, backing = world_of(pages=16)
    share = world.core.arena.total // 8
    engine.store(chain(64))
    assert len(world.flying(ev.Write)) <= PUTS
    assert backing.putting <= share + SLOT
    assert backing.queued_writes > 0
    while world.flying(ev.Write):
        finish(world, ev.Write)
    assert not backing.busy


def test_puts_keep_to_their_rate() -> None:
    world, engine, _ = world_of(put_rate=SLOT)
    engine.commit(chain(1))
    engine.commit(chain(1, "b"))
    finish(world, ev.Write)
    assert not world.flying(ev.Write), "a slot a second"
    deadline = world.core.next_deadline
    assert deadline is not None
    assert world.now < deadline <= world.now + SECOND
    later(world, SECOND)
    assert len(world.flying(ev.Write)) == 1


def test_a_store_that_is_only_read_gets_nothing() -> None:
    world = World(pages=8)
    engine = world.engine(slots=3)
    world.handle(RemoteOpened(STORE, read_only=True))
    world.handle(Serves(STORE, serves=True))
    engine.commit(chain(2))
    assert not world.flying(ev.Write)


def test_what_is_private_is_not_given() -> None:
    world = World(pages=8)
    for event in opened(STORE):
        world.handle(event)
    engine = world.engine(slots=3, private=True)
    engine.commit(chain(2))
    assert not world.flying(ev.Write)


def test_what_it_does_not_take_is_dropped_and_offered_when_it_is_used_later() -> None:
    world, engine, backing = world_of()
    engine.commit(chain(1))
    finish(world, ev.Write, bad=[0])
    assert backing.dropped == 1
    assert hit(engine, chain(1)) == 1
    assert not world.flying(ev.Write), "it said no just now"
    later(world, 601 * SECOND)
    assert hit(engine, chain(1)) == 1
    assert len(world.flying(ev.Write)) == 1


def test_what_it_said_to_have_is_offered_again_when_that_is_long_ago() -> None:
    world, engine, backing = world_of()
    engine.commit(chain(1))
    finish(world, ev.Write)
    assert backing.objects == 1
    later(world, 599 * SECOND)
    hit(engine, chain(1))
    assert not world.flying(ev.Write)
    later(world, 2 * SECOND)
    hit(engine, chain(1))
    finish(world, ev.Write)
    hit(engine, chain(1))
    assert not world.flying(ev.Write)
    assert backing.objects == 1


def test_nothing_waits_for_a_store_that_does_not_serve() -> None:
    world, engine, backing = world_of(pages=16)
    engine.store(chain(64, "b"))
    assert backing.queued_writes
    world.handle(Serves(STORE, serves=False))
    assert not backing.queued_writes
    finish(world, ev.Write, bad=list(range(256)))
    engine.commit(chain(1))
    assert not world.flying(ev.Write)
    dropped = backing.dropped
    assert dropped >= 60
    world.handle(Serves(STORE, serves=True))
    hit(engine, chain(1))
    assert len(world.flying(ev.Write)) == 1, "what it has missed is offered when it is used"


# --- fetching ---------------------------------------------------------------------------------------------------


def test_nobody_waits_longer_than_a_second_for_what_it_gives() -> None:
    """Until its read has ended the slot is held; what came in time is the answer, and what comes late counts."""
    keys = chain(3)
    world, engine, _ = world_of(*keys[1:])
    engine.commit(keys[:1])
    finish(world, ev.Write)
    world.settle(engine.query_event(keys, op=1))
    finish(world, ev.Ask)
    assert world.flying(ev.Read)
    deadline = world.core.next_deadline
    assert deadline is not None
    assert deadline <= world.now + SECOND
    assert not answers(later(world, deadline - world.now - 2))
    (answer,) = answers(later(world, 2))
    assert (answer.resident, answer.reason) == (1, Reason.REMOTE_LATE)
    assert world.core.catalogue.bytes[State.LOADING] == 2 * SLOT
    (answer,) = answers(world.settle(engine.query_event(keys, op=2)))
    assert (answer.resident, answer.reason) == (1, Reason.REMOTE_LATE), "its slot is being read into"
    finish(world, ev.Read)
    assert hit(engine, keys) == 3
    assert not world.flying(ev.Ask)


def test_what_comes_has_the_age_that_the_store_says() -> None:
    """It is as old as on the host that computed it: a store that has lost it gets it as old as that."""
    (key,) = chain(1)
    world, engine, _ = world_of(key)
    world.settle(engine.query_event([key], op=1))
    finish(world, ev.Ask)
    (read,) = world.flying(ev.Read)
    done = world.disk.finish(read.io)
    assert isinstance(done, ev.Done)
    world.settle(ev.Done(done.io, ages=(7 * SECOND,)))
    engine.release(1)
    later(world, 601 * SECOND)
    hit(engine, [key])
    (write,) = world.flying(ev.Write)
    assert write.objects[0].age >= 608 * SECOND


# --- forgetting -------------------------------------------------------------------------------------------------


def test_a_purge_of_what_is_old_leaves_the_store_alone() -> None:
    """Nothing is known of when it got what it has."""
    world, engine, _ = world_of()
    engine.commit(chain(1))
    finish(world, ev.Write)
    world.settle(ev.Purge(older=SECOND))
    assert not world.flying(ev.Forget)
    world.settle(ev.Purge())
    assert len(world.flying(ev.Forget)) == 1


def test_what_is_being_put_is_purged() -> None:
    world, engine, backing = world_of()
    engine.commit(chain(1))
    world.settle(ev.Purge(NAMESPACE))
    assert [io.namespace for io in world.flying(ev.Forget)] == [NAMESPACE]
    finish(world, ev.Write)
    assert (world.core.objects, backing.objects) == (0, 0)
    assert not any(world.core.accounts()[state] for state in ("leased", "doomed", "resident"))


def test_an_engine_that_dies_while_its_objects_come_leaves_nothing() -> None:
    (key,) = chain(1)
    world, engine, _ = world_of(key)
    world.settle(engine.query_event([key], op=1))
    finish(world, ev.Ask)
    for session in (engine.scheduler, *engine.workers):
        world.settle(ev.Left(session, Gone.DEAD))
    finish(world, ev.Read)
    assert world.core.catalogue.bytes[State.LOADING] == 0
