"""Looking at a log from outside changes nothing and finds what is wrong."""

import errno

import pytest
from testbed.ssd.ssd_fakes import ROOT, Driver, FakeFiles, Item, items

from kvhold.core.log.segments import BLOCK, HEADER
from kvhold.tiers.ssd.survey import DirectoryError, segment_name
from kvhold.tiers.ssd.verify import Scrub, inspect

RECORD = HEADER + 3 * BLOCK


@pytest.fixture
def files() -> FakeFiles:
    files = FakeFiles()
    driver = Driver(files)
    assert driver.begin(0)
    assert not driver.store(items("a", "b", "c"))
    assert driver.seal()
    assert driver.begin(1)
    assert not driver.store([*items("a", "d"), Item(b"p", namespace=b"m" * 32)])
    assert driver.forget(*items("b"))
    driver.close()
    return files


def test_inspect(files: FakeFiles) -> None:
    files.calls.clear()
    summary = inspect(ROOT, files)
    assert not [call for call in files.calls if call[0] not in ("names", "open", "read")]
    assert [(found.seq, found.sealed, found.records) for found in summary.segments] == [(2, False, 3), (1, True, 3)]
    assert (summary.records, summary.useful_records) == (5, 4)  # b is forgotten, a was stored twice
    assert summary.namespaces == {(b"n" * 32, 0): (3, 9 * BLOCK), (b"m" * 32, 0): (1, 3 * BLOCK)}
    assert summary.useful_bytes == 12 * BLOCK
    assert summary.disk_bytes == 2 * (128 << 10)
    assert summary.useful_ratio == summary.useful_bytes / summary.disk_bytes
    assert summary.counts["tombstoned"] == 1
    assert 0 < summary.oldest <= summary.newest


def test_scrub(files: FakeFiles) -> None:
    scrub = Scrub(ROOT, files=files)
    assert list(scrub) == []
    assert (scrub.checked, scrub.checked_bytes, scrub.damaged) == (5, 5 * RECORD, 0)
    files.files[segment_name(0)].now[HEADER + 3 * RECORD - 1] ^= 1
    files.files[segment_name(1)].now[HEADER + RECORD + HEADER] ^= 1
    scrub = Scrub(ROOT, files=files)
    assert [(found.file, found.at, found.reason, found.key) for found in scrub] == [
        (segment_name(0), HEADER + 2 * RECORD, "checksum", b"c"),
        (segment_name(1), HEADER + RECORD, "checksum", b"d"),
    ]
    assert scrub.damaged == 2


def test_scrub_beside_a_manager(files: FakeFiles) -> None:
    scrub = Scrub(ROOT, live=True, files=files)
    files.files[segment_name(1)].now[HEADER + HEADER] ^= 1
    assert list(scrub) == []
    assert (scrub.checked, scrub.skipped_segments) == (2, 1)


def test_a_segment_that_is_begun_anew_meanwhile(files: FakeFiles) -> None:
    scrub = iter(Scrub(ROOT, files=files))
    driver = Driver(files)
    original = files.preadv

    def preadv(handle: int, buffers: list[memoryview], offset: int) -> int:
        if offset == HEADER + 2 * RECORD:
            files.preadv = original  # type: ignore[method-assign]
            assert driver.begin(0)
            assert not driver.store([Item(b"x", shards=(BLOCK,))] * 5)
        return original(handle, buffers, offset)

    files.preadv = preadv  # type: ignore[method-assign,assignment]
    assert list(scrub) == []
    driver.close()


def test_scrub_keeps_to_its_rate(files: FakeFiles) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    scrub = Scrub(ROOT, bytes_per_second=RECORD, files=files, clock=lambda: now[0], sleep=sleep)
    assert list(scrub) == []
    assert now[0] == pytest.approx(5)


def test_a_sample() -> None:
    files = FakeFiles()
    driver = Driver(files, 4 * (256 << 10) + (64 << 10), 256 << 10)
    assert driver.begin(0)
    assert not driver.store([Item(b"%d" % index, shards=(BLOCK,)) for index in range(20)])
    driver.close()
    scrub = Scrub(ROOT, sample=0.5, files=files)
    assert list(scrub) == []
    assert 0 < scrub.checked < 20


def test_a_disk_that_fails(files: FakeFiles) -> None:
    reads = []

    def fault(operation: str, name: str) -> int:
        if operation == "read" and name == segment_name(0):
            reads.append(name)
            return errno.EIO if len(reads) > 2 else 0  # header and footer are read, the records are not
        return 0

    files.fault = fault
    assert {found.reason for found in Scrub(ROOT, files=files)} == {"unreadable (Input/output error)"}


def test_no_log_no_look() -> None:
    with pytest.raises(DirectoryError, match="holds no log of kvhold; name the directory"):
        inspect(ROOT, FakeFiles())
    files = FakeFiles()
    files.fault = lambda operation, name: errno.ENOENT
    with pytest.raises(DirectoryError, match="cannot be read"):
        list(Scrub(ROOT, files=files))
