"""A real Redis server, through the real process that speaks to it."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.process.remote import NAMESPACE, Remote

from kvhold.core.events import Ask, Read, Write

redis = pytest.importorskip("redis")
SERVER = shutil.which("redis-server") or shutil.which("valkey-server") or ""
pytestmark = pytest.mark.skipif(not SERVER, reason="there is no redis-server (Debian: redis-server)")


class Server:
    def __init__(self, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.options = options
        self.url = f"redis://127.0.0.1:{self.port}"
        self.begin()

    def begin(self) -> None:
        listen = ("--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no")
        self.process = subprocess.Popen([SERVER, *listen, *self.options], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert time.monotonic() < deadline
                assert self.process.poll() is None
                time.sleep(0.01)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *how: object) -> None:
        self.kill()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[object]:
    with redis.Redis(port=server.port) as client:
        client.flushall()
        yield client


@pytest.fixture
def remote(server: Server, client: object) -> Iterator[Remote]:
    remote = Remote(server.url)
    remote.wait_until_it_serves()
    yield remote
    remote.close()


def test_what_is_put_is_asked_for_got_and_removed(remote: Remote) -> None:
    assert remote.put(*range(100)).failed == ()
    assert remote.ask(99, 100, 0).there == (0, 2)
    assert remote.get(2, 100, 0).failed == (1,)
    assert remote.has(500, 2)
    assert remote.has(502, 0)
    assert remote.forget(0, 1).failed == ()
    assert remote.ask(0, 1, 2).there == (2,)
    assert remote.forget(namespace=NAMESPACE).failed == ()
    assert remote.ask(*range(100)).there == ()


def test_pools_have_nothing_in_common(server: Server, remote: Remote) -> None:
    remote.put(0)
    other = Remote(f"{server.url}?pool=other")
    other.wait_until_it_serves()
    assert other.ask(0).there == ()
    other.forget(namespace=b"")
    other.close()
    assert remote.ask(0).there == (0,)


@pytest.mark.parametrize(
    ("kind", "value"),
    [("checksum", None), ("length", b"short"), ("length", bytes(1 << 20)), ("identity", "another"), ("length", ["a"])],
)
def test_what_is_wrong_is_a_miss_counted_and_removed(remote: Remote, client: object, kind: str, value: object) -> None:
    assert isinstance(client, redis.Redis)
    remote.put(0, 1)
    right = client.get(remote.name(0))
    if isinstance(value, list):
        client.delete(remote.name(0))
        client.lpush(remote.name(0), *value)
    else:
        wrong = {None: right[:-1] + b"?", "another": client.get(remote.name(1))}.get(value, value)  # type: ignore[call-overload]
        client.set(remote.name(0), wrong)
    assert remote.get(0, 1).failed == (0,)
    assert remote.counts("wrong")[kind] == 1
    assert sum(remote.counts("wrong").values()) == 1
    assert not client.exists(remote.name(0))


@pytest.mark.parametrize("doing", ["ask", "get", "put"])
def test_a_frozen_server_costs_the_process_and_is_used_again(server: Server, remote: Remote, doing: str) -> None:
    remote.put(0)
    pid = remote.pid
    server.process.send_signal(signal.SIGSTOP)
    try:
        io = {
            "ask": lambda: remote.submit(Ask, ((NAMESPACE, 0, remote.key(0)),)),
            "get": lambda: remote.submit(Read, (remote.stored(0, at=500),)),
            "put": lambda: remote.submit(Write, (remote.stored(1),)),
        }[doing]()
        told = remote.end(io)
        assert told.failed
        assert not Path(f"/proc/{pid}").exists(), "answered while it may still write"
        if doing == "get":
            assert told.kept
    finally:
        server.process.send_signal(signal.SIGCONT)
    remote.until(lambda: not remote.serves)
    remote.wait_until_it_serves()
    assert remote.get(0).failed == ()


def test_a_killed_server_is_used_again_when_it_is_back_empty(server: Server, remote: Remote) -> None:
    remote.put(0)
    server.kill()
    while remote.serves:
        assert remote.ask(0).failed
        assert remote.get(0).kept
    assert remote.executor.report()["state"] == "down"
    server.begin()
    remote.wait_until_it_serves()
    assert remote.ask(0).there == ()
    assert remote.put(0).failed == ()


def test_a_full_store_that_evicts_nothing_refuses_and_says_what_helps() -> None:
    with Server("--maxmemory", "1mb", "--maxmemory-policy", "noeviction") as server:
        remote = Remote(server.url)
        remote.until(lambda: remote.executor.report()["state"] == "refusing")
        assert "allkeys-lru" in str(remote.executor.report()["why"])
        remote.close()


def test_a_password_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with Server("--requirepass", "hunter2") as server:
        remote = Remote(server.url)
        remote.until(lambda: remote.executor.report()["state"] == "down")
        assert "uthentication" in str(remote.executor.report()["why"])
        remote.close()
        monkeypatch.setenv("KVHOLD_REMOTE_PASSWORD", "hunter2")
        remote = Remote(server.url)
        remote.wait_until_it_serves()
        assert b"hunter2" not in Path(f"/proc/{remote.pid}/cmdline").read_bytes()
        assert os.environ["KVHOLD_REMOTE_PASSWORD"] not in str(remote.executor.report())
        remote.close()
