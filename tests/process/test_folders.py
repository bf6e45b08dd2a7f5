"""Where a manager listens and is found, whoever looks, and what becomes of it when its folder goes away."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from testbed.process.manager_process import Manager
from testbed.process.peers import listening_pid, until
from testbed.process.puppet import environment

from kvhold import folders as where

OTHER = 12345
"""Another user."""


@pytest.fixture
def home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has the folders that are looked at in its own ``run``, ``user`` and ``tmp``, as the root of a host has them."""
    monkeypatch.delenv("KVHOLD_RUNTIME_DIR")
    for name in ("run", "user", "tmp"):
        (folder / name).mkdir()
    return folder


def folders(home: Path) -> list[Path]:
    return [home / "run/kvhold", home / "user/kvhold", home / "tmp/kvhold-1"]


def program(home: Path) -> tuple[str, str]:
    """The commands as on a host whose folders are those of ``home``."""
    patch = (
        "from pathlib import Path; import kvhold.folders as found\n"
        f"found._GIVEN = Path({str(home / 'run/kvhold')!r})\n"
        f"found.runtime_folders = lambda: [Path(each) for each in {list(map(str, folders(home)))}]\n"
    )
    return "-c", patch + "from kvhold.cli import main; main()"


def kvhold(home: Path, *command: str, code: int | tuple[int, ...] = 0) -> str:
    """What a command says that ends so."""
    done = subprocess.run(
        [sys.executable, *program(home), *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment(COLUMNS="400"),
    )
    assert done.returncode in (code if isinstance(code, tuple) else (code,)), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return " ".join((done.stdout + done.stderr).replace("│", " ").split())


class Placed(Manager):
    """A manager that was told of no socket, and is to choose the one in ``where``."""

    def __init__(self, home: Path, where: Path, number: int) -> None:
        self.socket = where / "kvhold.sock"
        self.log = home / f"{number}.log"
        self._command = [sys.executable, *program(home), "serve", "--dram", "8MiB"]
        self.start()


def remove(folder: Path) -> None:
    """All at once: a manager may put something back into a folder that is being emptied."""
    gone = folder.rename(folder.with_name(folder.name + "-removed"))
    shutil.rmtree(gone)


@pytest.fixture
def serve(home: Path) -> Iterator[Callable[..., Manager]]:
    """Starts a manager that is to choose a certain folder."""
    managers: list[Manager] = []

    def start(where: Path) -> Manager:
        managers.append(Placed(home, where, len(managers)))
        return managers[-1]

    yield start
    for each in managers:
        each.cont()
        each.kill()


def test_the_environment_of_whoever_looks_does_not_matter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVHOLD_RUNTIME_DIR")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("TMPDIR", raising=False)
    before = where.runtime_folders()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert where.runtime_folders() == before
    monkeypatch.setenv("KVHOLD_RUNTIME_DIR", str(tmp_path))
    assert where.runtime_folders() == [tmp_path]


def test_found_in_each_folder(home: Path, serve: Callable[..., Manager]) -> None:
    """A service manager's, a session's, and that of whoever had neither when it was started."""
    said = kvhold(home, "status", code=1)
    for folder in folders(home):
        assert f"{folder}/kvhold.sock" in said
    running = serve(folders(home)[1])
    assert f"on {running.socket}" in kvhold(home, "status")
    running.kill()
    folders(home)[0].mkdir()
    running = serve(folders(home)[0])
    assert f"on {running.socket}" in kvhold(home, "status")
    running.kill()
    shutil.rmtree(home / "run")
    shutil.rmtree(home / "user")
    running = serve(folders(home)[2])
    assert f"on {running.socket}" in kvhold(home, "status")
    assert folders(home)[2].stat().st_mode & 0o777 == 0o700
    (home / "user").mkdir()  # its user logs in
    said = kvhold(home, "serve", "--dram", "8MiB", code=3)
    assert f"{running.socket} belongs to a running manager" in said


def test_a_folder_of_another_user_is_not_used(home: Path, serve: Callable[..., Manager]) -> None:
    """Whoever makes one where all may is not found in it, nor keeps others from a manager."""
    if os.getuid() != 0:
        pytest.skip("needs the right to give files away")
    shutil.rmtree(home / "run")
    first, second = folders(home)[1:]
    first.mkdir(mode=0o755)
    os.chown(first, OTHER, OTHER)
    running = serve(second)
    said = kvhold(home, "status")
    assert f"on {running.socket}" in said
    running.kill()
    os.chmod(second, 0o777)
    said = kvhold(home, "serve", "--dram", "8MiB", code=2)
    assert f"{first} (it belongs to another user)" in said
    assert f"{second} (others may write to it)" in said


def test_without_any_folder_commands_say_so(home: Path) -> None:
    for name in ("run", "user", "tmp"):
        (home / name).rmdir()
        (home / name).write_text("no folder")
    said = kvhold(home, "serve", "--dram", "8MiB", code=2)
    assert "socket: no folder can have one: " in said
    assert f"{folders(home)[2]} (Not a directory); make one of them usable, set KVHOLD_RUNTIME_DIR to another" in said
    assert "no manager is running" in kvhold(home, "status", code=1)


@pytest.mark.parametrize("what", ["folder", "socket", "lock"])
def test_what_is_removed_is_put_back(home: Path, serve: Callable[..., Manager], what: str) -> None:
    """Whoever starts a second one at once waits for that, and is refused."""
    folder = folders(home)[1]
    running = serve(folder)
    if what == "folder":
        remove(folder)
    else:
        (folder / f"kvhold.sock{'.lock' if what == 'lock' else ''}").unlink()
    said = kvhold(home, "serve", "--dram", "8MiB", code=(2, 3))
    assert f"{running.socket}" in said
    until(lambda: sorted(os.listdir(folder)) == ["kvhold.sock", "kvhold.sock.lock"], "both are there again")
    assert f"on {running.socket}" in kvhold(home, "status")
    assert "belongs to a running manager" in kvhold(home, "serve", "--dram", "8MiB", code=3)
    assert running.terminate() == 0
    assert os.listdir(folder) == []


def test_a_folder_that_is_gone_for_good(home: Path, serve: Callable[..., Manager]) -> None:
    """After logout nobody can make the user's folder again: it listens in the next one."""
    running = serve(folders(home)[1])
    remove(home / "user")
    there = folders(home)[2] / "kvhold.sock"
    until(there.exists, "it listens elsewhere")
    assert f"on {there}" in kvhold(home, "status")
    assert "the socket was removed by somebody; this manager listens on" in running.log.read_text()


def test_a_folder_that_was_taken_meanwhile_is_not_taken_back(home: Path, serve: Callable[..., Manager]) -> None:
    """Both say so, and neither takes the other's files away."""
    first = serve(folders(home)[1])
    first.stop()
    remove(folders(home)[1])
    second = serve(folders(home)[1])
    assert "another process listens on a socket that was removed from" in second.log.read_text()
    first.cont()
    said = f"{first.socket} belongs to another running manager now; stop one of them"
    until(lambda: said in first.log.read_text(), "the first says so")
    assert first.terminate() == 0
    assert second.socket.exists()
    assert listening_pid(second.socket) == second.pid
    assert second.terminate() == 0
