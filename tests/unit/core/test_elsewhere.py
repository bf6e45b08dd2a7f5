"""What nobody has here, and a store that others fill has: it is asked for, fetched, and then like any other object."""

import pytest
from testbed.core.core_world import NAMESPACE, SLOT, Engine, World, chain
from testbed.core.shared_store import opened

from kvhold.core import events as ev
from kvhold.core.events import Gone, Reason, Tier
from kvhold.core.limits import Limits
from kvhold.core.remote.events import Serves
from kvhold.core.rows import State

STORE, OTHER = 8, 9
MS = 1_000_000


def world_of(*there: bytes, number: int = STORE, **limits: int) -> tuple[World, Engine]:
    """A world with a shared store that has these keys, and an engine that watches."""
    world = World(pages=2, limits=Limits(prepared_share=1, engine_share=1, **limits))  # type: ignore[arg-type]
    engine = world.engine(slots=1, watch=True, chain=True)
    share(world, *there, number=number)
    return world, engine


def share(world: World, *keys: bytes, number: int = STORE) -> None:
    world.disk.stores[number] = {(NAMESPACE, 0, key) for key in keys}
    for event in opened(number):
        world.handle(event)


def asks(world: World) -> list[ev.Ask]:
    return world.flying(ev.Ask)


def lookup(engine: Engine, keys: list[bytes], op: int = 1) -> list[ev.Effect]:
    return engine.world_.settle(ev.Lookup(engine.scheduler, op, ((0, b"".join(keys)),)))


def only(kind: type, effects: list[ev.Effect]) -> list:
    return [effect for effect in effects if isinstance(effect, kind)]


def later(world: World, nanoseconds: int) -> list[ev.Effect]:
    world.now += nanoseconds
    return world.settle(ev.Tick())


def answered(world: World) -> list[ev.Effect]:
    """All asks and reads end well."""
    effects: list[ev.Effect] = []
    while world.disk.flying:
        effects += world.settle(world.disk.finish(min(world.disk.flying)))
    return effects


# --- questions --------------------------------------------------------------------------------------------------


def test_a_chain_that_others_have_is_asked_for_and_fetched() -> None:
    keys = chain(3)
    world, engine = world_of(*keys[:2])
    (waiting,) = only(ev.Waiting, world.settle(engine.query_event(keys, op=1)))
    assert waiting.objects == 0
    assert [ask.names for ask in asks(world)] == [tuple((NAMESPACE, 0, key) for key in keys)]
    (waiting,) = only(ev.Waiting, world.settle(world.disk.finish(asks(world)[0].io)))
    assert waiting.objects == 2
    effects = answered(world)
    (answer,) = only(ev.Answer, effects)
    assert (answer.resident, answer.reason) == (2, Reason.NOT_STORED)
    assert answer.read == b"\0\0\0\0\1\0\0\0"
    assert only(ev.Added, effects) == [ev.Added(engine.scheduler, 0, b"".join(keys[:2]))]
    assert effects.index(only(ev.Added, effects)[0]) < effects.index(answer)


def test_what_came_from_elsewhere_is_like_any_other_object() -> None:
    world, engine = world_of(*chain(1))
    world.settle(engine.query_event(chain(1), op=1))
    answered(world)
    engine.release(1)
    assert engine.query(chain(1)).resident == 1
    assert not asks(world)
    assert not only(ev.Write, world.told), "it is there"
    engine.release(1000)
    catalogue = world.core.catalogue
    assert world.core.common.eviction.evict_own(catalogue.namespaces[NAMESPACE])
    (removed,) = only(ev.Removed, world.handle(ev.Tick()))
    assert removed.keys == chain(1)[0]
    assert catalogue.objects == 0, "what is elsewhere is no object of this host"


def test_what_is_on_its_way_is_in_no_listing_and_counts_as_elsewhere() -> None:
    world, engine = world_of(*chain(1))
    world.settle(engine.query_event(chain(1), op=1))
    world.settle(world.disk.finish(asks(world)[0].io))
    assert State.LOADING in world.core.catalogue.state
    (listed,) = only(ev.Listed, world.settle(ev.List(99, NAMESPACE, 0)))
    assert listed.keys == b""
    (residency,) = only(ev.Residency, lookup(engine, chain(1), op=2))
    assert residency.tiers == (bytes([Tier.ELSEWHERE]),)


