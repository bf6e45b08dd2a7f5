"""A folder that hosts share, through the real process that speaks to it."""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.process.remote import NAMESPACE, Remote
from xxhash import xxh3_128_digest

from kvhold.core.events import Ask, Done, Found, Read, Write
from kvhold.tiers.remote.record import HEADER

pytest.importorskip("obstore")


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Remote]:
    remote = Remote(f"file://{tmp_path}?min_free=1MiB")
    remote.wait_until_it_serves()
    yield remote
    remote.close()


def test_what_is_put_is_asked_for_got_and_removed(remote: Remote) -> None:
    assert remote.ask(0, 1).there == ()
    assert remote.put(0, 1, 2, age=5 * 10**9).failed == ()
    asked = remote.ask(1, 9, 2)
    assert (asked.there, asked.failed) == ((0, 2), False)
    got = remote.get(2, 9, 0)
    assert (got.failed, got.kept) == ((1,), False)
    assert remote.has(500, 2)
    assert remote.has(502, 0)
    assert got.ages[0] >= 5 * 10**9
    assert got.ages[1] == 0
    assert remote.forget(0).failed == ()
    assert remote.ask(0, 1).there == (1,)
    counts = remote.counts()
    assert (counts["put"], counts["got"], counts["missed"]) == (3, 2, 1)


def test_many_are_cut_into_calls_and_come_back_whole(remote: Remote) -> None:
    numbers = range(300)
    assert remote.put(*numbers).failed == ()
    assert remote.ask(*numbers, *range(600, 1400)).there == tuple(numbers)
    assert remote.get(*numbers, at=400).failed == ()
    assert all(remote.has(400 + number, number) for number in numbers)


def changed(path: Path, kind: str, remote: Remote) -> None:
    data = path.read_bytes()
    if kind == "checksum":
        data = data[:-1] + bytes([data[-1] ^ 1])
    elif kind == "length":
        data = data[:-4096]
    elif kind == "identity":
        data = remote.path(1).read_bytes()
    else:
        head = data[:8] + b"\x02" + data[9 : HEADER - 16]
        data = head + xxh3_128_digest(head) + data[HEADER:]
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["checksum", "length", "identity", "version"])
def test_what_is_wrong_is_a_miss_counted_and_removed(remote: Remote, kind: str) -> None:
    assert remote.put(0, 1).failed == ()
    changed(remote.path(0), kind, remote)
    got = remote.get(0, 1)
    assert (got.failed, got.kept) == ((0,), False)
    assert remote.counts("wrong") == {**dict.fromkeys(remote.counts("wrong"), 0), kind: 1}
    assert not remote.path(0).exists()
    assert remote.path(1).exists()


def test_a_purge_takes_its_namespace_and_nothing_from_before_it_is_believed(remote: Remote) -> None:
    assert remote.put(0, 1).failed == ()
    before = remote.path(0).read_bytes()
    assert remote.forget(namespace=b"another").failed == ()
    assert remote.ask(0, 1).there == (0, 1)
    assert remote.forget(namespace=NAMESPACE).failed == ()
    assert remote.ask(0, 1).there == ()
    remote.path(0).write_bytes(before)  # another host had it, and put it again
    assert remote.ask(0).there == (0,)
    assert remote.get(0).failed == (0,)
    assert remote.counts("wrong")["old"] == 1
    assert not remote.path(0).exists()


def test_what_is_being_forgotten_is_gone_and_no_write_before_it_brings_it_back(remote: Remote) -> None:
    for number in range(200):
        remote.arena[remote.slot(number)] = remote.bytes_of(number)
    numbers = tuple(remote.stored(number) for number in range(200))
    ios = [remote.submit(Write, numbers) for _ in range(3)]
    assert remote.forget(namespace=NAMESPACE).failed == ()
    assert all(isinstance(remote.end(io), Done) for io in ios)
    assert remote.ask(*range(200)).there == ()


def test_a_frozen_process_is_killed_and_its_slots_come_back_only_then(remote: Remote) -> None:
    remote.put(0)
    pid = remote.pid
    os.kill(pid, signal.SIGSTOP)
    ios = [
        remote.submit(Ask, ((NAMESPACE, 0, remote.key(0)),)),
        remote.submit(Read, (remote.stored(0, at=500),)),
        remote.submit(Write, (remote.stored(1),)),
    ]
    began = time.monotonic()
    for io in ios:
        remote.end(io)
        assert not Path(f"/proc/{pid}").exists(), "answered while it may still write"
    assert time.monotonic() - began > 2.5
    asked, got, put = (remote.told[io] for io in ios)
    assert isinstance(asked, Found)
    assert asked.failed
    assert isinstance(got, Done)
    assert (got.failed, got.kept) == ((0,), True)
    assert isinstance(put, Done)
    assert put.failed == (0,)
    remote.until(lambda: not remote.serves)
    assert "took longer than 3 s" in str(remote.executor.report()["why"])
    remote.wait_until_it_serves()
    assert remote.get(0).failed == ()


