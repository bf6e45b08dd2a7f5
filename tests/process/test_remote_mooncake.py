"""A real Mooncake master and the owner of a pool, through the real process that speaks to them."""

import importlib.util
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.process.ports import free_port
from testbed.process.remote import Remote, await_listener, fails_while_frozen, keeps_what_it_is_given


def loads() -> str:
    """Why Mooncake cannot be used here. In a process of its own: its library is not to be in this one."""
    if importlib.util.find_spec("mooncake") is None:
        return "mooncake-transfer-engine-non-cuda is not installed"
    tried = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True, check=False)
    return tried.stderr.strip().rpartition("\n")[2]


WHY = loads()
pytestmark = pytest.mark.skipif(bool(WHY), reason=f"Mooncake cannot be loaded: {WHY}")
OWNER = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", sys.argv[1]) == 0
print("\\nready", flush=True)
for line in sys.stdin:
    what, name = line.split()
    if what == "begin":
        done = store.batch_put_session_start([name], [int(4096 + 16384)])
    elif what == "put":
        done = store.put(name, b"wrong" * 1000)
    elif what == "cross":
        name, other = name.split(",")
        value = store.get(other)
        store.remove(name, True)
        done = store.put(name, value)
    print(f"\\ndone {done}", flush=True)
"""


class Pool:
    def __init__(self) -> None:
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None
        assert spec.submodule_search_locations
        self.binary = Path(spec.submodule_search_locations[0]) / "mooncake_master"
        self.port = free_port()
        self.begin_master()
        self.owner = subprocess.Popen(
            [sys.executable, "-c", OWNER, f"127.0.0.1:{self.port}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._until("ready")

    def begin_master(self) -> None:
        ports = (f"--rpc_port={self.port}", f"--metrics_port={free_port()}")
        options = (
            "--rpc_address=127.0.0.1",
            "--metrics_host=127.0.0.1",
            "--default_kv_lease_ttl=1000",
        )
        quiet = subprocess.DEVNULL
        self.master = subprocess.Popen([self.binary, *ports, *options], stdout=quiet, stderr=quiet)
        await_listener(self.port, self.master)

    def tell(self, what: str, name: str) -> str:
        assert self.owner.stdin is not None
        self.owner.stdin.write(f"{what} {name}\n")
        self.owner.stdin.flush()
        return self._until("done")

    def _until(self, word: str) -> str:
        assert self.owner.stdout is not None
        for line in self.owner.stdout:
            if line.startswith(word):
                return line
        raise AssertionError("the pool's owner has ended")

    def end(self) -> None:
        for process in (self.owner, self.master):
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.end()


@pytest.fixture
def remote(pool: Pool) -> Iterator[Remote]:
    remote = Remote(f"mooncake://127.0.0.1:{pool.port}?protocol=tcp")
    remote.wait_until_it_serves()
    remote.forget(namespace=b"")
    remote.close()
    remote = Remote(f"mooncake://127.0.0.1:{pool.port}")
    remote.wait_until_it_serves()
    yield remote
    remote.close()


def test_what_is_put_is_asked_for_got_and_removed(remote: Remote) -> None:
    keeps_what_it_is_given(remote, 100)


def test_what_is_wrong_is_a_miss_counted_and_removed(pool: Pool, remote: Remote) -> None:
    remote.put(0, 1, 2)
    pool.tell("cross", f"{remote.name(0)},{remote.name(1)}")
    pool.tell("put", remote.name(3))
    got = remote.get(0, 1, 3)
    assert got.failed == (0, 2)
    assert (remote.counts("wrong")["identity"], remote.counts("wrong")["length"]) == (1, 1)
    assert remote.ask(0, 1, 3).there == (1,)


def test_a_put_that_another_began_and_never_ended_counts_as_refused(pool: Pool, remote: Remote) -> None:
    pool.tell("begin", remote.name(0))
    assert remote.put(0, 1).failed == (0,)
    assert remote.counts()["refused"] == 1
    assert remote.ask(0, 1).there == (1,)
    assert remote.get(0, 1).failed == (0,)


@pytest.mark.parametrize("doing", ["ask", "get", "put"])
def test_a_frozen_master_costs_the_process_and_is_used_again(pool: Pool, remote: Remote, doing: str) -> None:
    remote.put(0)
    fails_while_frozen(remote, pool.master.pid, doing)
    assert remote.put(2).failed == ()


def test_a_killed_master_is_used_again_when_it_is_back_empty(pool: Pool, remote: Remote) -> None:
    remote.put(0)
    pool.master.kill()
    pool.master.wait()
    while remote.serves:
        assert remote.ask(0).failed
        assert remote.get(0).failed == (0,)
    assert remote.executor.report()["state"] == "down"
    pool.begin_master()
    remote.wait_until_it_serves()
    assert remote.put(0).failed == ()
    assert remote.get(0).failed == ()