def test_a_lookup_waits_for_others_and_says_what_they_have() -> None:
    keys = chain(4)
    world, engine = world_of(*keys[1:3])
    engine.commit(keys[:1])
    answered(world)
    world.disk.stores[STORE].update((NAMESPACE, 0, key) for key in keys[1:3])
    assert not only(ev.Residency, lookup(engine, keys))
    assert world.core.budgets.answering == 1
    (residency,) = only(ev.Residency, answered(world))
    assert residency.tiers == (bytes([Tier.DRAM, Tier.ELSEWHERE, Tier.ELSEWHERE, Tier.NOWHERE]),)
    assert world.core.budgets.answering == 0
    (waiting,) = only(ev.Waiting, engine.prepare((0, keys[:3]), op=1))
    assert waiting.objects == 2
    (answer,) = only(ev.Answer, answered(world))
    assert (answer.resident, answer.reason) == (3, Reason.NONE)


def test_a_preparation_takes_what_was_heard_and_asks_nobody() -> None:
    world, engine = world_of(*chain(1))
    (answer,) = only(ev.Answer, engine.prepare((0, chain(1)), op=1))
    assert (answer.resident, answer.reason) == (0, Reason.NOT_STORED)
    assert not asks(world)


def test_watchers_are_told_before_a_lookup_that_waited() -> None:
    """What left while others were asked is told before the answer that does not have it."""
    keys = chain(2)
    world, engine = world_of()
    engine.commit(keys[:1])
    answered(world)
    lookup(engine, keys)
    world.core.common.eviction.evict_own(world.core.catalogue.namespaces[NAMESPACE])
    effects = answered(world)
    (residency,) = only(ev.Residency, effects)
    assert residency.tiers == (bytes(2),)
    told = [effect for effect in world.told if isinstance(effect, ev.Removed | ev.Residency)]
    assert [type(effect) for effect in told[-2:]] == [ev.Removed, ev.Residency]


def test_a_lookup_ends_with_what_takes_its_place() -> None:
    world, engine = world_of(*chain(2))
    lookup(engine, chain(2))
    lookup(engine, chain(1))
    assert len(asks(world)) == 1, "the same key is asked for once"
    engine.prepare((0, chain(1)), op=2)
    assert len(only(ev.Residency, answered(world))) == 1
    lookup(engine, chain(3, "b"))
    engine.prepare((0, []), op=1)
    assert not only(ev.Residency, answered(world))
    assert world.core.budgets.answering == 0


def test_a_lookup_ends_with_its_owner() -> None:
    world, engine = world_of()
    lookup(engine, chain(2))
    lookup(engine, chain(2, "b"), op=2)
    engine.leave(Gone.DEAD)
    assert world.core.budgets.answering == 0
    assert not only(ev.Residency, answered(world))


def test_a_lookup_too_many_asks_nobody() -> None:
    _, engine = world_of(queries=1)
    lookup(engine, chain(2))
    (residency,) = only(ev.Residency, lookup(engine, chain(2, "b"), op=2))
    assert residency.tiers == (bytes(2),)


def test_what_an_engine_has_itself_is_not_asked_for() -> None:
    world, engine = world_of(*chain(3))
    (answer,) = only(ev.Answer, world.settle(engine.query_event(chain(3), op=1, skip=1)))
    assert (answer.resident, answer.reason) == (0, Reason.NOT_STORED)
    assert not asks(world)


def test_nobody_is_asked_for_what_is_private() -> None:
    world, engine = world_of()
    engine.open(space=1, namespace=b"p" * 32, private=True)
    (answer,) = only(ev.Answer, world.settle(engine.query_event(chain(1), space=1, op=1)))
    assert answer.reason is Reason.NOT_STORED
    assert only(ev.Residency, world.settle(ev.Lookup(engine.scheduler, 2, ((1, chain(1)[0]),))))
    assert not asks(world)


