"""The commands that ask a running manager: which one they ask, what they say, and what they refuse."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from manager_process import Manager
from peers import Engine, keys_of, status, until
from puppet import environment
from ssd_load import SMALL, Client, Known

from kvhold import protocol as wire

MIB = 1 << 20
NAME = "ab" * 32


def kvhold(*command: str, home: Path | None = None, code: int = 0) -> str:
    """What a command says on the way it should end, in one line. ``home`` has the sockets' directory."""
    program = "import sys; from kvhold.cli import main; sys.modules['kvhold.cli.ask']._SECONDS = 1.0; main()"
    more = {} if home is None else {"XDG_RUNTIME_DIR": str(home)}
    done = subprocess.run(
        [sys.executable, "-c", program, *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment(COLUMNS="200", **more),
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return " ".join((done.stderr if code else done.stdout).replace("│", " ").split())


@contextmanager
def embedded(path: Path, *options: str, **how: object) -> Iterator[subprocess.Popen[bytes]]:
    """A manager as an engine starts it, with its output in ``path`` + .log."""
    ours, theirs = socket.socketpair()
    with ours, theirs, path.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvhold.manager", str(path), str(8 * MIB), str(theirs.fileno()), "0", *options],
            stdin=subprocess.DEVNULL,
            stderr=log,
            pass_fds=[theirs.fileno()],
            env=environment(),
            **how,  # type: ignore[call-overload]
        )
        try:
            until(lambda: "of DRAM" in path.with_suffix(".log").read_text(), "it says that it listens")
            yield process
        finally:
            process.kill()
            process.wait()


# --- which manager is asked -----------------------------------------------------------------------------------------


@pytest.fixture
def sockets(folder: Path) -> Path:
    (folder / "kvhold").mkdir(mode=0o700)
    return folder / "kvhold"


def test_the_only_one_that_lives_is_asked(sockets: Path) -> None:
    home = sockets.parent
    assert "no manager is running" in kvhold("purge", home=home, code=1)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(sockets / "e-dead.sock"))
    (sockets / "kvhold.sock").write_text("no socket")
    assert "no manager is running" in kvhold("purge", home=home, code=1)
    living = sockets / "e-living.sock"
    with embedded(living):
        assert kvhold("purge", home=home) == f"purged: the manager on {living}"


def test_one_that_does_not_answer_is_named_and_no_other_is_asked(sockets: Path) -> None:
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(sockets / "kvhold.sock"))
        hung.listen(5)
        assert str(sockets / "kvhold.sock") in kvhold("purge", home=sockets.parent, code=1)


def test_with_several_one_must_be_named(sockets: Path) -> None:
    other = sockets / "e-1.sock"
    manager = Manager(sockets, dram="8MiB")
    try:
        with embedded(other):
            for command in (["purge"], ["limit", "write_rate=1"], ["status"], ["flush"], ["explain"]):
                said = kvhold(*command, home=sockets.parent, code=1)
                assert "several managers" in said
                assert f"--socket {other}" in said
                assert f"--socket {manager.socket}" in said
            assert kvhold("purge", "--socket", str(other)) == f"purged: the manager on {other}"
    finally:
        manager.kill()


