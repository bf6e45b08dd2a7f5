"""Whether a manager runs is seen in its page, whichever namespaces it and the engine live in."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from testbed.process.manager_process import Manager
from testbed.process.peers import until
from testbed.process.puppet import Puppet

from process.test_proof import APART, ELSEWHERE, KERNEL, MAIN, serve


def running_in(manager: Manager) -> int:
    """The process that is the manager, which may be the child of one that waits for it outside of its namespaces."""
    children = Path(f"/proc/{manager.pid}/task/{manager.pid}/children").read_text().split()
    return int(children[0]) if children else manager.pid


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize(
    ("program", "within"),
    [(MAIN, []), (MAIN, APART), (ELSEWHERE + MAIN, []), (ELSEWHERE + MAIN, APART)],
    ids=["the same", "the manager's above", "the engine's above", "beside each other"],
)
def test_a_manager_that_does_not_run_is_told_from_one_that_has_not_answered(
    folder: Path, program: str, within: Sequence[str]
) -> None:
    if program != MAIN and KERNEL < (6, 5):
        pytest.skip("before Linux 6.5 the engine is refused: test_containers_share_no_pid_namespace")
    manager = serve(folder, program)
    engine = Puppet(folder, within)
    try:
        try:
            asker = engine.make("asker", str(manager.socket))
        except (RuntimeError, OSError):
            if not within:
                raise
            pytest.skip("no PID namespaces here")
        asker.ask()
        until(lambda: not asker.silent(), "a turn of the manager is seen")
        pid = running_in(manager)
        os.kill(pid, signal.SIGSTOP)
        until(lambda: state(pid) == "T", "it is stopped")
        asker.ask()
        assert asker.silent()
        os.kill(pid, signal.SIGCONT)
        until(lambda: not asker.silent(), "it runs again")
    finally:
        engine.kill()
        manager.kill()