# --- batches ----------------------------------------------------------------------------------------------------


def test_keys_are_asked_for_in_batches_until_one_has_a_gap() -> None:
    keys = chain(9)
    world, engine = world_of(*keys[:4], ask_batch=2)
    world.settle(engine.query_event(keys, op=1))
    answered(world)
    asked = [[name[2] for name in ask.names] for ask in only(ev.Ask, world.told)]
    assert asked == [keys[0:2], keys[2:4], keys[4:6]]


def test_a_question_asks_for_so_many_keys_at_most() -> None:
    keys = chain(9)
    world, engine = world_of(*keys, ask_batch=2, ask_keys=5)
    world.settle(engine.query_event(keys, op=1))
    (answer,) = only(ev.Answer, answered(world))
    assert (answer.resident, answer.reason) == (5, Reason.NOT_STORED)


def test_a_gap_ends_a_chain_and_nothing_else() -> None:
    """Of windows each may be of use, whatever is missing before it."""
    world, engine = world_of(*chain(6)[3:], ask_batch=2)
    engine.open(space=1, group=1)
    world.disk.stores[STORE] |= {(NAMESPACE, 1, key) for key in chain(6)[3:]}
    keys = b"".join(chain(6))
    world.settle(ev.Lookup(engine.scheduler, 1, ((0, keys), (1, keys))))
    (residency,) = only(ev.Residency, answered(world))
    assert residency.tiers == (bytes(6), bytes([0, 0, 0, 3, 3, 3]))


def test_two_questions_about_the_same_ask_once() -> None:
    world, engine = world_of(*chain(2))
    other = world.engine("two", slots=1, chain=True)
    for one in (engine, other):
        world.settle(one.query_event(chain(2), op=1))
    assert len(asks(world)) == 1
    answers = only(ev.Answer, answered(world))
    assert [(answer.session, answer.resident) for answer in answers] == [(engine.scheduler, 2), (other.scheduler, 2)]
    assert len(only(ev.Read, world.told)) == 1, "and it is fetched once"


def test_two_stores_are_asked_and_either_may_have_it() -> None:
    keys = chain(2)
    world, engine = world_of(keys[0])
    share(world, keys[1], number=OTHER)
    world.settle(engine.query_event(keys, op=1))
    assert [ask.backing for ask in asks(world)] == [STORE, OTHER]
    (answer,) = only(ev.Answer, answered(world))
    assert answer.resident == 2
    assert [read.backing for read in only(ev.Read, world.told)] == [STORE, OTHER]


# --- deadlines --------------------------------------------------------------------------------------------------


def test_a_question_does_not_wait_for_who_says_nothing() -> None:
    world, engine = world_of(*chain(2))
    world.settle(engine.query_event(chain(2), op=1))
    deadline = world.core.next_deadline
    assert deadline is not None
    assert deadline <= world.now + 20 * MS
    assert not only(ev.Answer, later(world, 19 * MS))
    (answer,) = only(ev.Answer, later(world, 2 * MS))
    assert (answer.resident, answer.reason) == (0, Reason.REMOTE_LATE)
    answered(world)
    (residency,) = only(ev.Residency, lookup(engine, chain(2), op=2))
    assert residency.tiers == (bytes([Tier.ELSEWHERE] * 2),), "what is heard late counts"


def test_a_lookup_does_not_wait_for_who_says_nothing() -> None:
    world, engine = world_of(*chain(2))
    lookup(engine, chain(2))
    (residency,) = only(ev.Residency, later(world, 21 * MS))
    assert residency.tiers == (bytes(2),)


def test_who_wants_an_answer_now_has_it() -> None:
    world, engine = world_of(*chain(2))
    world.settle(engine.query_event(chain(2), op=1))
    (answer,) = only(ev.Answer, world.settle(ev.AnswerNow(engine.scheduler, 1, 1)))
    assert answer.reason is Reason.REMOTE_LATE
    assert not only(ev.Answer, answered(world))


