"""The engine never notices: its manager is killed, stopped and restarted at every moment that matters."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from testbed.engine.bed import LLM, add, drain, free_blocks, generate, prompt, reference, running, settle, step
from testbed.engine.kvhold_bed import (
    attached,
    check_identity,
    check_nothing_held,
    connect,
    counting,
    scheduler_side,
    serving,
    status,
    until,
    worker_side,
)
from testbed.process.manager_process import Manager

from kvhold.copy.host import HostCopier

PROMPTS = [prompt(400, seed) for seed in range(3)]
FAULTS = ["kill", "stop"]


@contextmanager
def held_restores(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Restores begin but do not copy until the event is set."""
    go = threading.Event()
    advance = HostCopier.advance

    def held(self: HostCopier) -> None:
        if go.is_set():
            advance(self)

    with monkeypatch.context() as patch:
        patch.setattr(HostCopier, "advance", held)
        try:
            yield go
        finally:
            go.set()


def begin_restores(llm: LLM) -> None:
    """Send all prompts, and step until the restore of each has begun."""
    for i, tokens in enumerate(PROMPTS):
        add(llm, f"r{i}", tokens)
    until(lambda: step(llm) == [] and len(worker_side().copies.loads) == 3, "restores begin")


def strike(manager: Manager, fault: str) -> None:
    manager.kill() if fault == "kill" else manager.stop()


def recover(manager: Manager, fault: str, llm: LLM) -> None:
    """Whatever was done to it, the manager is there again, and the engine attached to it by itself."""
    if fault == "kill":
        manager.start()
    else:
        manager.cont()
    until(lambda: attached(llm), "the engine is attached again")
    assert generate(llm, [prompt(100, 777)])[0].finish_reason == "length"


def check_still_useful(llm: LLM, manager: Manager, expected: list[Any]) -> None:
    """After the fault, what is computed is stored and restored as before."""
    for _ in range(2):
        assert llm.reset_prefix_cache()
        outputs = generate(llm, PROMPTS)
        assert outputs == expected
    assert [output.cached for output in outputs] == [384, 384, 384]


@pytest.mark.parametrize("fault", FAULTS)
def test_before_a_lookup(llama_dir: Path, manager: Manager, fault: str) -> None:
    expected = reference(llama_dir, PROMPTS)
    with serving(llama_dir, manager, settings={"answer_deadline_ms": 50}) as llm, counting() as counts:
        free = free_blocks(llm)
        generate(llm, PROMPTS)
        assert llm.reset_prefix_cache()
        strike(manager, fault)
        outputs = generate(llm, PROMPTS)
        assert outputs == expected
        assert [output.cached for output in outputs] == [0, 0, 0]
        check_identity(counts)
        assert counts["tokens_missed_detached"] + counts["tokens_missed_deadline"] == 3 * 384
        recover(manager, fault, llm)
        check_nothing_held(llm, free, manager.socket)
    with serving(llama_dir, manager) as llm:
        check_still_useful(llm, manager, expected)


@pytest.mark.parametrize("fault", ["kill", "cont"])
def test_with_a_query_pending(llama_dir: Path, manager: Manager, fault: str) -> None:
    expected = reference(llama_dir, PROMPTS)
    with serving(llama_dir, manager) as llm:
        free = free_blocks(llm)
        generate(llm, PROMPTS)
        assert llm.reset_prefix_cache()
        manager.stop()
        for i, tokens in enumerate(PROMPTS):
            add(llm, f"r{i}", tokens)
        for _ in range(5):
            assert step(llm) == []  # deferred: nobody answers
        manager.kill() if fault == "kill" else manager.cont()
        outputs = drain(llm)
        assert [outputs[f"r{i}"] for i in range(3)] == expected
        if fault == "kill":
            assert [outputs[f"r{i}"].cached for i in range(3)] == [0, 0, 0]
            recover(manager, fault, llm)
        else:
            assert [outputs[f"r{i}"].cached for i in range(3)] == [384, 384, 384]
        check_nothing_held(llm, free, manager.socket)
        check_still_useful(llm, manager, expected)


