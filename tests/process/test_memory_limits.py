"""A manager in a cgroup with a memory limit: what it takes, where it stops, and that nobody is killed for it.

The cgroups are real ones, made where this may be done.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from testbed.process.manager_process import Manager
from testbed.process.peers import status, until
from testbed.process.puppet import environment

MIB = 1 << 20
TAKE = """
import mmap, sys
taken = mmap.mmap(-1, int(sys.argv[1]))
for at in range(0, len(taken), 4096):
    taken[at] = 1
print("taken", flush=True)
sys.stdin.read()
"""
"""Uses so much memory, and lets it go when its input ends."""


class Cgroup:
    """A cgroup with a limit, and one below it for the processes, which has none."""

    def __init__(self, parent: Path, version: int, name: str, limit: int) -> None:
        self.folder = parent / name
        self.version = version
        self.own = self.folder / "own"
        self.folder.mkdir()
        self._write("memory.limit_in_bytes" if version == 1 else "memory.max", str(limit))
        if version == 2:
            self._write("cgroup.subtree_control", "+memory")
        self.own.mkdir()
        self._processes: list[subprocess.Popen[str]] = []

    def _write(self, name: str, value: str) -> None:
        (self.folder / name).write_text(value)

    @property
    def enter(self) -> str:
        """A statement with which a program goes there."""
        return f"open({str(self.own / 'cgroup.procs')!r}, 'w').write('0')\n"

    def run(self, program: str, *arguments: str, **how: object) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", self.enter + program, *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment()}
        self._processes.append(subprocess.Popen(command, **pipes | how))  # type: ignore[call-overload]
        return self._processes[-1]

    def killed(self) -> int:
        """How many processes the kernel has killed for its limit."""
        text = (self.own / ("memory.oom_control" if self.version == 1 else "memory.events")).read_text()
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill "))

    def used(self) -> int:
        name = "memory.usage_in_bytes" if self.version == 1 else "memory.current"
        return int((self.folder / name).read_text())

    def remove(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        for folder in (self.own, self.folder):
            if folder.exists():
                until(lambda folder=folder: not (folder / "cgroup.procs").read_text(), "its processes are gone")
                folder.rmdir()


@pytest.fixture
def cgroup() -> Iterator[Callable[[int], Cgroup]]:
    """Makes cgroups with a limit of so many bytes."""
    made: list[Cgroup] = []

    def make(limit: int) -> Cgroup:
        name = f"kvhold-test-{os.getpid()}-{len(made)}"
        problem: object = "there is no memory controller"
        for version, parent in ((1, "/sys/fs/cgroup/memory"), (2, "/sys/fs/cgroup")):
            enabled = Path(parent, "memory.limit_in_bytes" if version == 1 else "cgroup.subtree_control")
            if not enabled.exists() or (version == 2 and "memory" not in enabled.read_text().split()):
                continue
            try:
                made.append(Cgroup(Path(parent), version, name, limit))
                return made[-1]
            except OSError as error:
                problem = error
        pytest.skip(f"no cgroup with a memory limit can be made here: {problem}")

    yield make
    for each in made:
        each.remove()


@pytest.fixture
def serve_in(folder: Path) -> Iterator[Callable[..., Manager]]:
    """Starts a manager in a cgroup, which looks for memory again soon, after ``program``."""
    managers: list[Manager] = []

    def start(cgroup: Cgroup, dram: str, program: str = "") -> Manager:
        soon = "import kvhold.manager.memory as memory; memory.AGAIN_SECONDS = 0.05\n"
        main = "from kvhold.cli import main; main()"
        managers.append(Manager(folder, dram=dram, program=("-c", cgroup.enter + soon + program + main)))
        return managers[-1]

    yield start
    for each in managers:
        each.kill()


def populated(manager: Manager) -> int:
    return int(status(manager.socket)["arena"]["populated"])


def said(manager: Manager, text: str) -> str:
    """The log, once it has ``text``."""
    return until(lambda: log if text in (log := manager.log.read_text()) else "", f"it says {text!r}")


def test_a_small_limit_gives_the_arena_that_was_asked_for(
    cgroup: Callable[[int], Cgroup], serve_in: Callable[..., Manager]
) -> None:
    group = cgroup(512 * MIB)
    manager = serve_in(group, "256MiB")
    until(lambda: populated(manager) == 256 * MIB, "all of it is there")
    assert group.killed() == 0


def test_more_than_the_limit_is_refused(cgroup: Callable[[int], Cgroup], folder: Path) -> None:
    group = cgroup(512 * MIB)
    arguments = ["serve", "--dram", "600MiB", "--socket", str(folder / "kvhold.sock")]
    main = "import sys; from kvhold.cli import main; main()"
    process = group.run(main, *arguments, stderr=subprocess.PIPE)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2, errors
    assert f"dram: 600MiB is more than 512MiB, the memory limit of cgroup {group.folder}; give less" in errors


def test_an_engine_s_own_manager_takes_its_part_of_the_limit(cgroup: Callable[[int], Cgroup]) -> None:
    group = cgroup(512 * MIB)
    process = group.run("from kvhold.host import default_dram; print(default_dram())")
    dram = int(process.communicate(timeout=60)[0])
    assert 64 * MIB < dram <= 512 * MIB // 5


def test_page_cache_is_not_in_the_way(
    cgroup: Callable[[int], Cgroup], serve_in: Callable[..., Manager], tmp_path: Path
) -> None:
    """Weights that were read fill a container's memory; the kernel gives them up for whoever asks."""
    group = cgroup(256 * MIB)
    weights = tmp_path / "weights"
    read = (
        "import os, sys\n"
        "with open(sys.argv[1], 'wb') as f:\n"
        "    for _ in range(300): f.write(bytes(1 << 20))\n"
        "    f.flush(); os.fsync(f.fileno())\n"
    )
    process = group.run(read, str(weights))
    process.communicate(timeout=60)
    assert process.returncode == 0
    if group.used() < 200 * MIB:
        pytest.skip("what is written to files here does not count as the cgroup's")
    manager = serve_in(group, "128MiB")
    until(lambda: populated(manager) == 128 * MIB, "all of it is there")
    assert group.killed() == 0


