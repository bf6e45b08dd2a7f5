"""A well-behaved client beside each kind of bad one: what its questions take, and what the manager's memory does.

Windows with and without the bad client alternate, so that what else the machine does falls on both. Beside what the
questions take stands what tells the manager's part of it from the machine's: the longest turn of the manager's loop in
CPU time of its thread, and how late an uninvolved process was woken that slept meanwhile; each as the median of all
windows' longest and as the longest of all.

./dev run python benchmarks/neighbours.py [--seconds S] [KIND...]
./dev run python benchmarks/neighbours.py --churn MINUTES
"""

import argparse
import itertools
import mmap
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from figures import goal, median
from lookup import SHARD, Engine, attach, await_arena

from kvhold import protocol as wire

DRAM = "256MiB"
BLOCKS = 100
GAP = 0.002
"""Between questions of the well-behaved client."""
ROUNDS = 12
STOPPED_SECONDS = 0.1
"""From when the bad client is stopped until what it has begun is over."""
BEYOND_MS, MORE_MIB, LEFT_MIB = 5.0, 64.0, 5.0
"""Goals: its maximum beyond that without the bad client; the manager's memory more than before, meanwhile and after."""
SETTLE_SECONDS = 3.0
CHURN_PAUSE = 0.5
"""Seconds between one engine and the next."""
CHURN_GOAL = 5.0
"""MiB that the manager's memory may grow in an hour of engines that come and go."""


# --- bad clients, each in a process of its own ------------------------------------------------------------------------


class Raw:
    """A connection that says what it likes; with ``reads`` a thread takes in the answers and forgets them."""

    def __init__(self, path: Path, role: str, reads: bool = True, instance: str = "bad") -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(path))
        self.say(wire.PREAMBLE + wire.frame(wire.Hello(role, instance)))
        if reads:
            threading.Thread(target=self._read, daemon=True).start()

    def say(self, data: bytes) -> None:
        self.socket.sendall(data)

    def tell(self, *messages: wire.ClientMessage) -> None:
        self.say(b"".join(map(wire.frame, messages)))

    def close(self) -> None:
        self.socket.close()

    def _read(self) -> None:
        with suppress(OSError):
            while self.socket.recv(1 << 20):
                pass


KEYS = os.urandom(32 * 1000)


def flood(role: str, message: Callable[[int], wire.ClientMessage], reads: bool = True) -> Callable[[Path], None]:
    """Says it without end, as fast as it is taken in."""

    def run(path: Path) -> None:
        halves = [Raw(path, role, reads)]
        if role == "scheduler":
            halves.append(Raw(path, "worker"))
            halves[1].tell(wire.Mapped())
            time.sleep(0.2)  # until the instance is ready
            halves[0].tell(wire.Open(1, b"b" * 32, 0, 32, (SHARD,), 16))
        for number in itertools.count():
            halves[0].say(b"".join(wire.frame(message(number * 16 + at)) for at in range(16)))

    return run


def quotas(path: Path) -> None:
    while True:
        admin = Raw(path, "admin")
        with suppress(OSError):
            while True:
                admin.tell(wire.Configure({}, {os.urandom(32): (0, 1 << 40) for _ in range(5000)}))
        admin.close()


def halves_of_frames(path: Path) -> None:
    held = []
    while True:
        with suppress(OSError):
            held.append(Raw(path, "admin", reads=False))
            held[-1].say(wire.MAX_FRAME.to_bytes(4, "little") + bytes(wire.MAX_FRAME - 1))
        if len(held) > 60:
            held.pop(0).close()


def lost_sessions(path: Path) -> None:
    for number in itertools.count():
        with suppress(OSError):
            Raw(path, "worker", reads=False, instance=f"lost {number}").close()


def gone_before_the_answer(path: Path) -> None:
    while True:
        with suppress(OSError):
            admin = Raw(path, "admin", reads=False)
            admin.say(wire.frame(wire.Explain(op=1)) * 5000)
            admin.close()


