"""Whatever a client sends: it is refused and logged, nobody else is disturbed, and the manager stays up."""

import contextlib
import os
import socket
import struct
import tempfile
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from testbed.process.manager_process import Manager
from testbed.process.peers import DEADLINE, KEY_BYTES, NAMESPACE, SHARD, Engine, Peer, keys_of, populated, status, until

from kvhold import protocol as wire
from kvhold.client.channel import AttachError, Channel

STORED = [11, 12, 13]


class Site:
    """A manager, and a well-behaved engine that must not notice anything."""

    def __init__(self, folder: Path) -> None:
        # All those whom it refuses are of one process, which goes on.
        roomy = "import kvhold.manager.clients as c; c.PROCESS_CLIENTS = 256; from kvhold.cli import main; main()"
        self.manager = Manager(folder, dram="32MiB", program=("-c", roomy))
        self.path = self.manager.socket
        self.neighbour = Engine(self.path, "neighbour", slots=4)
        self.neighbour.store(STORED)
        self._engines = 0

    def engine(self, slots: int = 2) -> Engine:
        """An engine of its own name, to misbehave with."""
        self._engines += 1
        return Engine(self.path, f"engine {self._engines}", slots, b"e" * 32)

    def session(self, role: str) -> Peer:
        self._engines += 1
        peer = Peer(self.path)
        peer.join(role, f"engine {self._engines}")
        return peer

    def refuses(self, peer: Peer, reason: str) -> None:
        """The manager ends ``peer`` with ``reason``, says so in its log, and all is well."""
        said = peer.refusal()
        assert reason in said
        assert f"refused: {said}" in self.manager.log.read_text()
        peer.close()
        self.is_well()

    def is_well(self) -> None:
        self.neighbour.works(STORED)
        status(self.path)
        assert self.manager.alive


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="kvhold-") as folder:
        site = Site(Path(folder))
        yield site
        newcomer = Engine(site.path, "newcomer", slots=4)
        newcomer.store([21])
        newcomer.works([21])
        assert site.manager.terminate() == 0
        assert "Traceback" not in site.manager.log.read_text()


# --- before there is a session ----------------------------------------------------------------------------------------


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def packed(hello: wire.Hello) -> bytes:
    return wire.frame(hello)


HELLO = packed(wire.Hello("scheduler", "x"))


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", "not a kvhold client"),
        (bytes(range(256)) * 40, "not a kvhold client"),
        (b"\0", "not a kvhold client"),
        (b"KVHOLX", "not a kvhold client"),
        (b"KVHOLD\x63\0", f"client speaks protocol 99, this manager speaks {wire.VERSION}"),
        (b"KVHOLD\0\0" + HELLO, f"client speaks protocol 0, this manager speaks {wire.VERSION}"),
        (wire.PREAMBLE + struct.pack("<I", wire.MAX_FRAME + 1), f"frame of {wire.MAX_FRAME + 1} bytes"),
        (wire.PREAMBLE + b"\xff" * 64, "frame of 4294967295 bytes"),
        (wire.PREAMBLE + framed(b""), "malformed message"),
        (wire.PREAMBLE + framed(HELLO[4:-1]), "malformed message"),
        (wire.PREAMBLE + framed(HELLO[4:] + b"\0"), "malformed message"),
        (wire.PREAMBLE + framed(b"hello"), "malformed message"),
        (wire.PREAMBLE + framed(b"\x92\xa5Hello\xa4root"), "malformed message"),
        (wire.PREAMBLE + framed(b"\x91\xa7Welcome"), "malformed message"),
        (wire.PREAMBLE + framed(b"\x92\xa7Release\xdd\xff\xff\xff\xff\1"), "malformed message"),
        (wire.PREAMBLE + framed(b"\x92\xa5Purge\xc6\xff\xff\xff\xff\1"), "malformed message"),
        (wire.PREAMBLE + framed(b"\x91" * 1_000_000), "malformed message"),
        (wire.PREAMBLE + wire.frame(wire.Status()), "a new session does not say Status"),
        (wire.PREAMBLE + wire.frame(wire.Bye()), "a new session does not say Bye"),
        (wire.PREAMBLE + packed(wire.Hello("worker", "x", -1)), "rank -1 of 1"),
        (wire.PREAMBLE + packed(wire.Hello("worker", "x", 2, 2)), "rank 2 of 2"),
        (wire.PREAMBLE + packed(wire.Hello("worker", "x", 0, 0)), "rank 0 of 0"),
        (wire.PREAMBLE + packed(wire.Hello("worker", "x", 0, 1 << 40)), f"rank 0 of {1 << 40}"),
        (wire.PREAMBLE + packed(wire.Hello("worker", "x" * 300)), "in instance"),
        (
            wire.PREAMBLE + packed(wire.Hello("worker", "x", report=b"x" * 4001)),
            "a report of 4001 bytes, more than 4000",
        ),
    ],
)
def test_what_is_no_introduction(site: Site, sent: bytes, reason: str) -> None:
    peer = Peer(site.path)
    peer.raw(sent)
    site.refuses(peer, reason)