def test_it_stops_before_the_limit_and_goes_on_later(
    cgroup: Callable[[int], Cgroup], serve_in: Callable[..., Manager]
) -> None:
    """Whatever there was when it began: here an engine takes memory when some of the arena is there already."""
    group = cgroup(256 * MIB)
    stop = (
        "populate, count = memory._populate, iter(range(1000))\n"
        "def slowly(address, size):\n"
        "    if next(count) == 8:\n"
        "        import os, signal; os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    return populate(address, size)\n"
        "memory._populate = slowly\n"
    )
    manager = serve_in(group, "160MiB", stop)
    os.waitid(os.P_PID, manager.pid, os.WSTOPPED | os.WNOWAIT)
    engine = group.run(TAKE, str(100 * MIB))
    assert engine.stdout is not None
    assert engine.stdout.readline() == "taken\n"
    os.kill(manager.pid, signal.SIGCONT)
    log = said(manager, "arena: only ")
    assert f"of 160MiB can be allocated now: cgroup {group.folder} has " in log
    assert 32 * MIB < populated(manager) < 140 * MIB
    own = 1  # MiB, of page tables and the like: it comes after the look that found room for the last page
    assert group.used() <= (256 - 256 // 8 + own) * MIB
    assert engine.poll() is None
    engine.communicate(timeout=60)
    until(lambda: populated(manager) == 160 * MIB, "the rest of it is there")
    assert group.killed() == 0
    assert manager.log.read_text().count("arena: only ") == 1


def test_no_room_at_all_is_said(cgroup: Callable[[int], Cgroup], folder: Path) -> None:
    group = cgroup(256 * MIB)
    engine = group.run(TAKE, str(200 * MIB))
    assert engine.stdout is not None
    assert engine.stdout.readline() == "taken\n"
    arguments = ["serve", "--dram", "64MiB", "--socket", str(folder / "kvhold.sock")]
    process = group.run("import sys; from kvhold.cli import main; main()", *arguments, stderr=subprocess.PIPE)
    _, errors = process.communicate(timeout=60)
    engine.communicate(timeout=60)
    assert process.returncode == 2, errors
    assert f"dram: not even 2MiB of memory can be allocated: cgroup {group.folder} has " in errors
    assert group.killed() == 0
