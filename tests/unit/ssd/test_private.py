"""What a log's directory may be and hold: files, which nobody else may write to. All else is named with a remedy."""

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from testbed.ssd.ssd_fakes import open_log

from kvhold.tiers.ssd.directory import claim_log, in_use, open_for_reading
from kvhold.tiers.ssd.files import RealFiles
from kvhold.tiers.ssd.survey import DirectoryError

SIZE = 4 << 20
NAMES = [
    "kvhold.log",
    "kvhold.lock",
    "kvhold.tombstones",
    "kvhold.log.new",
    "kvhold.tombstones.new",
    "kvhold-00000000.segment",
    "kvhold-00000003.segment",
]


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


KINDS: dict[str, Callable[[Path], None]] = {
    "a named pipe": lambda path: os.mkfifo(path),
    "a directory": lambda path: path.mkdir(),
    "a symbolic link": lambda path: path.symlink_to("kvhold.elsewhere"),
    "a socket": a_socket,
}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A directory that was used before."""
    open_log(tmp_path / "ssd", SIZE, min_free=0).close()
    return tmp_path / "ssd"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_file_is_named_and_left_alone(log: Path, name: str, kind: str) -> None:
    path = log / name
    path.unlink(missing_ok=True)
    KINDS[kind](path)
    (log / "kvhold.elsewhere").write_bytes(b"precious")
    with pytest.raises(DirectoryError) as refused:
        claim_log(log, SIZE, min_free=0)
    assert str(refused.value) == (
        f"ssd: {log} cannot be used: {path}: it is {kind}, not a file; remove it, or name another directory"
    )
    assert not in_use(log)
    with suppress(DirectoryError):  # looking at it waits for nothing either
        open_for_reading(log)
    assert path.lstat().st_mode & 0o170000 != 0o100000
    assert (log / "kvhold.elsewhere").read_bytes() == b"precious"


@pytest.mark.parametrize("kind", KINDS)
def test_what_takes_a_files_place_later_is_no_file_either(log: Path, kind: str) -> None:
    KINDS[kind](log / "kvhold-00000000.segment")
    for how in ({"create": True}, {"write": False}, {}):
        with pytest.raises(OSError, match=f"it is {kind}, not a file"):
            RealFiles().open_segment(log / "kvhold-00000000.segment", **how)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a device")
def test_a_device_is_no_file(log: Path) -> None:
    try:
        os.mknod(log / "kvhold.tombstones", 0o020600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("no device can be made here")
    with pytest.raises(DirectoryError, match=r"kvhold\.tombstones: it is a device, not a file; remove it"):
        claim_log(log, SIZE, min_free=0)


@pytest.mark.parametrize(
    ("mode", "who"), [(0o770, "its group"), (0o777, "every user"), (0o1777, "every user"), (0o2775, "its group")]
)
def test_a_directory_that_others_may_write_to_is_refused(log: Path, mode: int, who: str) -> None:
    log.chmod(mode)
    with pytest.raises(DirectoryError) as refused:
        claim_log(log, SIZE, min_free=0)
    assert str(refused.value) == (
        f"ssd: {log} cannot be used: {who} may write to it: run `chmod go-w {log}`, or name a folder in it that is not "
        "there yet, which kvhold makes for this user alone"
    )
    open_log(log / "below", SIZE, min_free=0).close()  # as it says
    log.chmod(mode & ~0o022)
    claim_log(log, SIZE, min_free=0).close()


def test_a_file_that_others_may_write_to_is_refused(log: Path) -> None:
    (log / "kvhold.log").chmod(0o664)
    with pytest.raises(DirectoryError, match=f"{log}/kvhold.log: its group may write to it: run `chmod go-w {log}/kvh"):
        claim_log(log, SIZE, min_free=0)
    (log / "kvhold.log").chmod(0o644)
    claim_log(log, SIZE, min_free=0).close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("name", ["", "kvhold.log"])
def test_what_belongs_to_another_user_is_refused(log: Path, name: str) -> None:
    """Also by root, which would write where that user wants: a hard link is a file like any other."""
    path = log / name
    os.chown(path, 65534, 65534)
    with pytest.raises(DirectoryError) as refused:
        claim_log(log, SIZE, min_free=0)
    assert f"it belongs to another user (uid 65534): run `chown {'' if name else '-R '}0 {path}`" in str(refused.value)
