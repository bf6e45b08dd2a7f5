"""Opening a directory: one manager, one budget, one version, one log."""

import errno
import shutil
from pathlib import Path

import pytest
from testbed.ssd.ssd_fakes import ROOT, Driver, FakeFile, FakeFiles, Item, items, open_log

from kvhold.core.log.segments import BLOCK
from kvhold.tiers.ssd import directory
from kvhold.tiers.ssd import files as layer
from kvhold.tiers.ssd.directory import (
    claim_log,
    open_for_reading,
    reserve_bytes,
    segment_size,
)
from kvhold.tiers.ssd.executor import Executor
from kvhold.tiers.ssd.format import Flaw, SegmentHead, checksum
from kvhold.tiers.ssd.survey import LOCK_FILE, DirectoryError, segment_name
from kvhold.units import format_size

SEGMENT = 128 << 10


def budget(segments: int) -> int:
    return segments * SEGMENT + (64 << 10)


def filled(segments: int) -> FakeFiles:
    """A log whose segments hold one object each, s0, s1, ... in this order."""
    files = FakeFiles()
    driver = Driver(files, budget(segments))
    for index in range(segments):
        assert driver.begin(index)
        assert not driver.store(items(f"s{index}"))
    driver.close()
    return files.after_kill()


def contents(files: FakeFiles) -> dict[str, bytes]:
    return {name: bytes(file.now) for name, file in files.files.items() if name != LOCK_FILE}


@pytest.mark.parametrize("size", [1 << 20, 100 << 20, 300 << 20, 3 << 30, 10 << 30, 20 << 30, 8 << 40])
def test_segments_fit_the_budget(size: int) -> None:
    segment = segment_size(size)
    assert segment % BLOCK == 0
    assert segment <= 256 << 20
    assert (size - reserve_bytes(size)) // segment >= 4
    assert size < 16 << 30 or segment == 256 << 20


def test_a_new_log(tmp_path: Path) -> None:
    log = open_log(tmp_path / "new", 64 << 20, min_free=0)
    assert len(log.numbers) == 4
    assert log.heads == [None] * 4
    assert (log.newest_seq, log.bytes_on_disk) == (0, 0)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    log.close()
    again = open_log(tmp_path / "new", 64 << 20, min_free=0)
    assert (again.id, again.segment_bytes) == (log.id, log.segment_bytes)
    again.close()


def test_the_second_manager_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "_LOCK_TRIES", 1)
    first = open_log(tmp_path, 64 << 20, min_free=0)
    (tmp_path.parent / "link").symlink_to(tmp_path)
    for path in (tmp_path, tmp_path.parent / "link"):
        with pytest.raises(DirectoryError, match=r"in use by another kvhold manager; stop that one, or"):
            open_log(path, 64 << 20, min_free=0)
    open_for_reading(tmp_path)  # looking is allowed
    first.close()
    open_log(tmp_path, 64 << 20, min_free=0).close()


def test_too_small_a_budget_says_what_is_enough() -> None:
    with pytest.raises(DirectoryError, match=r"ssd: 100KiB for /ssd is too small .* give at least 320KiB"):
        open_log(ROOT, 100 << 10, files=FakeFiles())
    open_log(ROOT, 320 << 10, files=FakeFiles())


def test_only_the_last_folder_is_made(tmp_path: Path) -> None:
    """So that a disk that is not mounted is noticed, instead of the root filesystem being filled."""
    with pytest.raises(
        DirectoryError, match=r"ssd: .*/disk/kvhold cannot be made, .*/disk is not there: make that, or"
    ):
        open_log(tmp_path / "disk" / "kvhold", 64 << 20)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("operation", ["make_directory", "names", "create", "write", "sync", "replace", "sync_names"])
def test_a_directory_that_fails(operation: str, code: int) -> None:
    files = FakeFiles()
    files.fault = lambda called, name: code if called == operation else 0
    with pytest.raises(DirectoryError, match=r"ssd: /ssd cannot be used: .*; check that"):
        open_log(ROOT, budget(4), segment_bytes=SEGMENT, files=files)
    assert not files.open_handles


