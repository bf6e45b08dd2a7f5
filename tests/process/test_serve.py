"""``kvhold serve``: how it starts, what it refuses, and what is left of it."""

import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from testbed.process.manager_process import Manager
from testbed.process.peers import Engine, Peer, http_address, keys_of, populated, status, until
from testbed.process.puppet import environment

from kvhold import protocol as wire

_MEMORY = Path("/proc/meminfo").read_text()
HUGE_FREE = int(_MEMORY.partition("HugePages_Free:")[2].split()[0]) if "HugePages_Free:" in _MEMORY else 0


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """A command that is expected to end by itself."""
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=60, check=False, env=environment()
    )


def refused(path: Path | str, *options: str, dram: str = "32MiB", code: int = 2) -> str:
    """What a manager says that refuses to start."""
    done = run("-m", "kvhold.cli", "serve", "--dram", dram, "--socket", str(path), *options)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.replace("│", " ").split())


def get(manager: Manager, path: str, timeout: float = 10.0) -> tuple[int, str]:
    """Status and body of one HTTP request."""
    try:
        with urllib.request.urlopen(http_address(manager.log) + path, timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_says_what_it_took_answers_and_leaves_nothing(manager: Manager, folder: Path, number: int) -> None:
    engine = Engine(manager.socket, "one")
    engine.store([1, 2, 3])
    said = run("-m", "kvhold.cli", "status", "--socket", str(manager.socket))
    assert said.returncode == 0
    assert "objects  3" in said.stdout
    assert "scheduler rank 0" in said.stdout
    os.kill(manager.pid, number)
    until(lambda: not manager.alive, "the manager's end")
    assert manager.terminate() == 0
    log = manager.log_tail()
    assert f"on {manager.socket}: 32MiB of DRAM" in log
    assert log.rstrip().endswith("ended")
    assert os.listdir(folder) == [manager.log.name]
    assert engine.scheduler.receive() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_it_starts_ends_it_cleanly(folder: Path, number: int) -> None:
    signalled = (
        "import os, kvhold.manager.process as p; from kvhold.cli import main; Memory = p.ArenaMemory\n"
        f"def memory(*how): os.kill(os.getpid(), {int(number)}); return Memory(*how)\n"
        "p.ArenaMemory = memory; main()"
    )
    done = run("-c", signalled, "serve", "--dram", "32MiB", "--socket", str(folder / "s"))
    assert done.returncode == 0, done.stderr
    assert os.listdir(folder) == []


def test_status_without_a_manager_says_so(folder: Path) -> None:
    done = run("-m", "kvhold.cli", "status", "--socket", str(folder / "none"))
    assert done.returncode == 1
    assert "no manager answers" in done.stderr


def test_status_of_a_stopped_manager_ends(manager: Manager) -> None:
    manager.stop()
    impatient = "import sys; from kvhold.cli import main; sys.modules['kvhold.cli.ask']._SECONDS = 0.3; main()"
    done = run("-c", impatient, "status", "--socket", str(manager.socket))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr
    manager.cont()
    Engine(manager.socket, "one").bye()


def test_purge_says_what_it_did(manager: Manager) -> None:
    engine = Engine(manager.socket, "one")
    engine.store([1, 2])
    done = run("-m", "kvhold.cli", "purge", "--all", "--socket", str(manager.socket))
    said = f"purged: the manager on {manager.socket} has forgotten 2 objects, 8KiB\n"
    assert (done.returncode, done.stdout) == (0, said)
    until(lambda: status(manager.socket)["objects"] == 0, "purged objects gone")


# --- the audit ----------------------------------------------------------------------------------------------------


def counter(manager: Manager, name: str) -> float:
    status, body = get(manager, "/metrics")
    assert status == 200
    return next(
        sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
        if sample.name == f"kvhold_{name}_total"
    )


def test_an_audit_finds_nothing_wrong_with_a_manager_at_work(serve: Callable[..., Manager]) -> None:
    manager = serve("--audit", "--http", "127.0.0.1:0", dram="32MiB")
    engine = Engine(manager.socket, "one")
    engine.store([1, 2, 3])
    until(lambda: counter(manager, "audits") > 0, "the end of an audit")
    assert counter(manager, "audit_violations") == 0
    assert "ERROR" not in manager.log_tail()
    engine.bye()


def test_what_an_audit_finds_is_logged_once_and_counted_each_time(serve: Callable[..., Manager]) -> None:
    broken = (
        "import kvhold.core.catalogue as c, kvhold.manager.audit as a; from kvhold.cli import main\n"
        "use = c.Catalogue.use\n"
        "def used(self, index): use(self, index); self.objects += 1\n"
        "c.Catalogue.use = used; a.PASS_SECONDS = 0.01; main()"
    )
    manager = serve("--audit", "--http", "127.0.0.1:0", dram="32MiB", program=("-c", broken))
    assert counter(manager, "audit_violations") == 0
    engine = Engine(manager.socket, "one")
    until(lambda: counter(manager, "audit_violations") > 2, "what is wrong")
    log = manager.log.read_text()
    (told,) = [line for line in log.splitlines() if "audit: " in line]
    assert " ERROR " in told
    assert "all and only rows that can be found are in an index; not so: number of objects is 0, and said to be" in told
    engine.store([1])
    assert manager.alive, "it serves on"


def test_a_move_that_is_not_allowed_is_refused_logged_and_counted(serve: Callable[..., Manager]) -> None:
    broken = (
        "import kvhold.core.catalogue as c; from kvhold.cli import main\n"
        "use = c.Catalogue.use\n"
        "def used(self, index): use(self, index); self.move(self.new(), c.State.DOOMED)\n"
        "c.Catalogue.use = used; main()"
    )
    manager = serve("--http", "127.0.0.1:0", dram="32MiB", program=("-c", broken))
    engine = Engine(manager.socket, "one")
    engine.store([1, 2])
    until(lambda: " ERROR " in manager.log.read_text(), "the log's word of it")
    assert "a change of a slot's state was against the rules and was not made, 1 times" in manager.log_tail()
    assert counter(manager, "forbidden_moves") == 1


# --- the socket -----------------------------------------------------------------------------------------------------


def test_the_socket_is_its_users_alone(serve: Callable[..., Manager], folder: Path) -> None:
    folder.chmod(0o755)
    old = os.umask(0)
    try:
        manager = serve()
    finally:
        os.umask(old)
    assert manager.socket.stat().st_mode & 0o777 == 0o600
    assert manager.socket.with_name("kvhold.sock.lock").stat().st_mode & 0o777 == 0o600


def test_refuses_a_live_manager(manager: Manager) -> None:
    said = refused(manager.socket, code=wire.SOCKET_TAKEN)
    assert f"{manager.socket} belongs to a running manager; stop it or choose another path" in said
    manager.stop()
    refused(manager.socket, code=wire.SOCKET_TAKEN)
    manager.cont()
    Engine(manager.socket, "one").bye()


@pytest.mark.parametrize("busy", [False, True])
def test_refuses_another_programs_socket(folder: Path, busy: bool) -> None:
    path = folder / "s"
    with socket.socket(socket.AF_UNIX) as other, socket.socket(socket.AF_UNIX) as waiting:
        other.bind(str(path))
        other.listen(0)
        if busy:  # its queue is full: nobody accepts
            waiting.connect(str(path))
        assert f"something listens on {path} already" in refused(path)
        assert os.listdir(folder) == ["s"]


def test_replaces_what_kill_9_left(manager: Manager, folder: Path) -> None:
    manager.kill()
    assert sorted(os.listdir(folder)) == ["kvhold.sock", "kvhold.sock.lock", "manager.log"]
    manager.start()
    Engine(manager.socket, "one").bye()
    assert manager.terminate() == 0
    assert os.listdir(folder) == [manager.log.name]


def test_two_at_once_are_one(folder: Path) -> None:
    path = folder / "s"
    command = [sys.executable, "-m", "kvhold.cli", "serve", "--dram", "16MiB", "--socket", str(path)]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, env=environment()) for _ in range(3)]
    until(lambda: sum(process.poll() is None for process in started) == 1, "one is left")
    (left,) = [process for process in started if process.poll() is None]
    until(path.is_socket, "it listens")
    left.terminate()
    left.communicate(timeout=60)
    assert sorted(process.wait(60) for process in started) == [0, wire.SOCKET_TAKEN, wire.SOCKET_TAKEN]
    for process in started:
        assert process.stderr is not None
        process.stderr.close()
    assert os.listdir(folder) == []


