"""Starts: what is refused has changed nothing on an SSD, and an engine's own manager waits for its directory."""

import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from testbed.process.manager_process import Manager
from testbed.process.peers import Peer, populated, status, until
from testbed.process.ssd_load import NEW, SMALL, Client, Known, no_damage, purge, rebuilt, settle

from kvhold import protocol as wire
from kvhold.core import events as ev
from kvhold.core.log import events as lev
from kvhold.manager.config import ManagerConfig, SsdConfig
from kvhold.manager.listener import Listener
from kvhold.manager.memory import ArenaMemory
from kvhold.manager.server import Server
from kvhold.manager.ssd import Latecomer
from process.test_cli import embedded, kvhold
from process.test_serve import refused
from process.test_ssd_bounds import begin, found

MANY = list(range(1, 301))
Serve = Callable[..., Manager]
IMPATIENT = (
    "import runpy, kvhold.manager.ssd as ssd; ssd.AGAIN_SECONDS = ssd.LOCK_SECONDS = 0.1; "
    "runpy.run_module('kvhold.manager', run_name='__main__', alter_sys=True)"
)


@contextmanager
def impatient(path: Path, directory: str, known: Known) -> Iterator[Client]:
    """An engine with a manager of its own, one that soon tries again what it could not open."""
    with embedded(path, directory, program=("-c", IMPATIENT), dram=32 << 20):
        populated(path)
        yield Client(path, SMALL, known)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def filled(serve: Serve, folder: Path) -> tuple[Path, Known]:
    """A directory with what a manager stored that is gone."""
    directory, known = folder / "ssd", Known()
    assert begin(serve, f"{directory}:16MiB").terminate() == 0  # for small segments
    manager = begin(serve, f"{directory}:48MiB")
    client = Client(manager.socket, SMALL, known)
    client.store(MANY)
    settle(manager.socket)
    assert manager.terminate() == 0
    assert sum(path.name.endswith(".segment") for path in directory.iterdir()) > 6
    return directory, known


@pytest.mark.parametrize("why", ["size", "http", "another directory", "another log"])
def test_a_start_that_is_refused_takes_nothing(
    serve: Serve, folder: Path, filled: tuple[Path, Known], why: str
) -> None:
    """Not even what a smaller budget has no room for."""
    directory, known = filled
    before = contents(directory)
    (folder / "other" / "kvhold.tombstones").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options, reason = {
            "size": ((f"{directory}:8MiB",), "is too small for the log that is there"),
            "http": ((f"{directory}:16MiB", "--http", f"127.0.0.1:{taken.getsockname()[1]}"), "Address already in use"),
            "another directory": (
                (f"{directory}:16MiB", "--ssd", f"{folder}/no/such:64MiB"),
                f"{folder}/no is not there",
            ),
            "another log": ((f"{directory}:16MiB", "--ssd", f"{folder}/other:64MiB"), "tombstones: it is a directory"),
        }[why]
        assert reason in refused(folder / "s", "--ssd", *options, dram="8MiB")
    assert contents(directory) == before
    manager = begin(serve, f"{directory}:48MiB")
    assert found(Client(manager.socket, SMALL, known), MANY) == MANY


@dataclass(frozen=True)
class Waiting:
    """An engine whose own manager, on ``path``, waits for a directory that the manager ``other`` has."""

    path: Path
    directory: Path
    client: Client
    other: Manager


@pytest.fixture
def waiting(serve: Serve, folder: Path, filled: tuple[Path, Known]) -> Iterator[Waiting]:
    directory, known = filled
    path, other = folder / "e-1.sock", begin(serve, f"{directory}:48MiB")
    with impatient(path, f"{directory}:48MiB", known) as client:
        yield Waiting(path, directory, client, other)


def test_an_engines_own_manager_opens_its_directory_when_that_is_free(waiting: Waiting) -> None:
    path, directory, client = waiting.path, waiting.directory, waiting.client
    client.store(NEW)
    [closed] = status(path)["closed_logs"]
    assert closed["path"] == str(directory)
    assert "is in use by another kvhold manager" in closed["reason"]
    said = kvhold("status", "--socket", str(path))
    assert re.search(rf"ssd +{directory} is not open since [^:]+: ssd: {directory} is in use", said), said
    waiting.other.kill()
    until(lambda: status(path)["logs"], "the directory is open")
    rebuilt(path)
    assert not status(path)["closed_logs"]
    assert found(client, MANY + NEW) == MANY + NEW
    client.store([9001])
    no_damage(settle(path))