def test_an_introduction_may_come_in_pieces(site: Site) -> None:
    peer = Peer(site.path)
    for byte in wire.PREAMBLE + packed(wire.Hello("admin")):
        peer.raw(bytes([byte]))
        site.neighbour.scheduler.sync()
    peer.expect(wire.Welcome)
    peer.close()


def introduced(manager: Manager) -> bool:
    """Whether this process was quick enough: a busy machine may keep it from introducing itself in time."""
    try:
        Engine(manager.socket, "one").bye()
    except (AssertionError, OSError):
        return False
    return True


def test_who_says_nothing_is_let_go(folder: Path) -> None:
    impatient = "import kvhold.manager.clients as c; c.HELLO_SECONDS = 0.3; from kvhold.cli import main; main()"
    manager = Manager(folder, dram="16MiB", program=("-c", impatient))
    try:
        opening = wire.PREAMBLE + HELLO
        peers = []
        for sent in (b"", opening[:3], opening[:8], opening[:10], opening[:-1]):
            peers.append(Peer(manager.socket))
            peers[-1].raw(sent)
        for peer in peers:
            assert peer.refusal() == "no introduction within 0.3 s"
        assert manager.log.read_text().count("refused: no introduction within 0.3 s") == len(peers)
        until(lambda: introduced(manager), "who introduces itself is served")
    finally:
        manager.kill()


# --- in a session -----------------------------------------------------------------------------------------------------

ONE = array("I", [0]).tobytes()
EPOCH = array("Q", [1]).tobytes()
KEY = keys_of([1])
SCHEDULERS = [
    wire.Open(9, NAMESPACE, 0, KEY_BYTES, (SHARD,), 1),
    wire.Close(1),
    wire.Query(1, 1, 1, 0, KEY),
    wire.Lookup(1, ()),
    wire.Prepare(1, 1, ()),
    wire.Cut(1, 1, KEY, 0),
    wire.AnswerNow(1, 1),
    wire.Started((1,)),
    wire.RestoreFailed(1),
    wire.Release(((1, 1),)),
    wire.Commit(1, b"", 0, KEY, ONE, EPOCH, (SHARD,)),
    wire.Return(ONE, EPOCH),
]
HALVES = [wire.Retire(1), wire.Bye()]
ADMINS = [wire.Status(), wire.Purge(), wire.Flush(), wire.Explain(), wire.List(NAMESPACE, 0), wire.Configure({}, {})]
HELLOS = [wire.Hello("admin"), wire.Hello("scheduler", "x"), wire.Hello("worker", "x")]


