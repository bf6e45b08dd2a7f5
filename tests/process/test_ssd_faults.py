"""Disks that cannot be used, fill up, vanish, hang, crawl, fail: the manager serves what is in DRAM, and ends."""

import itertools
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from testbed.process.manager_process import Manager
from testbed.process.peers import populated, until
from testbed.process.ssd_load import (
    NEW,
    OLD,
    SMALL,
    Client,
    Disk,
    Known,
    calm,
    look,
    no_damage,
    purge,
    rebuilt,
    reports,
    settle,
)
from xxhash import xxh3_128_digest

from process.test_serve import refused, run

Serve = Callable[..., Manager]


# --- what is refused at start -----------------------------------------------------------------------------------------


def test_two_managers_never_share_a_directory(serve: Serve, folder: Path) -> None:
    """The second is told so; the lock ends with its owner, however that ends."""
    directory = folder / "ssd"
    option = f"{directory}:64MiB"
    first = serve("--ssd", option, "--ssd-min-free", "1MiB")
    impatient = "import kvhold.manager.ssd as s; from kvhold.cli import main; s.LOCK_SECONDS = 0; main()"
    done = run("-c", impatient, "serve", "--dram", "8MiB", "--socket", str(folder / "s"), "--ssd", option)
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert f"ssd: {directory} is in use by another kvhold manager; stop that one, or give this one another" in said
    assert "Traceback" not in said
    first.kill()
    first.start()
    assert rebuilt(first.socket)["logs"][0]["path"] == str(directory)


def unusable(folder: Path, path: Path, size: str = "64MiB") -> str:
    """What a manager says that cannot use ``path``. It begins with the setting."""
    before = sorted(os.listdir(folder))
    said = refused(folder / "s", "--ssd", f"{path}:{size}", dram="8MiB")
    assert f"ssd: {path}" in said or f"for {path}" in said, said
    assert {*os.listdir(folder)} <= {*before, path.name}, "something was left behind"
    return said


def test_refuses_what_is_no_directory(folder: Path) -> None:
    (folder / "file").write_text("precious")
    for path in (folder / "file", folder / "file" / "below"):
        assert "cannot be used: Not a directory; check that" in unusable(folder, path)
    assert (folder / "file").read_text() == "precious"


def test_refuses_a_read_only_filesystem(folder: Path, tmpfs: Callable[[str], Path]) -> None:
    where = tmpfs("16m")
    subprocess.run(["mount", "-o", "remount,ro", str(where)], check=True)
    for path in (where, where / "below"):
        said = unusable(folder, path)
        assert f"ssd: {path} cannot be used: " in said
        assert "Read-only file system; check that" in said


def test_refuses_what_it_may_not_write_to(folder: Path) -> None:
    (folder / "d").mkdir(mode=0o500)
    command = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", "true"]
    if os.getuid() == 0 and (not shutil.which("setpriv") or subprocess.run(command, check=False).returncode):
        pytest.skip("root may write anywhere here")
    said = ""
    program = [
        "-m",
        "kvhold.cli",
        "serve",
        "--dram",
        "8MiB",
        "--socket",
        str(folder / "s"),
        "--ssd",
        f"{folder}/d:64MiB",
    ]
    if os.getuid() == 0:
        launch = "import os, sys; os.execvp('setpriv', ['setpriv', *sys.argv[1:]])"
        import sys

        done = run("-c", launch, *command[1:3], sys.executable, *program)
    else:
        done = run(*program)
    said = " ".join(done.stderr.split())
    assert done.returncode == 2, said
    assert f"ssd: {folder}/d cannot be used: {folder}/d/kvhold.lock: Permission denied; check that" in said
    assert "this user may write to it" in said
    assert os.listdir(folder / "d") == []


def test_refuses_sizes_that_hold_nothing(folder: Path) -> None:
    said = unusable(folder, folder / "d", "200KiB")
    assert "200KiB for" in said
    assert "is too small" in said
    assert "give at least" in said
    assert "is not PATH:SIZE" in refused(folder / "s", "--ssd", str(folder / "d"))
    assert "is not a size" in refused(folder / "s", "--ssd", f"{folder / 'd'}:many")


