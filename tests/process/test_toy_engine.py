"""A toy engine with a real manager: whatever becomes of that, every answer is the one without any cache."""

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from manager_process import Manager
from peers import populated, status, until
from toy_engine import BLOCK, Model, PoolEngine

from kvhold.client.attacher import Attacher
from kvhold.engines.common import blocking

MODEL = Model()


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts that have beginnings in common."""
    rng = random.Random(seed)
    stems = [[rng.randrange(1000) for _ in range(40)] for _ in range(4)]
    return [
        rng.choice(stems)[: rng.randrange(41)] + [rng.randrange(1000) for _ in range(rng.randrange(1, 12))]
        for _ in range(count)
    ]


def answers(engine: PoolEngine, asked: list[list[int]]) -> None:
    """All at once, and each is right."""
    given = [engine.submit(tokens) for tokens in asked]
    assert [each.result(60) for each in given] == [MODEL.expected(tokens) for tokens in asked]


@pytest.fixture
def pool(manager: Manager) -> Iterator[Callable[..., PoolEngine]]:
    populated(manager.socket)
    engines: list[PoolEngine] = []

    def make(name: str, **how: Any) -> PoolEngine:
        engines.append(PoolEngine(name, lambda half: Attacher(half, [manager.socket], None, True), MODEL, **how))
        assert engines[-1].kvhold.wait(60)
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def nothing_held(engine: PoolEngine, manager: Manager) -> None:
    until(
        lambda: not any(status(manager.socket)["accounts"][state] for state in ("leased", "doomed", "limbo")),
        "nothing is leased",
    )
    until(lambda: len(engine.kvhold._mappings._sessions) == 1, "old arenas are let go")
    assert not engine.kvhold._control._asked
    assert not engine.kvhold._plans
    assert engine.cache.free == len(engine.cache.pages)


def test_what_one_has_computed_another_restores(manager: Manager, pool: Callable[..., PoolEngine]) -> None:
    one, two = pool("one"), pool("two")
    asked = prompts(40)
    answers(one, asked)
    assert one.restored > 0, "beginnings are shared"
    answers(two, asked)
    known = sum(len(tokens) // BLOCK * BLOCK for tokens in asked)
    until(lambda: two.restored >= known or answers(two, asked), "all full blocks are restored")
    for engine in (one, two):
        nothing_held(engine, manager)


def test_a_namespace_is_a_model(manager: Manager, pool: Callable[..., PoolEngine]) -> None:
    asked = prompts(10)
    answers(pool("one"), asked)
    other = PoolEngine("other", lambda half: Attacher(half, [manager.socket], None, True), Model("other weights"))
    try:
        assert other.kvhold.wait(60)
        assert other.serve(asked[0]) == other.model.expected(asked[0]) != MODEL.expected(asked[0])
        assert other.restored == 0
    finally:
        other.close()


class Owned:
    """Whether what belongs to who holds the lock is used by somebody else, and whether it is held over a copy."""

    def __init__(self, engine: PoolEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wrong: list[str] = []
        face = engine.kvhold
        held = face._lock._is_owned  # type: ignore[attr-defined]
        control: Any = face._control
        for name in ("take_up", "pump", "ask", "look", "use", "answer", "residency", "start", "release", "commit"):
            self._watch(monkeypatch, control, name, held, True)
        for name in ("copy_in", "copy_out"):
            self._watch(monkeypatch, blocking, name, held, False)
        self._watch(monkeypatch, face._mappings, "attached", held, False)

    def _watch(self, patch: pytest.MonkeyPatch, thing: Any, name: str, held: Callable[[], bool], wanted: bool) -> None:
        method = getattr(thing, name)

        def watched(*args: Any, **more: Any) -> Any:
            if held() is not wanted:
                self.wrong.append(f"{name} by {threading.current_thread().name}")
            return method(*args, **more)

        patch.setattr(thing, name, watched)


def test_many_threads_and_a_manager_that_comes_and_goes(
    manager: Manager, pool: Callable[..., PoolEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines of eight threads each: right answers all the while, bounded waits, and nothing is left over."""
    engines = [pool(name, threads=8, blocks=128) for name in ("one", "two")]
    owned = Owned(engines[0], monkeypatch)
    asked = prompts(150)
    faults: list[Callable[[], Any]] = [
        manager.kill,
        manager.start,
        manager.stop,
        manager.cont,
        lambda: _lose(engines[0], "_worker"),
        lambda: _lose(engines[1], "_scheduler"),
        manager.restart,
    ]
    for fault in faults:
        given = [(engine, tokens, engine.submit(tokens)) for engine in engines for tokens in asked[:60]]
        fault()
        for engine, tokens, answer in given:
            assert answer.result(60) == MODEL.expected(tokens), engine.kvhold.label
        random.Random(len(given)).shuffle(asked)
    for engine in engines:
        assert engine.kvhold.wait(60)
        answers(engine, asked)
        before = engine.restored
        until(lambda engine=engine, before=before: answers(engine, asked) or engine.restored > before, "hits again")
    for engine in engines:
        nothing_held(engine, manager)
        counts = engine.kvhold.counts
        missed = sum(count for name, count in counts.items() if name.startswith("missed_"))
        unpublished = sum(count for name, count in counts.items() if name.startswith("unpublished_"))
        assert counts["asked"] == counts["found"] + missed
        assert counts["found"] == counts["restored"] + counts["void"]
        assert counts["offered"] == counts["present"] + counts["published"] + unpublished
    assert not owned.wrong


def _lose(engine: PoolEngine, half: str) -> None:
    """A connection breaks, as it may when a process is short of memory."""
    channel = getattr(engine.kvhold, half).channel
    if channel is not None:
        channel.abandon()
