"""A manager of the engine's own, started through the client as engines do: gone with the engine, however it ends."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from testbed.process.peers import Peer, Watched, listening_pid, status, until
from testbed.process.puppet import Handle, Puppet, environment

from kvhold.client.channel import AttachError
from kvhold.client.embedded import Embedded

DRAM = 16 << 20
Make = Callable[[], Puppet]


@pytest.fixture
def run(folder: Path) -> Path:
    """The directory of the sockets, which the first manager makes."""
    return folder / "kvhold"


@pytest.fixture
def watch() -> Iterator[Callable[[Path], Watched]]:
    """The manager that listens on a path; killed after the test if it is still there."""
    watched: list[Watched] = []

    def look(path: Path) -> Watched:
        watched.append(Watched(listening_pid(path)))
        return watched[-1]

    yield look
    for each in watched:
        if not each.gone():
            os.kill(each.pid, signal.SIGKILL)
        each.close()


def starter(puppet: Make, path: Path) -> tuple[Puppet, Handle]:
    """A process that has started a manager on ``path``."""
    process = puppet()
    embedded = process.make("embedded", str(path), DRAM)
    embedded.start()
    return process, embedded


def managers(run: Path) -> list[int]:
    """Processes that were told of a socket in ``run``: also those that do not listen yet, or came too late to."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(run).encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


def ended(manager: Watched, run: Path) -> None:
    """The manager ends by itself, and nothing of it is left."""
    assert manager.gone(20), "the manager outlived its engine"
    until(lambda: not managers(run), "no process is left")
    assert os.listdir(run) == []
    assert not [name for name in os.listdir("/dev/shm") if "kvhold" in name]


@pytest.mark.parametrize("how", ["kill", "leave", "close"])
def test_ends_with_its_starter_when_nobody_came(
    puppet: Make, run: Path, watch: Callable[[Path], Watched], how: str
) -> None:
    process, embedded = starter(puppet, run / "e-1.sock")
    manager = watch(run / "e-1.sock")
    assert run.stat().st_mode & 0o777 == 0o700
    assert (run / "e-1.sock").stat().st_mode & 0o777 == 0o600
    assert status(run / "e-1.sock")["embedded"]
    assert not manager.gone()
    if how == "kill":
        process.kill()
    elif how == "leave":
        assert process.leave() == 0
    else:
        embedded.close()
    ended(manager, run)


def test_ends_with_a_starter_whose_child_lives_on(puppet: Make, run: Path, watch: Callable[[Path], Watched]) -> None:
    """A worker that was forked holds a copy of its parent's lifeline; the parent's death counts all the same."""
    process, _ = starter(puppet, run / "e-1.sock")
    manager = watch(run / "e-1.sock")
    child = process.make("fork")
    process.kill()
    try:
        ended(manager, run)
    finally:
        os.kill(child.made, signal.SIGKILL)


def test_ends_when_its_starter_died_before_it_looked(run: Path) -> None:
    script = (
        "import os, signal, socket, subprocess, sys\n"
        "ours, theirs = socket.socketpair()\n"
        "command = [sys.executable, '-m', 'kvhold.manager', os.environ['AT'], '2097152', str(theirs.fileno())]\n"
        "command += ['0', 'lru']\n"
        "subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=2)\n"
        "theirs.close()\n"
        "child = os.fork()\n"
        "if child: print(child, flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
        "os.close(1); signal.pause()"
    )
    died = subprocess.run(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        check=False,
        env=environment(AT=str(run / "e-1.sock")),
        timeout=60,
    )
    assert died.returncode == -signal.SIGKILL
    try:
        until(run.exists, "the manager begins")
        until(lambda: not managers(run), "no process is left")
        assert os.listdir(run) == []
    finally:
        os.kill(int(died.stdout), signal.SIGKILL)


@pytest.mark.parametrize("how", ["kill", "leave", "bye"])
def test_ends_with_the_last_session(puppet: Make, run: Path, watch: Callable[[Path], Watched], how: str) -> None:
    path = run / "e-1.sock"
    first, _ = starter(puppet, path)
    manager = watch(path)
    mine = first.make("peer", str(path))
    mine.join("scheduler", "one")
    second = puppet()
    theirs = second.make("peer", str(path))
    theirs.join("scheduler", "two")
    first.kill()
    until(lambda: [s["instance"] for s in status(path)["sessions"]] == ["two"], "the first session is gone")
    assert not manager.gone()
    if how == "kill":
        second.kill()
    elif how == "leave":
        second.leave()
    else:
        theirs.bye()
    ended(manager, run)


def test_lives_while_another_process_is_served(puppet: Make, run: Path, watch: Callable[[Path], Watched]) -> None:
    """The starter alone is killed: a whole instance elsewhere is served on."""
    path = run / "e-1.sock"
    first, _ = starter(puppet, path)
    manager = watch(path)
    second = puppet()
    scheduler, worker = second.make("peer", str(path)), second.make("peer", str(path))
    scheduler.join("scheduler", "two")
    worker.join("worker", "two")
    worker.map()
    scheduler.ready()
    scheduler.open(4)
    first.kill()
    scheduler.commit([1, 2])
    _, resident, *_ = scheduler.ask([1, 2, 3])
    assert resident == 2
    admin = Peer(path)  # one who only looks keeps no manager alive
    admin.join("admin")
    assert not manager.gone()
    second.kill()
    ended(manager, run)
    assert admin.receive() is None