@pytest.mark.parametrize("fault", FAULTS)
def test_during_a_load(llama_dir: Path, manager: Manager, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference(llama_dir, PROMPTS)
    with serving(llama_dir, manager) as llm:
        free = free_blocks(llm)
        generate(llm, PROMPTS)
        assert llm.reset_prefix_cache()
        with held_restores(monkeypatch) as go:
            begin_restores(llm)
            strike(manager, fault)
            step(llm)
            go.set()
            outputs = drain(llm)
        assert [outputs[f"r{i}"] for i in range(3)] == expected
        assert [outputs[f"r{i}"].cached for i in range(3)] == [384, 384, 384]
        recover(manager, fault, llm)
        check_nothing_held(llm, free, manager.socket)
        check_still_useful(llm, manager, expected)


def test_restart_during_a_load(llama_dir: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy out of the old arena runs while the engine is attached to the new manager, and ends right."""
    expected = reference(llama_dir, PROMPTS)
    with serving(llama_dir, manager) as llm:
        free = free_blocks(llm)
        generate(llm, PROMPTS)
        assert llm.reset_prefix_cache()
        with held_restores(monkeypatch) as go:
            begin_restores(llm)
            manager.restart()
            until(lambda: attached(llm), "attached to the new manager")
            assert len(worker_side().copies.mappings._sessions) == 2  # the old arena is still mapped
            go.set()
            outputs = drain(llm)
        assert [outputs[f"r{i}"] for i in range(3)] == expected
        until(lambda: len(worker_side().copies.mappings._sessions) == 1, "the old arena is let go")
        check_nothing_held(llm, free, manager.socket)
        check_still_useful(llm, manager, expected)


@pytest.mark.parametrize("fault", FAULTS)
def test_during_a_publish(llama_dir: Path, manager: Manager, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference(llama_dir, PROMPTS)
    begin = HostCopier.begin_publish
    struck: list[str] = []

    def striking(self: HostCopier, *args: Any) -> Any:
        if not struck:
            struck.append(fault)
            strike(manager, fault)
        return begin(self, *args)

    with serving(llama_dir, manager) as llm:
        free = free_blocks(llm)
        with monkeypatch.context() as patch:
            patch.setattr(HostCopier, "begin_publish", striking)
            assert generate(llm, PROMPTS) == expected
        assert struck
        assert llm.reset_prefix_cache(), "a block is held while the manager does not answer"
        recover(manager, fault, llm)
        check_nothing_held(llm, free, manager.socket)
        check_still_useful(llm, manager, expected)


def test_idle_engine_attaches_again_and_lets_the_old_arena_go(llama_dir: Path, manager: Manager) -> None:
    with serving(llama_dir, manager) as llm:
        generate(llm, PROMPTS)
        old = worker_side().copies.mappings._sessions[-1]
        manager.restart()
        # no step, no hook: both halves see to it from their own threads
        until(lambda: status(manager.socket)["instances"], "sessions of the new manager")
        until(lambda: status(manager.socket)["instances"][0]["ready"], "the new manager has both halves")
        until(
            lambda: worker_side().copies.mappings._sessions and old not in worker_side().copies.mappings._sessions,
            "the old arena is unmapped",
        )
        assert len(worker_side().copies.mappings._sessions) == 1


def test_no_manager_at_the_start_and_one_later(llama_dir: Path, manager: Manager) -> None:
    expected = reference(llama_dir, PROMPTS)
    manager.kill()
    with running(llama_dir, connector=connect(manager)) as llm:
        assert generate(llm, PROMPTS) == expected
        manager.start()
        until(lambda: attached(llm), "the engine attaches")
        assert llm.reset_prefix_cache()
        check_still_useful(llm, manager, expected)


def test_a_manager_that_refuses_or_talks_nonsense(llama_dir: Path, tmp_path: Path) -> None:
    import socket

    expected = reference(llama_dir, PROMPTS[:1])
    path = tmp_path / "k.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        seen: list[bytes] = []

        def nonsense() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    seen.append(connection.recv(100))
                    connection.sendall(b"\xff" * 64)

        threading.Thread(target=nonsense, daemon=True).start()
        with running(llama_dir, connector={"socket": str(path)}) as llm:
            assert generate(llm, PROMPTS[:1]) == expected
        assert seen
        listener.shutdown(socket.SHUT_RDWR)


def _fail(*_: object) -> None:
    raise RuntimeError("injected")


@pytest.mark.parametrize(
    ("half", "method"),
    [
        ("kvhold.engines.common.questions.Questions", "find"),
        ("kvhold.engines.common.questions.Questions", "take"),
        ("kvhold.engines.common.questions.Questions", "settle"),
        ("kvhold.engines.vllm.publishing.Publishing", "plan"),
        ("kvhold.engines.vllm.publishing.Publishing", "admit"),
        ("kvhold.engines.common.mappings.Mappings", "arena"),
        ("kvhold.copy.host.HostCopier", "begin_publish"),
        ("kvhold.copy.host.HostCopier", "begin_restore"),
        ("kvhold.copy.host.HostCopier", "advance"),
        ("kvhold.client.control.Control", "pump"),
        ("kvhold.client.control.Control", "take_up"),
        ("kvhold.client.control.Control", "ask"),
        ("kvhold.client.control.Control", "release"),
        ("kvhold.client.control.Control", "commit"),
        ("kvhold.client.channel.Channel", "send"),
        ("kvhold.client.channel.Channel", "receive"),
    ],
)
def test_an_error_of_ours_never_reaches_the_engine(
    llama_dir: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch, half: str, method: str
) -> None:
    expected = reference(llama_dir, PROMPTS)
    rounds = [[*PROMPTS, prompt(300, 300 + i)] for i in range(3)]
    expected_rounds = [reference(llama_dir, prompts) for prompts in rounds]
    with serving(llama_dir, manager) as llm:
        free = free_blocks(llm)
        generate(llm, PROMPTS)
        assert llm.reset_prefix_cache()
        calls = iter(range(10**6))
        original: Callable[..., Any] = _resolve(half, method)

        def sometimes(*args: Any, **kwargs: Any) -> Any:
            return _fail() if next(calls) % 3 == 1 else original(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(f"{half}.{method}", sometimes)
            for prompts, outputs in zip(rounds, expected_rounds, strict=True):
                assert generate(llm, prompts) == outputs
                llm.reset_prefix_cache()
        assert next(calls) > 1
        assert generate(llm, PROMPTS) == expected
        settle(llm)
        assert free_blocks(llm) == free
        assert not scheduler_side(llm).restores._under_way


def _resolve(half: str, method: str) -> Any:
    import importlib

    module, name = half.rsplit(".", 1)
    return getattr(getattr(importlib.import_module(module), name), method)