@pytest.mark.parametrize(
    ("role", "message"),
    [
        *(("scheduler", message) for message in [*HELLOS, *ADMINS, wire.Mapped()]),
        *(("worker", message) for message in [*HELLOS, *ADMINS, *SCHEDULERS]),
        *(("admin", message) for message in [*HELLOS, *SCHEDULERS, *HALVES, wire.Mapped()]),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_not_for_the_role(site: Site, role: str, message: wire.ClientMessage) -> None:
    peer = site.session(role)
    peer.send(message)
    site.refuses(peer, f"a {role} session does not say {type(message).__name__}")


def opened(**changes: object) -> wire.Open:
    values = {"namespace": NAMESPACE, "key_bytes": KEY_BYTES, "shards": (SHARD,), "slots": 1} | changes
    return wire.Open(space=2, group=0, **values)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (opened(namespace=b"short"), "space with a namespace of 5 bytes"),
        (opened(key_bytes=0), "space with keys of 0 bytes"),
        (opened(key_bytes=-8), "space with keys of -8 bytes"),
        (opened(key_bytes=65), "space with keys of 65 bytes; they have 1 to 64"),
        (opened(slots=-1), "space with -1 slots"),
        (opened(shards=(0,)), "space with a shard of 0 bytes"),
        (opened(shards=(-4096,)), "space with a shard of -4096 bytes"),
        (opened(shards=(1 << 40,)), f"space with a shard of {1 << 40} bytes"),
        (opened(shards=(SHARD + 1,)), f"space with a shard of {SHARD + 1} bytes"),
        (opened(shards=()), "without geometry"),
        (opened(shards=(SHARD,) * 2), "without geometry"),
        (opened(shards=(SHARD,) * 1025), "malformed message: Expected `array` of length <= 1024"),
        (opened(namespace=b"e" * 32, shards=(2 * SHARD,)), "known with another geometry"),
        (opened(namespace=b"e" * 32, key_bytes=16), "known with another geometry"),
        (wire.Open(1, NAMESPACE, 0, KEY_BYTES, (SHARD,), 1), "space 1 opened twice"),
        (wire.Query(1, 1, 1, -1, KEY), "query of 8 bytes from -1"),
        (wire.Query(-1, 1, 1, 0, KEY), "numbers out of range"),
        (wire.Query(1, 1 << 62, 1, 0, KEY), "numbers out of range"),
        (wire.Query(1, 1, 1, 1 << 20, KEY), "query of 8 bytes from 1048576"),
        (wire.Lookup(1, ((1, KEY), (1, KEY[:-1]))), "keys are torn"),
        (wire.Lookup(1, ((1, KEY),) * 65), "malformed message: Expected `array` of length <= 64"),
        (wire.Prepare(1, 1, ((1, KEY), (1, KEY + b"\0"))), "keys are torn"),
        (wire.Prepare(1, -1, ()), "numbers out of range"),
        (wire.Prepare(1, 1, (), ((1, KEY + b"\0"),)), "keys are torn"),
        (wire.Prepare(1, 1, ((1, KEY),) * 40, ((1, KEY),) * 25), "a question of 65 parts"),
        (wire.Prepare(1, 1, ((1, KEY * 40_000),), ((1, KEY * 40_000),)), "80000 keys, more than 65536"),
        (wire.Cut(1, 1, KEY + b"\0", 0), "keys are torn"),
        (wire.Cut(1, 1, b"", 0), "hit cut at block 0 by a key of 0 bytes"),
        (wire.Cut(1, 1, KEY, -1), "hit cut at block -1"),
        (wire.Cut(1, 1, KEY, 1 << 32), "hit cut at block 4294967296"),
        (wire.Cut(-1, 1, KEY, 0), "numbers out of range"),
        (wire.Started((1,) * 257), "malformed message: Expected `array` of length <= 256"),
        (wire.Query(1, 1, 1, 0, KEY + b"\0"), "keys are torn"),
        (wire.Release(((1, 1),) * 257), "malformed message: Expected `array` of length <= 256"),
        (wire.Commit(1, b"", 0, KEY, b"", b"", (SHARD,)), "commit whose keys do not fit its rows"),
        (wire.Commit(1, b"", 0, KEY + b"\0", ONE * 2, EPOCH * 2, (SHARD,)), "commit whose keys do not fit its rows"),
        (wire.Commit(1, b"", 0, KEY * 2, ONE, EPOCH, (SHARD,)), "commit to space 1 without all of its shards"),
        (wire.Commit(1, b"", 0, KEY, ONE[:3], EPOCH, (SHARD,)), "batch of 3 bytes of rows and 8 of epochs"),
        (wire.Commit(1, b"", 0, KEY, ONE, EPOCH * 2, (SHARD,)), "batch of 4 bytes of rows and 16 of epochs"),
        (wire.Commit(1, b"", 0, KEY * 257, ONE * 257, EPOCH * 257, (SHARD,)), "batch of 1028 bytes of rows"),
        (wire.Commit(1, b"", 0, KEY, ONE, EPOCH, (SHARD, SHARD)), "commit to space 1 without all of its shards"),
        (wire.Commit(1, b"", 0, KEY, ONE, EPOCH, ()), "commit to space 1 without all of its shards"),
        (wire.Commit(7, b"", 0, KEY, ONE, EPOCH, (SHARD,)), "commit to space 7"),
        (wire.Return(ONE, EPOCH[:7]), "batch of 4 bytes of rows and 7 of epochs"),
        (wire.Return(ONE * 257, EPOCH * 257), "batch of 1028 bytes of rows"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value[:40],
)
def test_absurd_values(site: Site, message: wire.ClientMessage, reason: str) -> None:
    engine = site.engine()
    engine.scheduler.send(message)
    site.refuses(engine.scheduler, reason)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (wire.List(b"", 0), "listing without a proper namespace or group"),
        (wire.List(NAMESPACE, -1), "listing without a proper namespace or group"),
        (wire.List(NAMESPACE, 1 << 32), "listing without a proper namespace or group"),
        (wire.List(NAMESPACE, 0, -1), "numbers out of range"),
        (wire.List(NAMESPACE, 0, 1 << 62), "numbers out of range"),
    ],
)
def test_absurd_listings(site: Site, message: wire.ClientMessage, reason: str) -> None:
    admin = site.session("admin")
    admin.send(message)
    site.refuses(admin, reason)