def test_starters_at_once_share_one(puppet: Make, run: Path, watch: Callable[[Path], Watched]) -> None:
    path = run / "e-1.sock"
    processes = [puppet() for _ in range(3)]
    starters = [process.make("embedded", str(path), DRAM) for process in processes]
    for each in starters:
        each.tell("start")
    assert sorted(process.hear() for process in processes) == [False, False, True], "one of them started it"
    manager = watch(path)
    peers = [process.make("peer", str(path)) for process in processes]
    for rank, peer in enumerate(peers):
        peer.join("scheduler", f"rank {rank}")
    assert len(status(path)["sessions"]) == len(peers)
    for process in processes:
        assert not manager.gone()
        process.kill()
    ended(manager, run)


def test_a_start_while_one_is_running_starts_none(puppet: Make, run: Path, watch: Callable[[Path], Watched]) -> None:
    path = run / "e-1.sock"
    first, embedded = starter(puppet, path)
    manager = watch(path)
    assert not embedded.start()
    second, _ = starter(puppet, path)
    assert listening_pid(path) == manager.pid
    second.kill()
    assert not manager.gone()
    first.kill()
    ended(manager, run)


def test_what_kill_9_left_is_swept_by_the_next(puppet: Make, run: Path, watch: Callable[[Path], Watched]) -> None:
    """The next manager of any engine sweeps; managers that live stay."""
    process, _ = starter(puppet, run / "e-1.sock")
    manager = watch(run / "e-1.sock")
    living, _ = starter(puppet, run / "e-2.sock")
    os.kill(manager.pid, signal.SIGKILL)
    assert manager.gone(20)
    (run / "e-3.sock.lock").touch()  # of one that was killed before it listened
    assert sorted(os.listdir(run)) == [
        "e-1.sock",
        "e-1.sock.lock",
        "e-2.sock",
        "e-2.sock.lock",
        "e-3.sock.lock",
    ]
    another, _ = starter(puppet, run / "e-4.sock")
    assert sorted(os.listdir(run)) == ["e-2.sock", "e-2.sock.lock", "e-4.sock", "e-4.sock.lock"]
    assert status(run / "e-2.sock")["embedded"]
    left = [watch(run / "e-2.sock"), watch(run / "e-4.sock")]
    for each in (process, living, another):
        each.kill()
    for each in left:
        assert each.gone(20)
    ended(left[0], run)


def test_starts_again_after_its_manager_was_killed(puppet: Make, run: Path, watch: Callable[[Path], Watched]) -> None:
    path = run / "e-1.sock"
    process, embedded = starter(puppet, path)
    first = watch(path)
    os.kill(first.pid, signal.SIGKILL)
    assert first.gone(20)
    embedded.start()
    second = watch(path)
    assert second.pid != first.pid
    process.kill()
    ended(second, run)


def test_its_manager_evicts_as_it_was_told(puppet: Make, run: Path, watch: Callable[[Path], Watched]) -> None:
    path = run / "e-1.sock"
    process = puppet()
    process.make("embedded", str(path), DRAM, "2q").start()
    manager = watch(path)
    assert status(path)["eviction"] == "2q"
    process.kill()
    ended(manager, run)


def test_one_that_cannot_start_says_so(puppet: Make, run: Path) -> None:
    embedded = puppet().make("embedded", str(run / "e-1.sock"), 1 << 20)
    says = "the engine's own manager did not start: dram: 1MiB is too small; give at least 2MiB$"
    for _ in range(2):  # the second time from memory
        with pytest.raises(RuntimeError, match=says):
            embedded.start()
    assert os.listdir(run) == []


def why_not(path: Path, huge_pages: bool = False, dram: int = DRAM, ssd: str | None = None) -> str:
    """What a starter hears of a manager that cannot start."""
    embedded = Embedded([path], dram, huge_pages, ssd)
    try:
        with pytest.raises(AttachError) as raised:
            embedded.start()
    finally:
        embedded.close()
    reason = str(raised.value)
    assert reason.startswith("the engine's own manager did not start: ")
    return reason.partition(": ")[2]


def test_huge_pages_that_are_in_use_are_named(run: Path) -> None:
    memory = Path("/proc/meminfo").read_text()
    need = 16 + (int(memory.partition("HugePages_Free:")[2].split()[0]) if "HugePages_Free:" in memory else 0)
    said = why_not(run / "e-1.sock", huge_pages=True, dram=need << 21)
    assert said.startswith(f"huge_pages: the kernel has no {need} free huge pages of 2MiB (")
    assert f"sysctl vm.nr_hugepages={need}" in said


def test_a_reason_is_cut_where_it_gets_long(run: Path) -> None:
    said = why_not(run / "e-1.sock", ssd="ü" * 5000)
    assert said.startswith("'üüü")
    assert 500 < len(said) < 1100


def test_what_nobody_foresaw_is_named_too(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that cannot say anything any more."""
    broken = tmp_path / "sitecustomize.py"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    fault = "import kvhold.host\ndef total(): {}\nkvhold.host.total_memory = total\n"
    broken.write_text(fault.format("raise RuntimeError('this host is strange')"))
    assert why_not(run / "e-1.sock") == "RuntimeError: this host is strange"
    broken.write_text(fault.format("import os; os.kill(os.getpid(), 9)"))
    assert why_not(run / "e-1.sock") == "it ended without a word"
