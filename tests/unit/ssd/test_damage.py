"""Whatever happens to a log's files: what is hit is a miss and a count, the rest is as it was, nothing is raised."""

import pytest
from testbed.ssd.ssd_fakes import ROOT, Driver, FakeFile, FakeFiles, Item, items

from kvhold.core.log.segments import BLOCK, HEADER
from kvhold.tiers.ssd.format import checksum
from kvhold.tiers.ssd.survey import segment_name
from kvhold.tiers.ssd.verify import Scrub

SIZE = 128 << 10
SEALED, OPEN = segment_name(0), segment_name(1)
FIRST = items("a", "b", "c")  # in the sealed segment
SECOND = items("d", "e", "f")  # in the one that was open
RECORD = HEADER + sum(FIRST[0].shards)
ALL = {item.key: item for item in FIRST + SECOND}


@pytest.fixture
def disk() -> FakeFiles:
    """Segment 0 sealed with a, b, c; segment 1 open with d, e, f; nobody there any more."""
    files = FakeFiles()
    driver = Driver(files)
    assert driver.begin(0)
    assert not driver.store(FIRST)
    assert driver.seal()
    assert driver.begin(1)
    assert not driver.store(SECOND)
    driver.close()
    return files.after_kill()


def look(files: FakeFiles) -> tuple[set[bytes], dict[str, int]]:
    """Which keys are found and read, and all that was counted. What is read must be right."""
    driver = Driver(files)
    found = driver.recover()
    good = set()
    for record in found:
        data = driver.read(record)
        if data is not None:
            assert data == ALL[record[2]].payload
            good.add(record[2])
    counts = dict(+(found.counts + driver.executor.counters().rejected + driver.executor.counters().errors))
    for kept in ("records", "segments", "sealed", "unsealed"):
        counts.pop(kept, None)
    driver.close()
    damaged = list(Scrub(ROOT, files=files))
    assert {damage.key for damage in damaged} == found.keys - good  # offline, the same is found
    driver = Driver(files.after_kill())
    assert driver.begin(2)  # and it can be used on
    driver.close()
    return good, counts


def flip(file: FakeFile, at: int, bit: int = 0) -> None:
    file.now[at] ^= 1 << bit


def sign(file: FakeFile, at: int) -> None:
    file.now[at + BLOCK - 16 : at + BLOCK] = checksum(memoryview(file.now)[at : at + BLOCK - 16])


def test_without_damage(disk: FakeFiles) -> None:
    assert look(disk) == (set(ALL), {})


@pytest.mark.parametrize("at", [0, 8, 16, 32, 40, 48, 100, BLOCK - 1])
def test_segment_header(disk: FakeFiles, at: int) -> None:
    for name, lost in ((SEALED, FIRST), (OPEN, SECOND)):
        files = FakeFiles()
        files.files = {each: FakeFile(bytearray(file.now)) for each, file in disk.files.items()}
        flip(files.files[name], at)
        assert look(files) == (set(ALL) - {item.key for item in lost}, {"bad_header": 1})


@pytest.mark.parametrize(
    "at", [0, 8, 12, 16, 32, 40, 44, 48, 56, 64, 80, 112, 128, 192, 256, 512, 520, 3000, BLOCK - 1]
)
def test_record_header(disk: FakeFiles, at: int) -> None:
    """In a sealed segment the record is found and does not pass; in an open one, the scan ends there."""
    flip(disk.files[SEALED], HEADER + RECORD + at)
    good, counts = look(disk)
    assert good == set(ALL) - {b"b"}
    assert counts == {"header_damaged": 1}
    flip(disk.files[OPEN], HEADER + RECORD + at)
    good, counts = look(disk)
    assert good == {b"a", b"c", b"d"}
    assert counts == {"header_damaged": 1, "torn": 1}


@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 77, 3 * BLOCK - 1])
@pytest.mark.parametrize(("name", "keys"), [(SEALED, b"abc"), (OPEN, b"def")])
def test_payload(disk: FakeFiles, name: str, keys: bytes, at: int) -> None:
    flip(disk.files[name], HEADER + RECORD + HEADER + at, 5)
    good, counts = look(disk)
    assert good == set(ALL) - {keys[1:2]}
    assert counts == {"checksum": 1}


@pytest.mark.parametrize("back", [1, 16, 17, 60, 100, 127, 128])
def test_footer_head(disk: FakeFiles, back: int) -> None:
    flip(disk.files[SEALED], SIZE - back)
    assert look(disk) == (set(ALL), {"bad_footer": 1})  # headers tell as much


@pytest.mark.parametrize("at", [0, 32, 56, 70, 72 + 5, 72 + 64, 72 + 80, 72 + 2 * 96])
def test_footer_body(disk: FakeFiles, at: int) -> None:
    flip(disk.files[SEALED], SIZE - BLOCK + at)
    assert look(disk) == (set(ALL), {"bad_footer": 1})