def test_a_smaller_budget_takes_the_oldest(caplog: pytest.LogCaptureFixture) -> None:
    files = filled(7)
    driver = Driver(files)
    found = driver.recover()
    assert found.keys == {b"s3", b"s4", b"s5", b"s6"}
    assert driver.log.numbers == [3, 4, 5, 6]
    assert driver.log.removed_segments == 3
    assert driver.log.bytes_on_disk == 4 * SEGMENT
    assert sorted(name for name in files.files if name.endswith(".segment")) == [segment_name(n) for n in range(3, 7)]
    # Core's numbers have no gaps, the files' do. All goes on.
    for record in found:
        assert driver.read(record) == Item(record[2]).payload
    assert driver.begin(0)
    assert not driver.store(items("new"))
    assert driver.seal()
    driver.close()
    driver = Driver(files.after_kill(), budget(6))  # and up again
    assert driver.log.numbers == [3, 4, 5, 6, 0, 1]
    assert driver.recover().keys == {b"new", b"s4", b"s5", b"s6"}
    driver.close()


def test_damaged_segments_go_first() -> None:
    files = filled(6)
    for number in (4, 5):
        files.files[segment_name(number)].now[100] ^= 1
    driver = Driver(files)
    assert driver.recover().keys == {b"s0", b"s1", b"s2", b"s3"}
    driver.close()


def test_a_budget_below_four_segments_is_refused_and_takes_nothing() -> None:
    """A size that was mistyped must not cost the whole cache."""
    files = filled(4)
    before = contents(files)
    with pytest.raises(
        DirectoryError,
        match=r"320KiB for /ssd is too small for the log that is there, which has 4 segments of 128KiB; give at least "
        r"576KiB, or remove /ssd/kvhold\* to begin anew with smaller ones",
    ):
        open_log(ROOT, 320 << 10, files=files)
    assert contents(files) == before
    assert not files.open_handles
    open_log(ROOT, 576 << 10, files=files).close()
    for name in [name for name in files.files if name.endswith(".segment")]:
        files.remove(ROOT / name)
    log = open_log(ROOT, 320 << 10, min_free=0, files=files)  # of nothing nothing is lost
    assert log.segment_bytes == 64 << 10
    log.close()


def test_a_claim_changes_nothing() -> None:
    files = filled(7)
    before = contents(files)
    claim = claim_log(ROOT, budget(4), files=files)
    claim.close()
    assert contents(files) == before
    assert not files.open_handles


@pytest.mark.parametrize("version", [0, 2])
def test_another_version_is_refused(version: int) -> None:
    files = filled(4)
    block = files.files["kvhold.log"].now
    block[8] = version
    block[-16:] = checksum(bytes(block[:-16]))
    before = contents(files)
    with pytest.raises(DirectoryError, match=r"another version of the format, .* use another directory, or remove"):
        Driver(files)
    assert contents(files) == before
    assert not files.open_handles


@pytest.mark.parametrize("at", [None, 0, 8, 20, 40, 4000, 4090])
def test_a_log_file_that_is_damaged_or_gone(at: int | None) -> None:
    """The segments still say whose they are."""
    files = filled(4)
    if at is None:
        del files.files["kvhold.log"]
    else:
        files.files["kvhold.log"].now[at] ^= 1
    driver = Driver(files)
    assert driver.log.bad_log
    assert driver.recover().keys == {b"s0", b"s1", b"s2", b"s3"}
    driver.close()
    driver = Driver(files.after_kill())
    assert not driver.log.bad_log
    driver.close()


def test_segments_of_two_logs_and_nobody_says_which() -> None:
    files = filled(4)
    files.files[segment_name(3)] = filled(4).files[segment_name(3)]
    del files.files["kvhold.log"]
    with pytest.raises(DirectoryError, match=r"segments of 2 logs .* remove the segments that do not belong"):
        Driver(files)


def test_nothing_but_rubbish_is_a_new_log() -> None:
    files = FakeFiles()
    files.files["kvhold.log"] = FakeFile(bytearray(b"rubbish"))
    files.files[segment_name(0)] = FakeFile(bytearray(5000))
    files.files["precious"] = FakeFile(bytearray(b"x"))
    driver = Driver(files)
    assert driver.begin(0)
    assert not driver.store(items("a"))
    driver.close()
    assert files.files["precious"].now == b"x"
    assert Driver(files.after_kill()).recover().keys == {b"a"}


