"""Try a store as a manager would use it: what ``kvhold remote check`` does."""

import os
import queue
import time
from dataclasses import dataclass
from typing import Final

from kvhold.core.events import Ask, Done, Forget, Found, Read, Stored, Write
from kvhold.core.remote.events import Serves
from kvhold.tiers.remote.executor import RemoteExecutor
from kvhold.tiers.remote.url import RemoteConfig

OBJECTS: Final = 16
SIZE: Final = 512 << 10
"""Bytes of each of them."""
PATIENCE: Final = 30.0
"""Seconds for a store to serve, and for each step after that."""


@dataclass(frozen=True, slots=True)
class Checked:
    """``why`` it is of no use, with what helps; "" if it is. Rates are in bytes a second, ``asked`` in seconds."""

    state: str
    why: str = ""
    put: float = 0.0
    got: float = 0.0
    asked: float = 0.0


def check(config: RemoteConfig, patience: float = PATIENCE) -> Checked:
    """Probe the store, move 8 MiB to it and back, compare, and remove them. It takes a second or two."""
    told: queue.SimpleQueue[Done | Found | Serves] = queue.SimpleQueue()
    arena = os.memfd_create("kvhold-check", os.MFD_CLOEXEC)
    try:
        os.ftruncate(arena, 2 * OBJECTS * SIZE)
        data = os.urandom(OBJECTS * SIZE)
        os.pwrite(arena, data, 0)
        executor = RemoteExecutor(config, arena, 2 * OBJECTS * SIZE, told.put)
        executor.start(1)
        try:
            return _try(executor, told, arena, data, patience)
        finally:
            executor.close(patience)
    finally:
        os.close(arena)


def _try(
    executor: RemoteExecutor, told: "queue.SimpleQueue[Done | Found | Serves]", arena: int, data: bytes, patience: float
) -> Checked:
    deadline = time.monotonic() + patience
    while not (state := _state(executor)) or state.state == "starting":
        if time.monotonic() >= deadline:
            return Checked("down", f"it did not answer within {patience:g} s; is its address right?")
        time.sleep(0.01)
    if state.state != "serving":
        return state
    namespace = os.urandom(32)
    names = tuple((namespace, 0, number.to_bytes(16, "little")) for number in range(OBJECTS))

    def objects(first: int) -> tuple[Stored, ...]:
        return tuple(Stored(*name, b"", 0, (SIZE,), (first + number) * SIZE, 0) for number, name in enumerate(names))

    seconds = []
    for effect in (
        Write(1, 1, objects(0)),
        Ask(2, 1, names),
        Read(3, 1, objects(OBJECTS)),
        Forget(4, 1, (), namespace),
        Ask(5, 1, names),
    ):
        began = time.monotonic()
        executor.submit(effect)
        answer = _answer(told, patience)
        seconds.append(time.monotonic() - began)
        what = type(effect).__name__.lower()
        if answer is None or (answer.failed if isinstance(answer, Done) else answer.failed is True):
            report = executor.report()
            return Checked(
                "down", str(report["why"]) or f"{what} failed for some of {OBJECTS} objects: {report['wrong']}"
            )
        if isinstance(answer, Found) and len(answer.there) != (OBJECTS if effect.io == 2 else 0):
            return Checked("down", f"of {OBJECTS} objects it says that {len(answer.there)} are there, which is wrong")
    if os.pread(arena, len(data), len(data)) != data:
        return Checked("down", "it gave back other bytes than it was given")
    return Checked("serving", "", len(data) / seconds[0], len(data) / seconds[2], seconds[1])


def _state(executor: RemoteExecutor) -> Checked:
    report = executor.report()
    return Checked(str(report["state"]), str(report["why"]))


def _answer(told: "queue.SimpleQueue[Done | Found | Serves]", patience: float) -> Done | Found | None:
    deadline = time.monotonic() + patience
    while True:
        try:
            answer = told.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None
        if not isinstance(answer, Serves):
            return answer