def test_a_question_about_what_is_being_restored(site: Site) -> None:
    engine = site.engine()
    engine.store([1])
    engine.scheduler.send(wire.Query(5, 1, 1, 0, KEY), wire.Started((5,)), wire.Query(5, 2, 1, 0, KEY))
    site.refuses(engine.scheduler, "operation 5 is being restored")


def test_a_question_said_twice_is_answered_once(site: Site) -> None:
    engine = site.engine()
    engine.store([1])
    engine.scheduler.send(wire.Query(5, 2, 1, 0, KEY), wire.Query(5, 2, 1, 0, KEY), wire.Query(5, 1, 1, 0, KEY))
    assert engine.scheduler.expect(wire.Answer).revision == 2
    engine.scheduler.send(wire.Query(6, 1, 1, 0, KEY))
    assert engine.scheduler.expect(wire.Answer).op == 6
    engine.bye()


def test_a_torn_message_in_a_session(site: Site) -> None:
    engine = site.engine()
    engine.scheduler.raw(framed(wire.frame(wire.Query(1, 1, 1, 0, KEY))[4:-2]))
    site.refuses(engine.scheduler, "malformed message")


def test_an_oversized_frame_in_a_session(site: Site) -> None:
    engine = site.engine()
    engine.scheduler.raw(struct.pack("<I", wire.MAX_FRAME + 1))
    site.refuses(engine.scheduler, f"at most {wire.MAX_FRAME} are allowed")