def test_refuses_what_is_no_socket(folder: Path) -> None:
    path = folder / "s"
    path.write_text("precious")
    assert f"{path} exists and is not a socket; choose another path" in refused(path)
    assert path.read_text() == "precious"
    (folder / "d").mkdir()
    assert "is not a socket" in refused(folder / "d")
    assert f"{path / 'below'} cannot be made: " in refused(path / "below")
    assert sorted(os.listdir(folder)) == ["d", "s"]


def test_refuses_a_path_it_cannot_listen_on(folder: Path) -> None:
    assert "longer than 107 bytes; choose a shorter path" in refused(folder / ("x" * 100))
    done = run("-m", "kvhold.manager", "relative.sock", str(32 << 20), "0", "0", "lru")
    assert done.returncode == 2
    assert "relative.sock is not an absolute path" in done.stderr
    assert os.listdir(folder) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_refuses_another_users_directory(folder: Path) -> None:
    (folder / "theirs").mkdir()
    os.chown(folder / "theirs", 65534, 65534)
    assert "belongs to another user; choose another path" in refused(folder / "theirs" / "s")
    assert os.listdir(folder / "theirs") == []


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dram", "said"),
    [
        ("many", "'many' is not a size; write it like '64GiB'"),
        ("-1GiB", "is not a size"),
        ("0", "0B is too small; give at least 2MiB"),
        ("1MiB", "1MiB is too small; give at least 2MiB"),
        ("9999999TiB", "dram: "),
        ("99999999999999999999TiB", "dram: "),
    ],
)
def test_refuses_bad_sizes(folder: Path, dram: str, said: str) -> None:
    assert said in refused(folder / "s", dram=dram)
    assert os.listdir(folder) == []