@pytest.mark.parametrize(
    ("size", "left"),
    [
        (0, b""),
        (100, b""),
        (BLOCK, b""),
        (HEADER + 100, b""),
        (HEADER + RECORD - 1, b""),
        (HEADER + RECORD, b"a"),
        (HEADER + 2 * RECORD + BLOCK, b"ab"),
        (HEADER + 3 * RECORD, b"abc"),
        (SIZE - 100, b"abc"),
    ],
)
def test_truncated_file(disk: FakeFiles, size: int, left: bytes) -> None:
    del disk.files[SEALED].now[size:]
    good, counts = look(disk)
    assert good == {bytes([key]) for key in left + b"def"}
    assert counts.keys() & {"unused", "bad_header", "truncated"}


def test_torn_tail(disk: FakeFiles) -> None:
    """The last record's write ended anywhere."""
    file = disk.files[OPEN]
    whole = bytes(file.now)
    start = HEADER + 2 * RECORD
    for size in range(0, RECORD, 512):
        file.now[:] = whole
        file.now[start + size : start + RECORD] = bytes(RECORD - size)
        good, counts = look(disk)
        assert good == set(ALL) - {b"f"}
        assert counts == ({} if size == 0 else {"torn": 1} if size < HEADER else {"checksum": 1}), size


@pytest.mark.parametrize("version", [0, 2, 999])
def test_another_version(disk: FakeFiles, version: int) -> None:
    file = disk.files[OPEN]
    start = HEADER + RECORD
    file.now[start + 8 : start + 12] = version.to_bytes(4, "little")
    sign(file, start)
    assert look(disk) == ({b"a", b"b", b"c", b"d"}, {"wrong_version_record": 1})
    file.now[8:12] = version.to_bytes(4, "little")
    sign(file, 0)
    assert look(disk) == ({b"a", b"b", b"c"}, {"wrong_version": 1})


def test_foreign_files(disk: FakeFiles) -> None:
    """Files of others, links and folders are left alone; a segment of another log, or of another place, is no part."""
    other = FakeFiles()
    driver = Driver(other)
    assert driver.begin(0)
    assert not driver.store(items("x"))
    driver.close()
    disk.files["notes.txt"] = FakeFile(bytearray(b"mine"))
    disk.files[segment_name(2)] = other.files[segment_name(0)]
    disk.files[segment_name(3)] = FakeFile(bytearray(disk.files[SEALED].now))
    good, counts = look(disk)
    assert good == set(ALL)
    assert counts == {"foreign_files": 1, "foreign": 2}
    assert disk.files["notes.txt"].now == b"mine"


def test_a_record_in_a_wrong_place(disk: FakeFiles) -> None:
    file = disk.files[OPEN]
    file.now[HEADER + RECORD : HEADER + 2 * RECORD] = file.now[HEADER : HEADER + RECORD]
    assert look(disk) == ({b"a", b"b", b"c", b"d"}, {"foreign_record": 1})
    sealed = disk.files[SEALED]
    sealed.now[HEADER + RECORD : HEADER + 2 * RECORD] = sealed.now[HEADER : HEADER + RECORD]
    good, counts = look(disk)
    assert good == {b"a", b"c", b"d"}
    assert counts["header_foreign"] == 1


def test_the_old_life_never_reappears(disk: FakeFiles) -> None:
    """Records of the new life have the same sizes, so that the old ones lie exactly where a scan looks next."""
    driver = Driver(disk)
    assert driver.begin(0)
    driver.close()
    good, counts = look(disk.after_kill())
    assert good == {b"d", b"e", b"f"}
    assert counts == {"stale": 1}
    driver = Driver(disk.after_kill())
    assert driver.begin(0)
    new = Item(b"new")
    ALL[b"new"] = new
    assert not driver.store([new])
    driver.close()
    good, counts = look(disk.after_kill())
    assert good == {b"d", b"e", b"f", b"new"}
    assert counts == {"stale": 1}
    del ALL[b"new"]


def test_an_entry_that_lies(disk: FakeFiles) -> None:
    """A signed footer that points elsewhere, or beyond the file, reads nothing wrong."""
    file = disk.files[SEALED]
    start = SIZE - BLOCK
    for at in (HEADER, 7 * BLOCK, 1 << 40):
        body = memoryview(file.now)[start:]
        entry = 72 + 96 + 72  # the table, the first entry, and what stands before the place in the second
        body[entry + 4 : entry + 8] = (at // BLOCK).to_bytes(4, "little")
        used = 72 + 3 * 96
        body[BLOCK - 128 + 64 : BLOCK - 128 + 80] = checksum(body[:used])
        body[-16:] = checksum(body[-128:-16])
        body.release()
        good, counts = look(disk)
        assert good == set(ALL) - {b"b"}
        assert "bad_footer" not in counts


def test_an_unreadable_segment(disk: FakeFiles) -> None:
    def fault(operation: str, name: str) -> int:
        return 5 if operation == "read" and name == SEALED else 0

    disk.fault = fault
    good, counts = look(disk)
    assert good == {b"d", b"e", b"f"}
    assert counts == {"bad_header": 1}


def test_every_bit_of_a_small_log_by_sample(disk: FakeFiles) -> None:
    """One flip at a time, anywhere: at most what it hits is lost."""
    for name in (SEALED, OPEN):
        file = disk.files[name]
        for at in range(0, SIZE, 1009):
            flip(file, at, at % 8)
            driver = Driver(disk)
            for record in driver.recover():
                data = driver.read(record)
                assert data is None or data == ALL[record[2]].payload
            driver.close()
            flip(file, at, at % 8)