def test_half_a_frame_waits_for_the_other_half(site: Site) -> None:
    engine = site.engine()
    query = wire.frame(wire.Query(3, 1, 1, 0, KEY))
    engine.scheduler.raw(query[:9])
    site.is_well()
    site.is_well()
    engine.scheduler.raw(query[9:])
    assert engine.scheduler.expect(wire.Answer).op == 3
    engine.bye()


def test_values_that_mean_nothing_are_harmless(site: Site) -> None:
    """Odd numbers for what is only a name, and orders about what is not there."""
    engine = site.engine()
    least, most = -(1 << 63), (1 << 63) - 1
    engine.scheduler.send(wire.Open(least, NAMESPACE, (1 << 32) - 1, 64, ((1 << 40) - wire.SHARD_ALIGN,), most))
    assert engine.scheduler.expect(wire.Opened).note
    engine.scheduler.send(
        wire.Close(most),
        wire.Release(((least, most), (most, least), (77, 1))),
        wire.Retire(most),
        wire.Started((least, most)),
        wire.RestoreFailed(most),
        wire.Cut(7, most, b"torn", 0),
        wire.Prepare(8, 1, (), ((most, b"torn"),)),
        wire.Lookup(7, ((most, KEY), (most - 1, b"torn"))),
        wire.Query(9, 1, most, 0, b"torn"),
    )
    assert engine.scheduler.expect(wire.Answer).op == 8
    assert engine.scheduler.expect(wire.Residency).tiers == (b"", b"")
    assert engine.scheduler.expect(wire.Answer).reason == "detached"
    engine.scheduler.sync()
    site.is_well()
    engine.bye()


def test_rows_that_are_not_the_senders_are_counted_and_ignored(site: Site) -> None:
    """Not granted, granted to another, of another time, of another space, named twice."""
    engine = site.engine()
    peer, theirs = engine.scheduler, site.neighbour.scheduler
    row, epoch = peer.rows[0], peer.epochs[0]
    assert theirs.rows

    def names(rows: list[int], epochs: list[int]) -> tuple[bytes, bytes]:
        return array("I", rows).tobytes(), array("Q", epochs).tobytes()

    wrong = [
        names([(1 << 32) - 1], [epoch]),
        names([row], [epoch + 1]),
        names([row], [0]),
        names([theirs.rows[0]], [theirs.epochs[0]]),
    ]
    before = status(site.path)["counters"]
    for rows, epochs in wrong:
        peer.send(wire.Commit(1, b"", 0, KEY, rows, epochs, (SHARD,)), wire.Return(rows, epochs))
    peer.send(wire.Return(*names([row, row], [epoch, epoch])))
    peer.send(wire.Commit(1, b"", 0, KEY, *names([row], [epoch]), (SHARD,)))
    peer.sync()
    after = status(site.path)["counters"]
    assert after["stale"] - before.get("stale", 0) == 2 * len(wrong) + 2
    assert after["returns"] - before.get("returns", 0) == 1
    assert after["commits"] == before["commits"]
    site.neighbour.store([31])  # into the row that was named by another
    site.neighbour.works([31])
    site.is_well()
    engine.bye()


def test_a_second_half_of_the_same_rank(site: Site) -> None:
    impostor = Peer(site.path)
    impostor.raw(wire.PREAMBLE + wire.frame(wire.Hello("scheduler", "neighbour")))
    site.refuses(impostor, "instance neighbour already has a live scheduler of rank 0")
    another = Peer(site.path)
    another.raw(wire.PREAMBLE + wire.frame(wire.Hello("worker", "neighbour", 1, 2)))
    site.refuses(another, "instance neighbour has 1 ranks, not 2")


# --- too much ---------------------------------------------------------------------------------------------------------