def namespaces(path: Path) -> None:
    """Stores an object under a new name, and leaves that."""
    engine = attach(path, "namespaces")
    channel = engine.control._channel
    assert channel is not None
    for number in itertools.count(100):
        channel.send(wire.Open(number, os.urandom(32), 0, 32, (SHARD,), 1))
        grant = None
        while grant is None:
            found = [one for one in channel.receive(1) if isinstance(one, wire.Grant) and one.space == number]
            grant = found[0] if found else None
            assert not channel.lost
        commit = wire.Commit(number, b"", 0, os.urandom(32), grant.rows, grant.epochs, (SHARD,))
        channel.send(wire.Close(number))
        channel.send(commit)


def busy(_: Path) -> None:
    """Says nothing at all: what a process costs others by being there."""
    while True:
        pass


def one_key(number: int) -> bytes:
    return KEYS[number % 1000 * 32 :][:32]


BAD: dict[str, Callable[[Path], None]] = {
    "busy process": busy,
    "explain, unread": flood("admin", lambda _: wire.Explain(op=1), reads=False),
    "explain": flood("admin", lambda _: wire.Explain(op=1)),
    "gone before its answers": gone_before_the_answer,
    "status": flood("admin", lambda _: wire.Status()),
    "status, unread": flood("admin", lambda _: wire.Status(), reads=False),
    "list": flood("admin", lambda _: wire.List(b"b" * 32, 0)),
    "flush": flood("admin", lambda _: wire.Flush()),
    "purge": flood("admin", lambda _: wire.Purge(b"p" * 32)),
    "quotas": quotas,
    "query": flood("scheduler", lambda n: wire.Query(n, 1, 1, 0, KEYS)),
    "query, unread": flood("scheduler", lambda n: wire.Query(n, 1, 1, 0, KEYS), reads=False),
    "lookup": flood("scheduler", lambda n: wire.Lookup(n, ((1, KEYS * 65),))),
    "lookup, unread": flood("scheduler", lambda n: wire.Lookup(n, ((1, KEYS * 65),)), reads=False),
    "prepare": flood("scheduler", lambda n: wire.Prepare(n, 1, ((1, one_key(n)),))),
    "cut": flood("scheduler", lambda n: wire.Cut(n, 1, one_key(n), 0)),
    "release": flood("scheduler", lambda n: wire.Release(tuple((op, 1) for op in range(wire.MAX_OPS)))),
    "spoiled": flood("scheduler", lambda n: wire.RestoreFailed(n)),
    "halves of frames": halves_of_frames,
    "lost sessions": lost_sessions,
    "namespaces": namespaces,
}


# --- the manager ------------------------------------------------------------------------------------------------------


class Longest:
    """The longest duration since it was taken last, noted by one process and taken by another."""

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(mmap.PAGESIZE)
            self._seconds = memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE)).cast("d")

    def note(self, seconds: float) -> None:
        if seconds > self._seconds[0]:
            self._seconds[0] = seconds

    def take_ms(self) -> float:
        found, self._seconds[0] = self._seconds[0], 0.0
        return found * 1e3


def manage(path: Path, arguments: list[str]) -> None:
    """``kvhold`` with ``arguments``; what each turn of its loop took of its thread's CPU time is noted at ``path``."""
    from kvhold.cli import main
    from kvhold.manager import server

    longest = Longest(path)

    class Timed(server.Poller):
        _since = 0.0

        def poll(self, timeout: float | None) -> list[tuple[Callable[[int], None], int]]:
            if self._since:
                longest.note(time.thread_time() - self._since)
            found = super().poll(timeout)
            self._since = time.thread_time()
            return found

    server.Poller = Timed  # type: ignore[misc]
    sys.argv = ["kvhold", *arguments]
    main()


def sleep_on(path: Path) -> None:
    """Sleep like the client between its questions; how late that ends is noted at ``path``."""
    longest = Longest(path)
    while True:
        until = time.monotonic() + GAP
        time.sleep(GAP)
        longest.note(time.monotonic() - until)