# --- what is refused before anybody is asked --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["purge", "--namespace", ""], "--namespace: '' is no namespace; give all 64 hexadecimal digits"),
        (["purge", "--namespace", "ab"], "'ab' is no namespace"),
        (["purge", "--older-than", ""], "--older-than: '' is not a time"),
        (["limit", "--floor", "1GiB"], "--floor: is for one namespace; name it with --namespace"),
        (["limit", "--max", "1GiB"], "--max: is for one namespace"),
        (["limit", "--namespace", "xy", "--max", "1GiB"], "'xy' is no namespace"),
        (["limit", "--namespace", NAME, "--max", "many"], "--max: 'many' is not a size"),
        (["limit", "write_rate"], "'write_rate' is not NAME=VALUE"),
        (["limit", "write_rate=-5"], "write_rate=-5: '-5' is not a size"),
        (["limit", "max_objects=1e6"], "max_objects=1e6: '1e6' is not a count; give a whole number"),
        (["limit", "engine_share=half"], "engine_share=half: 'half' is not a share"),
        (["limit", "rate=5"], "rate=5: there is no limit 'rate'; there are: prepared_share"),
        (["keys", "xyz", "0"], "NAMESPACE: 'xyz' is no namespace; give all 64"),
        (["keys", NAME, str(1 << 32)], "should be less than or equal to 4294967295"),
        (["explain", "0"], "'0' is neither a block's hash"),
        (["explain", "--", ""], "'' is neither a block's hash"),
    ],
)
def test_refuses(folder: Path, command: list[str], said: str) -> None:
    assert said in kvhold(*command, home=folder, code=2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--dram", "many"], "--dram: 'many' is not a size"),
        (["--http", "9464"], "--http: '9464' is not an address"),
        (["--ssd", "/x"], "--ssd: '/x' is not PATH:SIZE"),
        (["--ssd", "x:1GiB"], "--ssd: ssd: 'x' is not an absolute path; write it like /var/cache"),
        (["--ssd", "~/x:1GiB"], "'~/x' is not an absolute path"),
        (["--ssd", "/x:much"], "--ssd: ssd: '/x:much': 'much' is not a size"),
        (["--ssd", "/x:4095KiB"], "for /x is too small; give at least 4MiB"),
        (["--ssd", "/x:1GiB", "--ssd-min-free", "x"], "--ssd-min-free: 'x' is not a size"),
        (["--ssd", "/x:1GiB", "--ssd-write-rate", "x"], "--ssd-write-rate: 'x' is not a size"),
        (["--ssd-min-free", "1GiB"], "--ssd-min-free: is for SSD directories; name one with --ssd"),
        (["--ssd-write-rate", "0"], "--ssd-write-rate: is for SSD directories"),
        (["--ssd-second-touch"], "--ssd-second-touch: is for SSD directories"),
    ],
)
def test_serve_names_the_option(folder: Path, options: list[str], said: str) -> None:
    dram = [] if "--dram" in options else ["--dram", "8MiB"]
    assert said in kvhold("serve", *dram, "--socket", str(folder / "s"), *options, code=2)
    assert os.listdir(folder) == []


# --- what is said and changed ---------------------------------------------------------------------------------------


def test_a_floor_and_a_limit_are_changed_one_by_one(manager: Manager) -> None:
    def limit(*options: str) -> dict[str, object]:
        shown: dict[str, object] = json.loads(kvhold("limit", "--socket", str(manager.socket), *options))
        return shown

    one = ("--namespace", NAME)
    assert limit(*one) == {NAME: {"floor": 0, "limit": None}}
    assert limit(*one, "--max", "16MiB")["quotas"] == {NAME: {"floor": 0, "limit": 16 * MIB}}
    assert limit(*one, "--floor", "4MiB")["quotas"] == {NAME: {"floor": 4 * MIB, "limit": 16 * MIB}}
    assert limit(*one, "--max", "8MiB")["quotas"] == {NAME: {"floor": 4 * MIB, "limit": 8 * MIB}}
    assert limit(*one) == {NAME: {"floor": 4 * MIB, "limit": 8 * MIB}}
    assert limit(*one, "--max", "none")["quotas"] == {NAME: {"floor": 4 * MIB, "limit": None}}
    assert limit("max_objects=1000", "engine_share=0.5")["max_objects"] == 1000
    for change, wanted in (("max_objects=0", "1 or more"), ("engine_share=2", "a share from 0 to 1")):
        said = kvhold("limit", "--socket", str(manager.socket), change, code=1)
        assert f"limit {change} cannot be; give {wanted}" in said
    assert limit()["max_objects"] == 1000


