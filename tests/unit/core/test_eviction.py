"""Which objects give way, by each policy; and that what names policies elsewhere names all of them."""

from typing import get_args

import pytest
from testbed.core.core_world import Engine, World, chain

from kvhold.core.eviction import POLICIES
from kvhold.engines.common.settings import ManagerSettings

HOT = chain(6, "hot")


def world_of(policy: str) -> tuple[World, Engine]:
    """An arena of 16 slots, 4 of them credits, and a chain that was stored and then asked for."""
    world = World(pages=4, policy=POLICIES[policy])
    engine = world.engine()
    engine.store(HOT)
    engine.query(HOT, op=1)
    engine.release(1)
    return world, engine


@pytest.mark.parametrize(("policy", "left"), [("lru", 0), ("2q", 6)])
def test_what_is_used_again_outlives_what_comes_once(policy: str, left: int):
    world, engine = world_of(policy)
    for number in range(10):
        engine.store(chain(4, f"o{number}"))
    assert world.resident(HOT) == HOT[:left]


def test_what_is_used_again_goes_too_once_it_is_more_than_half():
    world, engine = world_of("2q")
    for number in range(10):
        engine.store(keys := chain(4, f"a{number}"))
        engine.query(keys, op=2 + number)
        engine.release(2 + number)
    assert world.resident(HOT) == []
    assert world.resident(keys) == keys


def test_half_is_left_to_what_was_used_once():
    world, engine = world_of("2q")
    engine.store(more := chain(6, "more"))
    engine.query(more, op=2)
    engine.release(2)
    last = chain(6, "new")
    for keys in (chain(6, "old"), last):
        engine.store(keys)
    kept = [*world.resident(HOT), *world.resident(more)]
    assert len(world.resident(last)) >= 5, "half of what is not granted"
    assert 5 <= len(kept) <= 7


def test_what_comes_back_from_a_log_is_no_newcomer():
    world = World(pages=4, policy=POLICIES["2q"])
    world.open_log(HOT)
    engine = world.engine()
    world.settle(engine.query_event(HOT, op=1))
    world.finish()
    engine.release(1)
    for number in range(10):
        engine.store(chain(4, f"o{number}"))
    assert world.resident(HOT) == HOT


def test_settings_name_all_policies_and_the_default_is_the_first():
    assert list(get_args(ManagerSettings.__annotations__["eviction"])) == list(POLICIES)
    assert ManagerSettings().eviction == next(iter(POLICIES))
