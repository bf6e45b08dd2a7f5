"""What a directory may take, what is kept of it when that changes, and what a graceful end leaves: everything."""

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path

import pytest
from testbed.process.manager_process import Manager
from testbed.process.peers import Peer, Watched, listening_pid, populated
from testbed.process.ssd_load import (
    LARGE,
    NEW,
    OLD,
    SMALL,
    SPACES,
    Client,
    Disk,
    Known,
    bytes_of,
    calm,
    lives,
    look,
    no_damage,
    purge,
    rebuilt,
    settle,
)

from kvhold import protocol as wire
from kvhold.client.embedded import Embedded
from process.test_serve import refused

MIB = 1 << 20
Serve = Callable[..., Manager]


@contextmanager
def always(condition: Callable[[], bool], what: str) -> Iterator[None]:
    """``condition`` is true whenever one looks while the body runs."""
    ended = threading.Event()
    seen: list[bool] = []

    def look_on() -> None:
        while not ended.wait(0.001):
            seen.append(condition())

    onlooker = threading.Thread(target=look_on)
    onlooker.start()
    try:
        yield
    finally:
        ended.set()
        onlooker.join()
    assert seen
    assert all(seen), what


def begin(serve: Serve, *directories: str, min_free: str = "1MiB", dram: str = "32MiB") -> Manager:
    options = [option for directory in directories for option in ("--ssd", directory)]
    manager = serve(*options, "--ssd-min-free", min_free, dram=dram)
    populated(manager.socket)
    rebuilt(manager.socket)
    return manager


def found(client: Client, keys: list[int]) -> list[int]:
    """Those of ``keys`` that are here, after a look at every byte of them."""
    here = [key for key, tier in zip(keys, client.tiers(keys), strict=True) if tier]
    for start in range(0, len(here), 16):
        part = here[start : start + 16]
        assert client.ask(part).resident == len(part)
    return here


def fill(manager: Manager, known: Known, first: int, count: int) -> None:
    """Objects of two sizes, and now and then a purge of one kind."""
    clients = [Client(manager.socket, space, known) for space in SPACES]
    for start in range(first, first + count, 40):
        for client in clients:
            client.store(list(range(start, start + 40)))
        if start % 200 == first % 200:
            purge(manager.socket, known, LARGE.namespace)
    settle(manager.socket)
    for client in clients:
        client.bye()


def test_a_budget_is_kept_also_when_it_changes(serve: Serve, folder: Path) -> None:
    directory, known = folder / "ssd", Known()
    last = 0
    kept: list[int] = []
    for budget in (16, 40, 20):
        before = sorted(lives(directory), key=itemgetter(1)) if last else []
        manager = begin(serve, f"{directory}:{budget}MiB")
        # A surplus is gone before anybody is served.
        assert bytes_of(directory) <= budget * MIB
        client = Client(manager.socket, SMALL, known)
        survivors = found(client, list(range(1, last + 1)))
        if budget == 20:
            after = sorted(lives(directory), key=itemgetter(1))
            assert 4 <= len(after) < len(before)
            assert after == before[-len(after) :], "what was written last is what is kept"
            assert 20 < len(survivors) < len(kept)
            assert set(survivors) <= set(kept)
        else:
            assert survivors == kept
        client.bye()
        with always(lambda most=budget * MIB: bytes_of(directory) <= most, f"within {budget} MiB"):  # type: ignore[misc]
            fill(manager, known, last + 1, 600)
        last += 600
        # It does use what it may: all but the part for small files, and what makes no whole segment.
        assert bytes_of(directory) > 0.7 * budget * MIB
        manager.kill()
        manager.start()
        populated(manager.socket)
        rebuilt(manager.socket)
        kept = found(Client(manager.socket, SMALL, known), list(range(1, last + 1)))
        assert found(Client(manager.socket, LARGE, known), [last]), "what was stored last is not on the disk"
        no_damage(look(manager.socket))
        assert manager.terminate() == 0
        calm(manager)


def test_a_filesystem_keeps_what_is_to_stay_free(serve: Serve, tmpfs: Callable[[str], Path]) -> None:
    where = tmpfs("64m")
    manager = begin(serve, f"{where}/ssd:64MiB", min_free="30MiB")
    assert "min_free" in manager.log_tail()
    with always(lambda: shutil.disk_usage(where).free >= 30 * MIB, "30 MiB stay free"):
        fill(manager, Known(), 1, 400)
    report = look(manager.socket)
    assert report["logs"][0]["live_bytes"] > 5 * MIB
    assert report["counters"]["reuse_failed"]
    assert manager.terminate() == 0
    calm(manager)


