"""What an engine's cache events tell of blocks that a manager has."""

import random
import time
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from testbed.engine.storing import FULL, attention, keys
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.request import Request

from kvhold import protocol as wire
from kvhold.client.control import Control, Geometry, QuestionId
from kvhold.engines.common.announcements import Published
from kvhold.engines.vllm.events import CacheEvents


def silent() -> Any:
    """A session that nothing is asked in and that says nothing."""
    return SimpleNamespace(attachment=1, silent=False)


def routing(control: Any = None) -> CacheEvents:
    cache: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=attention(16))])
    events = CacheEvents(control or silent(), cache, (FULL,))
    events.begun((7,))
    return events


def published(tokens: int = 33) -> Published:
    request = Request("r", list(range(tokens)), SamplingParams(max_tokens=1), None)
    return Published(request, b"", 0, 16)


def test_stored_removed_and_stored_again_in_one_step_are_three_events() -> None:
    events, [key] = routing(), keys(1)
    for _ in range(2):
        events.expect(7, key, published())
        events.stored(7, [key])
        events.removed(7, [key])
    events.expect(7, key, published())
    events.stored(7, [key])
    kinds = [type(event) for event in events.take()]
    assert kinds == [BlockStored, BlockRemoved, BlockStored, BlockRemoved, BlockStored]
    assert list(events.take()) == []
    assert list(events.take()) == []


def test_a_removal_that_comes_with_a_publish_leaves_nothing_announced() -> None:
    events, [key] = routing(), keys(1)
    events.expect(7, key, published())
    events.removed(7, [key])
    assert list(events.take()) == [], "nobody was told of it"
    for _ in range(2):  # another request has stored it once more
        events.expect(7, key, published())
        events.stored(7, [key])
    events.removed(7, [key])
    events.removed(7, [key])
    stored, removed = events.take()
    assert isinstance(removed, BlockRemoved)
    assert (stored.medium, removed.medium) == (MEDIUM_CPU, MEDIUM_CPU)
    assert (removed.group_idx, removed.locality) == (0, "LOCAL")
    events.removed(7, [key])
    assert list(events.take()) == [], "nothing is announced any more"


def test_an_engine_that_would_idle_goes_on_while_somebody_is_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    events, [key] = routing(), keys(1)
    assert not events.awaited
    events.expect(7, key, published())
    assert events.awaited
    events.stored(7, [key])
    assert not events.awaited
    events.expect(7, key, published())
    events.expect_no_more(7, [key])
    assert not events.awaited


def test_an_idle_engine_does_not_go_on_for_a_manager_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    control, [key] = silent(), keys(1)
    events = routing(control)
    now = time.monotonic()
    monkeypatch.setattr("kvhold.engines.common.announcements.time.monotonic", lambda: now)
    events.expect(7, key, published())
    events.stored(7, [key])
    control.look = lambda parts: QuestionId(1, 1, 1, now)
    events.begun((8,))  # the next session is asked what is left of it
    assert events.awaited
    now += 2
    assert not events.awaited


class Line:
    """A session with a manager that has ``there``; it answers what it is asked when it is told to."""

    def __init__(self, there: set[bytes]) -> None:
        self.there = there
        self.lost, self.drained = False, True
        self.turns, self.unsent = 0, 0
        self.welcome = wire.Welcome(7, 1, 1 << 20)
        self.asked: list[wire.Lookup] = []
        self.inbox: list[Any] = [wire.Ready()]

    def send(self, message: Any) -> None:
        if isinstance(message, wire.Lookup):
            self.asked.append(message)

    def receive(self, wait: float) -> list[Any]:
        said, self.inbox = self.inbox, []
        return said

    def answer(self) -> None:
        for asked in self.asked:
            [(_, packed)] = asked.parts
            tiers = bytes(packed[at : at + 32] in self.there for at in range(0, len(packed), 32))
            self.inbox.append(wire.Residency(asked.op, (tiers,)))
        self.asked.clear()


