"""The layer over real files: nothing misaligned gets through, short calls are continued, O_DIRECT is not a must."""

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from testbed.ssd.ssd_fakes import FakeFiles

from kvhold.core.log.segments import BLOCK
from kvhold.tiers.ssd import files as layer
from kvhold.tiers.ssd.files import IOV_MAX, Misaligned, RealFiles, blocks, read_all, write_all


@pytest.fixture(params=["real", "fake"])
def files(request: pytest.FixtureRequest) -> RealFiles | FakeFiles:
    return RealFiles() if request.param == "real" else FakeFiles()


@pytest.fixture
def handle(files: RealFiles | FakeFiles, tmp_path: Path) -> int:
    made = files.open_segment(tmp_path / "f", create=True)
    files.allocate(made, 16 * BLOCK)
    return made


@pytest.mark.parametrize(
    ("buffers", "offset"),
    [
        ([blocks(BLOCK)], 1),
        ([blocks(BLOCK)], 512),
        ([blocks(BLOCK)[:512]], 0),
        ([blocks(2 * BLOCK)[8 : BLOCK + 8]], 0),
        ([blocks(BLOCK), blocks(BLOCK)[:100]], 0),
        ([blocks(BLOCK)[:0]], 0),
        ([], 0),
        ([blocks(BLOCK)] * (IOV_MAX + 1), 0),
    ],
)
def test_misalignment_is_never_forgiven(
    files: RealFiles | FakeFiles, handle: int, buffers: list[memoryview], offset: int
) -> None:
    with pytest.raises(Misaligned):
        files.preadv(handle, buffers, offset)
    with pytest.raises(Misaligned):
        files.pwritev(handle, buffers, offset)


def test_there_and_back(files: RealFiles | FakeFiles, handle: int) -> None:
    assert files.size(handle) == 16 * BLOCK
    source, target = blocks(3 * BLOCK), blocks(3 * BLOCK)
    source[:] = os.urandom(3 * BLOCK)
    assert write_all(files, handle, [source[:BLOCK], source[BLOCK:]], 4 * BLOCK) == 3 * BLOCK
    files.fdatasync(handle)
    assert read_all(files, handle, [target], 4 * BLOCK) == 3 * BLOCK
    assert target == source
    assert read_all(files, handle, [target], 14 * BLOCK) == 2 * BLOCK  # the file ends
    files.allocate(handle, 2 * BLOCK)
    assert files.size(handle) == 2 * BLOCK
    files.close(handle)


@pytest.mark.parametrize("most", [1, 100, BLOCK, BLOCK + 1, 2 * BLOCK + 512, 5 * BLOCK])
def test_short_calls_are_continued(most: int) -> None:
    files = FakeFiles()
    handle = files.open_segment(Path("/f"), create=True)
    files.allocate(handle, 16 * BLOCK)
    files.short = lambda size: min(size, most)
    source, target = blocks(6 * BLOCK), blocks(6 * BLOCK)
    source[:] = os.urandom(6 * BLOCK)
    parts = [source[:BLOCK], source[BLOCK : 4 * BLOCK], source[4 * BLOCK :]]
    whole = 6 * BLOCK if most >= BLOCK else 0  # what does not get on by a whole block has failed
    assert write_all(files, handle, parts, BLOCK) == whole
    assert read_all(files, handle, [target], BLOCK) == whole
    assert target == source or not whole


def test_more_buffers_than_one_call_takes(tmp_path: Path) -> None:
    files = RealFiles()
    handle = files.open_segment(tmp_path / "f", create=True)
    source = blocks(BLOCK)
    assert write_all(files, handle, [source] * (IOV_MAX + 5), 0) == (IOV_MAX + 5) * BLOCK
    files.close(handle)


@pytest.mark.parametrize("when", ["open", "use"])
def test_without_o_direct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    """Some filesystems refuse to open, some only to read and write. Either way it works, and is said once."""
    real_open, real_pwritev = os.open, os.pwritev
    dropped = []

    def fussy_open(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return real_open(path, flags, *rest)

    def fussy_pwritev(handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        if layer.fcntl.fcntl(handle, layer.fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return real_pwritev(handle, buffers, offset)

    monkeypatch.setattr(os, "posix_fadvise", lambda *args: dropped.append(args))
    if when == "open":
        monkeypatch.setattr(os, "open", fussy_open)
    else:
        monkeypatch.setattr(os, "pwritev", fussy_pwritev)
    files = RealFiles()
    with caplog.at_level(logging.WARNING):
        for name in ("f", "g"):
            handle = files.open_segment(tmp_path / name, create=True)
            source, target = blocks(BLOCK), blocks(BLOCK)
            source[:] = os.urandom(BLOCK)
            assert files.pwritev(handle, [source], 0) == BLOCK
            files.fdatasync(handle)
            assert files.preadv(handle, [target], 0) == BLOCK
            assert target == source
            files.close(handle)
    assert len(dropped) == 4  # the page cache behind each sync and each read
    assert [record.message.count("O_DIRECT") for record in caplog.records] == [1]


def test_no_room_is_no_room(tmp_path: Path) -> None:
    files = RealFiles()
    handle = files.open_segment(tmp_path / "f", create=True)
    with pytest.raises(OSError, match=r"space|large") as caught:
        files.allocate(handle, 1 << 50)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    files.close(handle)


def test_a_filesystem_that_cannot_promise_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*args: int) -> int:
        layer.ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    monkeypatch.setattr(layer, "_fallocate", unsupported)
    files = RealFiles()
    handle = files.open_segment(tmp_path / "f", create=True)
    files.allocate(handle, 5 * BLOCK)
    assert files.size(handle) == 5 * BLOCK
    files.close(handle)


def test_a_removed_file_is_noticed_by_the_next_sync(tmp_path: Path) -> None:
    files = RealFiles()
    handle = files.open_segment(tmp_path / "f", create=True)
    files.fdatasync(handle)
    (tmp_path / "f").unlink()
    with pytest.raises(FileNotFoundError):
        files.fdatasync(handle)
    files.close(handle)


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"x")
    (tmp_path / "f").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic"):
        RealFiles().open_segment(tmp_path / "f", create=True)


def test_names_tell_files_from_the_rest(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 5000)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("file")
    found = RealFiles().names(tmp_path)
    assert found["file"] >= 5000
    assert found["folder"] == found["link"] == -1
    assert RealFiles().free_bytes(tmp_path) > 0


def test_a_lock_ends_with_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "_LOCK_TRIES", 1)
    program = (
        "import pathlib, sys, time; from kvhold.tiers.ssd.files import RealFiles\n"
        "RealFiles().lock(pathlib.Path(sys.argv[1])); print('locked', flush=True); time.sleep(60)"
    )
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(BlockingIOError):
            RealFiles().lock(path)
        process.kill()
    files = RealFiles()
    handle = files.lock(path)
    files.close(handle)
    files.close(files.lock(path))
