"""What can be found of one (namespace, group), in parts, while other things go on."""

from collections.abc import Callable

import pytest
from testbed.core.core_world import NAMESPACE, World, chain

from kvhold.core import events as ev
from kvhold.core.events import Listed
from kvhold.core.log.events import Read

ADMIN = 999


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ev, "MAX_BATCH", 2)
    monkeypatch.setattr(ev, "MAX_LISTED", 4)


def part(world: World, cursor: int, group: int = 0) -> Listed:
    (listed,) = [one for one in world.settle(ev.List(ADMIN, NAMESPACE, group, cursor)) if isinstance(one, Listed)]
    assert listed.session == ADMIN
    return listed


def listing(world: World, between: Callable[[], object] = lambda: None, group: int = 0) -> list[tuple[bytes, int]]:
    """(key, tier) in the order of a whole listing; ``between`` is done after its first part."""
    found: list[tuple[bytes, int]] = []
    cursor, parts = 0, 0
    while parts == 0 or cursor:
        listed = part(world, cursor, group)
        keys = [listed.keys[at : at + 8] for at in range(0, len(listed.keys), 8)]
        found += zip(keys, listed.tiers, strict=True)
        assert len(keys) <= 4
        cursor, parts = listed.cursor, parts + 1
        if parts == 1:
            between()
    assert parts > 1 or len(found) < 4
    return found


def test_each_key_is_named_once_with_where_it_is():
    world = World()
    world.open_log(chain(5, "cold"))
    engine = world.engine()
    engine.open(1, group=1)
    engine.store(chain(7, "a"))
    engine.store(chain(3, "b"), 1)
    expected = [(key, 1) for key in chain(7, "a")] + [(key, 2) for key in chain(5, "cold")]
    assert sorted(listing(world)) == expected
    assert sorted(listing(world, group=1)) == [(key, 1) for key in chain(3, "b")]


def test_what_is_being_read_is_on_ssd_alone():
    world = World()
    world.open_log(chain(2))
    engine = world.engine(slots=2)
    world.settle(engine.query_event(chain(2)))
    assert [tier for _, tier in listing(world)] == [2, 2]
    world.finish()
    assert [tier for _, tier in listing(world)] == [1, 1]


def test_of_what_nobody_knows_nothing_is_listed():
    world = World()
    assert part(world, 0) == Listed(ADMIN, b"", b"", 0)
    world.engine().store(chain(3))
    for cursor in (1 << 31, (1 << 62) - 1):
        part(world, cursor)
    assert listing(world, group=7) == []


def test_a_slice_looks_at_a_batch():
    world = World()
    world.engine().store(chain(7))
    effects = world.handle(ev.List(ADMIN, NAMESPACE, 0))
    slices = 1
    while not any(isinstance(effect, Listed) for effect in effects):
        effects = world.step()
        slices += 1
    assert slices == 3


def test_what_comes_and_goes_meanwhile_hides_nothing_else():
    world = World()
    engine = world.engine()
    engine.store(chain(12))

    def between() -> None:
        engine.query(chain(6), op=1)
        world.settle(ev.RestoreFailed(engine.scheduler, 1))
        engine.store(chain(6, "new"))

    found = [key for key, _ in listing(world, between) if not key.startswith(b"new")]
    assert len(found) == len(set(found))
    assert set(chain(12)[6:]) <= set(found)


def test_going_to_a_log_and_coming_back_meanwhile_hides_nothing():
    world = World(pages=2)
    world.open_log()
    engine = world.engine()
    engine.store(chain(6))
    world.finish()

    def between() -> None:
        engine.store(chain(8, "b"))
        world.finish()
        world.settle(engine.query_event(chain(6), op=1))
        world.finish()

    found = [key for key, _ in listing(world, between) if key.startswith(b"a")]
    assert sorted(found) == chain(6)


@pytest.mark.parametrize("within", [False, True], ids=["between parts", "within the last part"])
def test_a_key_that_is_given_another_row_meanwhile_is_not_missed(within: bool, monkeypatch: pytest.MonkeyPatch):
    """Its read failed while somebody waited for it."""
    world = World()
    world.open_log(chain(12))
    engine = world.engine(slots=2)
    for key in chain(3):  # their rows are spare now
        world.settle(engine.query_event([key], op=1))
        world.finish()
        world.settle(ev.RestoreFailed(engine.scheduler, 1))
        engine.release(1)

    world.settle(engine.query_event(chain(12)[10:], op=2))

    def between() -> None:
        io = world.flying(Read)[0].io
        world.handle(ev.Done(world.disk.finish(io, range(2)).io, (0, 1), kept=True))

    before = {key: world.core.catalogue.find(NAMESPACE, 0).get(key) for key in chain(12)}  # type: ignore[union-attr]
    if within:
        monkeypatch.setattr(ev, "MAX_LISTED", 100)
        world.handle(ev.List(ADMIN, NAMESPACE, 0))
        for _ in range(3):
            world.step()
        between()
        world.run()
        (first,) = [effect for effect in world.told if isinstance(effect, Listed)]
        rest = part(world, first.cursor)
        assert first.cursor
        assert rest.cursor == 0
        packed = first.keys + rest.keys
        found = {packed[at : at + 8] for at in range(0, len(packed), 8)}
    else:
        found = {key for key, _ in listing(world, between)}
    after = {key: world.core.catalogue.find(NAMESPACE, 0).get(key) for key in chain(12)}  # type: ignore[union-attr]
    assert [key for key in chain(12)[3:] if after[key] != before[key]] == chain(12)[10:]
    assert found == set(chain(12)[3:])