def test_status_tells_of_directories_and_namespaces(serve: Callable[..., Manager], folder: Path) -> None:
    manager = serve("--ssd", f"{folder}/ssd:64MiB", "--ssd-min-free", "1MiB", dram="32MiB")
    client = Client(manager.socket, SMALL, Known())
    client.store(list(range(1, 21)))
    assert kvhold("flush", "--socket", str(manager.socket)) == f"flushed: the manager on {manager.socket}"
    until(lambda: status(manager.socket)["logs"][0]["ready"], "the index is there")
    said = kvhold("status", "--socket", str(manager.socket))
    report = status(manager.socket)
    (space,) = report["spaces"]
    assert f"objects {report['objects']}, 0 of them only on SSD; 0 evicted" in said
    assert f"namespace {space['namespace']} group {space['group']}: 20 objects of " in said
    assert len(space["namespace"]) == 64
    assert f"ssd {folder}/ssd: " in said
    assert "of 64MiB, 0 records found at the start, 0 writes queued" in said
    assert "errors" not in said
    assert "rebuilt" not in said


def test_keys_are_listed_with_where_they_are(serve: Callable[..., Manager], folder: Path) -> None:
    manager = serve("--ssd", f"{folder}/ssd:64MiB", "--ssd-min-free", "1MiB", dram="8MiB")
    client = Client(manager.socket, SMALL, Known())
    every = list(range(1, 201))
    for start in range(0, len(every), 20):  # what DRAM has no room for before it is written would be lost
        client.store(every[start : start + 20])
        kvhold("flush", "--socket", str(manager.socket))
    space = SMALL.namespace.hex()
    words = kvhold("keys", "--socket", str(manager.socket), space, "0").split()
    found = dict(zip(words[::2], words[1::2], strict=True))
    tiers = client.tiers(every)
    assert set(tiers) == {1, 2}
    assert found == {keys_of([key]).hex(): ["", "dram", "ssd"][tier] for key, tier in zip(every, tiers, strict=True)}
    assert len(words) == 2 * len(found)
    assert kvhold("keys", "--socket", str(manager.socket), space, "1") == ""
    assert kvhold("keys", "--socket", str(manager.socket), NAME, "0") == ""


def test_explain_says_which_group_cut_a_hit(manager: Manager) -> None:
    engine = Engine(manager.socket, "one")
    key = keys_of([77])
    engine.scheduler.send(wire.Cut(5, 1, key, 14))
    engine.scheduler.sync()
    told = f"hit cut by group 0 at block 14: key ...{key.hex()} was not stored"
    assert told in kvhold("explain", "--socket", str(manager.socket), "5")
    assert told in kvhold("explain", "--socket", str(manager.socket))
    assert "cut the hit of operation 5: group 0 at block 14" in kvhold(
        "explain", "--socket", str(manager.socket), key.hex()
    )


# --- an engine's own manager ------------------------------------------------------------------------------------------


def test_it_names_only_the_directories_that_it_has(serve: Callable[..., Manager], folder: Path) -> None:
    taken, path = folder / "ssd", folder / "e-1.sock"
    serve("--ssd", f"{taken}:64MiB", "--ssd-min-free", "1MiB")
    with embedded(path, f"{taken}:64MiB"):
        failed, started = path.with_suffix(".log").read_text().splitlines()
        assert f"ssd: {taken} is in use by another kvhold manager" in failed
        assert "runs without the directory: nothing is kept on SSD" in failed
        assert "8MiB of DRAM" in started
        assert str(taken) not in started


def test_it_runs_on_all_cores_whatever_its_engine_is_bound_to(folder: Path) -> None:
    all_of_them = os.sched_getaffinity(0)
    if len(all_of_them) < 2:
        pytest.skip("needs two cores")
    one = min(all_of_them)
    with embedded(folder / "e-1.sock", preexec_fn=lambda: os.sched_setaffinity(0, {one})) as process:
        for task in os.listdir(f"/proc/{process.pid}/task"):
            assert os.sched_getaffinity(int(task)) >= all_of_them
        engine = Engine(folder / "e-1.sock", "one")
        engine.bye()