def test_a_purge_is_for_a_directory_that_opens_later_too(waiting: Waiting) -> None:
    """It cannot be told of it, so it is not used any more, and whoever purges is told that it was not reached."""
    path, directory = waiting.path, waiting.directory
    admin = Peer(path)
    admin.join("admin")
    admin.send(wire.Purge())
    said = admin.expect(wire.Refused)
    assert f"it is purged here, but not in {directory}, which this manager could not open" in said.reason
    waiting.other.kill()
    until(lambda: "not tried again" in status(path)["closed_logs"][0]["reason"], "it is given up")
    assert not status(path)["logs"]
    assert set(waiting.client.tiers(MANY)) == {0}


def test_an_engines_own_manager_serves_without_a_directory_that_cannot_be_used(folder: Path) -> None:
    (folder / "ssd" / "kvhold.tombstones").mkdir(parents=True)
    path = folder / "e-1.sock"
    with impatient(path, f"{folder}/ssd:64MiB", Known()) as client:
        client.store([1, 2, 3])
        assert found(client, [1, 2, 3]) == [1, 2, 3]
        assert "it is a directory, not a file" in status(path)["closed_logs"][0]["reason"]
        (folder / "ssd" / "kvhold.tombstones").rmdir()
        until(lambda: status(path)["logs"], "the directory is open")


class Opened:
    """A store that is told of nothing."""

    closed = False

    def start(self, log: int, tell: Callable[[ev.Event], None]) -> None:
        tell(lev.LogOpened(log, 4, 1 << 20, 0))

    def close(self, seconds: float) -> None:
        self.closed = True


@pytest.mark.parametrize("quarantined", [0, 1])
def test_a_directory_that_opens_later_is_known_at_once_or_never(folder: Path, quarantined: int) -> None:
    """To the core, that is: it hears of the directory before anything is purged or put into quarantine again."""
    config = ManagerConfig(folder / "s", 4 << 20)
    memory = ArenaMemory(config.dram, huge_pages=False)
    with closing(Listener(config.socket)) as listener:
        server = Server(config, listener, memory)
        server.core.counters["quarantined"] = quarantined
        store, ssd = Opened(), SsdConfig(folder / "ssd", 64 << 20, 0)
        latecomer = Latecomer(ssd, memory.view, "in use", server.stores.adopt)
        server.stores.latecomers.append(latecomer)
        server.stores.adopt(latecomer, store)  # type: ignore[arg-type]
        assert server.stores.latecomers
        server._calls.get_nowait()()
        assert (list(server.core.storage.backings), server.stores.latecomers) == (
            ([], [latecomer]) if quarantined else ([1], [])
        )
        assert store.closed == bool(quarantined)
        assert ("a restore has failed" in latecomer.reason) == bool(quarantined)


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
    assert "has no SSD open, so all that it has is lost" in kvhold("flush", "--socket", str(manager.socket), code=1)


def test_a_named_pipe_in_a_files_place_is_named_and_waited_for_by_nobody(folder: Path) -> None:
    (folder / "ssd").mkdir(mode=0o700)
    os.mkfifo(folder / "ssd" / "kvhold.log")
    said = refused(folder / "s", "--ssd", f"{folder}/ssd:64MiB", dram="8MiB")
    assert f"{folder}/ssd/kvhold.log: it is a named pipe, not a file; remove it, or name another directory" in said
    assert "it is a named pipe, not a file" in kvhold("verify", f"{folder}/ssd", code=2)


def test_a_directory_that_others_may_write_to_is_refused(folder: Path) -> None:
    (folder / "ssd").mkdir()
    (folder / "ssd").chmod(0o777)
    said = refused(folder / "s", "--ssd", f"{folder}/ssd:64MiB", dram="8MiB")
    assert f"every user may write to it: run `chmod go-w {folder}/ssd`" in said


def test_a_purge_outlasts_the_loss_of_its_tombstones(serve: Serve, folder: Path, filled: tuple[Path, Known]) -> None:
    directory, known = filled
    manager = begin(serve, f"{directory}:48MiB")
    client = Client(manager.socket, SMALL, known)
    assert found(client, MANY) == MANY
    purge(manager.socket, known)
    client.store(NEW)
    settle(manager.socket)
    assert manager.terminate() == 0
    (directory / "kvhold.tombstones").unlink()
    manager = begin(serve, f"{directory}:48MiB")
    client = Client(manager.socket, SMALL, known)
    assert set(client.tiers(MANY)) == {0}
    assert "kvhold.tombstones is missing or out of date" in manager.log_tail()
    client.store(NEW)
    settle(manager.socket)
    assert manager.terminate() == 0
    manager = begin(serve, f"{directory}:48MiB")
    assert found(Client(manager.socket, SMALL, known), MANY + NEW) == NEW
