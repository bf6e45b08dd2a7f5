"""What an operator is told: how much was there, when it was used, what a purge took, whether an SSD is in use."""

import pytest
from testbed.core.core_world import NAMESPACE, SLOT, World, chain

from kvhold.core import events as ev
from kvhold.core.indexes import Index
from kvhold.core.limits import SECOND
from kvhold.core.log import events as lev
from kvhold.core.log.device import ERRORS, WRITE_PATIENCE

MINUTE = 60 * SECOND


def index_of(world: World, group: int = 0, namespace: bytes = NAMESPACE) -> Index:
    index = world.core.catalogue.find(namespace, group)
    assert index is not None
    return index


def hits(index: Index) -> tuple[int, int, int]:
    return index.asked, index.found, index.read


class TestHits:
    def test_they_are_counted_for_each_namespace_and_group(self):
        world = World()
        engine = world.engine(slots=8)
        engine.open(1, slots=8, group=1)
        engine.store(chain(4))
        engine.query([*chain(4), b"unknown."])
        engine.query([b"unknown."], space=1)
        engine.prepare((0, chain(2)), (1, [b"unknown."]), op=7)
        engine.prepare((0, chain(2)), op=8)
        assert hits(index_of(world)) == (9, 6, 0)
        assert hits(index_of(world, 1)) == (2, 0, 0)
        counters = world.core.counters
        assert (counters["keys_asked"], counters["keys_resident"]) == (11, 6)

    def test_what_had_to_be_read_is_counted_apart(self):
        world = World()
        world.open_log(chain(4))
        engine = world.engine(slots=2)
        world.settle(engine.query_event(chain(4), op=1))
        world.finish()
        engine.query(chain(4), op=2)
        assert hits(index_of(world)) == (8, 8, 4)

    def test_a_name_is_that_of_who_opened_it_last(self):
        world = World()
        engine = world.engine(space=False)
        for space, label in ((0, "one"), (1, "two")):
            world.settle(ev.Open(engine.scheduler, space, NAMESPACE, space, 8, (SLOT,), 1, label=label))
            assert index_of(world).namespace.label == label


class TestAges:
    def used_before(self, world: World) -> int | None:
        (used,) = world.core.catalogue.used_before([index_of(world)])
        return used

    def test_the_oldest_is_what_goes_next(self):
        world = World()
        engine = world.engine(slots=8)
        assert (self.used_before(world), index_of(world).used_at) == (None, None)
        stored = []
        for name in "abc":
            engine.commit(chain(2, name))
            stored.append(world.now)
            world.tick(10 * MINUTE)
        assert index_of(world).used_at == stored[2]
        for name in "ab":
            used = self.used_before(world)
            assert used is not None
            assert stored["abc".index(name)] <= used <= stored["abc".index(name)] + 11 * MINUTE
            assert used <= (index_of(world).used_at or 0)
            engine.query(chain(2, name))
            assert index_of(world).used_at == world.now
            world.tick(10 * MINUTE)

    def test_what_was_only_recovered_was_not_used(self):
        world = World()
        world.open_log(chain(4))
        assert (self.used_before(world), index_of(world).used_at) == (None, None)


class TestPurges:
    def test_it_is_told_how_much_is_forgotten_wherever_it_was(self):
        world = World()
        world.open_log(chain(4))
        engine = world.engine(slots=4)
        engine.open(1, 2 * SLOT, 4, namespace=b"m" * 32)
        engine.store(chain(3, "b"))
        engine.store(chain(2, "m"), space=1)
        admin = world.session()
        told = world.settle(ev.Purge(b"m" * 32, 0, admin)) + world.finish()
        assert [each for each in told if isinstance(each, ev.Purged)] == [ev.Purged(admin, True, 2, 4 * SLOT)]
        told = world.settle(ev.Purge(b"", 0, admin)) + world.finish()
        assert [each for each in told if isinstance(each, ev.Purged)] == [ev.Purged(admin, True, 7, 7 * SLOT)]
        told = world.settle(ev.Purge(b"", 0, admin)) + world.finish()
        assert [each for each in told if isinstance(each, ev.Purged)] == [ev.Purged(admin, True, 0, 0)]


class TestOutOfUse:
    @pytest.fixture
    def world(self) -> World:
        world = World()
        world.open_log(chain(ERRORS + 2))
        self.engine = world.engine(slots=4)
        return world

    def out(self, world: World) -> dict[str, tuple[str, int]]:
        return world.core.storage.backings[0].device.out_of_use(world.core.common.now, 2 * SECOND)

    def test_reads_that_fail_until_one_succeeds(self, world: World):
        limits, began = world.core.common.limits, 0
        for count, key in enumerate(chain(ERRORS)):
            assert self.out(world) == {}
            world.settle(self.engine.query_event([key]))
            world.complete(ev.Read, failing=[0])
            began = began or world.now
            world.tick(SECOND)
            assert count < ERRORS
        assert self.out(world) == {"read": ("errors", began)}
        world.tick(limits.retry_ns)
        assert self.out(world) == {"read": ("errors", began)}, "nobody has tried since"
        world.settle(self.engine.query_event(chain(ERRORS + 2)[-1:]))
        world.complete(ev.Read)
        assert self.out(world) == {}

    def test_a_read_that_hangs(self, world: World):
        world.settle(self.engine.query_event(chain(1)))
        began = world.now
        world.tick(SECOND)
        assert self.out(world) == {}
        world.tick(2 * SECOND)
        assert self.out(world) == {"read": ("hangs", began)}
        world.complete(ev.Read)
        assert self.out(world) == {}

    def test_writes_that_fail_or_hang(self, world: World):
        self.engine.commit(chain(1, "w"))
        world.complete(lev.Reuse)
        began = world.now
        world.tick(SECOND)
        assert self.out(world) == {}
        world.tick(WRITE_PATIENCE)
        assert self.out(world)["write"][0] == "hangs"
        assert abs(self.out(world)["write"][1] - began) < SECOND
        world.complete(ev.Write, failing=[0])
        began = world.now
        while "write" not in self.out(world):
            self.engine.commit(chain(1, f"w{world.now}"))
            world.tick(SECOND)
            world.complete(ev.Write, failing=[0])
        assert self.out(world) == {"write": ("errors", began)}
        world.tick(world.core.common.limits.retry_ns)
        world.finish()
        assert self.out(world) == {}
