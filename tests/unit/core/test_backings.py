"""Objects that are in a log, in a store that finds them by their name, or in both."""

import pytest
from testbed.core.core_world import NAMESPACE, SLOT, Engine, World, chain

from kvhold.core import events as ev
from kvhold.core.events import Reason
from kvhold.core.limits import Limits
from kvhold.core.log import events as lev
from kvhold.core.log.device import ERRORS
from kvhold.core.log.segments import HEADER

LOG, STORE = 0, 8
KEYS = chain(2)


def world_of(*numbers: int, **limits: int) -> tuple[World, Engine]:
    """A world with these backings, and an engine whose two objects are in all of them and no more in DRAM."""
    world = World(pages=1, limits=Limits(prepared_share=1, engine_share=1, **limits))  # type: ignore[arg-type]
    if LOG in numbers:
        world.open_log(segments=2, segment_bytes=HEADER + 3 * (HEADER + SLOT) + HEADER)
    if STORE in numbers:
        world.open_store(STORE)
    engine = world.engine(slots=1)
    engine.store(KEYS)
    world.finish()
    return world, engine


def evict(world: World, objects: int = len(KEYS)) -> None:
    """What is in backings is there alone now."""
    common = world.core.common
    while common.catalogue.cold < objects:
        assert common.eviction.evict_own(next(iter(common.catalogue.namespaces.values())))


def read_of(world: World) -> ev.Read:
    (read,) = world.flying(ev.Read)
    return read


def ask(engine: Engine, op: int = 1) -> list[ev.Effect]:
    return engine.world_.settle(engine.query_event(KEYS, op=op))


def answers(effects: list[ev.Effect]) -> list[ev.Answer]:
    return [effect for effect in effects if isinstance(effect, ev.Answer)]


@pytest.mark.parametrize("numbers", [(LOG,), (STORE,), (LOG, STORE)])
def test_what_is_in_any_backing_can_be_found(numbers: tuple[int, ...]) -> None:
    world, engine = world_of(*numbers)
    evict(world)
    ask(engine)
    assert read_of(world).backing == numbers[0], "the log is asked first"
    (answer,) = answers(world.finish())
    assert (answer.resident, answer.reason) == (2, Reason.NONE)


def test_an_object_is_written_to_its_home_and_to_the_store() -> None:
    world, _ = world_of(LOG, STORE)
    written = [
        (effect.backing, one.key) for effect in world.told if isinstance(effect, ev.Write) for one in effect.objects
    ]
    assert sorted(written) == [(number, key) for number in (LOG, STORE) for key in KEYS]


@pytest.mark.parametrize("first", [LOG, STORE])
def test_what_one_cannot_give_another_does(first: int) -> None:
    world, engine = world_of(LOG, STORE)
    evict(world)
    if first == STORE:
        world.core.storage.backings[LOG].device.reads_again = 10**9  # type: ignore[attr-defined]
    ask(engine)
    assert read_of(world).backing == first
    if first == STORE:
        world.core.storage.backings[LOG].device.reads_again = 0  # type: ignore[attr-defined]
    assert not answers(world.complete(ev.Read, failing=[0, 1]))
    assert read_of(world).backing == LOG + STORE - first
    (answer,) = answers(world.finish())
    assert (answer.resident, answer.reason) == (2, Reason.NONE)
    forgotten = [effect for effect in world.told if isinstance(effect, ev.Forget)]
    assert [(effect.backing, len(effect.names)) for effect in forgotten] == [(first, 2)], "the other still has it"


def test_what_could_not_be_looked_at_is_in_both_as_before() -> None:
    world, engine = world_of(LOG, STORE)
    evict(world)
    ask(engine)
    for number in (LOG, STORE):
        read = read_of(world)
        assert read.backing == number
        world.disk.finish(read.io, [0, 1])
        told = world.settle(ev.Done(read.io, (0, 1), kept=True))
    (answer,) = answers(told)
    assert (answer.resident, answer.reason) == (0, Reason.READ_FAILED)
    assert world.core.catalogue.cold == world.core.catalogue.backed == 2
    assert not [effect for effect in world.told if isinstance(effect, ev.Forget)]


