"""SGLang with kvhold as its storage, beside its own file backend and beside none.

    ./dev run --sglang python benchmarks/sglang.py [--rounds 9] [--pages 128] [--prompts 6] [--no-engines]

First the copies, without an engine: finding and restoring pages through a manager beside a plain copy of as many bytes
from memory of the arena's kind (goal: 1.3 times as long and 3 ms). Then real engines in turns: prompts that nobody has
seen (goal: kvhold has 0.98 of the throughput without a storage), and the same ones again after a flush. SGLang's CPU
engine needs the shims of its tests, so they must lie beside.
"""

import argparse
import contextlib
import ctypes
import mmap
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from figures import goal, in_turns, median, ratios, spread
from lookup import await_arena

from kvhold.client.attacher import Attacher
from kvhold.client.channel import AttachError
from kvhold.client.control import Geometry
from kvhold.engines.common.blocking import Blocking

TESTS = Path(__file__).parents[1] / "tests"
PAGE_BYTES, PIECES = 512 << 10, 2
"""Of a page: keys and values, as in the layout page_first_direct."""
SECONDS = 10.0
TOKENS = 1000
_kept: list[mmap.mmap] = []


@contextmanager
def manager(folder: Path) -> Iterator[Path]:
    socket = folder / "kvhold.sock"
    command = [sys.executable, "-m", "kvhold.cli", "serve", "--dram", "512MiB", "--socket", str(socket)]
    with (folder / "manager.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        end = time.monotonic() + 60
        while True:
            try:
                await_arena(socket)
                break
            except AttachError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
        yield socket
    finally:
        process.terminate()
        process.wait()


def copies(rounds: int, pages: int) -> None:
    """Find and restore, in turns with a plain copy."""
    size = pages * PAGE_BYTES
    pool = ctypes.create_string_buffer(os.urandom(1 << 20) * (size >> 20), size)
    source = _shared(pool.raw)
    piece = PAGE_BYTES // PIECES

    def pieces(memory: Any, page: int) -> list[tuple[int, int]]:
        """Keys of all pages first, then all values."""
        start = ctypes.addressof(memory)
        return [(start + half * (size // PIECES) + page * piece, piece) for half in range(PIECES)]

    buffers = [pieces(pool, page) for page in range(pages)]
    plain = list(zip((each for page in buffers for each in page), range(0, size, piece), strict=True))
    keys = [os.urandom(32) for _ in range(pages)]
    with tempfile.TemporaryDirectory(prefix="kvhold-") as name, manager(Path(name)) as socket:
        face = Blocking("bench", "benchmark", lambda half: Attacher(half, [socket], None, True))
        try:
            assert face.wait(SECONDS)
            space = face.open(Geometry(os.urandom(32), 0, 32, (PAGE_BYTES,), chain=True), pages)
            while not all(face.publish(space, keys, buffers, SECONDS)):
                pass

            def restored() -> float:
                begun = time.perf_counter()
                hit = face.find(space, keys, SECONDS)
                done = face.restore(hit, buffers)
                took = time.perf_counter() - begun
                assert done == pages, hit
                return took * 1e3

            def copied() -> float:
                begun = time.perf_counter()
                for (address, length), at in plain:
                    ctypes.memmove(address, source + at, length)
                return (time.perf_counter() - begun) * 1e3

            restored(), copied()
            found = in_turns(rounds, copied=copied, restored=restored)
        finally:
            face.close()
    beyond = [now - 1.3 * then for now, then in zip(found["restored"], found["copied"], strict=True)]
    print(f"{pages} pages of {PAGE_BYTES >> 10} KiB: ms to find and restore them, beside a plain copy, {rounds} rounds")
    for what, values in found.items():
        print(f"  {what:>9} {spread(values)}")
    print(f"  beyond 1.3 times the copy {spread(beyond)} ms {goal(median(beyond), 3.0)}")


def _shared(data: bytes) -> int:
    """The address of a copy of ``data`` in memory of the arena's kind: a file in memory, mapped for good."""
    descriptor = os.memfd_create("kvhold-benchmark")
    os.ftruncate(descriptor, len(data))
    mapped = mmap.mmap(descriptor, len(data))
    mapped[:] = data
    _kept.append(mapped)
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def engines(rounds: int, count: int) -> None:
    """New prompts, and the same again after a flush, with each kind of storage in turns."""
    sys.path.insert(0, str(TESTS))
    os.environ["PYTHONPATH"] = os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))
    from testbed.sglang.engine import Sglang
    from testbed.sglang.model import VOCABULARY, make_llama
    from testbed.sglang.shims.on_cpu import define_torchvision_operators

    define_torchvision_operators()  # transformers imports them

    rng = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="kvhold-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model = make_llama(folder / "model")
        socket = stack.enter_context(manager(folder))
        file = {"hicache_storage_backend": "file"}
        stored = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder / "files")}
        served = {
            "none": Sglang(model, folder / "none.log", None),
            "file": Sglang(model, folder / "file.log", None, environment=stored, **file),
            "kvhold": Sglang(model, folder / "kvhold.log", {"socket": str(socket)}),
        }
        for engine in served.values():
            stack.callback(engine.close)
            engine.generate([3] * TOKENS)  # what is compiled and allocated once
            engine.flush()
        seconds: dict[str, dict[str, list[float]]] = {"new": {}, "again": {}}

        def turn(engine: Any, again: list[float]) -> Callable[[], float]:
            def both() -> float:
                prompts = [[rng.randrange(3, VOCABULARY) for _ in range(TOKENS)] for _ in range(count)]
                took = [_seconds(engine, prompts)]
                engine.flush()
                again.append(_seconds(engine, prompts))
                engine.flush()
                return took[0]

            return both

        for name in served:
            seconds["again"][name] = []
        seconds["new"] = in_turns(rounds, **{name: turn(one, seconds["again"][name]) for name, one in served.items()})
    print(f"\n{count} prompts of {TOKENS} tokens one after the other, seconds, {rounds} rounds")
    for what, by in seconds.items():
        for name, values in by.items():
            print(f"  {what:>6} {name:>7} {spread(values)}")
    share = median(ratios(seconds["new"]["none"], seconds["new"]["kvhold"]))
    print(f"  throughput of new prompts beside none {share:.3f} (goal 0.98: {'met' if share >= 0.98 else 'MISSED'})")
    faster = median(ratios(seconds["again"]["none"], seconds["again"]["kvhold"]))
    print(f"  the same prompts again: {faster:.2f} times as fast as computing them")


def _seconds(engine: Any, prompts: Sequence[list[int]]) -> float:
    begun = time.perf_counter()
    for prompt in prompts:
        engine.generate(prompt, new=1)
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--pages", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=6, help="in each turn")
    parser.add_argument("--no-engines", action="store_true", help="the copies alone")
    options = parser.parse_args()
    copies(options.rounds, options.pages)
    if not options.no_engines:
        engines(options.rounds, options.prompts)


if __name__ == "__main__":
    main()