def test_a_copied_directory_works_and_is_not_mixed(tmp_path: Path) -> None:
    def use(path: Path, key: bytes) -> set[bytes]:
        log = open_log(path, budget(4), segment_bytes=SEGMENT, min_free=0)
        driver = Driver(FakeFiles(), log=log)
        found = driver.recover()
        for record in found:
            assert driver.read(record) == Item(record[2]).payload
        assert driver.begin(len(found.segments))
        assert not driver.store([Item(key)])
        driver.close()
        return found.keys

    one, two = tmp_path / "one", tmp_path / "two"
    assert use(one, b"a") == set()
    shutil.copytree(one, two)
    assert use(two, b"b") == {b"a"}
    assert use(one, b"c") == {b"a"}
    assert use(two, b"d") == {b"a", b"b"}
    # A segment of another log is not taken for one of this.
    three = tmp_path / "three"
    assert use(three, b"x") == set()
    shutil.copy(three / segment_name(0), one / segment_name(3))
    assert use(one, b"e") == {b"a", b"c"}


def test_min_free_is_kept() -> None:
    files = FakeFiles()
    log = open_log(ROOT, budget(4), min_free=1 << 20, segment_bytes=SEGMENT, files=files)
    driver = Driver(files, log=log)
    files.free = (1 << 20) + SEGMENT - 1
    assert not driver.begin(0)
    assert segment_name(0) not in files.files
    assert driver.executor.counters().errors == {"ENOSPC": 1}
    files.free += 1
    assert driver.begin(1)
    driver.close()


def test_too_little_room_is_said_at_once(caplog: pytest.LogCaptureFixture) -> None:
    files = FakeFiles()
    files.free = 3 * SEGMENT
    open_log(ROOT, budget(4), min_free=SEGMENT, segment_bytes=SEGMENT, files=files)
    assert "only 256KiB are free there beyond the 128KiB of min_free" in caplog.text
    files = FakeFiles()
    files.free = 3 * SEGMENT
    open_log(ROOT, budget(4), min_free=4 * SEGMENT, segment_bytes=SEGMENT, files=files)
    assert "nothing can be kept there, because 384KiB are free and min_free keeps 512KiB; lower it, or" in caplog.text


def test_numbers_of_lives_are_not_used_again() -> None:
    """Neither after damage to the newest segment's header nor after its file is gone."""
    files = filled(4)
    files.files[segment_name(3)].now[40] ^= 1
    log = open_log(ROOT, budget(4), files=files)
    assert log.heads[3] is Flaw.DAMAGED
    assert log.newest_seq > 4
    log.close()
    driver = Driver(files.after_kill())
    driver.seq = 3
    assert not driver.begin(3)
    assert driver.executor.counters().errors == {"Refused": 1}
    driver.close()
    files = filled(4)
    driver = Driver(files)
    assert driver.forget(namespace=b"")
    driver.close()
    del files.files[segment_name(3)]
    driver = Driver(files.after_kill())
    assert driver.log.newest_seq == 4
    assert driver.begin(3)
    assert not driver.store(items("later"))
    driver.close()
    assert Driver(files.after_kill()).recover().keys == {b"later"}


@pytest.mark.parametrize("code", [errno.EIO, 0])
def test_a_segment_that_cannot_be_read_at_one_start_brings_nothing_back(code: int) -> None:
    """What hides its records is kept until its header says that nothing so old is there."""
    files = filled(4)
    driver = Driver(files)
    assert driver.forget(namespace=b"")
    for index in range(1, 4):
        assert driver.begin(index)
        assert not driver.store(items(f"new{index}"))
    driver.close()
    files = files.after_kill()
    name = segment_name(0)
    if code:
        files.fault = lambda called, which: code if called == "open" and which == name else 0
    else:
        files.files[name].now[40] ^= 1
    log = open_log(ROOT, budget(4), files=files)
    assert isinstance(log.heads[0], Flaw)
    assert len(log.tombstones) == 1
    log.close()
    files.fault = lambda called, which: 0
    if not code:
        files.files[name].now[40] ^= 1
    driver = Driver(files.after_kill())
    assert driver.recover().keys == {b"new1", b"new2", b"new3"}
    assert driver.begin(0)
    driver.close()
    log = open_log(ROOT, budget(4), files=files.after_kill())
    assert len(log.tombstones) == 0
    log.close()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES])