def test_what_none_gives_is_gone() -> None:
    world, engine = world_of(LOG, STORE)
    evict(world)
    ask(engine)
    world.complete(ev.Read, failing=[0, 1])
    (answer,) = answers(world.complete(ev.Read, failing=[0]))
    assert (answer.resident, answer.reason) == (0, Reason.READ_FAILED)
    assert world.resident(KEYS) == [KEYS[1]], "what one of them gave is there"


def test_a_log_that_hangs_is_passed_over() -> None:
    world, engine = world_of(LOG, STORE, hung_ns=10)
    evict(world)
    ask(engine, op=1)
    hanging = read_of(world)
    engine.release(1)
    world.tick(20)
    other = engine.world_.engine("other", slots=1)
    (answer,) = answers(world.settle(other.query_event(KEYS, op=2)))
    assert answer.reason is Reason.OUT_OF_SERVICE, "its slot is being read into"
    world.settle(world.disk.finish(hanging.io))


def test_what_waits_for_a_log_that_fails_is_read_from_the_store() -> None:
    keys = chain(5)
    world = World(pages=3, limits=Limits(prepared_share=1, engine_share=1, read_bytes=1))
    world.open_log(segments=4, segment_bytes=HEADER + 3 * (HEADER + SLOT) + HEADER)
    world.open_store(STORE)
    engine = world.engine(slots=5)
    engine.store(keys)
    world.finish()
    evict(world, len(keys))
    world.core.storage.backings[LOG].device.read_errors = ERRORS - 1  # type: ignore[attr-defined]
    world.settle(engine.query_event(keys, op=1))
    read = read_of(world)
    assert read.backing == LOG
    assert len(read.objects) < len(keys), "others wait"
    failed = tuple(range(len(read.objects)))
    world.disk.finish(read.io, failed)
    world.settle(ev.Done(read.io, failed, kept=True))
    (answer,) = answers(world.finish())
    assert (answer.resident, answer.reason) == (5, Reason.NONE)
    reads = [effect.backing for effect in world.told if isinstance(effect, ev.Read)]
    assert set(reads[1:]) == {STORE}


def test_what_a_log_gives_up_is_still_in_the_store() -> None:
    world, engine = world_of(LOG, STORE)
    evict(world)
    engine.store(chain(6, "b"))
    world.finish()
    assert world.core.counters["reclaimed"] > 0
    ask(engine)
    (answer,) = answers(world.finish())
    assert (answer.resident, answer.reason) == (2, Reason.NONE)


def test_a_purge_reaches_both() -> None:
    world, _ = world_of(LOG, STORE)
    evict(world)
    told = world.settle(ev.Purge(session=99)) + world.finish()
    assert sorted(effect.backing for effect in told if isinstance(effect, ev.Forget)) == [LOG, STORE]
    assert ev.Purged(99, True, 2, 2 * SLOT) in told
    assert not world.disk.stores[STORE]
    assert not world.resident(KEYS)


def test_what_is_written_while_a_purge_runs_is_not_kept() -> None:
    world, engine = world_of(STORE)
    engine.store(chain(1, "b"))
    (write,) = world.flying(ev.Write)
    world.settle(ev.Purge())
    world.settle(world.disk.finish(write.io))
    world.finish()
    assert not world.disk.stores[STORE]
    assert world.core.objects == 0


def test_a_flush_waits_for_both() -> None:
    world, engine = world_of(LOG, STORE)
    engine.store(chain(1, "b"))
    told = world.settle(ev.Flush(99))
    assert ev.Flushed(99, True) not in told
    told = world.complete(lev.Write) + world.complete(lev.Sync)
    assert ev.Flushed(99, True) not in told
    assert ev.Flushed(99, True) in world.finish()


def test_explain_names_every_place() -> None:
    world, _ = world_of(LOG, STORE)
    (told,) = world.settle(ev.Explain(99, KEYS[0]))
    assert isinstance(told, ev.Explained)
    assert [line.strip() for line in told.lines if line.startswith("     in ")] == [
        f"in log {LOG}, segment 0, byte {HEADER}",
        f"in store {STORE}",
    ]
    assert NAMESPACE.hex() in "".join(told.lines)
