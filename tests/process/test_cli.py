"""The commands that ask a running manager: which one they ask, what they say, and what they refuse."""

import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from testbed.process.manager_process import Manager
from testbed.process.peers import NAMESPACE, Engine, keys_of, status, until
from testbed.process.puppet import environment
from testbed.process.ssd_load import SMALL, Client, Known

from kvhold import __version__
from kvhold import protocol as wire
from kvhold.cli import app
from kvhold.units import format_size

MIB = 1 << 20
NAME = "ab" * 32


def kvhold(*command: str, home: Path | None = None, code: int = 0, patience: float = 60.0) -> str:
    """What a command says on the way it should end, in one line. ``home`` has the sockets' directory; ``patience`` is
    how many seconds it waits for an answer."""
    program = f"import sys; from kvhold.cli import main; sys.modules['kvhold.cli.ask']._SECONDS = {patience}; main()"
    more = {} if home is None else {"KVHOLD_RUNTIME_DIR": str(home / "kvhold")}
    done = subprocess.run(
        [sys.executable, "-c", program, *command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment(COLUMNS="200", **more),
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return " ".join((done.stderr if code else done.stdout).replace("│", " ").split())


def notes(*command: str) -> str:
    """What a command that succeeds says beside its answer."""
    done = subprocess.run(
        [sys.executable, "-m", "kvhold.cli", *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=environment(),
    )
    return done.stderr


@contextmanager
def embedded(
    path: Path,
    *options: str,
    program: tuple[str, ...] = ("-m", "kvhold.manager"),
    dram: int = 8 * MIB,
    **how: object,
) -> Iterator[subprocess.Popen[bytes]]:
    """A manager as an engine starts it, with its output in ``path`` + .log."""
    ours, theirs = socket.socketpair()
    with ours, theirs, path.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *program, str(path), str(dram), str(theirs.fileno()), "0", "lru", *options],
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
    assert "no manager is running" in kvhold("purge", "--all", home=home, code=1)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(sockets / "e-dead.sock"))
    (sockets / "kvhold.sock").write_text("no socket")
    assert "no manager is running" in kvhold("purge", "--all", home=home, code=1)
    living = sockets / "e-living.sock"
    with embedded(living):
        said = kvhold("purge", "--all", home=home)
        assert said == f"purged: the manager on {living} has forgotten 0 objects, 0B"


def test_one_that_does_not_answer_is_named_and_no_other_is_asked(sockets: Path) -> None:
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(sockets / "kvhold.sock"))
        hung.listen(5)
        assert str(sockets / "kvhold.sock") in kvhold("purge", "--all", home=sockets.parent, code=1, patience=0.3)


def test_with_several_one_must_be_named(sockets: Path) -> None:
    other = sockets / "e-1.sock"
    manager = Manager(sockets, dram="8MiB")
    try:
        with embedded(other):
            for command in (["purge", "--all"], ["limit", "write_rate=1"], ["status"], ["flush"], ["explain"]):
                said = kvhold(*command, home=sockets.parent, code=1)
                assert "several managers" in said
                assert f"--socket {other}" in said
                assert f"--socket {manager.socket}" in said
            said = kvhold("purge", "--all", "--socket", str(other))
            assert said == f"purged: the manager on {other} has forgotten 0 objects, 0B"
    finally:
        manager.kill()


