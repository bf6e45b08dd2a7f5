"""One client must not hurt the others: what it may have taken in, kept and begun is bounded, and turns are fair."""

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from testbed.process.manager_process import Manager
from testbed.process.peers import KEY_BYTES, NAMESPACE, SHARD, Engine, Peer, keys_of, populated, status, until
from testbed.process.puppet import Puppet, environment

from kvhold import protocol as wire
from kvhold.core.limits import Limits
from kvhold.manager.config import ManagerConfig
from kvhold.manager.listener import Listener
from kvhold.manager.memory import ArenaMemory
from kvhold.manager.server import Server

STORED = [11, 12, 13]
MANY = 4000
"""Messages of a flood: the shortest of so many fit into a socket."""
MIB = 1 << 20

Serve = Callable[..., Manager]
Make = Callable[[], Puppet]


def resident(manager: Manager, field: str = "VmRSS") -> int:
    """Bytes of memory of the manager's process."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{manager.pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def forget_peak(manager: Manager) -> int:
    """Have ``VmHWM`` be the most from now on; the bytes there are now."""
    Path(f"/proc/{manager.pid}/clear_refs").write_text("5")
    return resident(manager)


@pytest.fixture
def full(serve: Serve) -> Manager:
    """A manager whose arena is populated: what grows from now on is its own."""
    manager = serve()
    populated(manager.socket)
    return manager


@pytest.fixture(scope="module")
def shared() -> Iterator[Manager]:
    """One for all who leave it as it was."""
    with tempfile.TemporaryDirectory(prefix="kvhold-") as folder:
        manager = Manager(Path(folder), dram="32MiB")
        yield manager
        manager.kill()


def say(peer: Peer, data: bytes) -> int:
    """Send of ``data`` what the socket takes now; how much that was."""
    peer.socket.setblocking(False)
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while sent < len(data):
            sent += peer.socket.send(data[sent:])
    peer.socket.setblocking(True)
    return sent


# --- turns ------------------------------------------------------------------------------------------------------------

KEY = keys_of([1])
BY_ENGINES: dict[str, wire.ClientMessage] = {
    "query": wire.Query(7, 1, 1, 0, KEY),
    "lookup": wire.Lookup(7, ((1, KEY),)),
    "prepare": wire.Prepare(7, 1, ((1, KEY),)),
    "cut": wire.Cut(7, 1, KEY, 0),
    "started": wire.Started((7,)),
    "spoiled": wire.RestoreFailed(7),
    "release": wire.Release(((7, 9),)),
    "return": wire.Return(array("I", [1 << 30]).tobytes(), array("Q", [1]).tobytes()),
}
BY_OPERATORS: dict[str, wire.ClientMessage] = {
    "status": wire.Status(),
    "purge": wire.Purge(b"p" * 32),
    "flush": wire.Flush(),
    "explain": wire.Explain(op=7),
    "misses": wire.Explain(),
    "list": wire.List(NAMESPACE, 0),
    "configure": wire.Configure({}, {b"q" * 32: (0, 1 << 40)}),
}


@pytest.mark.parametrize("kind", [*BY_ENGINES, *BY_OPERATORS])
def test_a_neighbours_question_comes_before_the_rest_of_a_flood(shared: Manager, kind: str) -> None:
    """All of it is in the socket before the neighbour asks; how much was handled is in the very answer."""
    neighbour = Peer(shared.socket)
    neighbour.join("admin")
    engine = Engine(shared.socket, kind)
    if kind in BY_ENGINES:
        flood, message = engine.scheduler, BY_ENGINES[kind]
    else:
        flood, message = Peer(shared.socket), BY_OPERATORS[kind]
        flood.join("admin")
    before = status(shared.socket)["messages"]
    one = wire.frame(message)
    shared.stop()
    said = say(flood, one * MANY) // len(one)
    assert said > 1000
    neighbour.send(wire.Status())
    shared.cont()
    answer = neighbour.expect(wire.StatusReply)
    handled = status_of(answer)["messages"] - before
    assert handled < said / 2
    engine.scheduler.close()
    engine.worker.close()
    flood.close()
    neighbour.close()


def status_of(reply: wire.StatusReply) -> dict[str, int]:
    found: dict[str, int] = json.loads(reply.document)
    return found


def test_long_questions_have_their_slices_in_turn(full: Manager) -> None:
    """A neighbour's long question ends before the rest of many longer ones that were asked before it."""
    engines = [Engine(full.socket, name) for name in ("flood", "neighbour")]
    flood, neighbour = (engine.scheduler for engine in engines)
    full.stop()
    longest = wire.frame(wire.Lookup(1, ((1, keys_of(range(20_000))),)))
    assert say(flood, longest) == len(longest)
    neighbour.send(wire.Lookup(1, ((1, keys_of(range(2_000))),)))
    full.cont()
    assert len(neighbour.expect(wire.Residency).tiers[0]) == 2_000
    assert len(flood.expect(wire.Residency).tiers[0]) == 20_000


