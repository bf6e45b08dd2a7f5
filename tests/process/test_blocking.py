"""Threads that find, restore and publish through one face, with a real manager and whatever may become of it."""

import contextlib
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from testbed.process.manager_process import Manager, all_written
from testbed.process.peers import populated, status, until

from kvhold import protocol as wire
from kvhold.client.attacher import Attacher
from kvhold.client.control import Geometry
from kvhold.core.limits import Limits
from kvhold.engines.common import attaching, blocking
from kvhold.engines.common.attaching import make_attacher
from kvhold.engines.common.blocking import Blocking, Hit, Space
from kvhold.engines.common.settings import ManagerSettings
from kvhold.folders import VARIABLE
from kvhold.manager.config import ManagerConfig
from kvhold.manager.listener import Listener
from kvhold.manager.memory import ArenaMemory
from kvhold.manager.server import Server

SIZE = 6000  # no multiple of what the arena is divided by
NAMESPACE = hashlib.sha256(b"blocking").digest()
PATIENT = 30.0
Array = np.ndarray[Any, Any]


def key(name: object) -> bytes:
    return hashlib.sha256(repr(name).encode()).digest()


def keys_of(*names: object) -> list[bytes]:
    return [key(name) for name in names]


def values(keys: list[bytes], size: int = SIZE) -> Array:
    """What is stored under ``keys``: each a row of bytes that nothing else has."""
    rows = [np.frombuffer(hashlib.shake_128(each).digest(size), np.uint8) for each in keys]
    return np.stack(rows) if rows else np.zeros((0, size), np.uint8)


def buffers(rows: Array) -> list[list[tuple[int, int]]]:
    """Each row in two pieces, the second part of which comes first in memory."""
    size = rows.shape[1]
    return [[(row.ctypes.data + 1000, size - 1000), (row.ctypes.data, 1000)] for row in rows]


def publish(face: Blocking, space: Space, keys: list[bytes], skip: int = 0, seconds: float = PATIENT) -> list[bool]:
    rows = values(keys[skip:], space.size)
    return face.publish(space, keys, buffers(rows), seconds, skip)


def restore(face: Blocking, hit: Hit) -> Array:
    """The rows that come of ``hit``; those that do not are left out."""
    rows = np.zeros((hit.count, hit.space.size), np.uint8)
    return rows[: face.restore(hit, buffers(rows))]


def works(face: Blocking, space: Space, keys: list[bytes]) -> None:
    """What is published is found and restored."""
    until(lambda: all(publish(face, space, keys)), "published")
    hit = face.find(space, keys, PATIENT)
    assert hit.count == len(keys), hit
    assert np.array_equal(restore(face, hit), values(keys, space.size))


Attach = Callable[..., tuple[Blocking, Space]]


@pytest.fixture
def attach() -> Iterator[Attach]:
    """Faces of engines of their own, with a space each; they are closed at the end."""
    faces: list[Blocking] = []

    def make(
        manager: Manager | Path, name: str = "one", slots: int = 64, size: int = SIZE, chain: bool = False
    ) -> tuple[Blocking, Space]:
        socket = manager if isinstance(manager, Path) else manager.socket
        face = Blocking(name, f"test {name}", lambda half: Attacher(half, [socket], None, True))
        faces.append(face)
        assert face.wait(60)
        return face, face.open(Geometry(NAMESPACE, 0, 32, (size,), "test", chain), slots)

    yield make
    for face in faces:
        face.close()


@pytest.fixture
def full(manager: Manager) -> Manager:
    populated(manager.socket)
    return manager


