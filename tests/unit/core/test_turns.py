"""Who asks for much waits for its own; what is asked for costs a batch at a time; nothing is done for who is gone."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
from testbed.core.core_world import NAMESPACE, SLOT, World, chain

from kvhold.core import events as ev
from kvhold.core.events import Effect, Gone
from kvhold.core.history import LOOK, History, Kind
from kvhold.core.limits import Limits
from kvhold.core.log import events as lev
from kvhold.core.turns import MANAGER, Turns

KEYS = b"".join(chain(400))


def piece(name: str, slices: int, done: list[str]) -> Iterator[list[Effect]]:
    for number in range(slices):
        done.append(f"{name}{number}")
        yield []


def test_owners_have_a_slice_in_turn_and_their_pieces_in_that():
    turns, done = Turns(), list[str]()
    for name in ("a", "b", "c"):
        turns.add(piece(name, 2, done), 1, True)
    turns.add(piece("x", 2, done), 2, True)
    turns.add(piece("m", 1, done), MANAGER, False)
    while turns:
        turns.slice()
    assert done == ["a0", "x0", "m0", "b0", "x1", "c0", "a1", "b1", "c1"]


def test_a_flood_of_questions_does_not_keep_a_neighbours_waiting():
    world = World()
    flood, neighbour = world.engine("flood"), world.engine("neighbour")
    for op in range(50):
        world.handle(ev.Lookup(flood.scheduler, op, ((0, KEYS),)))
    world.handle(ev.Lookup(neighbour.scheduler, 1, ((0, KEYS),)))
    told = world.run()
    assert next(effect.session for effect in told if isinstance(effect, ev.Residency)) == neighbour.scheduler


def test_who_is_gone_gets_no_more_answers():
    world = World()
    engine = world.engine(world=1)
    for op in range(5):
        world.handle(ev.Lookup(engine.scheduler, op, ((0, KEYS),)))
    world.handle(ev.Explain(77, op=1))
    world.handle(ev.List(78, NAMESPACE, 0))
    assert world.core.unfinished(engine.scheduler) == 5
    for gone in (engine.scheduler, 77, 78):
        world.handle(ev.Left(gone, Gone.UNKNOWN))
        assert world.core.unfinished(gone) == 0
    told = world.run()
    assert not [effect for effect in told if isinstance(effect, ev.Residency | ev.Explained | ev.Listed)]


def test_a_purge_goes_on_without_whoever_asked_for_it(monkeypatch: pytest.MonkeyPatch):
    world = World()
    engine = world.engine()
    engine.store(chain(12))
    monkeypatch.setattr(ev, "MAX_BATCH", 2)
    world.handle(ev.Purge(session=77))
    assert world.core.purges == 1
    world.handle(ev.Left(77, Gone.UNKNOWN))
    assert not [effect for effect in world.run() if isinstance(effect, ev.Purged)]
    assert world.resident(chain(12)) == []
    assert world.core.purges == 0


def test_a_flush_of_who_is_gone_is_not_waited_for():
    world = World()
    world.open_log()
    engine = world.engine()
    engine.store(chain(2))
    world.handle(ev.Flush(77))
    world.handle(ev.Left(77, Gone.UNKNOWN))
    assert not [effect for effect in world.finish() if isinstance(effect, lev.Sync | ev.Flushed)]


def test_a_release_of_what_is_not_known_is_done_a_batch_at_a_time():
    world = World()
    engine = world.engine()
    engine.store(chain(3))
    engine.query(chain(3), op=1)
    assert engine.world_.core.common.turns.of(engine.scheduler) == 0
    unknown = tuple((op, 1) for op in range(1000, 1000 + 3 * ev.MAX_BATCH))
    world.handle(ev.Release(engine.scheduler, (*unknown, (1, 1))))
    assert world.accounts["leased"] == 3 * SLOT, "that is in a later slice"
    world.run()
    assert "leased" not in world.accounts


def test_what_is_given_up_at_once_leaves_no_work():
    world = World()
    engine = world.engine()
    engine.store(chain(3))
    engine.query(chain(3), op=1)
    world.handle(ev.Release(engine.scheduler, ((1, 1),)))
    assert "leased" not in world.accounts
    world.step()
    assert not world.core.has_work


def test_shares_are_told_a_batch_at_a_time(monkeypatch: pytest.MonkeyPatch):
    world = World(pages=64)
    one = world.engine("one", slots=1000)
    held = len(one.slots[0])
    for space in range(1, 6):
        one.open(space, group=space, slots=0)
    monkeypatch.setattr(ev, "MAX_BATCH", 2)
    two = world.engine("two", space=False)
    three = world.engine("three", space=False)
    told = world.handle(ev.Open(two.scheduler, 0, NAMESPACE, 7, 8, (SLOT,), 1000))
    assert world.core.has_work
    told += world.handle(ev.Open(three.scheduler, 0, NAMESPACE, 8, 8, (SLOT,), 1000))
    told += world.run()
    recalls = [effect for effect in told if isinstance(effect, ev.Recall)]
    assert recalls[-1] == ev.Recall(one.scheduler, 0, held * 2 // 3)
    grants = {effect.session for effect in told if isinstance(effect, ev.Grant)}
    assert grants == {two.scheduler, three.scheduler}


def test_one_engine_is_granted_a_bounded_number_of_slots():
    world = World(pages=64, limits=Limits(credits=6))
    engine = world.engine(slots=1000)
    assert len(engine.slots[0]) == 6
    engine.open(1, group=1, slots=1000)
    assert len(engine.slots[1]) == 3


class TestExplain:
    def lines(self, world: World, **what: int) -> tuple[str, ...]:
        (told,) = [one for one in world.settle(ev.Explain(77, **what)) if isinstance(one, ev.Explained)]
        return told.lines

    def busy(self, revisions: int) -> World:
        world = World()
        engine = world.engine()
        engine.store(chain(1))
        for revision in range(1, revisions + 1):
            world.core.handle(engine.query_event(chain(1), op=5, revision=revision), world.now + revision)
        world.now += revisions + 1
        world.run()
        return world

    def test_the_latest_of_a_busy_operation_is_told_and_that_there_was_more(self):
        lines = self.lines(self.busy(1000), op=5)
        assert len(lines) == 1 + 1000 + 1
        assert lines[0] == "what is older than the latest 1000 entries is not told; name one session's: SESSION/5"
        assert "answered: 1 keys (revision 1000)" in lines[-2]
        assert lines[-1].startswith("now: operation")

    @pytest.mark.parametrize("what", [{"op": 5}, {"op": 4}, {}])
    def test_it_looks_at_some_entries_at_a_time(self, what: dict[str, int]):
        world = self.busy(2 * LOOK)
        world.handle(ev.Explain(77, **what))
        slices = 0
        while world.core.has_work:
            world.step()
            slices += 1
        assert slices > 2 * LOOK * 3 // LOOK // 2


class TestKnownSpaces:
    def open(self, world: World, number: int, keep: bool) -> None:
        """An engine that stores something under a name of its own, and leaves unless it is to ``keep`` it open."""
        engine = world.engine(f"e{number}", space=False)
        engine.open(namespace=f"{number:032}".encode(), slots=4)
        engine.store(chain(3))
        if not keep:
            engine.leave()

    def known(self, world: World) -> set[int]:
        return {int(name) for name in world.core.catalogue.namespaces}

    def test_what_nobody_has_open_is_forgotten_the_longest_unused_first(self):
        world = World(pages=64, limits=Limits(known_spaces=4))
        for number in range(4):
            self.open(world, number, keep=number == 1)
        again = world.engine("again", space=False)
        again.open(namespace=f"{0:032}".encode(), slots=0)
        again.leave()
        self.open(world, 4, keep=False)
        assert self.known(world) == {0, 1, 3, 4}
        self.open(world, 5, keep=False)
        assert self.known(world) == {0, 1, 4, 5}
        assert world.core.counters["forgotten"] == 6
        assert world.core.objects == 12

    def test_of_what_one_engine_has_brought_its_first_is_forgotten_and_nothing_of_others(self):
        world = World(pages=64, limits=Limits(brought_spaces=2))
        for number in range(3):
            self.open(world, number, keep=False)  # each by an engine of its own
        one, other = world.engine("one", space=False), world.engine("other", space=False)
        for number in range(4, 9):
            space = number
            one.open(space, namespace=f"{number:032}".encode(), slots=4)
            one.commit(chain(3), space=space)
            if number == 5:
                other.open(namespace=f"{number:032}".encode(), slots=0)
            world.settle(ev.Close(one.scheduler, space))
            one.back(one.take(len(one.slots[space]), space))
        assert self.known(world) == {0, 1, 2, 5, 7, 8}

    def test_what_is_being_forgotten_makes_room_for_one_alone(self, monkeypatch: pytest.MonkeyPatch):
        world = World(pages=64, limits=Limits(known_spaces=3, brought_spaces=2))
        one, other = world.engine("one", space=False), world.engine("other", space=False)
        for space in (1, 2):
            one.open(space, namespace=f"{space:032}".encode(), slots=4)
            one.commit(chain(3), space=space)
            world.settle(ev.Close(one.scheduler, space))
            one.back(one.take(len(one.slots[space]), space))
        other.open(namespace=f"{3:032}".encode(), slots=0)
        monkeypatch.setattr(ev, "MAX_BATCH", 1)
        for engine, number in ((one, 4), (other, 5)):
            world.handle(ev.Open(engine.scheduler, number, f"{number:032}".encode(), 0, 8, (SLOT,), 0))
        world.run()
        assert self.known(world) == {3, 4, 5}

    def test_no_more_are_opened_than_may_be_known(self):
        world = World(pages=64, limits=Limits(known_spaces=2))
        self.open(world, 1, keep=True)
        self.open(world, 2, keep=True)
        late = world.engine("late", space=False)
        (told,) = late.open(namespace=f"{3:032}".encode())
        assert told == ev.Refuse(late.scheduler, "2 spaces are open already")

    def test_one_that_is_opened_again_meanwhile_keeps_what_is_left(self, monkeypatch: pytest.MonkeyPatch):
        world = World(pages=64, limits=Limits(known_spaces=2))
        self.open(world, 1, keep=False)
        self.open(world, 2, keep=True)
        monkeypatch.setattr(ev, "MAX_BATCH", 1)
        late, again = world.engine("late", space=False), world.engine("again", space=False)
        world.handle(ev.Open(late.scheduler, 0, f"{3:032}".encode(), 0, 8, (SLOT,), 0))
        world.handle(ev.Open(again.scheduler, 0, f"{1:032}".encode(), 0, 8, (SLOT,), 0))
        world.run()
        assert len(world.resident(chain(3), namespace=f"{1:032}".encode())) == 2

    @pytest.mark.parametrize("how", ["closed", "dead", "closed while something is leased"])
    def test_what_is_private_is_forgotten_when_its_engine_leaves_it(self, how: str):
        world = World(pages=64)
        shared = world.engine("shared")
        shared.store(chain(3))
        engine = world.engine("private", space=False)
        engine.open(namespace=b"r" * 32, slots=4, private=True)
        engine.store(chain(3))
        if how.endswith("leased"):
            engine.query(chain(3), op=7)
        if how == "dead":
            engine.leave()
        else:
            world.settle(ev.Close(engine.scheduler, 0))
            engine.back(engine.take(len(engine.slots[0])))
        if how.endswith("leased"):
            assert world.core.accounts()["doomed"] == 3 * SLOT, "leased bytes stay until they are released"
            engine.release(7)
        assert world.core.accounts()["doomed"] == 0
        assert len(world.core.catalogue.namespaces) == 1
        assert world.core.objects == 3
        assert shared.query(chain(3)).resident == 3

    def test_what_is_private_stays_while_its_engine_is_attached_a_second_time(self):
        world = World(pages=64)
        former, engine = world.engine("former", space=False), world.engine("again", space=False)
        for each in (former, engine):
            each.open(namespace=b"r" * 32, slots=4, private=True)
        former.store(chain(3))
        former.leave()
        assert engine.query(chain(3)).resident == 3

    def test_groups_of_one_namespace_are_bounded(self):
        world = World(limits=Limits(spaces=2))
        for group in range(2):
            world.engine(f"e{group}", group=group)
        (told,) = world.engine("late", space=False).open(group=2)
        assert isinstance(told, ev.Refuse)
        assert told.reason == "a namespace of more than 2 groups"

    def test_logs_bring_no_more_than_may_be_known(self):
        world = World(limits=Limits(known_spaces=1))
        world.open_log(chain(2))
        world.open_log(chain(3), log=1, group=1)
        assert len(world.core.catalogue.indexes) == 1
        assert world.core.counters["recovered_over"] == 3

    def test_a_space_that_grows_finds_all_that_it_had(self):
        world = World(pages=1100)
        engine = world.engine(slots=4096)
        keys = [f"{number:07}{chr(number % 128)}".encode() for number in range(3000)]
        for start in range(0, 3000, 200):
            engine.commit(keys[start : start + 200], parent=keys[start - 1] if start else b"")
            world.core.handle(ev.Populated(0), world.now)
        assert engine.query(keys).resident == 3000
        assert world.resident(keys) == keys


def test_what_is_remembered_is_looked_at_a_batch_at_a_time():
    history, looked = History(4 * ev.MAX_BATCH), list[int]()
    for number in range(5 * ev.MAX_BATCH):
        history.note(Kind.MISSED, number, 1, 2, 3)
    slices = [0]
    for entry in history.latest(lambda entry: bool(looked.append(entry[2]))):
        assert entry is None
        slices.append(len(looked))
    assert looked == list(range(5 * ev.MAX_BATCH - 1, ev.MAX_BATCH - 1, -1)), "all that is not forgotten, latest first"
    assert all(end - start <= ev.MAX_BATCH for start, end in pairwise(slices))