# --- what is kept for one ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["explain", "status", "list"])
def test_answers_that_nobody_reads_are_not_made(full: Manager, kind: str) -> None:
    engine = Engine(full.socket, "engine", slots=256)
    for start in range(0, 4096, 256):
        engine.store(list(range(start, start + 256)))
    before = forget_peak(full)
    glutton = Peer(full.socket)
    glutton.join("admin")
    handled = status(full.socket)["messages"]
    one = wire.frame(BY_OPERATORS[kind])
    rest = one * 200_000
    stuck = 0
    while rest and stuck < 50:  # it is read as long as it is answered, and no longer
        sent = say(glutton, rest)
        rest = rest[sent:]
        stuck = 0 if sent else stuck + 1
        engine.works(STORED)
    assert status(full.socket)["messages"] - handled < 100_000
    assert resident(full, "VmHWM") - before < 16 * MIB
    glutton.close()
    until(lambda: status(full.socket)["unfinished"] == 0, "nothing is done for who is gone")
    engine.works(STORED)


def test_lookups_are_bounded_in_bytes(full: Manager) -> None:
    engine, neighbour = Engine(full.socket, "engine"), Engine(full.socket, "neighbour")
    neighbour.store(STORED)
    before = forget_peak(full)
    flood = wire.frame(wire.Lookup(1, ((1, keys_of(range(wire.MAX_KEYS))),)))
    sending = threading.Thread(target=engine.scheduler.raw, args=(flood * 100,))
    sending.start()
    for _ in range(100):
        assert len(engine.scheduler.expect(wire.Residency).tiers[0]) == wire.MAX_KEYS
        neighbour.works(STORED)
    sending.join()
    assert resident(full, "VmHWM") - before < 32 * MIB


