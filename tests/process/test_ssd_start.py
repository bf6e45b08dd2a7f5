"""Starts: what is refused has changed nothing on an SSD, and an engine's own manager waits for its directory."""

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from manager_process import Manager
from peers import Peer, populated, status, until
from puppet import environment
from ssd_load import NEW, OLD, SMALL, Client, Known, no_damage, rebuilt, settle
from test_cli import kvhold
from test_serve import refused
from test_ssd_bounds import begin, found

from kvhold import protocol as wire

Serve = Callable[..., Manager]
IMPATIENT = (
    "import runpy, kvhold.manager.ssd as ssd; ssd.AGAIN_SECONDS = ssd.LOCK_SECONDS = 0.1; "
    "runpy.run_module('kvhold.manager', run_name='__main__', alter_sys=True)"
)


@contextmanager
def embedded(path: Path, *directories: str) -> Iterator[subprocess.Popen[bytes]]:
    """A manager as an engine starts it, but one that tries again soon."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", IMPATIENT, str(path), str(32 << 20), str(theirs.fileno()), "0", *directories]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment(), start_new_session=True
        )
        try:
            until(lambda: listens(path), "it listens")
            populated(path)
            yield process
        finally:
            process.kill()
            process.wait()


def listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def filled(serve: Serve, folder: Path) -> tuple[Path, Known]:
    """A directory with what a manager stored that is gone."""
    directory, known = folder / "ssd", Known()
    manager = begin(serve, f"{directory}:48MiB")
    client = Client(manager.socket, SMALL, known)
    client.store(OLD)
    settle(manager.socket)
    assert manager.terminate() == 0
    return directory, known


@pytest.mark.parametrize("why", ["size", "http", "another directory"])
def test_a_start_that_is_refused_takes_nothing(
    serve: Serve, folder: Path, filled: tuple[Path, Known], why: str
) -> None:
    """Not even what a smaller budget has no room for."""
    directory, known = filled
    before = contents(directory)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options, reason = {
            "size": ((f"{directory}:32MiB",), "is too small for the log that is there"),
            "http": ((f"{directory}:47MiB", "--http", f"127.0.0.1:{taken.getsockname()[1]}"), "Address already in use"),
            "another directory": (
                (f"{directory}:47MiB", "--ssd", f"{folder}/no/such:64MiB"),
                f"{folder}/no is not there",
            ),
        }[why]
        assert reason in refused(folder / "s", "--ssd", *options, dram="8MiB")
    assert contents(directory) == before
    manager = begin(serve, f"{directory}:48MiB")
    assert found(Client(manager.socket, SMALL, known), OLD) == OLD


def test_an_engines_own_manager_opens_its_directory_when_that_is_free(
    serve: Serve, folder: Path, filled: tuple[Path, Known]
) -> None:
    directory, known = filled
    other = begin(serve, f"{directory}:48MiB")
    path = folder / "e-1.sock"
    with embedded(path, f"{directory}:48MiB"):
        client = Client(path, SMALL, known)
        client.store(NEW)
        [closed] = status(path)["closed_logs"]
        assert closed["path"] == str(directory)
        assert "is in use by another kvhold manager" in closed["reason"]
        assert f"ssd {directory} is not open: ssd: {directory} is in use" in kvhold("status", "--socket", str(path))
        other.kill()
        until(lambda: status(path)["logs"], "the directory is open")
        rebuilt(path)
        assert not status(path)["closed_logs"]
        assert found(client, OLD + NEW) == OLD + NEW
        client.store([9001])
        no_damage(settle(path))


def test_a_purge_is_for_a_directory_that_opens_later_too(
    serve: Serve, folder: Path, filled: tuple[Path, Known]
) -> None:
    """It cannot be told of it, so it is not used any more, and whoever purges is told that it was not reached."""
    directory, known = filled
    other = begin(serve, f"{directory}:48MiB")
    path = folder / "e-1.sock"
    with embedded(path, f"{directory}:48MiB"):
        client = Client(path, SMALL, known)
        admin = Peer(path)
        admin.join("admin")
        admin.send(wire.Purge())
        said = admin.expect(wire.Refused)
        assert "not every SSD has taken it" in said.reason
        other.kill()
        until(lambda: "not tried again" in status(path)["closed_logs"][0]["reason"], "it is given up")
        assert not status(path)["logs"]
        assert set(client.tiers(OLD)) == {0}


def test_a_flush_says_how_much_is_on_ssd(serve: Serve, folder: Path) -> None:
    manager = begin(serve, f"{folder}/ssd:4MiB", dram="16MiB")
    client = Client(manager.socket, SMALL, Known())
    client.store(list(range(1, 21)))
    assert "20 of 20 objects are on SSD" in kvhold("flush", "--socket", str(manager.socket))
    client.store(list(range(21, 121)))
    said = kvhold("flush", "--socket", str(manager.socket)).split()
    there = int(said[said.index("of") - 1])
    assert said[said.index("of") + 1] == "120"
    assert 20 < there < 70
    manager.restart()
    rebuilt(manager.socket)
    assert status(manager.socket)["objects"] == there
    manager.kill()
    manager = serve(dram="8MiB")
    assert "uses no SSD: nothing outlasts it" in kvhold("flush", "--socket", str(manager.socket), code=1)
