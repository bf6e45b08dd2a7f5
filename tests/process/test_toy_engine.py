"""Toy engines with a real manager: whatever becomes of that, every answer is the one without any cache."""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from testbed.process.manager_process import Manager
from testbed.process.peers import populated, status, until
from testbed.toy.toy_engine import BLOCK, Model, PoolEngine, StepEngine

from kvhold.client.attacher import Attacher
from kvhold.copy.host import HostCopier
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


Engine = PoolEngine | StepEngine


def answers(engine: Engine, asked: list[list[int]], meanwhile: Callable[[], Any] = lambda: None) -> None:
    """All are asked at once, and each answer is right."""
    if isinstance(engine, PoolEngine):
        given = [engine.threads.submit(engine.serve, tokens) for tokens in asked]
        meanwhile()
        said = [each.result(60) for each in given]
    else:
        names, found = [engine.submit(tokens) for tokens in asked], engine.step()
        meanwhile()
        until(lambda: found.update(engine.step()) or len(found) == len(asked), "all are answered")
        until(lambda: engine.step() or not engine.batches.holding, "all copies have ended")
        said = [found[name] for name in names]
    assert said == [MODEL.expected(tokens) for tokens in asked]


@pytest.fixture
def manager(serve: Callable[..., Manager]) -> Manager:
    """A manager with 4 MiB of DRAM: more than some requests need, and less than many."""
    manager = serve(dram="4MiB")
    populated(manager.socket)
    return manager


@pytest.fixture
def start(manager: Manager) -> Iterator[Callable[..., Any]]:
    """Starts engines that are served by ``manager``; they are closed at the end."""
    engines: list[Engine] = []

    def make(kind: type[Engine], name: str, model: Model = MODEL, **how: Any) -> Engine:
        engine = kind(name, manager.socket, model, **how)
        engines.append(engine)
        until(lambda: ready(engine), "it is served")
        return engine

    yield make
    for engine in engines:
        engine.close()


def ready(engine: Engine) -> bool:
    """Whether a manager serves it, and has granted what it needs to publish."""
    if isinstance(engine, PoolEngine):
        return engine.kvhold.wait(60) and bool(engine.kvhold._control.credit.get(engine.space.number))
    engine.step()
    return engine.spaces.plain is not None and all(map(len, engine.session.control.credit.values()))


def nothing_held(engine: Engine, manager: Manager) -> None:
    until(
        lambda: not any(status(manager.socket)["accounts"][state] for state in ("leased", "doomed", "orphaned")),
        "nothing is leased",
    )
    if isinstance(engine, PoolEngine):
        halves, control = [engine.kvhold._mappings], engine.kvhold._control
        assert not engine.kvhold._plans
    else:
        halves, control = [worker.copies.mappings for worker in engine.workers], engine.session.control
    until(lambda: all(len(half._sessions) == 1 for half in halves), "old arenas are let go")
    assert not control._asked
    assert not any(engine.pool.holds)


def restores_all(engine: Engine, asked: list[list[int]]) -> bool:
    """Whether all that can be is restored: the full blocks of each prompt without its last token."""
    before = engine.restored
    answers(engine, asked)
    return engine.restored - before >= sum((len(tokens) - 1) // BLOCK * BLOCK for tokens in asked)


PAIRS = {
    "threads": (PoolEngine, {}, PoolEngine, {}),
    "two ranks": (StepEngine, {"split": True}, StepEngine, {"split": True}),
    "steps, then threads": (StepEngine, {"split": False}, PoolEngine, {}),
    "threads, then steps": (PoolEngine, {}, StepEngine, {"split": False}),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_what_one_has_computed_another_restores(manager: Manager, start: Callable[..., Any], pair: str) -> None:
    """Also by the other face: ranks that hold the same KV store objects that are those of an engine of one rank."""
    kind, how, other, otherwise = PAIRS[pair]
    one, two = start(kind, "one", **how), start(other, "two", **otherwise)
    asked = prompts(30)
    until(lambda: restores_all(one, asked), "what one thread or step has stored is there for the next")
    assert restores_all(two, asked), "and for the other engine"
    for engine in (one, two):
        nothing_held(engine, manager)


@pytest.mark.parametrize("kind", ["threads", "steps"])
def test_with_zeros_for_what_is_restored_answers_are_others(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """So the answers prove what the other tests take from them."""
    how = {"split": True} if kind == "steps" else {}
    engine, asked = start(StepEngine if how else PoolEngine, "one", **how), prompts(10)
    until(lambda: restores_all(engine, asked), "all is stored")
    monkeypatch.setattr(blocking, "copy_out", lambda *_: None)
    monkeypatch.setattr(HostCopier, "restore", lambda *_: None)
    for worker in engine.workers if how else [engine]:
        worker.cache.pages.fill(0)
    with pytest.raises(AssertionError):
        restores_all(engine, asked)


def test_ranks_that_have_parts_share_nothing_with_those_that_have_all(start: Callable[..., Any]) -> None:
    parts, whole = start(StepEngine, "parts", model=Model("parts"), split=True), start(StepEngine, "whole", split=False)
    assert parts.spaces.namespace(parts.spaces.ranks) != whole.spaces.namespace(whole.spaces.ranks)


def test_a_namespace_is_a_model(start: Callable[..., Any]) -> None:
    asked = prompts(10)
    answers(start(PoolEngine, "one"), asked)
    other = start(PoolEngine, "other", model=Model("other weights"))
    assert other.serve(asked[0]) == other.model.expected(asked[0]) != MODEL.expected(asked[0])
    assert other.restored == 0


@pytest.mark.parametrize("split", [True, False])
def test_steps_while_a_manager_comes_and_goes(manager: Manager, start: Callable[..., Any], split: bool) -> None:
    engine = start(StepEngine, "one", split=split)
    asked = prompts(20)
    answers(engine, asked)
    faults: list[Callable[[], Any]] = [
        manager.kill,
        manager.start,
        manager.stop,
        manager.cont,
        lambda: lose(engine.workers[1].copies.attacher),
        lambda: lose(engine.session._attacher),
        manager.restart,
    ]
    for number, fault in enumerate(faults):
        answers(engine, [*asked, *prompts(10, number)], fault)
    until(lambda: ready(engine), "it is served again")
    answers(engine, asked)
    before = engine.restored
    until(lambda: answers(engine, asked) or engine.restored > before, "what is stored is found again")
    nothing_held(engine, manager)


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
    manager: Manager, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines of eight threads each: right answers all the while, bounded waits, and nothing is left over."""
    engines = [start(PoolEngine, name, threads=8, blocks=128) for name in ("one", "two")]
    owned = Owned(engines[0], monkeypatch)
    asked = prompts(150)
    faults: list[Callable[[], Any]] = [
        manager.kill,
        manager.start,
        manager.stop,
        manager.cont,
        lambda: lose(engines[0].kvhold._worker),
        lambda: lose(engines[1].kvhold._scheduler),
        manager.restart,
    ]
    for number, fault in enumerate(faults):
        random.Random(number).shuffle(asked)
        with ThreadPoolExecutor(2) as both:
            acts = (fault, lambda: None)
            for done in [both.submit(answers, *each) for each in zip(engines, [asked[:60]] * 2, acts, strict=True)]:
                done.result(120)
    for engine in engines:
        until(lambda engine=engine: ready(engine), "it is served again")
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


def lose(attacher: Attacher) -> None:
    """A connection breaks, as it may when a process is short of memory."""
    if attacher.channel is not None:
        attacher.channel.abandon()