def test_refuses_huge_pages_that_are_not_there(folder: Path) -> None:
    need = HUGE_FREE + 16
    said = refused(folder / "s", "--huge-pages", dram=f"{need * 2}MiB")
    assert f"huge_pages: the kernel has no {need} free huge pages of 2MiB" in said
    assert f"sysctl vm.nr_hugepages={need}" in said
    assert os.listdir(folder) == []


@pytest.mark.skipif(HUGE_FREE < 16, reason="needs 16 free huge pages: sysctl vm.nr_hugepages=16")
def test_takes_huge_pages(serve: Callable[..., Manager]) -> None:
    manager = serve("--huge-pages")
    populated(manager.socket)
    engine = Engine(manager.socket, "one")
    engine.worker.write(engine.scheduler.offsets[0], "kept")
    assert engine.worker.read(engine.scheduler.offsets[0], 4) == "kept"
    assert "32MiB of DRAM (huge pages)" in manager.log_tail()


# --- eviction -------------------------------------------------------------------------------------------------------


def test_refuses_a_policy_that_is_not_known(folder: Path) -> None:
    assert "'fifo' is unknown; use one of: lru, 2q" in refused(folder / "s", "--eviction", "fifo")
    assert os.listdir(folder) == []


@pytest.mark.parametrize(("options", "left"), [((), 0), (("--eviction", "2q"), 20)], ids=["lru", "2q"])
def test_what_is_asked_for_twice_stays_if_the_policy_says_so(
    serve: Callable[..., Manager], options: tuple[str, ...], left: int
) -> None:
    manager = serve(*options)
    populated(manager.socket)
    engine = Engine(manager.socket, "one", slots=8, shard=256 << 10)
    hot = list(range(20))
    engine.store(hot)
    op, resident, *_ = engine.scheduler.ask(hot)
    assert resident == 20
    engine.scheduler.release(op)
    engine.store(list(range(100, 400)))  # thrice what there is room for
    assert engine.scheduler.ask(hot)[1] == left
    assert status(manager.socket)["eviction"] == (options or ("", "lru"))[1]


# --- http -----------------------------------------------------------------------------------------------------------


def test_metrics_and_health(serve: Callable[..., Manager]) -> None:
    manager = serve("--http", "127.0.0.1:0")
    assert get(manager, "/healthz") == (200, "ok\n")
    code, text = get(manager, "/metrics")
    assert code == 200
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {"kvhold_arena_bytes", "kvhold_arena_state_bytes", "kvhold_keys_asked", "kvhold_sessions"} <= set(families)
    assert all(family.documentation for family in families.values())
    assert get(manager, "/")[0] == 404
    assert manager.terminate() == 0


def test_health_of_a_stopped_process_is_no_answer(serve: Callable[..., Manager]) -> None:
    manager = serve("--http", "127.0.0.1:0")
    http_address(manager.log)
    manager.stop()
    with pytest.raises(TimeoutError):
        get(manager, "/healthz", timeout=0.5)
    manager.cont()
    assert get(manager, "/healthz") == (200, "ok\n")