def test_while_it_does_not_serve_nothing_waits_and_what_to_forget_is_kept(remote: Remote) -> None:
    remote.put(0, 1)
    os.kill(remote.pid, signal.SIGKILL)
    remote.until(lambda: not remote.serves)
    assert remote.ask(0).failed
    assert remote.get(0).kept
    assert remote.put(2).failed == (0,)
    assert remote.forget(0).failed == (0,)
    assert remote.counts()["dropped"] == 1
    remote.wait_until_it_serves()
    assert remote.ask(0, 1).there == (1,)
    remote.until(lambda: not remote.path(0).exists())


def test_what_is_killed_at_random_leaves_nothing_and_every_call_is_answered(remote: Remote) -> None:
    remote.put(*range(100))
    fds, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(20):
        remote.wait_until_it_serves()
        pid = remote.pid
        ios = [remote.submit(Read, tuple(remote.stored(number, at=300 + number) for number in range(100)))]
        ios += [remote.submit(Ask, ((NAMESPACE, 0, remote.key(0)),)) for _ in range(10)]
        remote.until(lambda ios=ios: any(io in remote.told for io in ios))  # type: ignore[misc]
        os.kill(pid, signal.SIGKILL)
        for io in ios:
            remote.end(io)
        remote.until(lambda: not remote.serves)
        assert not Path(f"/proc/{pid}").exists()
    remote.wait_until_it_serves()
    assert len(os.listdir("/proc/self/fd")) == fds
    assert threading.active_count() == threads
    assert remote.get(*range(100), at=300).failed == ()


def test_a_full_folder_refuses_what_is_new_and_gives_what_it_has(tmp_path: Path) -> None:
    remote = Remote(f"file://{tmp_path}?min_free=1000TiB")
    remote.until(lambda: remote.executor.report()["state"] == "refusing")
    assert "lower ?min_free=" in str(remote.executor.report()["why"])
    remote.close()


def test_a_folder_that_is_missing_is_named_and_used_once_it_is_there(tmp_path: Path) -> None:
    remote = Remote(f"file://{tmp_path}/later")
    remote.until(lambda: remote.executor.report()["state"] == "down")
    assert "is not a folder; make it" in str(remote.executor.report()["why"])
    assert remote.ask(0).failed
    (tmp_path / "later").mkdir()
    remote.wait_until_it_serves()
    remote.close()


def test_a_read_only_store_is_left_as_it_is(tmp_path: Path, remote: Remote) -> None:
    remote.put(0, 1)
    changed(remote.path(0), "checksum", remote)
    reader = Remote(f"file://{tmp_path}", read_only=True)
    reader.wait_until_it_serves()
    assert reader.get(0, 1).failed == (0,)
    assert reader.forget(1).failed == (0,)
    reader.close()
    assert remote.ask(0, 1).there == (0, 1)


def test_the_process_ends_with_who_started_it(tmp_path: Path) -> None:
    script = (
        "import sys, time; from testbed.process.remote import Remote\n"
        f"remote = Remote('file://{tmp_path}?min_free=1MiB'); remote.wait_until_it_serves()\n"
        "print(remote.pid, flush=True); time.sleep(600)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=env)
    assert parent.stdout is not None
    pidfd = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(60_000)
    os.close(pidfd)


def check(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "kvhold.cli", "remote", "check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_check_measures_and_leaves_nothing(tmp_path: Path) -> None:
    done = check(f"file://{tmp_path}?min_free=1MiB", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["state"] == "serving"
    assert min(said["put_bytes_per_second"], said["get_bytes_per_second"], said["ask_seconds"]) > 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("url", "code", "says"),
    [
        ("file://{}/none", 1, "is not a folder; make it"),
        ("file://{}?min_free=1000TiB", 1, "lower ?min_free="),
        ("redis://127.0.0.1:1", 1, "down"),
        ("file://mnt", 2, "three slashes"),
    ],
)
def test_a_check_names_what_is_missing(tmp_path: Path, url: str, code: int, says: str) -> None:
    done = check(url.format(tmp_path))
    assert done.returncode == code
    assert says in done.stdout + done.stderr