def test_so_many_asks_are_under_way_at_most() -> None:
    world, engine = world_of(asks=1)
    world.settle(engine.query_event(chain(1), op=1))
    (answer,) = only(ev.Answer, world.settle(engine.query_event(chain(1, "b"), op=2)))
    assert answer.reason is Reason.REMOTE_LATE


def test_a_store_that_does_not_serve_is_not_asked() -> None:
    world, engine = world_of(*chain(2))
    world.handle(Serves(STORE, serves=False))
    (answer,) = only(ev.Answer, world.settle(engine.query_event(chain(2), op=1)))
    assert answer.reason is Reason.REMOTE_DOWN
    (answer,) = only(ev.Answer, engine.prepare((0, chain(2)), op=2))
    assert answer.reason is Reason.REMOTE_DOWN
    assert not asks(world)
    world.handle(Serves(STORE, serves=True))
    world.settle(engine.query_event(chain(2), op=3))
    assert asks(world)


# --- what is remembered -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("there", "known_ms"), [(True, 5000), (False, 1000)])
def test_what_was_said_is_believed_for_a_while(there: bool, known_ms: int) -> None:
    world, engine = world_of(*chain(1 if there else 0))
    lookup(engine, chain(1))
    answered(world)
    later(world, (known_ms - 1) * MS)
    assert only(ev.Residency, lookup(engine, chain(1), op=2))
    later(world, 2 * MS)
    assert not only(ev.Residency, lookup(engine, chain(1), op=3))
    assert asks(world)


def test_what_could_not_be_got_is_not_tried_again_for_a_while() -> None:
    """Whatever the store says."""
    world, engine = world_of(*chain(2))
    world.settle(engine.query_event(chain(2), op=1))
    world.settle(world.disk.finish(asks(world)[0].io))
    (read,) = world.flying(ev.Read)
    (answer,) = only(ev.Answer, world.settle(world.disk.finish(read.io, [1])))
    assert (answer.resident, answer.reason) == (1, Reason.READ_FAILED)
    assert world.core.catalogue.objects == 1
    assert not only(ev.Forget, world.told), "it is not this host's to remove"
    assert not only(ev.Removed, world.told), "nobody was told that it is there"
    world.disk.stores[STORE].add((NAMESPACE, 0, chain(2)[1]))
    engine.release(1)
    for wait in (0, 15_000, 14_000):
        later(world, wait * MS)
        assert engine.query(chain(2)).resident == 1
        engine.release(engine.next_op - 1)
        assert not asks(world)
    later(world, 2_000 * MS)
    world.settle(engine.query_event(chain(2), op=2))
    assert len(asks(world)) == 1


def test_a_store_that_lies_makes_a_miss() -> None:
    world, engine = world_of()
    world.settle(engine.query_event(chain(1), op=1))
    world.settle(world.disk.finish(asks(world)[0].io, [0]))
    (answer,) = only(ev.Answer, answered(world))
    assert (answer.resident, answer.reason) == (0, Reason.READ_FAILED)
    assert world.core.catalogue.objects == 0


def test_nothing_is_learnt_from_who_could_not_be_asked() -> None:
    world, engine = world_of(*chain(1))
    lookup(engine, chain(1))
    io = asks(world)[0].io
    world.disk.finish(io)
    (residency,) = only(ev.Residency, world.settle(ev.Found(io, failed=True)))
    assert residency.tiers == (bytes(1),)
    lookup(engine, chain(1), op=2)
    assert asks(world)


def test_an_answer_that_nobody_waits_for_is_counted() -> None:
    world, engine = world_of()
    lookup(engine, chain(1))
    ask = asks(world)[0]
    world.settle(ev.Done(ask.io))
    world.settle(ev.Found(12345))
    answered(world)
    world.settle(ev.Found(ask.io))
    assert world.core.counters["stale_io"] == 3


# --- ends -------------------------------------------------------------------------------------------------------


