"""How long the scheduler half's question takes, socket included, and what a step of it costs in CPU time.

./dev run python benchmarks/lookup.py
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from figures import goal, median, spread

from kvhold import protocol as wire
from kvhold.client.budget import Budget
from kvhold.client.channel import AttachError, Channel
from kvhold.client.control import Control, Geometry

GOALS_MS = {100: 0.2, 1_000: 0.6, 10_000: 4.0}
GAPS = {"every 1 ms": 0.001, "every 5 ms": 0.005, "after 20 ms idle": 0.02}
"""Between questions; in the longer one processors fall asleep and caches cool."""
SHARD = 4096
PENDING = 100
GROUPS = 4


class Engine:
    """A scheduler session and a worker session of one instance, without an engine."""

    def __init__(self, socket: Path, instance: str, name: bytes) -> None:
        self.worker = Channel(socket, wire.Hello("worker", instance, 0, 1, "benchmark"), 5)
        self.worker.send(wire.Mapped())
        attacher: Any = SimpleNamespace(
            channel=Channel(socket, wire.Hello("scheduler", instance, 0, 1, "benchmark"), 5)
        )
        self.control = Control(attacher, read_seconds=10.0)
        self.budget = Budget(1.0)
        while not self.control.attachment:
            self.control.take_up()
        for group in range(GROUPS):
            self.control.open(1 + group, Geometry(name, group, 32, (SHARD,)), 4096 if group == 0 else 0)

    def store(self, keys: list[bytes]) -> None:
        done = 0
        while done < len(keys):
            self.control.pump(0.01)
            count = min(len(self.control.credit[1]), len(keys) - done)
            if count:
                slots = self.control.credit[1].take(count)
                parent = keys[done - 1] if done else b""
                self.control.commit(1, parent, done, keys[done : done + count], slots, (SHARD,))
                done += count

    def ask(self, keys: list[bytes]) -> float:
        """Seconds from a request's hashes to the offsets of its blocks."""
        self.budget.renew()
        self.control.take_up()
        begun = time.perf_counter()
        ticket = self.control.ask(1, 0, b"".join(keys))
        answer = self.control.answer(ticket, self.budget)
        seconds = time.perf_counter() - begun
        assert answer is not None, "no answer within a second"
        assert answer.resident == len(keys), (len(keys), answer)
        self.control.release((ticket,))
        return seconds

    def ask_groups(self, keys: list[bytes]) -> float:
        """The same for keys of several groups: where are they, and then those of the first group, all or none.

        Without the engine's own search in between.
        """
        self.budget.renew()
        self.control.take_up()
        begun = time.perf_counter()
        packed = b"".join(keys)
        looked = self.control.look(tuple((1 + group, packed) for group in range(GROUPS)))
        tiers = self.control.residency(looked, self.budget)
        assert tiers is not None
        assert tiers[0] == b"\1" * len(keys)
        ticket = self.control.prepare(looked, ((1, packed),), ())
        answer = self.control.answer(ticket, self.budget)
        seconds = time.perf_counter() - begun
        assert answer is not None
        assert len(answer.offsets) == 8 * len(keys)
        self.control.release((ticket,))
        return seconds

    def idle_step(self) -> float:
        """CPU seconds of a step in which nothing is asked."""
        begun = time.thread_time()
        self.control.take_up()
        return time.thread_time() - begun


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kvb-") as folder:
        socket = Path(folder) / "k.sock"
        command = [sys.executable, "-m", "kvhold.cli", "serve", "--dram", "256MiB", "--socket", str(socket)]
        manager = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            engine = attach(socket)
            await_arena(socket)
            chains = {count: [os.urandom(32) for _ in range(count)] for count in GOALS_MS}
            for keys in chains.values():
                engine.store(keys)
            for keys in chains.values():
                for _ in range(10):
                    engine.ask(keys)
            for count, keys in chains.items():
                for name, gap in GAPS.items():
                    times = []
                    for _ in range(200 if count < 10_000 else 60):
                        times.append(engine.ask(keys) * 1e3)
                        time.sleep(gap)  # the manager marks the chain as used, and takes the release, after its answer
                    verdict = "met" if median(times) <= GOALS_MS[count] else "missed"
                    print(f"lookup of {count:>6} blocks, {name}: {spread(times)} ms; goal {GOALS_MS[count]}, {verdict}")
            for count, keys in chains.items():
                times = []
                for _ in range(60):
                    times.append(engine.ask_groups(keys) * 1e3)
                    time.sleep(0.005)
                print(f"two questions about {count:>6} blocks of each of {GROUPS} groups: {spread(times)} ms")
            idle = [engine.idle_step() * 1e6 for _ in range(2000)]
            print(f"a step of the scheduler half that asks nothing: {spread(idle)} us of CPU time")
            pending = pending_steps(engine, chains[100])
            verdict = goal(median(pending), 0.2)
            print(f"a step with {PENDING} requests that wait: {spread(pending)} ms of CPU time {verdict}")
        finally:
            manager.terminate()
            manager.wait()


def pending_steps(engine: Engine, keys: list[bytes]) -> list[float]:
    """CPU milliseconds of asking again for requests that are answered and wait to be admitted, per step."""
    from kvhold.engines.common.accounts import Accounts
    from kvhold.engines.common.groups import Group
    from kvhold.engines.common.question import Asker
    from kvhold.engines.common.questions import Questions

    group = Group(0, "full attention", 16, handed=False, whole=True, window=0)
    search: Any = SimpleNamespace()  # a chain needs none
    asker = Asker(engine.control, (group,))
    asker.bind(search, drops_last=False)
    questions = Questions(engine.control, engine.budget, Accounts(), asker, patience=lambda tokens: 10.0)
    names = [f"request {number}" for number in range(PENDING)]
    times = []
    for step in range(220):
        begun = time.thread_time()
        engine.control.take_up()
        found = [questions.find(name, 0, 16 * len(keys), (1,), keys) for name in names]
        if step >= 20:
            times.append((time.thread_time() - begun) * 1e3)
            assert found == [16 * len(keys)] * PENDING
    questions.drop_all()
    return times


def await_arena(socket: Path) -> None:
    """Until the whole arena is populated: chains stored before would push each other out."""
    arena = {"bytes": 1, "populated": 0}
    while arena["populated"] < arena["bytes"]:
        admin = Channel(socket, wire.Hello("admin"), 5)
        admin.send(wire.Status())
        [reply] = admin.receive(5)
        assert isinstance(reply, wire.StatusReply)
        arena = json.loads(reply.document)["arena"]
        admin.close()


def attach(socket: Path, instance: str = "bench", name: bytes = b"") -> Engine:
    """An engine of a manager that may be just starting; under a ``name`` of its own unless one is given."""
    end = time.monotonic() + 60
    while True:
        try:
            return Engine(socket, instance, name or os.urandom(32))
        except AttachError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


if __name__ == "__main__":
    main()