def test_releases_are_bounded_in_what_they_become(full: Manager) -> None:
    """Of what one may have unfinished, in releases of the longest kind, little stays in memory, also afterwards."""
    engine, neighbour = Engine(full.socket, "engine"), Engine(full.socket, "neighbour")
    neighbour.store(STORED)
    neighbour.works(STORED)
    before = forget_peak(full)
    ops = tuple((1000 + op, 1000 + op) for op in range(wire.MAX_OPS))
    engine.scheduler.raw(wire.frame(wire.Release(ops)) * (MANY // 4))
    neighbour.works(STORED)
    engine.scheduler.sync()
    assert resident(full, "VmHWM") - before < 8 * MIB
    assert status(full.socket)["counters"].get("stale", 0) == 0


def test_an_engine_that_asks_much_at_once_is_answered_all_of_it(full: Manager) -> None:
    """The most that may be asked in one message, many times, by one who reads only afterwards."""
    engine = Engine(full.socket, "engine", slots=256)
    chain = list(range(1024))
    for start in range(0, 1024, 256):
        engine.store(chain[start : start + 256])
    longest = keys_of([*chain, *range(1 << 20, (1 << 20) + wire.MAX_KEYS - 1024)])
    questions = b"".join(wire.frame(wire.Query(op, 1, 1, 0, longest)) for op in range(1, 41))
    sending = threading.Thread(target=engine.scheduler.raw, args=(questions,))
    sending.start()
    answers = [engine.scheduler.expect(wire.Answer) for _ in range(40)]
    sending.join()
    assert {answer.op for answer in answers} == set(range(1, 41))
    assert [(answer.resident, answer.reason) for answer in answers if answer.resident] == [(1024, "not_stored")] * sum(
        answer.resident > 0 for answer in answers
    )
    assert sum(answer.resident > 0 for answer in answers) >= 32
    engine.scheduler.send(wire.Release(tuple((op, 1) for op in range(1, 41))))
    engine.works(chain)


def test_questions_of_who_is_gone_are_not_begun(full: Manager) -> None:
    """What it did counts; what it only wanted to know does not."""
    engine = Engine(full.socket, "engine", slots=8)
    engine.scheduler.slots(8)
    before = status(full.socket)["counters"]
    full.stop()
    engine.scheduler.send(*[wire.Query(op, 1, 1, 0, KEY) for op in range(1, 500)])
    engine.scheduler.commit([1, 2, 3])
    engine.scheduler.send(*[wire.Lookup(op, ((1, KEY),)) for op in range(500, 1000)])
    engine.scheduler.send_bye()
    engine.scheduler.close()
    engine.worker.send_bye()  # which does not overtake the commit
    engine.worker.close()
    full.cont()
    until(lambda: not status(full.socket)["sessions"], "both have left")
    after = status(full.socket)
    assert after["counters"].get("queries", 0) == before.get("queries", 0)
    assert after["counters"]["commits"] == before.get("commits", 0) + 3
    assert after["accounts"]["credit"] == after["accounts"]["orphaned"] == 0


def test_halves_of_frames_are_bounded_together(full: Manager) -> None:
    neighbour = Engine(full.socket, "neighbour")
    neighbour.store(STORED)
    before = forget_peak(full)
    halves = []
    for _ in range(30):
        halves.append(Peer(full.socket))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            halves[-1].raw(wire.PREAMBLE + (wire.MAX_FRAME).to_bytes(4, "little") + bytes(wire.MAX_FRAME - 1))
        neighbour.works(STORED)
    assert resident(full, "VmHWM") - before < 48 * MIB
    assert "the rest of a frame did not come, after" in halves[0].refusal()
    assert halves[-1].socket.send(b"\0") == 1
    assert "malformed message" in halves[-1].refusal()
    for half in halves:
        half.close()


def test_the_rest_of_a_frame_has_to_come_some_day(serve: Serve) -> None:
    program = "import kvhold.manager.clients as c; c.FRAME_SECONDS = 0.3; from kvhold.cli import main; main()"
    manager = serve(program=("-c", program))
    engine = Engine(manager.socket, "engine")
    engine.scheduler.raw((MIB).to_bytes(4, "little") + bytes(MIB // 2))
    small = Engine(manager.socket, "small")
    small.scheduler.raw(wire.frame(wire.Query(3, 1, 1, 0, KEY))[:9])
    assert engine.scheduler.refusal() == "the rest of a frame did not come within 0.3 s"
    small.scheduler.raw(wire.frame(wire.Query(3, 1, 1, 0, KEY))[9:])
    assert small.scheduler.expect(wire.Answer).op == 3


# --- places -----------------------------------------------------------------------------------------------------------


def test_lost_sessions_of_one_process_lock_nobody_out(full: Manager, puppet: Make, folder: Path) -> None:
    """They are counted against their process, which is told so; an operator has places of his own."""
    process = puppet()
    for number in range(128):
        peer = process.make("peer", str(full.socket))
        peer.join("worker", f"engine {number}")
        peer.close()
    late = process.make("peer", str(full.socket))
    with pytest.raises(RuntimeError, match=r"128 sessions here already, \d+ of them lost; it has to end|BrokenPipe"):
        late.join("worker", "late")
    assert len(status(full.socket)["sessions"]) == 128
    command = [sys.executable, "-m", "kvhold.cli", "status", "--socket", str(full.socket)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    assert "session" in said.stdout
    Engine(full.socket, "neighbour").works([])
    process.kill()
    until(lambda: len(status(full.socket)["sessions"]) == 2, "what the process held is free")


def test_all_places_of_engines_are_taken_and_an_operator_comes_in(serve: Serve, puppet: Make) -> None:
    program = (
        "import kvhold.manager.clients as c; c.MAX_CLIENTS, c.PROCESS_OPERATORS = 6, 2; "
        "from kvhold.cli import main; main()"
    )
    manager = serve(program=("-c", program))
    crowd = [Engine(manager.socket, f"engine {number}") for number in range(3)]
    late = Peer(manager.socket)
    late.raw(wire.PREAMBLE + wire.frame(wire.Hello("worker", "late")))
    assert late.refusal() == "6 clients are here already"
    assert len(status(manager.socket)["sessions"]) == 6
    admins = [Peer(manager.socket) for _ in range(3)]
    for admin in admins[:2]:
        admin.join("admin")
    admins[2].raw(wire.PREAMBLE + wire.frame(wire.Hello("admin")))
    assert "asks in 2 sessions already" in admins[2].refusal()
    other = puppet().make("peer", str(manager.socket))
    other.join("admin")
    crowd[0].bye()
    until(lambda: len(status_of_peer(admins[0])["sessions"]) == 4, "two have left")
    Engine(manager.socket, "another").works([])


def status_of_peer(admin: Peer) -> dict[str, list[object]]:
    admin.send(wire.Status())
    found: dict[str, list[object]] = json.loads(admin.expect(wire.StatusReply).document)
    return found


def test_strangers_make_room_for_who_introduces_himself(full: Manager) -> None:
    strangers = [Peer(full.socket) for _ in range(70)]
    status(full.socket)
    assert strangers[0].refusal() == "too many clients do not introduce themselves"
    for stranger in strangers:
        stranger.close()
    status(full.socket)


def test_without_descriptors_nobody_is_let_in_and_the_log_says_so_a_few_times(serve: Serve) -> None:
    program = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (40, 40)); from kvhold.cli import main; main()"
    manager = serve(program=("-c", program))
    neighbour = Engine(manager.socket, "neighbour")
    neighbour.store(STORED)
    crowd = [Peer(manager.socket) for _ in range(60)]
    until(lambda: "Too many open files" in manager.log.read_text(), "there are no more descriptors")
    for _ in range(300):
        neighbour.works(STORED)
    assert manager.log.read_text().count("Too many open files") < 20
    for peer in crowd:
        peer.close()

    def room() -> bool:
        with contextlib.suppress(AssertionError, OSError):
            status(manager.socket)
            return True
        return False

    until(room, "there is room again")


def test_what_is_said_over_and_over_is_said_a_few_times(full: Manager) -> None:
    """And nothing else is lost for it."""
    for _ in range(100):
        peer = Peer(full.socket)
        peer.raw(b"GET / HTTP/1.1\r\n\r\n")
        assert peer.refusal() == "not a kvhold client"
        peer.close()
    peer = Peer(full.socket)
    peer.raw(b"KVHOLD\x63\0")
    peer.refusal()
    assert full.terminate() == 0
    text = full.log.read_text()
    assert text.count("not a kvhold client") <= 12
    assert re.search(r"refused: not a kvhold client \(and 89 more like this\)", text) or "more like this" in text
    assert text.count("client speaks protocol 99") == 1


# --- what is known ----------------------------------------------------------------------------------------------------


def test_a_namespace_costs_little_and_the_report_stays_short(full: Manager) -> None:
    engines = [Engine(full.socket, name) for name in ("one", "other")]
    before = resident(full)
    count, width = 1500, 50
    for start in range(0, count, width):
        engine = engines[start * 2 // count].scheduler
        for number in range(start, start + width):
            space, name = 10 + number, number.to_bytes(32, "little")
            engine.send(wire.Open(space, name, 0, KEY_BYTES, (SHARD,), 1))
            engine.shards[space] = (SHARD,)
        for number in range(start, start + width):
            grant = engine.expect(wire.Grant)
            while grant.space < 10 + start:
                grant = engine.expect(wire.Grant)
            engine.send(
                wire.Close(grant.space),  # before the commit, or another slot is granted for the one that it takes
                wire.Commit(grant.space, b"", 0, keys_of([number]), grant.rows, grant.epochs, (SHARD,)),
            )
        engine.sync()
    report = status(full.socket)
    assert report["namespaces"] > count
    assert report["spaces_known"] > count
    assert len(report["spaces"]) == 256
    assert resident(full) - before < count * 5 << 10, "what is stored there included"
    last = (count - 1).to_bytes(32, "little")
    command = [sys.executable, "-m", "kvhold.cli", "keys", last.hex(), "0", "--socket", str(full.socket)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    assert said.stdout.split() == [keys_of([count - 1]).hex(), "dram"]


def test_quotas_are_bounded_in_number(full: Manager) -> None:
    admin = Peer(full.socket)
    admin.join("admin")
    names = [number.to_bytes(32, "little") for number in range(2000)]
    admin.send(wire.Configure({}, dict.fromkeys(names[:1000], (0, MIB))))
    admin.expect(wire.Configured)
    admin.send(wire.Configure({}, dict.fromkeys(names, (0, MIB))))
    assert "quotas of 2000 namespaces are more than 1024" in admin.refusal()
    assert len(status(full.socket)["limits"]["quotas"]) == 1000


# --- leases -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hasty(folder: Path) -> Iterator[Path]:
    """A manager that keeps leases for half a second."""
    memory = ArenaMemory(32 << 20, huge_pages=False)
    listener = Listener(folder / "hasty.sock")
    limits = Limits(lease_ns=500_000_000, hear_ns=200_000_000)
    server = Server(ManagerConfig(folder / "hasty.sock", 32 << 20, limits=limits), listener, memory)
    listener.listen()
    loop = threading.Thread(target=server.run)
    loop.start()
    yield folder / "hasty.sock"
    server.stop()
    loop.join(60)
    assert not loop.is_alive()


def test_a_restore_that_was_declared_behind_unread_answers_keeps_its_lease(hasty: Path) -> None:
    """It was said in time, and is not handled yet: others' leases end, this one does not."""
    populated(hasty)
    engine, other = Engine(hasty, "engine", slots=256), Engine(hasty, "other")
    chain = list(range(2000))
    for start in range(0, 2000, 250):
        engine.store(chain[start : start + 250])
    op, *_ = engine.scheduler.ask(chain[:5])
    other.scheduler.ask(chain[:1])
    long = keys_of(chain)
    questions = [wire.Query(1000 + number, 1, 1, 0, long) for number in range(60)]
    engine.scheduler.send(*questions, wire.Started((op,)))
    assert other.scheduler.expect(wire.Expired).op, "so the time is over"
    time_is_over = time.monotonic() + 0.5
    until(lambda: time.monotonic() > time_is_over, "and more than over")
    assert status(hasty)["counters"].get("stale", 0) == 0
    got = 0
    while got < len(questions):
        message = engine.scheduler.receive()
        assert not (isinstance(message, wire.Expired) and message.op == op)
        got += isinstance(message, wire.Answer)
    engine.scheduler.sync()
    report = status(hasty)
    assert report["counters"].get("stale", 0) == 0, "the restore was declared in time"
    engine.scheduler.release(op)
    engine.scheduler.sync()