class Manager:
    def __init__(self, folder: Path, *options: str) -> None:
        self.socket = folder / "k.sock"
        self.turns = Longest(folder / "turns")
        command = [sys.executable, __file__, "--manager", str(folder / "turns")]
        command += ["serve", "--dram", DRAM, "--socket", str(self.socket), *options]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    @property
    def mib(self) -> float:
        return self._memory("VmRSS")

    @property
    def peak_mib(self) -> float:
        """The most since :meth:`forget_peak`."""
        return self._memory("VmHWM")

    def forget_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def _memory(self, field: str) -> float:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(rf"{field}:\s+(\d+) kB", text)
        assert found is not None
        return int(found[1]) / 1024

    def mappings(self) -> dict[str, float]:
        """Resident MiB by what they are."""
        kinds = dict.fromkeys(("heap", "anonymous", "arena", "files"), 0.0)
        kind = ""
        for line in Path(f"/proc/{self.process.pid}/smaps").read_text().splitlines():
            if found := re.match(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+\s*(.*)", line):
                name = found[1]
                named = "arena" if "memfd" in name else "files" if name.startswith("/") else "anonymous"
                kind = "heap" if name == "[heap]" else named
            elif line.startswith("Rss:"):
                kinds[kind] += int(line.split()[1]) / 1024
        return kinds


@contextmanager
def manager(*options: str) -> Iterator[Manager]:
    with tempfile.TemporaryDirectory(prefix="kvb-") as folder:
        one = Manager(Path(folder), *(option.replace("@", folder) for option in options))
        try:
            yield one
        finally:
            one.process.terminate()
            one.process.wait()


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """This program with other ``arguments``."""
    process = subprocess.Popen([sys.executable, __file__, *arguments], stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


# --- what is measured -------------------------------------------------------------------------------------------------


def ask_for(engine: Engine, keys: list[bytes], seconds: float) -> list[float]:
    """Milliseconds of each question."""
    times = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        times.append(engine.ask(keys) * 1e3)
        time.sleep(GAP)
    return times


@dataclass
class Seen:
    """By the client, in milliseconds, and meanwhile by others."""

    times: list[float] = field(default_factory=list)
    longest: list[float] = field(default_factory=list)  # of each window
    turns: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)

    def add(self, times: list[float], turn: float, late: float) -> None:
        self.times += times
        self.longest.append(max(times))
        self.turns.append(turn)
        self.late.append(late)

    def __str__(self) -> str:
        ordered = sorted(self.times)
        longest, turn, late = (
            f"{median(each):6.2f} / {max(each):6.2f}" for each in (self.longest, self.turns, self.late)
        )
        return (
            f"p50 {median(ordered):5.2f}  p99 {ordered[len(ordered) * 99 // 100]:6.2f}  max {longest} ms; "
            f"longest turn {turn} ms of CPU; a sleeper {late} ms late"
        )


def beside(kind: str, seconds: float) -> bool:
    """One kind, in a manager of its own; whether all goals were met."""
    with manager() as one, tempfile.NamedTemporaryFile() as file, process("--sleep", file.name):
        engine = attach(one.socket)
        await_arena(one.socket)
        keys = [os.urandom(32) for _ in range(BLOCKS)]
        engine.store(keys)
        ask_for(engine, keys, 0.5)
        late = Longest(Path(file.name))
        alone, disturbed = Seen(), Seen()

        def look(seen: Seen) -> None:
            one.turns.take_ms(), late.take_ms()
            times = ask_for(engine, keys, seconds / ROUNDS)
            seen.add(times, one.turns.take_ms(), late.take_ms())

        before = one.mib
        one.forget_peak()
        with process("--bad", kind, str(one.socket)) as bad:
            time.sleep(1.0)
            for _ in range(ROUNDS):
                look(disturbed)
                bad.send_signal(signal.SIGSTOP)
                time.sleep(STOPPED_SECONDS)
                look(alone)
                bad.send_signal(signal.SIGCONT)
            during = one.peak_mib
        time.sleep(SETTLE_SECONDS)
        after = one.mib
    beyond, more, left = max(disturbed.times) - max(alone.times), during - before, after - before
    print(f"{kind}\n  alone   {alone}\n  beside  {disturbed}\n  latency {beyond:+.2f} ms {goal(beyond, BEYOND_MS)}")
    print(
        f"  memory  {before:.1f} MiB before, {more:+.1f} meanwhile {goal(more, MORE_MIB)}, "
        f"{left:+.1f} after {goal(left, LEFT_MIB)}",
        flush=True,
    )
    return beyond <= BEYOND_MS and more <= MORE_MIB and left <= LEFT_MIB


# --- engines that come and go -----------------------------------------------------------------------------------------


def come_and_go(path: Path) -> None:
    """Engines that store and find, one after the other; every other under a name of its own. The last just dies."""
    for number in range(200):
        name = os.urandom(32) if number % 2 else b"c" * 32
        engine = attach(path, f"engine {os.getpid()}.{number}", name)
        keys = [os.urandom(32) for _ in range(256)]
        engine.store(keys)
        for count in range(64, 257, 64):
            engine.control.take_up()
            question = engine.control.ask(1, 0, b"".join(keys[:count]))
            engine.control.answer(question)  # some of it, or none, where others have stored much meanwhile
            engine.control.release((question,))
        engine.control.bye()
        engine.worker.bye()
        engine.worker.close()
        print(".", end="", flush=True)
        time.sleep(CHURN_PAUSE)
    attach(path, f"engine {os.getpid()}.dies").store([os.urandom(32) for _ in range(256)])
    os._exit(0)


def churn(minutes: float) -> bool:
    """Memory by the minute, and how much it grows in the second half; whether that keeps to its goal."""
    with manager("--ssd", "@/ssd:1GiB", "--ssd-min-free", "0") as one:
        attach(one.socket)
        await_arena(one.socket)
        begun, engines, points = time.monotonic(), 0, list[tuple[float, float]]()
        stop = threading.Event()

        def drive() -> None:
            nonlocal engines
            while not stop.is_set():
                command = [sys.executable, __file__, "--bad", "come and go", str(one.socket)]
                with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
                    assert process.stdout is not None
                    while process.stdout.read(1):
                        engines += 1
                        if stop.is_set():
                            process.kill()

        threads = [threading.Thread(target=drive) for _ in range(2)]
        for thread in threads:
            thread.start()
        while time.monotonic() - begun < minutes * 60:
            time.sleep(min(30.0, minutes * 6))
            at = (time.monotonic() - begun) / 60
            kinds = one.mappings()
            points.append((at, one.mib))
            parts = ", ".join(f"{kind} {mib:.1f}" for kind, mib in kinds.items())
            print(f"{at:6.1f} min, {engines:>6} engines: {one.mib:.1f} MiB ({parts})", flush=True)
        stop.set()
        for thread in threads:
            thread.join()
    later = points[len(points) // 2 :]
    slope = statistics.linear_regression(*zip(*later, strict=True)).slope
    grown = slope * (later[-1][0] - later[0][0])
    print(f"second half: {slope:+.3f} MiB a minute, {grown:+.2f} MiB in all {goal(grown, CHURN_GOAL)}")
    return grown <= CHURN_GOAL


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of: {', '.join(BAD)}")
    parser.add_argument("--seconds", type=float, default=6.0, help="for each kind, and as long without it")
    parser.add_argument("--churn", type=float, metavar="MINUTES", help="engines that come and go instead")
    parser.add_argument("--bad", nargs=2, metavar=("KIND", "SOCKET"), help=argparse.SUPPRESS)
    parser.add_argument("--sleep", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--manager", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.manager:
        manage(Path(options.manager[0]), options.manager[1:])
    if options.sleep:
        sleep_on(options.sleep)
    if options.bad:
        kind, path = options.bad
        (come_and_go if kind == "come and go" else BAD[kind])(Path(path))
        return 0
    if options.churn:
        return 0 if churn(options.churn) else 1
    met = [beside(kind, options.seconds) for kind in options.kinds or BAD]
    print(f"{sum(met)} of {len(met)} kinds meet all goals")
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