class Gate:
    """Copies in one direction that begin, and end when they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.begun, self._go = threading.Semaphore(0), threading.Event()
        copy = getattr(blocking, name)

        def gated(*args: Any) -> None:
            self.begun.release()
            assert self._go.wait(60)
            copy(*args)

        monkeypatch.setattr(blocking, name, gated)

    def await_begin(self) -> None:
        assert self.begun.acquire(timeout=60)

    def open(self) -> None:
        self._go.set()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Gate]]:
    gates: list[Gate] = []

    def make(name: str) -> Gate:
        gates.append(Gate(monkeypatch, name))
        return gates[-1]

    yield make
    for gate in gates:
        gate.open()


@contextmanager
def hasty_manager(path: Path) -> Iterator[None]:
    """A manager in this process that keeps leases for a fifth of a second."""
    limits = Limits(lease_ns=200_000_000, hear_ns=50_000_000)
    listener = Listener(path)
    server = Server(ManagerConfig(path, 32 << 20, limits=limits), listener, ArenaMemory(32 << 20, huge_pages=False))
    listener.listen()
    loop = threading.Thread(target=server.run)
    loop.start()
    try:
        populated(path)
        yield
    finally:
        server.stop()
        loop.join(60)
        assert not loop.is_alive()


def nothing_held(face: Blocking, path: Path) -> None:
    """Neither side keeps anything for what is over."""
    until(lambda: not any(status(path)["accounts"][state] for state in ("leased", "doomed", "orphaned")), "no lease")
    assert not face._control._asked
    assert not face._plans
    until(lambda: len(face._mappings._sessions) <= 1, "old arenas are let go")


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"namespace": b"short"}, "a namespace of 5 bytes; it has 32"),
        ({"key_bytes": 65}, "keys of 65 bytes; they have 1 to 64"),
        ({"group": -1}, "group -1"),
        ({"shards": (0,)}, "a shard of 0 bytes"),
    ],
)
def test_a_space_that_no_manager_takes_is_refused_at_once(
    full: Manager, attach: Attach, change: dict[str, Any], says: str
) -> None:
    """A session that opened it would be ended again and again."""
    face, space = attach(full)
    with pytest.raises(ValueError, match=says):
        face.open(replace(space.geometry, **change), 8)
    works(face, space, keys_of(1))


def test_more_spaces_than_a_session_may_have_are_refused(full: Manager, attach: Attach) -> None:
    face, space = attach(full)
    others = [face.open(replace(space.geometry, group=group), 0) for group in range(1, wire.MAX_SPACES)]
    with pytest.raises(ValueError, match=r"64 spaces are open already; close one of them first"):
        face.open(replace(space.geometry, group=100), 0)
    works(face, space, keys_of(1))
    face.close_space(others[0])
    face.open(replace(space.geometry, group=100), 0)
    works(face, space, keys_of(2))


# --- what is stored is found ----------------------------------------------------------------------------------------


def test_more_keys_than_a_message_holds_are_cut(full: Manager, attach: Attach) -> None:
    face, space = attach(full)
    long = face.open(replace(space.geometry, key_bytes=64, group=1), 8)
    keys = [number.to_bytes(64, "big") for number in range(wire.MAX_KEYS)]
    assert publish(face, long, keys[:4]) == [True] * 4
    assert len(face.look(long, keys, PATIENT)) == wire.most_keys(64)
    hit = face.find(long, keys, PATIENT)
    assert hit.count == 4
    face.release(hit)
    assert face.attached


def test_what_the_socket_did_not_take_is_sent_once_the_manager_reads(full: Manager, attach: Attach) -> None:
    """Nobody asks again: a question that was given up must not lease what nobody restores."""
    face, space = attach(full)
    keys = keys_of(*range(8))
    works(face, space, keys)
    os.kill(full.pid, signal.SIGSTOP)
    try:
        assert face.find(space, [*keys, *(number.to_bytes(32, "big") for number in range(60_000))], 0.05).count == 0
        channel = face._scheduler.channel
        assert channel is not None
        assert not channel.drained
    finally:
        os.kill(full.pid, signal.SIGCONT)
    until(lambda: channel.drained and not channel.lost, "the rest is sent")
    nothing_held(face, full.socket)


def test_objects_with_others_missing_between_them_are_leased_at_once(full: Manager, attach: Attach) -> None:
    face, space = attach(full)
    assert all(publish(face, space, keys_of(1, 2, 5)))
    wanted = keys_of(0, 1, 3, 5, 2, 9)
    hit, at = face.pick(space, wanted, PATIENT)
    assert at == [1, 3, 4]
    assert np.array_equal(restore(face, hit), values([wanted[position] for position in at]))
    none, nowhere = face.pick(space, keys_of(7, 8), PATIENT)
    assert (none.count, nowhere) == (0, [])
    assert face.counts["asked"] == face.counts["found"] + face.counts["missed_not_stored"] == 8
    nothing_held(face, full.socket)


def test_what_one_engine_publishes_another_restores(full: Manager, attach: Attach) -> None:
    one, space = attach(full, "one")
    two, other = attach(full, "two")
    keys = keys_of(*range(20))
    assert publish(one, space, keys) == [True] * 20
    until(lambda: two.look(other, keys, PATIENT) == b"\1" * 20, "all is there")
    hit = two.find(other, [*keys, key("another")], PATIENT, skip=5)
    assert (hit.count, hit.reason) == (15, "not_stored")
    assert np.array_equal(restore(two, hit), values(keys[5:]))
    assert two.restore(hit, buffers(values(keys))) == 0, "its lease has ended"
    assert two.find(other, keys_of("another"), PATIENT).count == 0
    assert two.look(other, keys_of("another", 3), PATIENT) == b"\0\1"
    assert two.counts.pop("looked_for") == two.counts.pop("seen") + two.counts.pop("unseen_not_stored")
    assert two.counts == {"asked": 17, "found": 15, "missed_not_stored": 2, "restored": 15, "void": 15}
    for face in (one, two):
        nothing_held(face, full.socket)


def test_a_part_of_a_hit_is_not_had(full: Manager, attach: Attach) -> None:
    face, space = attach(full)
    keys = keys_of(*range(4))
    publish(face, space, keys)
    hit = face.find(space, keys, PATIENT)
    rows = values(keys)
    fits = buffers(rows)
    with pytest.raises(ValueError, match="3 buffers were given for 4 objects"):
        face.restore(hit, fits[:3])
    with pytest.raises(ValueError, match="buffer 1 has 1000 bytes; an object has 6000"):
        face.restore(hit, [fits[0], fits[1][1:], *fits[2:]])
    assert np.array_equal(restore(face, hit), values(keys)), "nothing was lost by that"
    with pytest.raises(ValueError, match="keys of this space have 32 bytes"):
        face.find(space, [b"short"], PATIENT)
    with pytest.raises(ValueError, match="skip is -1"):
        face.find(space, keys, PATIENT, skip=-1)
    assert face.attached, "the manager heard nothing of it"
    with pytest.raises(ValueError, match="1 buffers for 2 keys"):
        face.publish(space, keys[:2], buffers(values(keys[:1])), PATIENT)
    face.release(face.find(space, keys, PATIENT))
    nothing_held(face, full.socket)


@pytest.mark.parametrize("chain", [False, True])
def test_only_what_is_missing_is_copied_wherever_it_is(
    full: Manager, attach: Attach, monkeypatch: pytest.MonkeyPatch, chain: bool
) -> None:
    """Of a chain that has holes, too: one commit names any of its keys."""
    face, space = attach(full, chain=chain)
    keys = keys_of(*range(12))
    there = range(6) if chain else (1, 2, 5, 11)
    for at in there:
        assert publish(face, space, keys[: at + 1], skip=at) == [True]
    moved: list[int] = []
    copy = blocking.copy_in

    def counting(arena: int, made: Any) -> None:
        moved.append(sum(size for _, _, size in made) // SIZE)
        copy(arena, made)

    monkeypatch.setattr(blocking, "copy_in", counting)
    assert publish(face, space, keys, skip=1) == [True] * 11
    assert sum(moved) == 11 - sum(at >= 1 for at in there)
    present = face.find(space, keys[1:], PATIENT) if not chain else face.find(space, keys, PATIENT, skip=1)
    assert np.array_equal(restore(face, present), values(keys[1:]))


def test_what_has_no_key_is_told_apart_from_what_was_not_stored(full: Manager, attach: Attach) -> None:
    face, space = attach(full)
    assert face.publish(space, keys_of(1, 2), buffers(values(keys_of(1, 2, 3))), PATIENT) == [True, True, False]
    assert face.counts == {"offered": 3, "published": 2, "unpublished_too_many": 1}


def test_what_could_not_be_reached_is_not_copied(full: Manager, attach: Attach) -> None:
    face, space = attach(full, chain=True)
    assert publish(face, space, keys_of(1, 2, 3), skip=2) == [False]
    assert face.counts["unpublished_unreachable"] == 1


def test_two_spaces_are_two(full: Manager, attach: Attach) -> None:
    face, space = attach(full)
    other = face.open(Geometry(key("other"), 0, 32, (3 * SIZE,)), 8)
    keys = keys_of(*range(3))
    works(face, other, keys)
    assert face.find(space, keys, PATIENT).count == 0
    hit = face.find(other, keys, PATIENT)
    face.close_space(other)
    assert len(restore(face, hit)) == 0, "what stands for other weights is not restored"
    assert publish(face, other, keys) == [False] * 3
    works(face, space, keys)


def test_a_space_that_cannot_be_is_a_miss_and_ends_nothing(full: Manager, attach: Attach) -> None:
    """Its namespace is known with objects of another size: the manager ends a session that speaks of it."""
    one, space = attach(full, "one")
    two, other = attach(full, "two")
    works(one, space, keys_of(1))
    wrong = two.open(Geometry(NAMESPACE, 0, 32, (4 * SIZE,)), 8)
    until(lambda: not two.attached, "the session is ended")
    assert two.find(wrong, keys_of(1), 0.1).count == 0
    two.close_space(wrong)
    until(lambda: two.look(other, keys_of(1), PATIENT) == b"\1", "without it the engine is served again")
    works(one, space, keys_of(2))


def test_a_copy_that_ends_after_its_space_is_closed_is_not_published(
    full: Manager, attach: Attach, slow: Callable[[str], Gate]
) -> None:
    face, space = attach(full)
    gate = slow("copy_in")
    with ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(publish, face, space, keys_of(1))
        gate.await_begin()
        face.close_space(space)
        again = face.open(space.geometry, 64)
        gate.open()
        assert publishing.result(60) == [False]
    assert face.look(again, keys_of(1), PATIENT) == b"\0"


def store_more_than_fits(face: Blocking, space: Space, manager: Manager) -> list[bytes]:
    """Keys of which the first are on SSD alone."""
    keys = keys_of(*range(24))
    for each in keys:
        assert publish(face, space, [each]) == [True]
        until(lambda: all_written(status(manager.socket)), "it is written")
    return keys


def test_what_is_on_ssd_alone_is_read_first(serve: Callable[..., Manager], folder: Path, attach: Attach) -> None:
    manager = serve("--ssd", f"{folder}/ssd:64MiB", dram="4MiB")
    populated(manager.socket)
    face, space = attach(manager, size=256 << 10, slots=4)
    first = store_more_than_fits(face, space, manager)[:8]
    assert face.look(space, first, PATIENT) == b"\2" * 8, "there is no room for them in DRAM"
    hit = face.find(space, first, PATIENT)
    assert np.array_equal(restore(face, hit), values(first, space.size))
    nothing_held(face, manager.socket)


def test_what_leaves_between_a_look_and_the_lease_takes_nothing_else_along(
    full: Manager, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    face, space = attach(full, "one")
    two, same = attach(full, "two")
    keys = keys_of(*range(4))
    works(face, space, keys)
    until(lambda: two.look(same, keys, PATIENT) == b"\1" * 4, "the other one is attached, too")
    prepare, gone = face._control.prepare, [keys[2], keys[0]]

    def late(*asked: Any) -> Any:
        if gone:
            hit = two.find(same, [key := gone.pop()], PATIENT)
            assert hit.id is not None
            with two._lock:  # its own threads use what it guards
                assert two._control.start(hit.id)
                two._control.restore_failed(hit.id)
            two.release(hit)
            until(lambda: two.look(same, [key], PATIENT) == b"\0", "it is gone")
        return prepare(*asked)

    monkeypatch.setattr(face._control, "prepare", late)
    hit, at = face.pick(space, keys, PATIENT)
    assert at == [1, 3]
    assert np.array_equal(restore(face, hit), values([keys[1], keys[3]]))
    assert face.counts["missed_not_stored"] == 2
    nothing_held(face, full.socket)


def test_the_end_of_a_long_chain_is_stored_at_its_depth(
    full: Manager, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    face, space = attach(full, chain=True)
    keys, commits = keys_of(*range(4)), []
    works(face, space, keys[:2])
    send = face._control._send

    def told(message: Any) -> None:
        if isinstance(message, wire.Commit):
            commits.append((message.parent, message.depth, message.keys))
        send(message)

    monkeypatch.setattr(face._control, "_send", told)
    assert face.publish(space, keys, buffers(values(keys[2:])), PATIENT, 2, 70_000) == [True] * 2
    assert commits == [(keys[1], 70_002, b"".join(keys[2:]))]


# --- bounds ---------------------------------------------------------------------------------------------------------


def test_without_room_one_waits_as_long_as_one_says(full: Manager, attach: Attach, slow: Callable[[str], Gate]) -> None:
    face, space = attach(full, slots=4)
    until(lambda: len(face._control.credit[space.number]) == 4, "slots are granted")
    gate = slow("copy_in")
    first, more = keys_of(*range(4)), keys_of(*range(4, 8))
    with ThreadPoolExecutor(1) as pool:
        copying = pool.submit(publish, face, space, first)
        gate.await_begin()
        assert publish(face, space, more, seconds=0.1) == [False] * 4
        assert face.counts["unpublished_no_room"] == 4
        gate.open()
        assert copying.result(60) == [True] * 4
    works(face, space, more)


def test_what_can_never_be_stored_is_not_waited_for(full: Manager, attach: Attach) -> None:
    face, space = attach(full, size=64 << 20, slots=4)
    until(lambda: face._control.notes, "the manager says that its arena is smaller")
    memory = np.zeros(space.size, np.uint8)
    begun = time.monotonic()
    assert face.publish(space, keys_of(1), [[(memory.ctypes.data, space.size)]], 600.0) == [False]
    assert time.monotonic() - begun < 600
    assert face.counts == {"offered": 1, "unpublished_too_large": 1}


def test_objects_of_several_kinds_wait_for_an_ssd_together(
    serve: Callable[..., Manager], folder: Path, attach: Attach
) -> None:
    """Who picks of one kind after the other has one time for all of them."""
    faults = folder / "faults"
    faults.mkdir()
    program = (str(Path(__file__).parents[1] / "testbed" / "process" / "ssd_faulty.py"), str(faults))
    manager = serve("--ssd", f"{folder}/ssd:64MiB", dram="4MiB", program=program)
    populated(manager.socket)
    face, space = attach(manager, size=256 << 10, slots=4)
    keys = store_more_than_fits(face, space, manager)
    face._control._read_seconds = 600.0
    (faults / "block-read").touch()
    hit, at = face.pick(space, keys[:4], PATIENT, 0.1)
    assert (hit.count, hit.reason, at) == (0, "deadline", []), "not when the manager gives it up"
    (faults / "block-read").unlink()
    until(lambda: face.pick(space, keys[:4], PATIENT)[0].count == 4, "it is read")


def test_a_stopped_manager_is_waited_for_once(full: Manager, attach: Attach) -> None:
    face, space = attach(full)
    keys = keys_of(*range(8))
    works(face, space, keys)
    hit = face.find(space, keys, PATIENT)
    full.stop()
    try:
        until(lambda: face.find(space, keys, 0.1).count == 0 and face._control.silent, "it is known to be stopped")
        begun, asked = time.monotonic(), face._control._next_op
        assert face.look(space, keys, 60) == bytes(8)
        assert face.find(space, keys, 60).count == 0
        assert publish(face, space, keys, seconds=60) == [False] * 8
        assert time.monotonic() - begun < 60, "nobody waits for who is known not to run"
        assert face._control._next_op == asked, "and nobody asks it"
        assert np.array_equal(restore(face, hit), values(keys)), "what is leased can be copied without it"
    finally:
        full.cont()
    until(lambda: face.look(space, keys, PATIENT) == b"\1" * 8, "it is asked again")
    works(face, space, keys_of(*range(100, 108)))
    nothing_held(face, full.socket)


def test_a_hit_that_nobody_restores_is_given_up_by_itself(folder: Path, attach: Attach) -> None:
    path = folder / "hasty.sock"
    with hasty_manager(path):
        face, space = attach(path)
        keys = keys_of(*range(4))
        works(face, space, keys)
        hits: list[Hit] = []
        thread = threading.Thread(target=lambda: hits.append(face.find(space, keys, PATIENT)))
        thread.start()
        thread.join()
        assert hits[0].count == 4
        assert face._control._asked
        until(lambda: not face._control._asked, "it is forgotten here as there")
        nothing_held(face, path)
        assert len(restore(face, hits[0])) == 0
        works(face, space, keys)


def test_settings_that_the_hosts_manager_ignores_are_told_of_once(
    full: Manager, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setenv(VARIABLE, str(folder))
    monkeypatch.setattr(attaching.log, "warning", lambda text, *args: said.append(text % args))
    settings = ManagerSettings(dram="64MiB", ssd=f"{folder}/own:64MiB")
    face = Blocking("one", "test", partial(make_attacher, engine="one", settings=settings, reads=True))
    try:
        until(lambda: said, "said")
        assert face.wait(60)
        assert len(said) == 1
        assert f"using the manager on {full.socket}" in said[0]
        assert "those of this engine for dram, ssd are ignored" in said[0]
    finally:
        face.close()


# --- managers that go, and come again -------------------------------------------------------------------------------


def test_a_manager_that_is_killed_between_find_and_restore(full: Manager, attach: Attach) -> None:
    face, space = attach(full)
    keys = keys_of(*range(8))
    works(face, space, keys)
    hit = face.find(space, keys, PATIENT)
    full.kill()
    until(lambda: not face.attached, "it is known to be gone")
    assert len(restore(face, hit)) == 0
    assert publish(face, space, keys, seconds=60) == [False] * 8
    assert face.find(space, keys, 60).reason == "detached"
    full.start()
    assert face.wait(60)
    assert len(restore(face, hit)) == 0, "it is no other manager's"
    works(face, space, keys)
    nothing_held(face, full.socket)


@pytest.mark.parametrize("fault", ["killed", "restarted", "stopped"])
@pytest.mark.parametrize("way", ["copy_out", "copy_in"])
def test_while_a_copy_runs(full: Manager, attach: Attach, slow: Callable[[str], Gate], fault: str, way: str) -> None:
    face, space = attach(full)
    keys, others = keys_of(*range(8)), keys_of(*range(50, 54))
    works(face, space, keys)
    work = (restore, face, face.find(space, keys, PATIENT)) if way == "copy_out" else (publish, face, space, others)
    gate = slow(way)
    with ThreadPoolExecutor(1) as pool:
        running: Any = pool.submit(*work)
        gate.await_begin()
        match fault:
            case "killed":
                full.kill()
                until(lambda: not face.attached, "it is known to be gone")
            case "restarted":
                full.restart()
                assert face.wait(60)
                until(lambda: len(face._mappings._sessions) == 2, "both arenas are mapped")
            case "stopped":
                full.stop()
        gate.open()
        ended = running.result(60)
    if way == "copy_out":
        assert np.array_equal(ended, values(keys)), "an arena outlives its manager"
    else:
        assert ended == [fault == "stopped"] * 4
    if fault == "killed":
        full.start()
    full.cont()
    assert face.wait(60)
    works(face, space, others)
    nothing_held(face, full.socket)


def test_a_hit_that_is_being_restored_stays_leased_whatever_others_do_with_it(
    full: Manager, attach: Attach, slow: Callable[[str], Gate]
) -> None:
    face, space = attach(full)
    keys = keys_of(*range(8))
    works(face, space, keys)
    hit = face.find(space, keys, PATIENT)
    gate = slow("copy_out")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(restore, face, hit)
        gate.await_begin()
        face.release(hit)
        assert face.restore(hit, buffers(values(keys))) == 0, "one thread restores it"
        hit_of_another = face.find(space, keys, PATIENT)  # what was said before is handled
        face.release(hit_of_another)
        assert face.look(space, keys, PATIENT) == b"\1" * 8
        assert status(full.socket)["accounts"]["leased"]
        gate.open()
        assert np.array_equal(running.result(60), values(keys))
    assert not face.counts["void"]
    nothing_held(face, full.socket)


def test_nothing_is_used_anew_while_a_copy_of_a_lost_session_runs(
    full: Manager, attach: Attach, slow: Callable[[str], Gate]
) -> None:
    """The same manager goes on, and the sessions are others: it frees what the copy reads when that has ended."""
    face, space = attach(full)
    keys = keys_of(*range(8))
    works(face, space, keys)
    gate = slow("copy_out")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(restore, face, face.find(space, keys, PATIENT))
        gate.await_begin()
        token = face._mappings._sessions[0].token
        assert face._worker.channel is not None
        face._worker.channel.abandon()
        until(lambda: not face.attached or len(face._mappings._sessions) == 2, "it is lost")
        assert face.wait(60)
        hit = face.find(space, keys, PATIENT)  # later plans end before it
        assert hit.count == 8
        face.release(hit)
        until(lambda: status(full.socket)["accounts"]["leased"], "it is leased")
        assert face._mappings._sessions[0].token == token
        assert status(full.socket)["orphaned_bytes"]
        gate.open()
        assert np.array_equal(running.result(60), values(keys))
    nothing_held(face, full.socket)
    assert status(full.socket)["orphaned_bytes"] == 0
    assert token not in [session.token for session in face._mappings._sessions]


# --- threads that do not come back ----------------------------------------------------------------------------------


def test_a_thread_that_dies_in_a_copy_leaves_nothing_behind(
    full: Manager, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    face, space = attach(full)
    keys = keys_of(*range(8))
    works(face, space, keys)

    def dies(*_: Any) -> None:
        raise SystemExit

    def begin(work: Callable[[], Any]) -> None:
        with contextlib.suppress(SystemExit):
            work()

    with monkeypatch.context() as patch:
        patch.setattr(blocking, "copy_out", dies)
        patch.setattr(blocking, "copy_in", dies)
        hit = face.find(space, keys, PATIENT)
        for work in (lambda: restore(face, hit), lambda: publish(face, space, keys_of("another"))):
            thread = threading.Thread(target=begin, args=(work,))
            thread.start()
            thread.join(60)
            assert not thread.is_alive()
    nothing_held(face, full.socket)
    until(lambda: len(face._control.credit[space.number]) == 64, "all slots can be used again")
    works(face, space, keys)


def test_a_copy_that_never_ends_keeps_what_it_uses_and_nobody_else(
    full: Manager, attach: Attach, slow: Callable[[str], Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking, "_LAST_COPY_SECONDS", 0.1)
    face, space = attach(full)
    keys = keys_of(*range(8))
    works(face, space, keys)
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        gate = Gate(patch, "copy_out")
        hanging = pool.submit(restore, face, face.find(space, keys, PATIENT))
        gate.await_begin()
        patch.undo()
        works(face, space, keys_of("another"))
        face.close()
        assert face._mappings._sessions, "it is still read"
        until(lambda: status(full.socket)["orphaned_bytes"], "and still leased")
        gate.open()
        assert np.array_equal(hanging.result(60), values(keys))


def test_who_waits_has_a_miss_when_another_closes(full: Manager, attach: Attach) -> None:
    face, space = attach(full, slots=4)
    works(face, space, keys_of(1))
    face._control._silent_seconds = 600.0  # it does not matter that it is stopped
    full.stop()
    try:
        with ThreadPoolExecutor(4) as pool:
            waiting = [
                pool.submit(face.look, space, keys_of(1), 600.0),
                pool.submit(lambda: bytes([face.find(space, keys_of(1), 600.0).count])),
                pool.submit(lambda: bytes(publish(face, space, keys_of(1), seconds=600.0))),
                pool.submit(lambda: bytes([face.wait(600.0) and not face._closed])),
            ]
            face.close()
            assert [each.result(60) for each in waiting][:3] == [b"\0"] * 3
        assert not face._mappings._sessions
        face.close()
        assert face.find(space, keys_of(1), 600.0).reason == "closed"
    finally:
        full.cont()
