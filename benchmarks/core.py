"""The core alone, at a million objects: a long question, its slices, memory, and the longest pause.

    ./dev run python benchmarks/core.py [--objects 1000000]

A pause is the time of one event or one step: for so long nobody else is served. Times are the thread's own CPU time,
so that other work on the machine does not count. Objects are named by 32-byte keys, in
chains of 512; a scattered chain is made of objects that were stored far apart.
"""

import argparse
import gc
import os
import random
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from statistics import median

from figures import goal, spread

from kvhold.core import Core
from kvhold.core import events as ev
from kvhold.core.limits import Limits

SLOT = 4096
PAGE = 64 << 20
CHAIN = 512
LONG = 8192
SECOND = 1_000_000_000


class Bench:
    """A core with one engine, and a note of how long each event and step took, by what it was for."""

    def __init__(self, objects: int) -> None:
        pages = -(-objects * 5 // 4 * SLOT // PAGE)
        self.core = Core(PAGE, pages * PAGE, Limits(prepared_share=1, engine_share=1))
        self.now = 0
        self.pauses: dict[str, list[float]] = {}
        self.free: list[tuple[int, int]] = []
        self.op = 0
        self.do("start", ev.Populated(pages))
        self.do("start", ev.Joined(1, ev.Role.SCHEDULER, "bench", 0, 1))
        self.do("start", ev.Joined(2, ev.Role.WORKER, "bench", 0, 1))
        self.do("start", ev.Mapped(2))
        self.do("start", ev.Open(1, 0, b"n" * 32, 0, 32, (SLOT,), 4096))

    def do(self, what: str, event: ev.Event) -> list[ev.Effect]:
        """``event`` and all work it leaves."""
        effects = self._timed(what, lambda: self.core.handle(event, self.now))
        while self.core.has_work:
            effects += self._timed(what, self.core.step)
        return effects

    def _timed(self, what: str, call: Callable[[], list[ev.Effect]]) -> list[ev.Effect]:
        self.now += 1
        begun = time.thread_time()
        effects = call()
        self.pauses.setdefault(what, []).append(time.thread_time() - begun)
        for effect in effects:
            if isinstance(effect, ev.Grant):
                self.free += zip(array("I", effect.rows), array("Q", effect.epochs), strict=True)
        return effects

    def store(self, what: str, keys: list[bytes], parent: bytes = b"") -> None:
        for start in range(0, len(keys), ev.MAX_BATCH):
            part = keys[start : start + ev.MAX_BATCH]
            taken, self.free = self.free[: len(part)], self.free[len(part) :]
            rows, epochs = array("I", [row for row, _ in taken]), array("Q", [epoch for _, epoch in taken])
            commit = ev.Commit(1, 0, parent, start, b"".join(part), rows.tobytes(), epochs.tobytes(), (SLOT,))
            self.do(what, commit)
            parent = part[-1]

    def ask(self, what: str, keys: list[bytes], skip: int = 0) -> float:
        """Seconds of the core's own work from the question to its answer."""
        self.op += 1
        seconds, effects = 0.0, list[ev.Effect]()
        packed = b"".join(keys)
        begun = time.thread_time()
        effects = self._timed(what, lambda: self.core.handle(ev.Query(1, self.op, 1, 0, skip, packed), self.now))
        while not any(isinstance(effect, ev.Answer) for effect in effects):
            effects = self._timed(what, self.core.step)
        seconds = time.thread_time() - begun
        (answer,) = (effect for effect in effects if isinstance(effect, ev.Answer))
        assert answer.resident == len(keys), answer
        while self.core.has_work:
            self._timed(what, self.core.step)
        self.do("release", ev.Release(1, ((self.op, 1),)))
        return seconds


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, default=1_000_000)
    objects: int = parser.parse_args().objects
    rng = random.Random(1)
    bench = Bench(objects)
    gc.collect()
    gc.freeze()
    before = resident_bytes()
    chains: list[bytes] = []  # one packed string per chain: the keys themselves belong to the core
    for _ in range(objects // CHAIN):
        keys = [rng.randbytes(32) for _ in range(CHAIN)]
        bench.store("commit", keys)
        chains.append(b"".join(keys))
    gc.collect()
    held = len(chains) * CHAIN * 32
    per_object = (resident_bytes() - before - held) / bench.core.objects
    print(f"{bench.core.objects:,} objects")
    print(f"memory per object: {per_object:.0f} B {goal(per_object, 300)}")

    def key(number: int) -> bytes:
        chain = chains[number // CHAIN]
        return chain[number % CHAIN * 32 : (number % CHAIN + 1) * 32]

    total = len(chains) * CHAIN
    local: list[float] = []
    scattered: list[float] = []
    for turn in range(15):
        start = turn * LONG % (total - LONG)
        local.append(bench.ask("query local", [key(start + i) for i in range(LONG)]) * 1e3)
        scattered.append(bench.ask("query scattered", [key(n) for n in rng.sample(range(total), LONG)]) * 1e3)
    print(f"question of {LONG} keys, one after the other: {spread(local)} ms {goal(median(local), 5)}")
    print(f"question of {LONG} keys, scattered:           {spread(scattered)} ms {goal(median(scattered), 15)}")
    for what in ("query local", "query scattered"):
        slices = sorted(second * 1e3 for second in bench.pauses[what])
        worst = slices[-1]
        print(f"longest slice of one: {what} {worst:.2f} ms, median {median(slices):.2f} {goal(worst, 1)}")
    for _ in range(100):  # by now every commit has to evict
        bench.store("commit that evicts", [rng.randbytes(32) for _ in range(CHAIN)])
    longest = [key(total - 65_536 + i) for i in range(65_536)]
    bench.ask("query of 65,536", longest)
    bench.do("tick", ev.Tick())
    bench.do("left", ev.Left(1, ev.Gone.DEAD))
    bench.do("left", ev.Left(2, ev.Gone.DEAD))
    bench.do("purge", ev.Purge())
    print("longest pause, ms, by what it was for:")
    for what, seconds in sorted(bench.pauses.items(), key=lambda item: -max(item[1])):
        print(f"  {what:<20} {max(seconds) * 1e3:6.2f}   of {len(seconds):,}")
    longest = max(max(seconds) for seconds in bench.pauses.values()) * 1e3
    print(f"longest pause: {longest:.2f} ms {goal(longest, 10)}")


if __name__ == "__main__":
    main()