def test_what_nobody_waits_for_is_not_fetched() -> None:
    """Before its read has begun the slot is free at once; afterwards when the read has ended."""
    world, engine = world_of(*chain(3), read_bytes=1)
    world.settle(engine.query_event(chain(1), op=1))
    world.settle(world.disk.finish(asks(world)[0].io))
    world.settle(engine.query_event(chain(3), op=2))
    world.settle(world.disk.finish(asks(world)[0].io))
    engine.release(2)
    assert world.core.catalogue.state.count(State.LOADING) == 1
    engine.release(1)
    (read,) = world.flying(ev.Read)
    assert only(ev.Cancel, world.told) == [ev.Cancel(read.io, STORE)]
    world.settle(world.disk.finish(read.io, [0]))
    assert State.LOADING not in world.core.catalogue.state
    assert world.core.catalogue.objects == 0
    lookup(engine, chain(1), op=3)
    assert not asks(world), "that it was cancelled says nothing about it"


def test_a_purge_takes_what_is_on_its_way_and_what_was_heard() -> None:
    world, engine = world_of(*chain(2))
    world.settle(engine.query_event(chain(2), op=1))
    world.settle(world.disk.finish(asks(world)[0].io))
    lookup(engine, chain(1, "b"), op=2)
    world.settle(ev.Purge())
    (answer,) = only(ev.Answer, answered(world))
    assert answer.resident == 0
    assert world.core.catalogue.objects == 0
    for keys in (chain(2), chain(1, "b")):
        assert not only(ev.Residency, lookup(engine, keys, op=3))
        answered(world)


def test_a_purge_takes_what_waits_for_its_fetch() -> None:
    """The store does not go on expecting to read it: its row may be another object's next."""
    world, engine = world_of(*chain(3), read_bytes=1)
    for op, length in ((1, 1), (2, 3)):
        world.settle(engine.query_event(chain(length), op=op))
        world.settle(world.disk.finish(asks(world)[0].io))
    world.settle(ev.Purge())
    assert [answer.resident for answer in only(ev.Answer, answered(world))] == [0, 0]
    assert not world.core.storage.backings[STORE].expected  # type: ignore[attr-defined]


def test_what_a_restore_made_nothing_of_is_not_fetched_again() -> None:
    world, engine = world_of(*chain(1))
    world.settle(engine.query_event(chain(1), op=1))
    answered(world)
    world.settle(ev.RestoreFailed(engine.scheduler, 1))
    world.disk.stores[STORE].add((NAMESPACE, 0, chain(1)[0]))
    assert engine.query(chain(1)).resident == 0


def test_what_a_restore_made_nothing_of_is_not_fetched_whatever_is_said_later() -> None:
    """It was asked for before it was stored here, and the answer comes after its restore has failed."""
    world, engine = world_of(*chain(1))
    lookup(engine, chain(1))
    (asked,) = asks(world)
    engine.commit(chain(1))
    engine.query(chain(1), op=2)
    world.settle(ev.RestoreFailed(engine.scheduler, 2))
    world.settle(ev.Found(asked.io, (0,)))
    assert engine.query(chain(1)).resident == 0
    assert not only(ev.Read, world.told)


def test_a_commit_of_what_is_on_its_way_is_announced_when_it_has_come() -> None:
    world, engine = world_of(*chain(1))
    world.settle(engine.query_event(chain(1), op=1))
    world.settle(world.disk.finish(asks(world)[0].io))
    assert not only(ev.Added, engine.commit(chain(1)))
    assert world.core.counters["duplicates"] == 1
    assert only(ev.Added, answered(world)) == [ev.Added(engine.scheduler, 0, chain(1)[0])]


def test_a_fetch_is_over_budget_like_any_read() -> None:
    world, engine = world_of(*chain(4))
    world.settle(ev.Configure(Limits(prepared_share=2.5 * SLOT / world.core.arena.total, engine_share=1)))
    world.settle(engine.query_event(chain(4), op=1))
    (answer,) = only(ev.Answer, answered(world))
    assert (answer.resident, answer.reason) == (2, Reason.BUDGET)


def test_without_a_store_nobody_is_asked() -> None:
    world = World(pages=2)
    engine = world.engine(slots=1)
    assert only(ev.Answer, world.settle(engine.query_event(chain(1), op=1)))
    assert only(ev.Residency, lookup(engine, chain(1), op=2))
    assert len(world.core.common.heard) == 0, "and it takes no memory"