def test_health_of_a_stuck_loop_is_503(serve: Callable[..., Manager], folder: Path) -> None:
    stuck = (
        "import time, pathlib, kvhold.manager.server as s, kvhold.manager.http as h; from kvhold.cli import main\n"
        "def report(server, namespace):\n"
        f"    while not pathlib.Path({str(folder / 'go')!r}).exists(): time.sleep(0.01)\n"
        "s.report = report; h.ANSWER_SECONDS = 0.3; main()"
    )
    manager = serve("--http", "127.0.0.1:0", program=("-c", stuck))
    until(lambda: get(manager, "/healthz") == (200, "ok\n"), "it answers within so little")
    admin = Peer(manager.socket)
    admin.join("admin")
    admin.send(wire.Status())
    for path in ("/healthz", "/metrics"):  # the loop may have taken in the first one before the question
        until(lambda path=path: get(manager, path) == (503, "the manager's loop does not answer\n"), "it is stuck")
    (folder / "go").touch()
    until(lambda: get(manager, "/healthz")[0] == 200, "the loop goes on")


def test_http_on_ipv6(serve: Callable[..., Manager]) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")
    manager = serve("--http", "[::1]:0")
    assert get(manager, "/healthz") == (200, "ok\n")


def test_refuses_an_address_it_cannot_have(folder: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        said = refused(folder / "s", "--http", f"127.0.0.1:{port}")
    assert f"http: 127.0.0.1:{port} cannot be bound: Address already in use" in said
    assert "http: 203.0.113.1:1 cannot be bound" in refused(folder / "s", "--http", "203.0.113.1:1")
    assert os.listdir(folder) == []


def test_who_watches_is_told_what_can_be_found_and_what_cannot_any_more(manager: Manager) -> None:
    watcher, deaf = Engine(manager.socket, "one", watch=True), Engine(manager.socket, "two")
    deaf.store([3, 4])
    watcher.scheduler.commit([1, 2, 3])
    assert watcher.scheduler.expect(wire.Added) == wire.Added(1, keys_of([1, 2, 3]))
    admin = Peer(manager.socket)
    admin.join("admin")
    admin.send(wire.Purge())
    gone = watcher.scheduler.expect(wire.Removed)
    assert (gone.space, sorted(array("Q", gone.keys))) == (1, [1, 2, 3, 4])
    deaf.scheduler.send(wire.Lookup(9, ((1, keys_of([1, 2, 3, 4])),)))
    while not isinstance(told := deaf.scheduler.receive(), wire.Residency):
        assert isinstance(told, wire.Grant), told
    assert told.tiers == (bytes(4),)


def test_a_signal_is_heeded_while_a_start_hangs(folder: Path) -> None:
    """In a call that nothing but the process's end interrupts, as one to a sick disk may be."""
    os.mkfifo(folder / "pipe")
    hanging = (
        "import os, pathlib, signal, sys, kvhold.manager.process as p; from kvhold.cli import main\n"
        "def memory(*how):\n"
        "    pathlib.Path('at').write_text('here')\n"
        "    open('pipe').read()\n"
        "p.ArenaMemory = memory; main()"
    )
    command = [sys.executable, "-c", hanging, "serve", "--dram", "32MiB", "--socket", str(folder / "s")]
    with subprocess.Popen(command, cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        until((folder / "at").exists, "it hangs")
        process.terminate()
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()
        assert process.stderr is not None
        assert "ended by SIGTERM while it was starting" in process.stderr.read()
    assert sorted(os.listdir(folder)) == ["at", "pipe"]


def test_uptime_does_not_follow_the_clock(folder: Path, serve: Callable[..., Manager]) -> None:
    """It was negative after the clock had been set back."""
    back = "import time, itertools; n = itertools.count(); time.time = lambda: 2e9 - 1e6 * next(n)\n"
    manager = serve(program=("-c", back + "from kvhold.cli import main; main()"))
    assert 0 <= status(manager.socket)["uptime_seconds"] < 1e6


def _niceness(pid: int) -> dict[str, int]:
    """By thread of a process; its first thread is the loop."""
    tasks = Path(f"/proc/{pid}/task")
    stats = {task.name: (task / "stat").read_text().rpartition(")")[2].split() for task in tasks.iterdir()}
    return {number: int(stat[16]) for number, stat in stats.items()}


def _may_rise() -> bool:
    raising = "import os; os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) - 1)"
    return subprocess.run([sys.executable, "-c", raising], capture_output=True, check=False).returncode == 0


def test_the_loop_runs_before_others_where_that_is_allowed(manager: Manager) -> None:
    """Its other threads, which read disks, stay where they were."""
    if _may_rise():
        until(lambda: _niceness(manager.pid)[str(manager.pid)] == -10, "the loop to be preferred")
    else:
        until(lambda: "no leave to run at a higher priority (CAP_SYS_NICE)" in manager.log.read_text(), "its word")
    niceness = _niceness(manager.pid)
    niceness.pop(str(manager.pid))
    assert set(niceness.values()) <= {os.getpriority(os.PRIO_PROCESS, 0)}
