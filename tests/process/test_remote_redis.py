"""A real Redis server, through the real process that speaks to it."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.process.ports import free_port
from testbed.process.remote import Remote, await_listener, fails_while_frozen, keeps_what_it_is_given

redis = pytest.importorskip("redis")
SERVER = shutil.which("redis-server") or shutil.which("valkey-server") or ""
pytestmark = pytest.mark.skipif(not SERVER, reason="there is no redis-server (Debian: redis-server)")


class Server:
    def __init__(self, *options: str) -> None:
        self.port = free_port()
        self.options = options
        self.url = f"redis://127.0.0.1:{self.port}"
        self.begin()

    def begin(self) -> None:
        listen = ("--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no")
        self.process = subprocess.Popen([SERVER, *listen, *self.options], stdout=subprocess.DEVNULL)
        await_listener(self.port, self.process)

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
    keeps_what_it_is_given(remote, 100)


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
    told = fails_while_frozen(remote, server.process.pid, doing)
    if doing == "get":
        assert told.kept
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