def test_refuses_another_version_and_leaves_it_alone(folder: Path) -> None:
    directory = folder / "d"
    directory.mkdir()
    head = bytearray(4080)
    struct.pack_into("<8sII16sQQ", head, 0, b"kvholdLG", 2, 0, bytes(16), 1 << 20, 1)
    block = bytes(head) + xxh3_128_digest(bytes(head))
    (directory / "kvhold.log").write_bytes(block)
    (directory / "kvhold-00000000.segment").write_bytes(b"precious")
    said = unusable(folder, directory)
    assert "in another version of the format" in said
    assert "use another directory, or remove" in said
    assert (directory / "kvhold.log").read_bytes() == block
    assert (directory / "kvhold-00000000.segment").read_bytes() == b"precious"


# --- what happens while it runs ---------------------------------------------------------------------------------------


@pytest.fixture
def disk(serve: Serve, folder: Path) -> Disk:
    disk = Disk(serve, folder)
    disk.fill()
    return disk


def test_a_read_that_hangs_costs_its_slot_and_a_miss(disk: Disk) -> None:
    disk.order("block-read")
    disk.misses(disk.cold[:2], "deadline")
    report = disk.report()
    assert report["accounts"]["loading"] == 2 * SMALL.size
    assert report["logs"][0]["io_running"] >= 1
    disk.dram_works()
    disk.misses(disk.cold[4:6], "out_of_service")  # the disk is not asked any more
    assert disk.client.ask(disk.cold[:2]).resident == 0
    disk.hits(NEW[:8])
    assert disk.report()["accounts"]["loading"] == 2 * SMALL.size, "a call may still write to the slots"
    disk.end_of("block-read")
    reports(disk.manager.socket, lambda report: not report["accounts"]["loading"], "the read ended")
    disk.hits(disk.cold[:8])
    counters = disk.report()["counters"]
    assert counters["keys_deadline"] >= 2
    assert counters["keys_out_of_service"] >= 2
    disk.ends()


def test_a_hung_read_does_not_keep_a_manager_from_ending(disk: Disk) -> None:
    disk.order("block-read")
    disk.misses(disk.cold[:2], "deadline")
    disk.ends()
    assert "a call to the disk hangs, and is not waited for" in disk.manager.log_tail()
    disk.end_of("block-read")
    disk.again()
    disk.hits(disk.cold[:8])


@pytest.mark.parametrize(
    ("operation", "how"),
    [
        ("write", "SIGKILL"),
        ("sync", "SIGTERM"),
        pytest.param("write", "SIGTERM", marks=pytest.mark.long),
        pytest.param("sync", "SIGKILL", marks=pytest.mark.long),
    ],
)
def test_a_hung_write_ends_with_the_manager(disk: Disk, operation: str, how: str) -> None:
    disk.order(f"block-{operation}")
    # Enough to fill a segment, so that there is something to sync, too.
    more = list(range(2001, 2201))
    for start in range(0, len(more), 20):
        disk.client.store(more[start : start + 20])
        disk.hits(more[start : start + 20])
    reports(disk.manager.socket, lambda report: report["logs"][0]["io_running"], f"a {operation} hangs")
    disk.hits(disk.cold[:4])  # reads need not wait for it
    if how == "SIGTERM":
        disk.ends()
    else:
        disk.manager.kill()
    disk.end_of(f"block-{operation}")
    disk.again()
    assert set(disk.client.tiers(OLD)) == {2}, "what was written before is found"
    there = [key for key, tier in zip(more, disk.client.tiers(more), strict=True) if tier]
    for start in range(0, len(there), 8):
        disk.hits(there[start : start + 8])
    disk.hits(disk.cold[:8])
    no_damage(disk.report())
    disk.ends()


def test_a_slow_disk_answers_in_time_and_then_helps(disk: Disk) -> None:
    """Seconds per read: the question is answered before, the bytes are there for the next one."""
    disk.order("delay-read", "1.0")
    disk.misses(disk.cold[:2], "deadline")
    disk.dram_works()
    reports(disk.manager.socket, lambda report: not report["accounts"]["loading"], "the slow read ended")
    disk.hits(disk.cold[:2])
    assert not disk.report()["counters"].get("read_failed")
    disk.ends()