# --- what is refused before anybody is asked --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["purge"], "say what to forget: --namespace HEX for one model, --older-than 7d for what is old, --all for e"),
        (["purge", "--all", "--older-than", "7d"], "--all: is everything; leave it out, or the others"),
        (["purge", "--all", "--namespace", NAME], "--all: is everything; leave it out, or the others"),
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
        (["explain", "3/0"], "'3/0' is neither a block's hash nor an operation"),
        (["explain", "99d312a3dd695a"], "give all hexadecimal digits of a hash or its last 16"),
        (["explain", str(1 << 64)], "nor an operation; give"),
        (["explain", "--", ""], "'' is neither a block's hash"),
    ],
)
def test_refuses(folder: Path, command: list[str], said: str) -> None:
    assert said in kvhold(*command, home=folder, code=2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--dram", "many"], "--dram: 'many' is not a size"),
        (["--http", "9464"], "--http: '9464' is not HOST:PORT; write it like 127.0.0.1:9464 or [::1]:9464"),
        (["--ssd", "/x"], "--ssd: '/x' is not PATH:SIZE"),
        (["--ssd", "x:1GiB"], "--ssd: ssd: 'x' is not an absolute path; write it like /var/cache"),
        (["--ssd", "~/x:1GiB"], "'~/x' is not an absolute path"),
        (["--ssd", "/x:much"], "--ssd: ssd: '/x:much': 'much' is not a size"),
        (["--ssd", "/x:4095KiB"], "for /x is too small; give at least 4MiB"),
        (["--ssd", "/x:1GiB", "--ssd-min-free", "x"], "--ssd-min-free: 'x' is not a size"),
        (["--ssd", "/x:1GiB", "--ssd-write-rate", "x"], "--ssd-write-rate: 'x' is not a size"),
        (["--ssd", "/x:1GiB", "--ssd-write-rate", "5"], "--ssd-write-rate: '5' a second would write next to nothing; "),
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
        shown: dict[str, object] = json.loads(kvhold("limit", "--json", "--socket", str(manager.socket), *options))
        return shown

    one = ("--namespace", NAME)
    assert limit(*one) == {"quotas": {NAME: {"floor": 0, "limit": None}}}
    assert limit(*one, "--max", "16MiB")["quotas"] == {NAME: {"floor": 0, "limit": 16 * MIB}}
    assert limit(*one, "--floor", "4MiB")["quotas"] == {NAME: {"floor": 4 * MIB, "limit": 16 * MIB}}
    assert limit(*one, "--max", "8MiB")["quotas"] == {NAME: {"floor": 4 * MIB, "limit": 8 * MIB}}
    assert limit(*one) == {"quotas": {NAME: {"floor": 4 * MIB, "limit": 8 * MIB}}}
    said = kvhold("limit", "--socket", str(manager.socket))
    assert "prepared_share 0.75" in said
    assert "read_bytes 256MiB" in said
    assert "write_rate 0 (no limit)" in said
    assert f"namespace {NAME}: floor 4MiB, max 8MiB" in said
    assert limit(*one, "--max", "none")["quotas"] == {NAME: {"floor": 4 * MIB, "limit": None}}
    assert limit("max_objects=1000", "engine_share=0.5")["max_objects"] == 1000
    for change, wanted in (("max_objects=0", "1 or more"), ("engine_share=2", "a share from 0 to 1")):
        said = kvhold("limit", "--socket", str(manager.socket), change, code=1)
        assert f"limit {change} cannot be; give {wanted}" in said
    assert limit()["max_objects"] == 1000


def test_what_could_never_work_is_refused_with_the_least_that_does(manager: Manager) -> None:
    limit = ("limit", "--socket", str(manager.socket))
    before = kvhold(*limit)
    for change, said in (
        ("prepared_share=0", "would restore nothing: an object has 4KiB, the arena 32MiB; give 0.00013 or more"),
        ("engine_share=0.0001", "limit engine_share=0.0001 would restore nothing"),
        ("read_bytes=0", "limit read_bytes=0 cannot be; give 1 or more, up to 1024TiB"),
        ("write_queue=0", "limit write_queue=0 cannot be; give 1 or more"),
        ("write_rate=5", "limit write_rate=5B a second would write next to nothing; give 1MiB or more, or 0 for no"),
        ("--floor 4GiB", "its floor of 4GiB cannot be kept: the arena has 32MiB; give at most 32MiB"),
        ("--floor 40MiB --max 20MiB", "its floor of 40MiB is not between 0 and its limit of 20MiB; lower the floor"),
        ("--max 4095", "its limit of 3.999KiB has no room for an object; give 4KiB or more"),
    ):
        named = ["--namespace", NAME] if change.startswith("-") else []
        assert said in kvhold(*limit, *named, *change.split(), code=1)
    assert kvhold(*limit) == before


def test_the_least_that_works_depends_on_what_is_there(manager: Manager) -> None:
    """An object, or the arena but for what others are sure of."""
    engine = Engine(manager.socket, "one", shard=1 << 20)
    one = ("limit", "--socket", str(manager.socket))
    assert "an object has 1MiB, the arena 32MiB; give 0.032 or more" in kvhold(*one, "prepared_share=0.03", code=1)
    kvhold(*one, "prepared_share=0.032")
    engine.store([1])
    engine.works([1])
    space = ("--namespace", NAMESPACE.hex())
    assert "has no room for an object; give 1MiB or more" in kvhold(*one, *space, "--max", "1023KiB", code=1)
    kvhold(*one, *space, "--max", "8MiB")
    kvhold(*one, "--namespace", NAME, "--floor", "30MiB")
    said = kvhold(*one, *space, "--floor", "4MiB", code=1)
    assert "the arena has 32MiB, of which others' floors take 30MiB; give at most 2MiB" in said


def test_only_what_changes_is_logged(manager: Manager) -> None:
    def logged(*change: str) -> list[str]:
        before = manager.log.read_text()
        kvhold("limit", "--socket", str(manager.socket), *change)
        lines = manager.log.read_text()[len(before) :].splitlines()
        return [line.partition("limits changed: ")[2] for line in lines if "limits changed" in line]

    assert logged() == logged("prepared_share=0.75") == logged("--namespace", NAME) == []
    assert logged("prepared_share=0.5", "engine_share=0.75") == ["{'prepared_share': 0.5}"]
    quota = "{'floor': 4194304, 'limit': None}"
    assert logged("--namespace", NAME, "--floor", "4MiB") == [f"{{'quotas': {{'{NAME}': {quota}}}}}"]
    assert logged("write_queue=5") == ["{'write_queue': 5}"]
    quota = "{'floor': 0, 'limit': None}"
    assert logged("--namespace", NAME, "--floor", "0") == [f"{{'quotas': {{'{NAME}': {quota}}}}}"]


def test_a_namespace_that_nobody_has_used_is_said_to_be_unknown(manager: Manager) -> None:
    """It may be given a quota ahead of its engine."""
    asked = ("--socket", str(manager.socket), "--namespace", NAME)
    assert f"this manager knew no namespace {NAME}; `kvhold status` lists" in notes("purge", *asked)
    assert f"no engine has used namespace {NAME} on this manager yet" in notes("limit", *asked, "--max", "1MiB")
    assert NAME in kvhold("limit", "--socket", str(manager.socket))
    said = kvhold("keys", "--socket", str(manager.socket), NAME, "0", code=1)
    assert f"knows no namespace {NAME}; `kvhold status` lists" in said
    engine = Engine(manager.socket, "one", namespace=bytes.fromhex(NAME))
    engine.store([1])
    assert notes("limit", *asked, "--max", "2MiB") == ""
    assert kvhold("purge", *asked) == f"purged: the manager on {manager.socket} has forgotten 1 object, 4KiB"
    assert kvhold("keys", "--socket", str(manager.socket), NAME, "0") == ""


def test_status_tells_of_directories_and_namespaces(serve: Callable[..., Manager], folder: Path) -> None:
    manager = serve("--ssd", f"{folder}/ssd:64MiB", "--ssd-min-free", "1MiB", dram="32MiB")
    client = Client(manager.socket, SMALL, Known())
    client.store(list(range(1, 21)))
    said = kvhold("flush", "--socket", str(manager.socket))
    assert said == f"flushed: the manager on {manager.socket}: 20 of 20 objects are on SSD"
    until(lambda: status(manager.socket)["logs"][0]["ready"], "the index is there")
    said = kvhold("status", "--socket", str(manager.socket))
    report = status(manager.socket)
    (space,) = report["spaces"]
    size, held = format_size(space["object_bytes"]), format_size(space["dram_bytes"])
    assert f"objects {report['objects']}, 0 of them only on SSD; 0 evicted" in said
    assert f"space unnamed, group 0: 20 objects of {size}, {held} of DRAM" in said
    assert f"namespace {space['namespace']} no key was asked for yet; used " in said
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
    integers = kvhold("keys", "--int", "--socket", str(manager.socket), space, "0").split()
    assert integers[::2] == [str(int(name[-16:], 16)) for name in words[::2]]
    said = kvhold("keys", "--socket", str(manager.socket), space, "1", code=1)
    assert "knows no group 1 of this namespace, which has: 0" in said


def test_explain_says_which_group_cut_a_hit(manager: Manager) -> None:
    engine = Engine(manager.socket, "one")
    key = keys_of([77])
    engine.scheduler.send(wire.Cut(5, 1, key, 14))
    engine.scheduler.sync()
    told = f"hit cut by group 0 at block 14: key ...{key.hex()} was not stored"
    assert told in kvhold("explain", "--socket", str(manager.socket), "5")
    assert told in kvhold("explain", "--socket", str(manager.socket))
    session = scheduler_session(manager)
    assert f"cut the hit of operation {session}/5: group 0 at block 14" in kvhold(
        "explain", "--socket", str(manager.socket), key.hex()
    )


def scheduler_session(manager: Manager) -> int:
    """The number of the only engine's scheduler half, as `kvhold status` shows it."""
    (number,) = [each["session"] for each in status(manager.socket)["sessions"] if each["role"] == "scheduler"]
    assert f"session {number}: scheduler rank 0" in kvhold("status", "--socket", str(manager.socket))
    return int(number)


def test_explain_names_what_was_missed_by_whom(manager: Manager) -> None:
    engine = Engine(manager.socket, "one")
    number = 12345678901234567890
    missing = number.to_bytes(8, "big")
    engine.store([1])
    engine.scheduler.send(wire.Query(7, 1, 1, 0, keys_of([1]) + missing))
    engine.scheduler.sync()
    explain = ("explain", "--socket", str(manager.socket))
    name = f"{scheduler_session(manager)}/7"
    told = f"operation {name}: fell short for the reason not_stored (revision 1), at key ...{missing.hex()}, position 1"
    for what in ([], [name], ["7"]):
        assert told in kvhold(*explain, *what)
    for hash_ in (missing.hex(), f"...{missing.hex()}", str(number)):
        assert f"operation {name} found it missing" in kvhold(*explain, hash_)


def test_what_nothing_is_known_of_is_no_success(manager: Manager) -> None:
    explain = ("explain", "--socket", str(manager.socket))
    assert kvhold(*explain) == "nothing missed lately"
    engine = Engine(manager.socket, "one")
    engine.store([1])
    engine.works([1])
    for what in ("99", "99/1", NAME, str(1 << 63)):
        assert f"nothing is known of {what} by the manager on {manager.socket}" in kvhold(*explain, what, code=1)


# --- an engine's own manager ------------------------------------------------------------------------------------------


def test_it_names_only_the_directories_that_it_has(serve: Callable[..., Manager], folder: Path) -> None:
    taken, path = folder / "ssd", folder / "e-1.sock"
    serve("--ssd", f"{taken}:64MiB", "--ssd-min-free", "1MiB")
    with embedded(path, f"{taken}:64MiB"):
        failed, started = path.with_suffix(".log").read_text().splitlines()[:2]
        assert f"ssd: {taken} is in use by another kvhold manager" in failed
        assert "runs without the directory, and tries it again" in failed
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


# --- which model it is, and how it does -------------------------------------------------------------------------------


def test_status_says_which_model_a_namespace_is_how_often_it_hits_and_since_when(manager: Manager) -> None:
    label = "org/Model-7B \x1b[2J" + "x" * 200
    engine = Engine(manager.socket, "one", label=label)
    shown = ("org/Model-7B ?[2J" + "x" * 200)[:125] + "..."
    engine.store([1, 2, 3])
    engine.scheduler.ask([1, 2, 3, 4])
    (space,) = status(manager.socket)["spaces"]
    assert (space["model"], space["keys_asked"], space["keys_found"], space["keys_read"]) == (shown, 4, 3, 0)
    assert 0 <= space["idle_seconds"] <= space["oldest_seconds"] < 60
    said = kvhold("status", "--socket", str(manager.socket))
    assert f"space {shown}, group 0: 3 objects of 4KiB" in said
    assert f"namespace {NAMESPACE.hex()} 3 of 4 keys were here (75%); used " in said
    assert " ago, the oldest in DRAM " in said


def test_status_says_that_an_ssd_is_out_of_use_since_when_and_why(serve: Callable[..., Manager], folder: Path) -> None:
    """And that it is in use again."""
    manager = serve("--ssd", f"{folder}/ssd:64MiB", "--ssd-min-free", "1MiB")
    client = Client(manager.socket, SMALL, Known())
    until(lambda: status(manager.socket)["logs"][0]["ready"], "the index is there")
    (folder / "ssd").rename(folder / "away")
    keys = iter(range(1, 100_000))

    def out() -> dict[str, dict[str, float]]:
        client.store([next(keys)])
        found: dict[str, dict[str, float]] = status(manager.socket)["logs"][0]["out_of_use"]
        return found

    until(out, "it is out of use")
    assert out()["write"]["why"] == "errors"
    assert out()["write"]["seconds"] >= 0
    said = kvhold("status", "--socket", str(manager.socket))
    assert "it is not written since " in said
    assert "because that failed (" in said
    assert "No such file or directory" in said
    (folder / "away").rename(folder / "ssd")
    until(lambda: not out(), "it is in use again")
    assert "it is not written" not in kvhold("status", "--socket", str(manager.socket))


# --- for programs -----------------------------------------------------------------------------------------------------


def test_every_command_that_prints_can_print_json() -> None:
    silent = {"serve", "demo"}
    commands = {command.callback.__name__: command.callback for command in app.registered_commands if command.callback}
    assert silent < set(commands)
    for name, command in commands.items():
        assert (name in silent) == ("as_json" not in signature(command).parameters), name


def test_the_version_is_an_option_too() -> None:
    assert kvhold("--version") == kvhold("version") == __version__
    shown = json.loads(kvhold("version", "--json"))
    assert shown == {"version": __version__, "python": platform.python_version(), "protocol": wire.VERSION}


def test_commands_print_what_they_say_as_json(serve: Callable[..., Manager], folder: Path) -> None:
    manager = serve("--ssd", f"{folder}/ssd:64MiB", "--ssd-min-free", "1MiB")
    client = Client(manager.socket, SMALL, Known())
    client.store([1, 2, 3])
    socket = ("--socket", str(manager.socket))
    space = SMALL.namespace.hex()

    def shown(*command: str, code: int = 0) -> Any:
        return json.loads(kvhold(*command, "--json", code=code))

    assert shown("flush", *socket) == {"socket": str(manager.socket), "objects": 3, "on_ssd": 3}
    assert shown("status", *socket)["objects"] == 3
    names = {keys_of([key]).hex(): "dram" for key in (1, 2, 3)}
    assert shown("keys", *socket, space, "0") == names
    assert set(shown("keys", "--int", *socket, space, "0")) == {str(int(name, 16)) for name in names}
    assert shown("explain", *socket) == {"lines": []}
    assert shown("explain", *socket, next(iter(names)))["lines"]
    assert shown("limit", *socket, "write_queue=7")["write_queue"] == 7
    purged = shown("purge", *socket, "--all")
    assert purged == {"socket": str(manager.socket), "objects": 3, "bytes": 3 * sum(SMALL.shards)}
    client.store([4, 5])
    kvhold("flush", *socket)
    assert manager.terminate() == 0
    found = shown("verify", f"{folder}/ssd")
    assert (found["records"], found["damaged"], found["met"]) == (2, [], {})
    assert found["segments"] == 1
    summary = shown("inspect", f"{folder}/ssd")
    assert summary["namespaces"] == [{"namespace": space, "group": 0, "objects": 2, "bytes": 2 * sum(SMALL.shards)}]
    assert 0 < summary["oldest"] <= summary["newest"]
    assert summary["met"]["tombstoned"] == 3

    (segment,) = (folder / "ssd").glob("*.segment")
    data = bytearray(segment.read_bytes())
    data[data.rindex(client.known.payload(SMALL, 5))] ^= 1
    segment.write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", CHATTY, "verify", "--json", f"{folder}/ssd"],
        capture_output=True, text=True, timeout=60, check=False, env=environment(),
    )  # fmt: skip
    assert done.returncode == 1
    [damage] = json.loads(done.stdout)["damaged"]
    assert (damage["reason"], damage["key"], damage["namespace"]) == ("checksum", keys_of([5]).hex(), space)
    progress = done.stderr.splitlines()
    assert progress[0].startswith("0 of 1 segments, 0 records, 0B read")
    assert progress[-1].startswith("1 of 1 segments, 2 records, ")
    assert progress[-1].endswith("1 damaged, about 0 s left")


CHATTY = "import kvhold.cli.ssd as ssd; from kvhold.cli import main; ssd.LOG_SECONDS = 0; main()"
