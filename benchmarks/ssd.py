"""The SSD tier against fio on the same file system: the same block size, depth and direct mode, in turns.

    ./dev run python benchmarks/ssd.py [--directory DIR] [--size 512KiB] [--runs 9]

kvhold's side is the manager's own executor, checksums on: what a write or a read of the tier costs, from effect to
answer. fio writes and reads one preallocated file of the same size with as many jobs as kvhold has threads. Needs fio.
"""

import argparse
import json
import mmap
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from figures import in_turns, ratios, spread

from kvhold.core.log import events as lev
from kvhold.core.log.segments import HEADER
from kvhold.tiers.ssd.directory import claim_log, trim_log
from kvhold.tiers.ssd.executor import Executor
from kvhold.units import format_size, parse_size

SEGMENT = 256 << 20
WRITE_BATCH, READ_BATCH = 16 << 20, 8 << 20
READERS = 4


class Tier:
    """A log of which two segments are written and read over and over."""

    def __init__(self, folder: Path, size: int) -> None:
        self.size = size
        self.count = (SEGMENT - (1 << 20)) // (size + HEADER)
        self.arena = mmap.mmap(-1, self.count * size)
        self.arena[:] = os.urandom(1 << 20) * (len(self.arena) >> 20) + bytes(len(self.arena) % (1 << 20))
        self.log = claim_log(folder, 6 * SEGMENT, min_free=0, segment_bytes=SEGMENT)
        trim_log(self.log)
        self.executor = Executor(self.log, memoryview(self.arena), self._done, readers=READERS)
        self.failed = 0
        self.io = 0
        self.seq = 0
        self._waiting: dict[int, threading.Event] = {}
        self._lock = threading.Lock()

    def _done(self, io: int, failed: tuple[int, ...], kept: bool) -> None:
        self.failed += len(failed)
        self._waiting.pop(io).set()

    def _submit(self, make: Callable[[int], lev.ToLog]) -> threading.Event:
        self.io += 1
        event = self._waiting[self.io] = threading.Event()
        self.executor.submit(make(self.io))
        return event

    def _objects(self, first: int, last: int) -> tuple[lev.Stored, ...]:
        return tuple(
            lev.Stored(
                b"n" * 32, 0, number.to_bytes(32, "little"), b"", 0, (self.size,), number * self.size, 0,
                HEADER + number * (HEADER + self.size),
            )
            for number in range(first, last)
        )  # fmt: skip

    def begin(self) -> None:
        """A new life of segment 0 (its file is preallocated at the first)."""
        self.seq += 1
        seq = self.seq
        self._submit(lambda io: lev.Reuse(io, 0, 0, seq)).wait()

    def write(self) -> float:
        """Bytes a second of payload, one batch after the other, as the core has them written."""
        self.begin()
        step = max(1, WRITE_BATCH // self.size)
        begun = time.perf_counter()
        for first in range(0, self.count, step):
            objects = self._objects(first, min(first + step, self.count))
            self._submit(lambda io, objects=objects: lev.Write(io, 0, objects, 0, self.seq)).wait()
        return self.count * self.size / (time.perf_counter() - begun)

    def read(self) -> float:
        """Bytes a second of payload, as many reads at once as there are readers."""
        step = max(1, READ_BATCH // self.size)
        begun = time.perf_counter()
        events = []
        for first in range(0, self.count, step):
            objects = self._objects(first, min(first + step, self.count))
            events.append(self._submit(lambda io, objects=objects: lev.Read(io, 0, objects, 0, self.seq)))
        for event in events:
            event.wait()
        return self.count * self.size / (time.perf_counter() - begun)

    def read_one(self, rng: random.Random) -> float:
        """Seconds until one object is restored."""
        number = rng.randrange(self.count)
        begun = time.perf_counter()
        objects = self._objects(number, number + 1)
        self._submit(lambda io: lev.Read(io, 0, objects, 0, self.seq)).wait()
        return time.perf_counter() - begun


def fio(folder: Path, mode: str, block: int, total: int, jobs: int) -> float:
    """Bytes a second of fio's synchronous engine, O_DIRECT, over one preallocated file."""
    share = total // jobs // block * block
    command = [
        "fio", "--name=kvhold", f"--filename={folder / 'fio.file'}", f"--rw={mode}", f"--bs={block}",
        "--ioengine=psync", "--direct=1", f"--size={share}", f"--numjobs={jobs}", f"--offset_increment={share}",
        "--thread", "--group_reporting", "--output-format=json", "--fallocate=none", "--invalidate=0",
    ]  # fmt: skip
    out = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    side = out["jobs"][0]["write" if "write" in mode else "read"]
    return float(side["bw_bytes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--size", type=parse_size, default=512 << 10)
    parser.add_argument("--runs", type=int, default=9)
    arguments = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit("this benchmark needs fio; install it with your distribution's package manager")
    with tempfile.TemporaryDirectory(prefix="kvb-", dir=arguments.directory) as name:
        folder = Path(name)
        tier = Tier(folder / "log", arguments.size)
        total = tier.count * tier.size
        tier.write()
        segment = folder / "log" / "kvhold-00000000.segment"
        subprocess.run(["cp", "--sparse=never", segment, folder / "fio.file"], check=True)
        runs: int = arguments.runs
        print(f"{tier.count} objects of {format_size(tier.size)}, {format_size(total)} in all, {runs} runs in turns")
        for what, block, jobs, ours in (
            ("write", WRITE_BATCH, 1, tier.write),
            ("read", READ_BATCH, READERS, tier.read),
        ):
            measured = in_turns(runs, kvhold=ours, fio=lambda w=what, b=block, j=jobs: fio(folder, w, b, total, j))
            ratio = ratios(measured["kvhold"], measured["fio"])
            low = sorted(ratio)[max(0, len(ratio) // 4 - 1)]
            for side, values in measured.items():
                print(f"{what:<5} {side:<7} {spread([value / 1e9 for value in values])} GB/s")
            verdict = "met" if median(ratio) >= 0.9 and low >= 0.85 else "MISSED"
            print(f"{what:<5} ratio   {spread(ratio)} (goal: median 0.9, lower bound 0.85: {verdict})")
        rng = random.Random(1)
        ones = [tier.read_one(rng) * 1e3 for _ in range(50)]
        print(f"one object restored after {spread(ones)} ms")
        assert not tier.failed, f"{tier.failed} objects failed"
        tier.executor.close(10)


if __name__ == "__main__":
    main()