def test_a_disk_that_fails_to_read_is_left_alone_and_tried_again(disk: Disk) -> None:
    disk.order("fail-read", "EIO")
    for position in range(3):
        disk.misses(disk.cold[position : position + 1], "read_failed")
    until(lambda: disk.client.ask(disk.cold[4:5]).reason in ("out_of_service", "read_failed"), "left alone")
    disk.dram_works()
    report = disk.report()
    assert report["counters"]["read_failed"] >= 3
    assert report["logs"][0]["errors"]["EIO"] >= 3
    assert disk.client.tiers(disk.cold[:3]) == bytes(3), "what could not be read is found no more"
    disk.end_of("fail-read")
    rest = disk.cold[8:12]
    until(lambda: disk.client.ask(rest).resident == len(rest), "the disk is used again")
    disk.ends()


@pytest.mark.parametrize(
    ("operation", "code"),
    [
        ("write", "EIO"),
        ("allocate", "ENOSPC"),
        pytest.param("create", "EROFS", marks=pytest.mark.long),
        pytest.param("sync", "EIO", marks=pytest.mark.long),
    ],
)
def test_a_disk_that_fails_to_write_is_tried_again(serve: Serve, folder: Path, operation: str, code: str) -> None:
    disk = Disk(serve, folder)
    disk.client.store(OLD[:20])
    settle(disk.manager.socket)
    disk.order(f"fail-{operation}", code)
    more = itertools.count(2001)

    def store_some() -> list[int]:
        keys = list(itertools.islice(more, 20))
        disk.client.store(keys)
        disk.hits(keys)
        return keys

    for _ in range(10):
        store_some()

    def noticed() -> bool:
        store_some()
        log = disk.report()["logs"][0]
        return bool(log["errors"].get(code)) and (operation != "sync" or log["sync_failures"] > 0)

    until(noticed, "the failure is counted")
    before = disk.report()["counters"]["write_objects"]
    disk.end_of(f"fail-{operation}")

    def written() -> list[int]:
        """What was stored last, once more gets to the disk than a segment may have had room for."""
        keys = store_some()
        return keys if disk.report()["counters"]["write_objects"] > before + 200 else []

    last = until(written, "the disk is used again")
    report = settle(disk.manager.socket)
    assert not report["counters"].get("read_failed")
    disk.manager.kill()
    disk.again()
    there = [key for key, tier in zip(last, disk.client.tiers(last), strict=True) if tier]
    assert there
    for start in range(0, len(there), 8):
        disk.hits(there[start : start + 8])
    disk.ends()


def test_a_purge_that_a_disk_does_not_take_says_so(disk: Disk) -> None:
    """Whoever asks is told that it may come back; this manager finds nothing of it any more."""
    for order, text in (("fail-sync", "EIO"), ("block-sync", "")):
        disk.order(order, text)
        with pytest.raises(AssertionError, match="not every SSD has taken it"):
            purge(disk.manager.socket, disk.known)
        assert set(disk.client.tiers(OLD + NEW)) == {0}
        disk.end_of(order)

    def taken() -> bool:
        try:
            purge(disk.manager.socket, disk.known)
        except AssertionError:  # a disk with much to do takes longer than it waits
            return False
        return True

    until(taken, "the disk takes it")
    disk.manager.kill()
    disk.again()
    assert set(disk.client.tiers(OLD + NEW)) == {0}
    disk.ends()


# --- filesystems ------------------------------------------------------------------------------------------------------


def plain(serve: Serve, directory: Path, size: str = "64MiB", dram: str = "32MiB") -> tuple[Manager, Client]:
    manager = serve("--ssd", f"{directory}:{size}", "--ssd-min-free", "1MiB", dram=dram)
    populated(manager.socket)
    return manager, Client(manager.socket, SMALL, Known(), slots=4)


def work(manager: Manager, client: Client, first: int, count: int) -> dict[str, Any]:
    """Store a lot, and find what was stored last, in DRAM; the report then."""
    for start in range(first, first + count, 20):
        keys = list(range(start, start + 20))
        client.store(keys)
        # Of so little DRAM, what is being written takes much of what may be leased.
        until(lambda keys=keys: client.ask(keys).resident == len(keys), "what was stored is found")
    return reports(manager.socket, lambda report: not report["io_pending"], "all I/O ended")


