"""What a client held is freed when it says so or is proved dead, and never before."""

import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from testbed.process.manager_process import Manager
from testbed.process.peers import SHARD, Engine, Peer, populated, status, until
from testbed.process.puppet import Handle, Puppet

from kvhold import protocol as wire

Make = Callable[[], Puppet]


@pytest.fixture
def full(manager: Manager) -> Manager:
    """A manager whose whole arena is populated, so that accounts change through clients alone."""
    populated(manager.socket)
    return manager


def held(path: Path) -> dict[str, int]:
    """Slots of one shard by who holds them; what nobody holds is left out."""
    report = status(path)
    found = {name: report["accounts"][name] // SHARD for name in ("credit", "leased", "doomed", "orphaned")}
    return {name: count for name, count in found.items() if count}


def settles(path: Path, expected: dict[str, int]) -> None:
    until(lambda: held(path) == expected, f"{expected} held, not {held(path)}")


def at_work(scheduler: Peer | Handle, worker: Peer | Handle, instance: str = "one") -> list[int]:
    """Both halves attach, store 1 to 4 and lease 1 to 3; 8 credits stay. The sessions' tokens."""
    tokens = [scheduler.join("scheduler", instance), worker.join("worker", instance)]
    worker.map()
    scheduler.ready()
    scheduler.open(8)
    scheduler.commit([1, 2, 3, 4])
    assert scheduler.ask([1, 2, 3])[1] == 3
    scheduler.slots(8)
    return tokens


HELD = {"credit": 8, "leased": 3}
LOST = {"orphaned": 8, "leased": 3}


def test_a_closed_socket_frees_nothing_a_death_does(full: Manager, puppet: Make) -> None:
    process = puppet()
    scheduler, worker = (process.make("peer", str(full.socket)) for _ in range(2))
    at_work(scheduler, worker)
    assert held(full.socket) == HELD
    scheduler.close()
    worker.close()
    settles(full.socket, LOST)
    report = status(full.socket)
    assert [session["open"] for session in report["sessions"]] == [False, False]
    assert report["orphaned_bytes"] == 11 * SHARD
    another = Engine(full.socket, "another", slots=0)
    another.works([1, 2, 3, 4])
    assert held(full.socket) == LOST
    process.kill()
    settles(full.socket, {})
    assert status(full.socket)["orphaned_bytes"] == 0


@pytest.mark.parametrize("order", ["scheduler first", "worker first"])
def test_bye_frees_at_once(full: Manager, order: str) -> None:
    scheduler, worker = Peer(full.socket), Peer(full.socket)
    at_work(scheduler, worker)
    first, second = (scheduler, worker) if order == "scheduler first" else (worker, scheduler)
    first.bye()
    assert held(full.socket) == LOST
    second.bye()
    assert held(full.socket) == {}
    assert status(full.socket)["objects"] == 4
    assert status(full.socket)["instances"] == []


def test_retire_frees_what_an_earlier_session_held(full: Manager) -> None:
    """The halves lost their sessions and attach again; each says of its own old session that it is over."""
    scheduler, worker = Peer(full.socket), Peer(full.socket)
    tokens = at_work(scheduler, worker)
    scheduler.close()
    settles(full.socket, LOST)
    assert worker.refusal() == ""  # it was parted
    again = Engine(full.socket, "one", slots=0)
    again.scheduler.retire(tokens[0])
    again.scheduler.sync()
    assert held(full.socket) == LOST
    again.worker.retire(tokens[1])
    settles(full.socket, {})
    again.works([1, 2, 3, 4])


def test_retire_needs_the_token(full: Manager) -> None:
    scheduler, worker = Peer(full.socket), Peer(full.socket)
    tokens = at_work(scheduler, worker)
    other = Engine(full.socket, "other", slots=0)
    for token in (0, -1, 1, tokens[0]):  # the last is right, but its session is at work
        other.scheduler.retire(token)
    other.scheduler.sync()
    assert held(full.socket) == HELD
    scheduler.release(1)
    scheduler.sync()
    assert held(full.socket) == {"credit": 8}


@pytest.mark.parametrize("first", ["scheduler", "worker"])
def test_bytes_are_free_when_both_processes_are_gone(full: Manager, puppet: Make, first: str) -> None:
    """The loss of either half parts the other; what the other may still touch stays until it is gone, too."""
    processes = {"scheduler": puppet(), "worker": puppet()}
    halves = {role: process.make("peer", str(full.socket)) for role, process in processes.items()}
    at_work(halves["scheduler"], halves["worker"])
    second = "worker" if first == "scheduler" else "scheduler"
    processes[first].kill()
    assert halves[second].refusal() == ""
    settles(full.socket, LOST)
    assert [session["role"] for session in status(full.socket)["sessions"]] == [second]
    processes[second].kill()
    settles(full.socket, {})
    name = f"{second} rank 0 of one (pid {processes[second].pid})"
    assert f"{name} must attach again: the {first} session" in full.log_tail()


def test_a_lost_worker_parts_all_and_they_come_back(full: Manager, puppet: Make) -> None:
    """Two ranks: one is killed, its successor and the others attach anew and are served while the old bytes wait."""
    engine, doomed = puppet(), puppet()
    path = str(full.socket)
    scheduler, worker = engine.make("peer", path), engine.make("peer", path)
    tokens = [scheduler.join("scheduler", "one", 0, 2), worker.join("worker", "one", 0, 2)]
    worker.map()
    lost = doomed.make("peer", path)
    lost.join("worker", "one", 1, 2)
    lost.map()
    scheduler.ready()
    scheduler.open(8, b"t".hex() * 32, 1, 2)
    doomed.kill()
    assert scheduler.refusal() == worker.refusal() == ""
    assert held(full.socket) == {"orphaned": 16}

    scheduler, *workers = (engine.make("peer", path) for _ in range(3))
    scheduler.join("scheduler", "one", 0, 2)
    for rank, each in enumerate(workers):
        each.join("worker", "one", rank, 2)
        each.map()
    scheduler.ready()
    scheduler.open(4, b"t".hex() * 32, 1, 2)
    assert held(full.socket) == {"orphaned": 16, "credit": 8}
    scheduler.retire(tokens[0])
    workers[0].retire(tokens[1])
    settles(full.socket, {"credit": 8})


def test_a_stopped_process_keeps_what_it_holds(full: Manager, puppet: Make) -> None:
    process = puppet()
    scheduler, worker = (process.make("peer", str(full.socket)) for _ in range(2))
    at_work(scheduler, worker)
    process.stop()
    other = Engine(full.socket, "other", slots=0)
    other.works([1, 2, 3, 4])
    assert held(full.socket) == HELD
    process.kill()
    settles(full.socket, {})


def test_a_full_queue_of_messages_counts_before_the_death(full: Manager, puppet: Make) -> None:
    """What a process said before it ended is heard: its last commits and its Bye."""
    process = puppet()
    scheduler, worker = (process.make("peer", str(full.socket)) for _ in range(2))
    at_work(scheduler, worker)
    full.stop()
    scheduler.commit([5, 6])
    scheduler.send_bye()
    worker.send_bye()
    process.kill()
    full.cont()
    settles(full.socket, {})
    assert status(full.socket)["objects"] == 6
    assert "is dead" not in full.log_tail()
    assert "parts" not in full.log_tail()


def test_a_mapped_arena_outlives_its_manager(full: Manager, puppet: Make) -> None:
    process = puppet()
    scheduler, worker = (process.make("peer", str(full.socket)) for _ in range(2))
    scheduler.join("scheduler", "one")
    worker.join("worker", "one")
    worker.map()
    scheduler.ready()
    scheduler.open(2)
    mine = Engine(full.socket, "two", slots=2)
    offset = mine.scheduler.offsets[0]
    mine.worker.write(offset, "still here")
    assert worker.read(offset, 10) == "still here"
    full.kill()
    assert scheduler.refusal() == worker.refusal() == ""
    assert worker.read(offset, 10) == mine.worker.read(offset, 10) == "still here"
    mine.worker.write(offset, "to the end")
    assert worker.read(offset, 10) == "to the end"
    full.start()
    fresh = Engine(full.socket, "two", slots=2)
    assert fresh.worker.read(offset, 10) == "\0" * 10
    assert worker.read(offset, 10) == "to the end"


def test_nobody_can_take_arena_pages_away(full: Manager) -> None:
    worker = Peer(full.socket)
    worker.join("worker", "one")
    descriptor = worker.arena_fd()
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 64 << 20)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, 1033, 8)  # another seal: against writes
    assert os.fstat(descriptor).st_size == 32 << 20
    os.close(descriptor)


def test_a_scheduler_is_handed_no_arena(full: Manager) -> None:
    """But a page in which it sees that the manager runs, and in which it cannot write."""
    peer = Peer(full.socket)
    peer.raw(wire.PREAMBLE + wire.frame(wire.Hello("scheduler", "one")))
    peer.expect(wire.Welcome)
    [descriptor] = peer.descriptors
    assert os.fstat(descriptor).st_size == mmap.PAGESIZE
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, mmap.PAGESIZE)
    with pytest.raises(PermissionError):
        os.write(descriptor, b"x")
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)
