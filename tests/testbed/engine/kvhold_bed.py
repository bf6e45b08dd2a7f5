"""What the engine tests want to know of kvhold's halves and its manager."""

import ctypes
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from testbed.engine.bed import LLM, free_blocks, generate, prompt, running, scheduler_half, settle, worker_half
from testbed.engine.owners import watched
from testbed.process.manager_process import Manager
from vllm.distributed.kv_transfer import has_kv_transfer_group

from kvhold import protocol as wire
from kvhold.client.channel import Channel
from kvhold.engines.common.accounts import Accounts
from kvhold.engines.common.settings import Settings
from kvhold.engines.vllm.scheduler import SchedulerHalf
from kvhold.engines.vllm.worker import WorkerHalf

DEADLINE = 60.0


def status(socket: Path) -> dict[str, Any]:
    """The manager's report."""
    channel = Channel(socket, wire.Hello("admin"), DEADLINE)
    channel.send(wire.Status())
    while not (answers := channel.receive(DEADLINE)):
        assert not channel.lost, "the manager ended instead of answering"
    channel.close()
    report: dict[str, Any] = json.loads(answers[0].document)  # type: ignore[union-attr]
    assert sum(report["accounts"].values()) == report["arena"]["populated"], report
    return report


def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for ``condition``, which must come true soon."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.005)


def scheduler_side(llm: LLM) -> SchedulerHalf:
    half = scheduler_half(llm)._scheduler
    assert isinstance(half, SchedulerHalf)
    return half


def worker_side() -> WorkerHalf:
    half = worker_half()._worker
    assert isinstance(half, WorkerHalf)
    return half


def connect(manager: Manager, **settings: Any) -> dict[str, Any]:
    """Settings for ``manager`` with a deadline that a busy machine does not miss: what is stored must be found."""
    return {"socket": str(manager.socket), "answer_deadline_ms": 10_000, **settings}


@contextmanager
def serving(
    model_dir: Path, manager: Manager, *, role: str = "kv_both", credits: int = 64, **options: Any
) -> Iterator[LLM]:
    """An engine that is attached and, unless it only consumes, has been granted slots to publish into."""
    settings = options.pop("settings", {})
    with watched(), running(model_dir, connector=connect(manager, **settings), role=role, **options) as llm:
        warm_up(llm, credits if role != "kv_consumer" else 0)
        yield llm


def in_step_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that start from now on are ranks of a mixture of experts, as far as their scheduler halves can tell."""
    init = SchedulerHalf.__init__

    def as_rank(self: SchedulerHalf, config: Any, cache: Any, settings: Settings) -> None:
        config = copy(config)
        config.parallel_config = copy(config.parallel_config)
        config.parallel_config.data_parallel_size = 2
        init(self, config, cache, settings)

    monkeypatch.setattr(SchedulerHalf, "__init__", as_rank)


def warm_up(llm: LLM, credits: int = 64) -> None:
    """Wait for the attachment; a prompt shorter than a block then makes the engine introduce its KV cache."""
    until(lambda: attached(llm), "the engine attaches")
    generate(llm, [prompt(3, 999)], 1)
    half = scheduler_side(llm)

    def granted() -> bool:
        half.control.take_up()
        tokens = half._config.scheduler_config.max_num_batched_tokens
        return half._spaces.opened and all(
            len(half.control.credit.get(space, ())) >= min(credits, 2 * max(1, tokens // group.block_tokens))
            for space, group in zip(half._spaces.plain or (), half._groups, strict=True)
        )

    until(granted, "slots are granted")


def attached(llm: LLM) -> bool:
    """Whether plans may be made; looks at the session as a step would."""
    control = scheduler_side(llm).control
    control.take_up()
    return bool(control.attachment)


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """All that both halves count while this is open."""
    total: Counter[str] = Counter()
    add = Accounts.add

    def also(self: Accounts, name: str, value: float = 1, **labels: int) -> None:
        add(self, name, value, **labels)
        total[name] += value  # type: ignore[assignment]

    with patch.object(Accounts, "add", also):
        yield total


def check_identity(counts: Counter[str]) -> None:
    """Every token asked for is a hit or a miss with a reason."""
    missed = sum(value for name, value in counts.items() if name.startswith("tokens_missed_"))
    assert counts["tokens_asked"] == counts["tokens_hit"] + missed, counts


def check_nothing_held(llm: LLM, free_at_start: int, socket: Path | None = None) -> None:
    """The engine idles: no block of it is held, and the manager holds nothing for it but credits."""
    settle(llm)
    assert free_blocks(llm) == free_at_start
    half = scheduler_side(llm)
    assert not half.holding
    assert not half.restores._under_way
    assert not half.restores.loads
    assert not half.restores._failed
    assert not half._questions._by_request
    assert not half._publishing._open
    if has_kv_transfer_group():  # the worker half is in this process
        assert not worker_side().copies.loads
        assert not worker_side().copies.publishes
    if socket is not None:
        until(lambda: status(socket)["accounts"]["leased"] == 0, "the manager's leases end")
        assert status(socket)["accounts"]["doomed"] == 0


@contextmanager
def recording_offsets() -> Iterator[list[int]]:
    """Arena offsets of all objects published while this is open."""
    from kvhold.copy.host import HostCopier

    seen: list[int] = []
    begin = HostCopier.begin_publish

    def also(self: HostCopier, arena: Any, group: int, blocks: Any, offsets: Any) -> Any:
        seen.extend(offsets)
        return begin(self, arena, group, blocks, offsets)

    with patch.object(HostCopier, "begin_publish", also):
        yield seen


def flip_byte(offset: int) -> None:
    """Damage one stored byte behind everybody's back, through the worker's own mapping."""
    at = worker_side().copies.mappings._sessions[-1].arena.address + offset
    ctypes.memset(at, ctypes.string_at(at, 1)[0] ^ 0x80, 1)