def test_a_full_disk_takes_what_it_can(serve: Serve, tmpfs: Callable[[str], Path]) -> None:
    """The budget is more than there is. What is there is used, round and round, and reads from it go on."""
    where = tmpfs("64m")
    manager, client = plain(serve, where / "ssd", "128MiB", "16MiB")
    assert "but only" in manager.log_tail()
    keys = list(range(1, 1601))
    report = work(manager, client, keys[0], len(keys))
    assert report["counters"].get("reuse_failed"), report
    assert report["logs"][0]["errors"].get("ENOSPC"), report
    assert report["counters"]["write_objects"] > 64 * 16, ("not even once around", report)
    assert not report["counters"].get("read_failed"), report
    # There is room for one segment, which is given up whole: right after that DRAM has all that the log has.
    cold: list[int] = []
    while len(cold) <= 50 and len(keys) < 2200:
        more = list(range(len(keys) + 1, len(keys) + 21))
        report = work(manager, client, more[0], len(more))
        keys += more
        cold = [key for key, tier in zip(keys, client.tiers(keys), strict=True) if tier == 2]
    assert len(cold) > 50, str(report)
    assert client.ask(cold[-8:]).resident == 8
    assert shutil.disk_usage(where).free >= 1 << 20
    assert manager.terminate() == 0
    calm(manager)


def test_a_directory_that_is_removed_costs_no_more_than_misses(serve: Serve, folder: Path) -> None:
    directory = folder / "ssd"
    manager, client = plain(serve, directory)
    work(manager, client, 1, 200)
    shutil.rmtree(directory)
    work(manager, client, 1001, 1000)
    report = look(manager.socket)
    assert report["logs"][0]["errors"].get("ENOENT") or report["logs"][0]["sync_failures"], report["logs"]
    for start in range(1, 200, 8):
        client.ask(list(range(start, start + 8)))  # bytes that are right, or a miss
    assert not directory.exists()
    assert manager.terminate() == 0
    calm(manager)


@pytest.mark.parametrize("another", [pytest.param(False, marks=pytest.mark.long), True])
def test_what_takes_the_directorys_place_is_left_alone(serve: Serve, folder: Path, another: bool) -> None:
    """A directory is removed and made anew under a manager, perhaps by one that was told to use it, too."""
    directory = folder / "ssd"
    manager, client = plain(serve, directory)
    work(manager, client, 1, 200)
    shutil.rmtree(directory)
    directory.mkdir(mode=0o700)
    second: Manager | None = None
    if another:
        (folder / "two").mkdir()
        second = Manager(folder / "two", "--ssd", f"{directory}:8MiB", "--ssd-min-free", "1MiB", dram="32MiB")
        other = Client(second.socket, SMALL, client.known, slots=4)
        other.store(list(range(9001, 9041)))
        settle(second.socket)
    try:
        before = {path.name: path.stat().st_ino for path in directory.iterdir()}
        work(manager, client, 1001, 1000)
        assert {path.name: path.stat().st_ino for path in directory.iterdir()} == before
        if second is not None:
            second.kill()
            second.start()
            rebuilt(second.socket)
            other = Client(second.socket, SMALL, client.known, slots=4)
            for start in range(9001, 9041, 8):
                assert other.ask(list(range(start, start + 8))).resident == 8
    finally:
        if second is not None:
            second.kill()
    assert manager.terminate() == 0
    calm(manager)


def test_a_filesystem_that_is_unmounted_is_not_replaced_by_what_is_below(
    serve: Serve, tmpfs: Callable[[str], Path]
) -> None:
    where = tmpfs("100m")
    manager, client = plain(serve, where)
    work(manager, client, 1, 200)
    subprocess.run(["umount", "-l", str(where)], check=True)
    assert os.listdir(where) == []
    work(manager, client, 1001, 1000)
    assert os.listdir(where) == [], "segments were made on another filesystem"
    for start in range(1, 200, 8):
        client.ask(list(range(start, start + 8)))
    assert manager.terminate() == 0
    calm(manager)