def test_a_copied_directory_is_a_log_of_its_own(serve: Serve, folder: Path) -> None:
    one, two, known = folder / "one", folder / "two", Known()
    manager = begin(serve, f"{one}:48MiB")
    client = Client(manager.socket, SMALL, known)
    client.store(OLD)
    settle(manager.socket)
    shutil.copytree(one, two)  # of a log that is in use, and at rest
    client.store(NEW)
    settle(manager.socket)
    manager.kill()

    # Each goes on for itself; what was stored to one of them alone is not in the other.
    extra = list(range(5001, 5041))
    manager = begin(serve, f"{two}:48MiB")
    client = Client(manager.socket, SMALL, known)
    assert found(client, OLD) == OLD
    assert set(client.tiers(NEW)) == {0}
    client.store(extra)
    settle(manager.socket)
    manager.kill()
    manager = begin(serve, f"{one}:48MiB", f"{two}:48MiB")
    client = Client(manager.socket, SMALL, known)
    assert found(client, OLD + NEW + extra) == OLD + NEW + extra
    no_damage(look(manager.socket))
    manager.kill()


def test_segments_of_another_log_do_not_count(serve: Serve, folder: Path) -> None:
    one, two, known = folder / "one", folder / "two", Known()
    for directory, keys in ((one, OLD), (two, NEW)):
        manager = begin(serve, f"{directory}:48MiB")
        Client(manager.socket, SMALL, known).store(keys)
        assert manager.terminate() == 0
    theirs = sorted(two.glob("*.segment"))
    assert theirs
    for path in theirs:
        target = one / path.name
        if target.exists():  # one that has a free number, and one in the place of its own
            target = one / f"kvhold-{len(list(one.iterdir())):08}.segment"
        shutil.copy(path, target)
    manager = begin(serve, f"{one}:48MiB")
    client = Client(manager.socket, SMALL, known)
    assert found(client, OLD) == OLD
    assert set(client.tiers(NEW)) == {0}
    recovery = look(manager.socket)["logs"][0]["recovery"]
    assert recovery["foreign"] == len(theirs)
    assert bytes_of(one) <= 48 * MIB
    manager.kill()


def test_sigterm_writes_out_what_waits(serve: Serve, folder: Path) -> None:
    known = Known()
    manager = begin(serve, f"{folder}/ssd:64MiB")
    client = Client(manager.socket, SMALL, known)
    keys = list(range(1, 301))
    client.store(keys)
    assert manager.terminate() == 0
    calm(manager)
    manager.start()
    rebuilt(manager.socket)
    populated(manager.socket)
    client = Client(manager.socket, SMALL, known)
    assert found(client, keys) == keys
    no_damage(look(manager.socket))


def test_an_embedded_manager_writes_out_when_its_last_engine_leaves(folder: Path) -> None:
    known, keys = Known(), list(range(1, 201))
    path = folder / "kvhold" / "e-1.sock"
    for turn in range(2):
        embedded = Embedded([path], 32 * MIB, False, f"{folder}/ssd:64MiB")
        embedded.start()
        manager = Watched(listening_pid(path))
        try:
            populated(path)
            rebuilt(path)
            client = Client(path, SMALL, known)
            if turn:
                assert found(client, keys) == keys
            else:
                client.store(keys)
            embedded.close()
            client.sync()
            assert not manager.gone()
            client.bye()
            assert manager.gone(20), "the manager outlived its engine"
        finally:
            if not manager.gone():
                os.kill(manager.pid, signal.SIGKILL)
            manager.close()


