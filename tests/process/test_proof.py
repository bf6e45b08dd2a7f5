"""A process's end is proved through a pidfd, however the kernel lets one have it; who cannot be watched is refused."""

import platform
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from testbed.process.manager_process import Manager
from testbed.process.peers import Peer, status, until
from testbed.process.puppet import Puppet

OLD_KERNEL = "import kvhold.manager.proof as proof; proof._SO_PEERPIDFD = 9999\n"
"""Linux before 6.5 knows no SO_PEERPIDFD."""
ELSEWHERE = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x20000000 | 0x08000000):  # CLONE_NEWPID | CLONE_NEWIPC
    sys.exit("cannot unshare")
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
"""
"""The manager lives in PID and IPC namespaces of its own, where its clients have no number."""
APART = ["unshare", "--pid", "--ipc", "--fork", "--kill-child"]
KERNEL = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])
MAIN = "from kvhold.cli import main; main()"


def serve(folder: Path, program: str) -> Manager:
    try:
        return Manager(folder, dram="16MiB", program=("-c", program))
    except RuntimeError as error:
        if "cannot unshare" in str(error):
            pytest.skip("no PID namespaces here")
        raise


@pytest.mark.parametrize("program", [MAIN, OLD_KERNEL + MAIN, ELSEWHERE + MAIN], ids=["new", "old", "elsewhere"])
def test_a_death_is_proved(folder: Path, puppet: Callable[[], Puppet], program: str) -> None:
    manager = serve(folder, program)
    try:
        process = puppet()
        peer = process.make("peer", str(manager.socket))
        peer.join("scheduler", "one")
        peer.close()
        until(lambda: [s["open"] for s in status(manager.socket)["sessions"]] == [False], "the session is lost")
        process.kill()
        until(lambda: not status(manager.socket)["sessions"], "its process is proved dead")
    finally:
        manager.kill()


@pytest.mark.parametrize("program", [MAIN, ELSEWHERE + MAIN], ids=["above", "beside"])
def test_containers_share_no_pid_namespace(folder: Path, program: str) -> None:
    """An engine is served and proved dead wherever it lives; before Linux 6.5, only by a manager that sees it."""
    manager = serve(folder, program)
    engine = Puppet(folder, APART)
    try:
        try:
            scheduler, worker = (engine.make("peer", str(manager.socket)) for _ in range(2))
        except (RuntimeError, OSError):
            pytest.skip("no PID namespaces here")
        if program != MAIN and KERNEL < (6, 5):
            assert "another PID namespace" in scheduler.refusal()
            return
        scheduler.join("scheduler", "one")
        worker.join("worker", "one")
        worker.map()
        scheduler.ready()
        scheduler.open(4)
        scheduler.commit([1, 2])
        _, resident, *_ = scheduler.ask([1, 2, 3])
        assert resident == 2
        engine.kill()
        until(lambda: not status(manager.socket)["sessions"], "its process is proved dead")
        assert status(manager.socket)["accounts"]["leased"] == 0
    finally:
        engine.kill()
        manager.kill()


def test_who_cannot_be_watched_is_refused(folder: Path) -> None:
    manager = serve(folder, ELSEWHERE + OLD_KERNEL + MAIN)
    try:
        assert "another PID namespace; share the host's (docker: --pid=host)" in Peer(manager.socket).refusal()
        assert "client refused: the process lives in another PID namespace" in manager.log.read_text()
    finally:
        manager.kill()


def test_one_that_left_before_it_was_looked_at_is_nobody(folder: Path, puppet: Callable[[], Puppet]) -> None:
    manager = serve(folder, OLD_KERNEL + MAIN)
    try:
        manager.stop()
        process = puppet()
        process.make("peer", str(manager.socket)).send_bye()
        process.kill()
        gone = Peer(manager.socket)
        gone.close()
        manager.cont()
        status(manager.socket)
        assert f"client refused: process {process.pid} cannot be watched" in manager.log.read_text()
        assert "has left" in manager.log.read_text()
    finally:
        manager.kill()