def test_of_many_announced_blocks_each_step_asks_about_a_few() -> None:
    """Meanwhile blocks are removed, stored and announced, and a session ends; what a router believes is right."""
    attacher: Any = SimpleNamespace(channel=None)
    control, rng = Control(attacher, 10.0, 10.0), random.Random(3)
    events = control.watcher = routing(control)
    many, slot = keys(20_000), published()
    for key in many:
        events.expect(7, key, slot)
        events.stored(7, [key])
    believed = {hash_of for event in events.take() for hash_of in event.block_hashes}
    assert len(believed) == len(many)
    there = {key for key in many if rng.random() < 0.5}

    def step() -> None:
        control.take_up()
        for event in events.take():
            told = set(event.block_hashes)
            assert len(told) <= 1100, "what one step tells is bounded, too"
            if isinstance(event, BlockStored):
                assert not told & believed, "announced twice"
                believed.update(told)
            else:
                assert told <= believed, "withdrawn without having been announced"
                believed.difference_update(told)

    steps = 0
    for space, most in ((8, 5), (9, 1 << 30)):  # the first of the new sessions ends when a part has been asked
        attacher.channel = line = Line(there)
        control.take_up()
        control.open(space, Geometry(b"n" * 32, 0, 32, (4096,)), 0)
        events.begun((space,))
        for _ in range(most):
            assert sum(len(asked.parts[0][1]) for asked in line.asked) <= 1024 * 32, "more than a slice at once"
            line.answer()
            lost, again, new = (rng.choice(many) for _ in range(3))
            if lost in there:
                there.discard(lost)
                line.inbox.append(wire.Removed(space, lost))
            for key in (again, new):
                if key not in there:
                    there.add(key)
                    events.expect(space, key, slot)
                    line.inbox.append(wire.Added(space, key))
            step()
            steps += 1
            if not line.asked and not line.inbox:
                break
    assert steps >= 20
    assert believed == {maybe_convert_block_hash(BlockHash(key)) for key in there}
    assert not events.awaited


def test_what_was_announced_of_a_closed_space_is_withdrawn_bit_by_bit() -> None:
    control, many, slot = silent(), keys(3000), published()
    control.release = lambda questions: None
    events = routing(control)
    events.opened((8,))
    for key in many:
        events.expect(8, key, slot)
        events.stored(8, [key])
    assert list(events.take())
    events.closed((8,))
    assert events.awaited, "an engine that would idle goes on"
    first = list(events.take())
    events.opened((9,))
    events.expect(9, many[0], slot)  # not withdrawn yet: the router knows it still
    events.stored(9, [many[0]])
    rest = [event for _ in range(3) for event in events.take()]
    gone = [name for event in (*first, *rest) for name in event.block_hashes]
    assert all(isinstance(event, BlockRemoved) and len(event.block_hashes) <= 1024 for event in (*first, *rest))
    assert len(gone) == len(set(gone)) == 2999
    assert not events.awaited


@pytest.mark.parametrize("last", [0, 1])
def test_of_two_questions_about_a_block_the_later_one_counts(last: int) -> None:
    control, [key] = silent(), keys(1)
    events = routing(control)
    answers: dict[int, tuple[bytes, ...]] = {}
    numbers = count(1)
    control.look = lambda parts: QuestionId(next(numbers), 1, 1, time.monotonic())
    control.residency = lambda question: answers.get(question.op)
    control.release = lambda questions: None
    events._ask(7, [key], {key: published()})
    events.removed(7, [key])
    events._ask(7, [key], {key: published()})
    answers[1] = (b"\x01",)  # from before it was removed
    assert list(events.take()) == []
    answers[2] = (bytes([last]),)
    assert [type(event) for event in events.take()] == [BlockStored] * last
    assert not events.awaited
    events.removed(7, [key])
    assert [type(event) for event in events.take()] == [BlockRemoved] * last