def test_a_watcher_that_never_reads(folder: Path) -> None:
    """Its events are kept for it up to a limit; then it is let go, and who reads is told all the same."""
    small = "import kvhold.manager.connection as c; c.OUTBOX_LIMIT = 1 << 16; from kvhold.cli import main; main()"
    manager = Manager(folder, dram="16MiB", program=("-c", small))
    try:
        populated(manager.socket)
        deaf, neighbour = Engine(manager.socket, "deaf"), Engine(manager.socket, "neighbour", slots=200)
        for space in range(2, 50):
            deaf.scheduler.open(0, space=space, watch=True)
        neighbour.scheduler.open(0, space=2, watch=True)
        admin = Peer(manager.socket)
        admin.join("admin")
        removed = 0
        while "does not read its answers" not in manager.log.read_text():
            neighbour.store(list(range(1000)))
            admin.send(wire.Purge())
            admin.expect(wire.Purged)
            for _ in range(len(range(0, 1000, 256))):
                removed += len(neighbour.scheduler.expect(wire.Removed).keys) // KEY_BYTES
            assert removed % 1000 == 0
            assert removed < 100_000
        with pytest.raises(AssertionError, match="closed before Ready"):
            deaf.scheduler.expect(wire.Ready)
        neighbour.store(STORED)
        neighbour.works(STORED)
    finally:
        manager.kill()


def test_a_flood_of_questions_disturbs_nobody(site: Site) -> None:
    """Long questions without end; the neighbour is answered in between."""
    engine = site.engine(slots=256)
    chain = list(range(100, 2100))
    engine.store(chain)
    questions = b"".join(wire.frame(wire.Query(op, 1, 1, len(chain), keys_of(chain))) for op in range(1, 101))
    engine.scheduler.socket.setblocking(False)
    sent = 0
    while sent < len(questions):
        with contextlib.suppress(BlockingIOError):
            sent += engine.scheduler.socket.send(questions[sent:])
        site.neighbour.works(STORED)
    engine.scheduler.socket.setblocking(True)
    answers = {answer.op: answer for answer in (engine.scheduler.expect(wire.Answer) for _ in range(100))}
    assert answers.keys() == set(range(1, 101))
    full = [answer for answer in answers.values() if answer.resident == len(chain)]
    assert len(full) >= 64, "so many may wait for their answer"
    assert all((a.resident, a.reason) == (0, "budget") for a in answers.values() if a not in full)
    engine.bye()
    site.is_well()


# --- other users ------------------------------------------------------------------------------------------------------


def as_nobody(function: Callable[[], str]) -> str:
    """What ``function`` returns or raises in a process of another user."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            said = function()
        except BaseException as error:  # noqa: BLE001 - told to the test
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_kept_out(site: Site) -> None:
    def ask() -> str:
        return Peer(site.path).refusal()

    assert "PermissionError" in as_nobody(ask)  # the directory
    site.path.parent.chmod(0o755)
    assert "PermissionError" in as_nobody(ask)  # the socket
    site.path.chmod(0o666)
    try:
        assert as_nobody(ask) == "user 65534 is not the manager's user 0"
    finally:
        site.path.chmod(0o600)
        site.path.parent.chmod(0o700)
    assert "client refused: user 65534 is not the manager's user 0" in site.manager.log.read_text()
    site.is_well()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_client_keeps_away_from_another_users_socket(folder: Path) -> None:
    os.chown(folder, 65534, 65534)
    path = folder / "s"

    def listen() -> str:
        with socket.socket(socket.AF_UNIX) as server:
            server.settimeout(DEADLINE)
            server.bind(f"{path}.new")
            server.listen()
            Path(f"{path}.new").rename(path)  # whoever sees it finds somebody who listens
            return server.accept()[0].recv(100).hex()

    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, as_nobody(listen).encode())
        os._exit(0)
    os.close(write)
    until(path.is_socket, "it listens")
    with pytest.raises(AttachError, match="is another user's"):
        Channel(path, wire.Hello("admin"), 5)
    with os.fdopen(read) as pipe:
        assert pipe.read() == "", "something was told to a stranger"
    os.waitpid(child, 0)