def test_it_serves_while_it_rebuilds_its_index(serve: Serve, folder: Path) -> None:
    """What is stored meanwhile is kept, what was purged meanwhile is not found later."""
    disk = Disk(serve, folder)
    disk.fill()
    other = Client(disk.manager.socket, LARGE, disk.known)
    other.store(NEW[:10])
    settle(disk.manager.socket)
    disk.manager.kill()
    disk.order("block-rebuild")
    disk.manager.start()
    populated(disk.manager.socket)
    small, large = (Client(disk.manager.socket, space, disk.known, slots=4) for space in SPACES)
    assert not disk.report()["logs"][0]["ready"]
    assert set(small.tiers(OLD + NEW)) == {0}
    assert small.ask(OLD[:4]).reason == "not_stored"
    fresh, again = list(range(7001, 7021)), NEW[:10]
    small.store(fresh)
    small.store(again)
    assert small.ask(fresh).resident == len(fresh)
    purge(disk.manager.socket, disk.known, LARGE.namespace)
    large.store(NEW[5:8])
    assert not disk.report()["logs"][0]["ready"]
    disk.end_of("block-rebuild")

    def check(clients: tuple[Client, Client]) -> None:
        small, large = clients
        assert found(small, OLD + NEW + fresh) == OLD + NEW + fresh
        assert found(large, NEW) == NEW[5:8]

    rebuilt(disk.manager.socket)
    check((small, large))
    settle(disk.manager.socket)
    disk.manager.kill()
    disk.again()
    check((disk.client, Client(disk.manager.socket, LARGE, disk.known, slots=4)))
    no_damage(disk.report())
    disk.manager.kill()
    disk.order("block-rebuild")
    disk.manager.start()
    disk.ends()  # also while it is rebuilding


def test_a_purge_by_age_keeps_what_is_younger(serve: Serve, folder: Path) -> None:
    known = Known()
    manager = begin(serve, f"{folder}/ssd:64MiB")
    client = Client(manager.socket, SMALL, known)
    client.store(OLD)
    settle(manager.socket)
    for older, answer in ((3600.0, wire.Purged), (-1.0, wire.Refused), (float("nan"), wire.Refused)):
        admin = Peer(manager.socket)
        admin.join("admin")
        admin.send(wire.Purge(b"", older))
        assert isinstance(admin.receive(), answer)
        admin.close()
    assert found(client, OLD) == OLD
    manager.kill()
    manager.start()
    populated(manager.socket)
    rebuilt(manager.socket)
    assert found(Client(manager.socket, SMALL, known), OLD) == OLD


def test_two_directories_share_what_is_stored(serve: Serve, folder: Path) -> None:
    one, two, known = folder / "one", folder / "two", Known()
    manager = begin(serve, f"{one}:32MiB", f"{two}:24MiB")
    fill(manager, known, 1, 800)
    for log in look(manager.socket)["logs"]:
        assert log["live_bytes"] > 10 * MIB, log
    assert bytes_of(one) <= 32 * MIB
    assert bytes_of(two) <= 24 * MIB
    keys = list(range(1, 801))
    manager.kill()
    manager.start()
    populated(manager.socket)
    rebuilt(manager.socket)
    both = found(Client(manager.socket, SMALL, known), keys)
    assert len(both) > 150
    purge(manager.socket, known, LARGE.namespace)
    manager.kill()
    apart: list[set[int]] = []
    for directory in (f"{one}:32MiB", f"{two}:24MiB"):
        manager = begin(serve, directory)
        apart.append(set(found(Client(manager.socket, SMALL, known), keys)))
        assert set(Client(manager.socket, LARGE, known).tiers(keys)) == {0}
        assert manager.terminate() == 0
    assert all(apart)
    assert not apart[0] & apart[1]
    assert apart[0] | apart[1] == set(both)


@pytest.mark.parametrize("alias", [False, True])
def test_one_directory_cannot_be_given_twice(folder: Path, alias: bool) -> None:
    (folder / "d").mkdir()
    other = folder / "alias" if alias else folder / "d"
    if alias:
        os.symlink(folder / "d", other)
    said = refused(folder / "s", "--ssd", f"{folder}/d:64MiB", "--ssd", f"{other}:64MiB", dram="8MiB")
    assert f"ssd: {other} is given twice" in said


def test_a_flush_is_answered_when_all_is_written(serve: Serve, folder: Path) -> None:
    """So that nothing is lost even to a manager that is killed at once."""
    directory, known = folder / "ssd", Known()
    manager = begin(serve, f"{directory}:64MiB")
    client = Client(manager.socket, SMALL, known)
    keys = list(range(1, 201))
    for start in range(0, len(keys), 40):
        client.store(keys[start : start + 40])
    admin = Peer(manager.socket)
    admin.join("admin")
    admin.send(wire.Flush())
    admin.expect(wire.Flushed)
    manager.restart()
    rebuilt(manager.socket)
    again = Client(manager.socket, SMALL, known)
    assert found(again, keys) == keys
    again.bye()
    calm(manager)