@pytest.mark.parametrize("name", ["kvhold.log", segment_name(0)])
def test_files_that_cannot_be_opened_begin_nothing_anew(name: str, code: int) -> None:
    """Too many open files, say, is no reason to take a full log for nobody's."""
    files = filled(4)
    files.fault = lambda called, which: code if called == "open" and which == name else 0
    with pytest.raises(DirectoryError, match="cannot be used"):
        open_log(ROOT, budget(4), files=files)
    files.fault = lambda called, which: 0
    assert Driver(files.after_kill()).recover().keys


def test_a_smaller_budget_bounds_the_tombstones_too() -> None:
    files = FakeFiles()
    large = 8 << 20
    driver = Driver(files, large)
    assert driver.begin(0)
    for index in range(7):
        assert driver.forget(*(Item(b"%d %d" % (index, key)) for key in range(33)))
    assert not driver.store(items("later"))
    driver.close()
    assert len(files.files["kvhold.tombstones"].now) > reserve_bytes(budget(4)) // 2
    driver = Driver(files.after_kill())
    assert len(files.files["kvhold.tombstones"].now) <= driver.log.tombstones.limit <= reserve_bytes(budget(4)) // 2
    assert driver.recover().keys == {b"later"}
    driver.close()


def test_a_log_has_no_more_segments_than_can_be_numbered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert directory.MAX_SEGMENTS == 1 << 20
    monkeypatch.setattr(directory, "MAX_SEGMENTS", 6)
    log = open_log(ROOT, budget(6), min_free=0, segment_bytes=SEGMENT, files=(files := FakeFiles()))
    log.close()
    assert not caplog.text
    log = open_log(ROOT, budget(9), min_free=0, files=files)
    assert len(log.numbers) == 6
    assert "more than 6 segments of 128KiB, the most that a log has: the rest is not used" in caplog.text


@pytest.mark.parametrize("size", [0, 1, 4096, 64 << 10, 100 << 10, (320 << 10) - 1])
def test_any_budget_that_is_too_small_says_the_least(size: int) -> None:
    assert segment_size(size) == 64 << 10
    with pytest.raises(DirectoryError, match=r"is too small for segments of 64KiB; give at least 320KiB"):
        open_log(ROOT, size, files=FakeFiles())


@pytest.mark.parametrize("size", [64 << 10, 1 << 20, 5 << 20, 64 << 20, 256 << 20, 1 << 30])
def test_the_least_budget_is_enough(size: int) -> None:
    least = directory.least_budget(size)
    with pytest.raises(DirectoryError, match=f"give at least {format_size(least)}"):
        open_log(ROOT, least - 4 * BLOCK, segment_bytes=size, files=FakeFiles())
    assert len(open_log(ROOT, least, segment_bytes=size, files=FakeFiles()).numbers) == 4


def test_heads_say_what_was_there() -> None:
    log = open_log(ROOT, budget(5), files=filled(4))
    assert [isinstance(head, SegmentHead) for head in log.heads] == [True] * 4 + [False]
    assert [head.seq for head in log.heads if isinstance(head, SegmentHead)] == [1, 2, 3, 4]


def test_real_files_from_start_to_kill(tmp_path: Path) -> None:
    """The whole way on this machine's filesystem."""
    log = open_log(tmp_path, budget(4), segment_bytes=SEGMENT, min_free=0)
    driver = Driver(FakeFiles(), log=log)
    assert driver.begin(0)
    assert not driver.store(items("a", "b"))
    assert driver.seal()
    assert driver.begin(1)
    assert not driver.store(items("c"))
    driver.close()
    assert (tmp_path / segment_name(0)).stat().st_size == SEGMENT
    log = open_log(tmp_path, budget(4), min_free=0)
    assert log.bytes_on_disk >= 2 * SEGMENT
    driver = Driver(FakeFiles(), log=log)
    found = driver.recover()
    assert found.keys == {b"a", b"b", b"c"}
    assert [segment.sealed for segment in found.segments] == [False, True]
    for record in found:
        assert driver.read(record) == Item(record[2]).payload
    driver.close()
    assert isinstance(driver.executor, Executor)
