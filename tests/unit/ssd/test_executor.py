"""Every I/O is answered exactly once, whatever the disk does, and nothing that was not proved is a success."""

import errno
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from testbed.ssd.ssd_fakes import Driver, FakeFiles, Item, Recovered, items, open_log

from kvhold.core.events import Cancel
from kvhold.core.log.events import Forget, Read, Seal, Stored, Write
from kvhold.core.log.segments import BLOCK, HEADER
from kvhold.tiers.ssd import executor as executor_module
from kvhold.tiers.ssd.survey import segment_name

SHARDS = (BLOCK, 2 * BLOCK)
RECORD = HEADER + sum(SHARDS)


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = Driver(FakeFiles())
    assert made.begin(0)
    yield made
    for event in made.files.blocked.values():
        event.set()
    made.executor.close(60)


def wait(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def wanted(objects: tuple[Stored, ...], offset: int = 0) -> tuple[Stored, ...]:
    """To read ``objects`` to other places, one behind the other."""
    moved = []
    for stored in objects:
        moved.append(replace(stored, parent=b"", depth=0, offset=offset))
        offset += sum(stored.shards)
    return tuple(moved)


def test_one_write_is_one_call(driver: Driver) -> None:
    driver.files.calls.clear()
    assert not driver.store(items("a", "b", "c"))
    assert [call for call in driver.files.calls if call[0] == "write"] == [
        ("write", segment_name(0), HEADER, 3 * RECORD)
    ]


def test_neighbours_are_read_in_one_call_and_any_order(driver: Driver) -> None:
    each = items("a", "b", "c", "d", "e")
    objects = driver.placed(each)
    assert not driver.store(each)
    driver.files.calls.clear()
    mixed = wanted(tuple(objects[index] for index in (4, 1, 0)))
    assert not driver.do(Read(driver.io(), 0, mixed, 0, 1))
    assert sorted(call[2:] for call in driver.files.calls if call[0] == "read") == [
        (HEADER, 2 * RECORD),
        (HEADER + 4 * RECORD, RECORD),
    ]
    data = bytes(driver.arena[: 3 * sum(SHARDS)])
    assert data == each[4].payload + each[1].payload + each[0].payload


def test_more_records_than_one_call_takes() -> None:
    driver = Driver(FakeFiles(), budget=4 * (16 << 20) + (2 << 20), segment_bytes=16 << 20)
    assert driver.begin(0)
    each = [Item(b"%d" % index, shards=(BLOCK,)) for index in range(1300)]
    objects = tuple(replace(stored, offset=0) for stored in driver.placed(each, fill=False))
    assert not driver.do(Write(driver.io(), 0, objects, 0, 1))
    assert not driver.do(Read(driver.io(), 0, objects, 0, 1))
    driver.end = objects[-1].at + 2 * BLOCK
    assert driver.seal()
    assert len(driver.recover().records) == 1300
    driver.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"group": -1},
        {"group": 1 << 32},
        {"depth": -1},
        {"depth": 1 << 32},
        {"key": b""},
        {"key": b"k" * 65},
        {"parent": b"p" * 65},
        {"namespace": b"n" * 31},
        {"shards": ()},
        {"shards": (BLOCK, 0)},
        {"shards": (BLOCK + 1,)},
        {"shards": (BLOCK,) * 129},
        {"shards": ((1 << 40) + BLOCK,)},
    ],
)
def test_what_no_record_can_hold_fails_and_what_was_before_it_does_not(driver: Driver, wrong: dict[str, Any]) -> None:
    """Of the objects after it, none would follow the last good one: they fail, too, and may be asked for again."""
    one, two, three = driver.placed(items("a", "b", "c"))
    assert driver.do(Write(driver.io(), 0, (one, replace(two, **wrong), three), 0, 1)) == (1, 2)
    driver.end = two.at
    assert not driver.store(items("d"))
    assert [record[2] for record in driver.recover()] == [b"a", b"d"]
    assert driver.executor.counters().errors == {"Refused": 1}


def test_identity_must_match(driver: Driver) -> None:
    """Everything else about the record is right, and its bytes are intact."""
    objects = driver.placed(items("a"))
    assert not driver.store(items("a"))
    right = wanted(objects)[0]
    assert not driver.do(Read(driver.io(), 0, (right,), 0, 1))
    for wrong in (
        replace(right, key=b"b"),
        replace(right, key=b"a\0"),
        replace(right, group=1),
        replace(right, namespace=b"m" * 32),
        replace(right, shards=(2 * BLOCK, BLOCK)),
        replace(right, shards=(3 * BLOCK,)),
        replace(right, shards=(BLOCK, BLOCK)),
    ):
        assert driver.do(Read(driver.io(), 0, (wrong,), 0, 1)) == (0,)
    assert driver.executor.counters().rejected == {"identity": 7}
    assert driver.do(Read(driver.io(), 0, (right,), 0, 2)) == (0,)  # another life
    assert driver.do(Read(driver.io(), 0, (replace(right, at=HEADER + BLOCK),), 0, 1)) == (0,)
    assert driver.do(Read(driver.io(), 0, (replace(right, at=1 << 30),), 0, 1)) == (0,)
    assert driver.do(Read(driver.io(), 0, (right,), 3, 1)) == (0,)  # no such file
    counters = driver.executor.counters()
    assert counters.rejected == {"identity": 7, "header_stale": 1, "header_empty": 1, "truncated": 1}
    assert counters.errors == {"ENOENT": 1}
    assert counters.failed_objects == 11


def test_what_does_not_follow_is_refused(driver: Driver) -> None:
    """A gap would end a scan by headers, and with it whatever was written behind it."""
    objects = driver.placed(items("a", "b", "c"))
    io = driver.io
    assert driver.do(Write(io(), 0, objects[1:], 0, 1)) == (0, 1)
    assert driver.do(Write(io(), 0, (objects[0], objects[2]), 0, 1)) == (0, 1)
    assert driver.do(Write(io(), 0, objects, 0, 2)) == (0, 1, 2)
    assert driver.do(Write(io(), 0, objects, 1, 1)) == (0, 1, 2)
    assert driver.do(Write(io(), 0, (replace(objects[0], offset=len(driver.arena)),), 0, 1)) == (0,)
    assert driver.do(Write(io(), 0, (replace(objects[0], key=b""),), 0, 1)) == (0,)
    assert driver.do(Write(io(), 0, (replace(objects[0], key=b"k" * 65),), 0, 1)) == (0,)
    assert driver.do(Write(io(), 0, (replace(objects[0], shards=(BLOCK,) * 129),), 0, 1)) == (0,)
    assert driver.do(Write(io(), 0, (replace(objects[0], offset=8),), 0, 1)) == (0,)
    assert driver.do(Seal(io(), 0, 0, 1, 128 << 10)) == (0,)
    assert driver.executor.counters().errors == {"Refused": 9, "Misaligned": 1}


def test_a_life_of_an_earlier_process_is_read_and_sealed_but_not_appended_to(driver: Driver) -> None:
    assert not driver.store(items("a", "b"))
    again = Driver(driver.files.after_kill())
    found = again.recover()
    assert [segment.sealed for segment in found.segments] == [False]
    again.segment, again.seq, again.end = 0, 1, found.segments[0].end
    assert again.store(items("c")) == (0,)
    again.end = found.segments[0].end
    assert again.seal()
    again.close()
    again = Driver(driver.files.after_kill())
    found = again.recover()
    assert [segment.sealed for segment in found.segments] == [True]
    assert [again.read(record) for record in found] == [item.payload for item in items("a", "b")]
    again.close()


def test_a_seal_that_fails_ends_the_segment_and_can_be_tried_again(driver: Driver) -> None:
    assert not driver.store(items("a"))
    driver.files.fault = lambda operation, name: errno.EIO if operation == "write" else 0
    assert not driver.seal()
    driver.files.fault = lambda operation, name: 0
    end = driver.end
    assert driver.store(items("b")) == (0,)
    driver.end = end
    assert driver.seal()
    assert not driver.seal()
    assert [segment.sealed for segment in driver.recover().segments] == [True]


def test_only_a_life_that_is_on_the_disk_is_sealed(driver: Driver) -> None:
    """Or its footer would speak for the next life of that number."""
    driver.files.fault = lambda operation, name: errno.EIO if operation == "sync" else 0
    assert not driver.begin(1)
    driver.files.fault = lambda operation, name: 0
    assert not driver.seal()
    again = Driver(driver.files.after_kill())
    again.segment, again.seq, again.end = 1, 2, HEADER
    files = again.files
    files.calls.clear()
    assert again.seal()
    assert [call[0] for call in files.calls if call[0] in ("sync", "write")] == ["sync", "write", "sync"]
    again.close()


def test_a_removed_file_is_made_anew(driver: Driver) -> None:
    assert not driver.store(items("a"))
    assert driver.begin(1)
    del driver.files.files[segment_name(0)]
    assert driver.begin(0)
    assert not driver.store(items("b"))
    driver.close()
    again = Driver(driver.files.after_kill())
    assert again.recover().keys == {b"b"}
    again.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.ENOENT])
def test_writes_that_fail(driver: Driver, code: int) -> None:
    assert not driver.store(items("a"))
    driver.files.fault = lambda operation, name: code if operation == "write" else 0
    assert driver.store(items("b", "c")) == (0, 1)
    assert not driver.begin(1)
    driver.files.fault = lambda operation, name: 0
    driver.segment, driver.seq, driver.end = 0, 1, HEADER + RECORD
    assert not driver.store(items("d"))  # in the place of b
    assert driver.seal()
    assert driver.recover().keys == {b"a", b"d"}
    assert driver.executor.counters().errors == {errno.errorcode[code]: 2}


@pytest.mark.parametrize("operation", ["create", "allocate", "write", "sync", "sync_names", "open"])
def test_a_segment_that_cannot_be_begun_takes_no_records(driver: Driver, operation: str) -> None:
    driver.files.fault = lambda called, name: errno.ENOSPC if called == operation else 0
    assert not driver.begin(1)
    driver.files.fault = lambda called, name: 0
    assert driver.store(items("a")) == (0,)
    assert driver.begin(1)
    assert not driver.store(items("a"))


@pytest.mark.parametrize("killed", [False, True])
def test_a_segment_whose_name_was_not_synced_is_named_before_it_is_used(driver: Driver, killed: bool) -> None:
    files = driver.files
    files.fault = lambda called, name: errno.EIO if called == "sync_names" else 0
    assert not driver.begin(1)
    files.fault = lambda called, name: 0
    if killed:
        driver.executor.close(10)
        files = files.after_kill()
        driver = Driver(files)
    assert driver.begin(1)
    assert not driver.store(items("a"))
    assert driver.executor.sync()
    after = files.after_power_loss(lambda count: 0)
    driver.close()
    assert Driver(after).recover().keys == {b"a"}


@pytest.mark.parametrize("taken", range(0, 3 * RECORD, 2 * BLOCK))
def test_a_disk_that_takes_a_part(driver: Driver, taken: int) -> None:
    """What was written in full counts; the rest may be written again to the same place."""
    left = [taken]

    def short(size: int) -> int:
        size = min(size, left[0])
        left[0] -= size
        return size

    driver.files.short = short
    good = taken // RECORD
    assert driver.store(items("a", "b", "c")) == tuple(range(good, 3))
    driver.files.short = lambda size: size
    assert not driver.store(items("d"))
    found = driver.recover()
    assert [record[2] for record in found] == [*[b"a", b"b", b"c"][:good], b"d"]
    for record in found:
        assert driver.read(record) == Item(record[2]).payload


@pytest.mark.parametrize("most", [BLOCK, BLOCK + 512, 3 * BLOCK])
def test_short_counts_are_no_failure(driver: Driver, most: int) -> None:
    driver.files.short = lambda size: min(size, most)
    assert not driver.store(items("a", "b"))
    for record in driver.recover():
        assert driver.read(record) == Item(record[2]).payload


def test_one_bad_sector_does_not_cost_the_neighbours(driver: Driver) -> None:
    each = items("a", "b", "c")
    objects = driver.placed(each)
    assert not driver.store(each)
    bad = HEADER + RECORD + 2 * BLOCK
    original = driver.files.preadv

    def preadv(handle: int, buffers: list[memoryview], offset: int) -> int:
        if offset <= bad < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, "bad sector")
        return original(handle, buffers, offset)

    driver.files.preadv = preadv  # type: ignore[method-assign,assignment]
    assert driver.do(Read(driver.io(), 0, wanted(objects), 0, 1)) == (1,)
    assert bytes(driver.arena[: sum(SHARDS)]) == each[0].payload
    assert driver.executor.counters().errors == {"EIO": 2}


KEPT = [errno.ENOENT, errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EROFS, errno.ENOMEM]


@pytest.mark.parametrize("code", [*KEPT, errno.EIO, errno.ENODATA])
@pytest.mark.parametrize("operation", ["open", "read"])
def test_what_could_not_be_looked_at_is_kept(driver: Driver, operation: str, code: int) -> None:
    objects = wanted(driver.placed(items("a", "b")))
    assert not driver.store(items("a", "b"))
    driver.files.fault = lambda called, name: code if called == operation else 0
    io = driver.io()
    assert driver.do(Read(io, 0, objects, 0, 1)) == (0, 1)
    assert driver.kept[io] == (code in KEPT)
    driver.files.fault = lambda called, name: 0
    io = driver.io()
    assert not driver.do(Read(io, 0, objects, 0, 1))
    assert not driver.kept[io]


def test_only_a_read_of_which_nothing_is_damaged_is_kept(driver: Driver) -> None:
    objects = wanted(driver.placed(items("a", "b")))
    assert not driver.store(items("a", "b"))
    original = driver.files.preadv
    bad = [0]

    def preadv(handle: int, buffers: list[memoryview], offset: int) -> int:
        if sum(map(len, buffers)) > RECORD or offset == HEADER:
            raise OSError(errno.ENOMEM, "no memory")
        done = original(handle, buffers, offset)
        buffers[1][0] ^= bad[0]
        return done

    driver.files.preadv = preadv  # type: ignore[method-assign,assignment]
    io = driver.io()
    assert driver.do(Read(io, 0, objects, 0, 1)) == (0,)
    assert driver.kept[io]
    bad[0] = 1
    io = driver.io()
    assert driver.do(Read(io, 0, objects, 0, 1)) == (0, 1)
    assert not driver.kept[io]
    assert driver.do(Read(io := driver.io(), 0, (replace(objects[1], key=b"x"),), 0, 1)) == (0,)
    assert not driver.kept[io]
    assert driver.do(Write(io := driver.io(), 0, objects, 1, 1)) == (0, 1)
    assert not driver.kept[io]


def test_reads_open_nothing_for_writing(driver: Driver) -> None:
    assert not driver.store(items("a", "b"))
    driver.close()
    again = Driver(driver.files.after_kill())
    original = again.files.open_segment

    def open_segment(path: Path, *, create: bool = False, write: bool = True) -> int:
        if write:
            raise FileNotFoundError(errno.ENOENT, "its lock file was replaced")
        return original(path, create=create, write=write)

    again.files.open_segment = open_segment  # type: ignore[method-assign]
    for record in again.recover():
        assert again.read(record) == Item(record[2]).payload
    assert not again.begin(1)
    again.close()


def test_reads_need_no_lock_file(tmp_path: Path) -> None:
    for start in range(2):
        log = open_log(tmp_path, 1 << 20, min_free=0)
        driver = Driver(FakeFiles(), log=log)
        if start:
            found = Recovered(log).records
            (tmp_path / "kvhold.lock").unlink()
            assert [driver.read(record) for record in found] == [Item(b"a").payload]
            assert not driver.begin(1)
        else:
            assert driver.begin(0)
            assert not driver.store(items("a"))
        driver.close()


def test_a_directory_that_vanishes(driver: Driver) -> None:
    assert not driver.store(items("a"))
    record = driver.recover().records[0]
    driver.files.vanish()
    assert driver.read(record) is None
    assert driver.store(items("b")) == (0,)
    assert not driver.begin(1)
    assert not driver.executor.sync()
    assert driver.executor.counters().sync_failures == 0  # those are counted by whoever syncs in time


def test_trouble_is_said_once_and_counted_always(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    driver.files.fault = lambda operation, name: errno.EIO if operation == "write" else 0
    for _ in range(5):
        assert driver.store(items("a")) == (0,)
    assert driver.executor.counters().errors == {"EIO": 5}
    assert [record.message for record in caplog.records] == ["ssd: /ssd: write failed: [Errno 5] Input/output error"]


def test_a_sync_that_fails(driver: Driver) -> None:
    assert not driver.store(items("a"))
    driver.files.fault = lambda operation, name: errno.EIO if operation == "sync" else 0
    assert not driver.seal()
    assert driver.executor.counters().sync_failures == 1
    driver.files.fault = lambda operation, name: 0
    assert driver.executor.sync()  # it is tried again


def test_writes_are_synced_in_time() -> None:
    driver = Driver(FakeFiles(), sync_seconds=0.01)
    assert driver.begin(0)
    assert not driver.store(items("a"))
    wait(lambda: not driver.files.files[segment_name(0)].pending)
    syncs = driver.executor.counters().syncs
    time.sleep(0.03)
    assert driver.executor.counters().syncs == syncs == 1  # and not without need
    driver.close()


def test_reads_go_on_while_a_write_hangs(driver: Driver) -> None:
    assert not driver.store(items("a"))
    record = driver.recover().records[0]
    driver.files.blocked["write"] = hung = threading.Event()
    driver.executor.submit(Write(900, 0, driver.placed(items("b", "c")), 0, 1))
    driver.executor.submit(Write(901, 0, driver.placed(items("d")), 0, 1))
    wait(lambda: driver.executor.in_flight()[:2] == (1, 1))
    assert driver.read(record) == Item(b"a").payload
    assert driver.executor.in_flight()[2] > 0
    hung.set()
    assert {driver.answers.get(timeout=60), driver.answers.get(timeout=60)} == {(900, ()), (901, (0,))}
    assert driver.executor.in_flight() == (0, 0, 0.0)


def test_a_cancelled_read_is_answered_once(driver: Driver) -> None:
    objects = wanted(driver.placed(items("a", "b")))
    assert not driver.store(items("a", "b"))
    driver.files.blocked["read"] = hung = threading.Event()
    for io in (900, 901, 902, 903):  # two are begun, two wait
        driver.executor.submit(Read(io, 0, objects, 0, 1))
    wait(lambda: driver.executor.in_flight()[:2] == (2, 2))
    for io in (900, 903, 903, 12345):
        driver.executor.submit(Cancel(io, 0))
    assert driver.answers.get(timeout=60) == (903, (0, 1))
    assert driver.kept == {**driver.kept, 903: True}
    hung.set()
    assert sorted(driver.answers.get(timeout=60)[0] for _ in range(3)) == [900, 901, 902]
    driver.close()


def test_closing_writes_the_tombstones_that_wait(driver: Driver) -> None:
    """Nobody would hear of one that was not: what was found wrong would be there again at the next start."""
    assert not driver.store(items("a"))
    record = driver.recover().records[0]
    driver.files.blocked["write"] = hung = threading.Event()
    driver.executor.submit(Write(900, 0, driver.placed(items("b")), 0, 1))
    wait(lambda: driver.executor.in_flight()[1] == 1)
    driver.executor.submit(Write(901, 0, driver.placed(items("c")), 0, 1))
    driver.executor.submit(Forget(902, 0, (record[:3],), None, 1, 1 << 20))
    closing = threading.Thread(target=driver.executor.close, args=(60,))
    closing.start()
    assert driver.answers.get(timeout=60) == (901, (0,))
    hung.set()
    assert {driver.answers.get(timeout=60), driver.answers.get(timeout=60)} == {(900, ()), (902, ())}
    closing.join(60)
    assert driver.executor.log.tombstones.hides(record)


def test_closing_with_a_hung_disk(driver: Driver) -> None:
    """It ends in time. What waited fails at once, what hangs when it returns, and later ones too."""
    objects = wanted(driver.placed(items("a", "b")))
    assert not driver.store(items("a", "b"))
    read, write = threading.Event(), threading.Event()
    driver.files.blocked.update(read=read, write=write)
    for io in (900, 901, 902):
        driver.executor.submit(Read(io, 0, objects, 0, 1))
    for io in (903, 904):
        driver.executor.submit(Write(io, 0, driver.placed(items("c")), 0, 1))
    wait(lambda: driver.executor.in_flight()[:2] == (2, 3))
    assert not driver.executor.close(0.05)
    driver.executor.submit(Read(905, 0, objects, 0, 1))
    early = {driver.answers.get(timeout=60) for _ in range(2)}
    assert early == {(902, (0, 1)), (904, (0,))}
    assert (driver.kept[902], driver.kept[904]) == (True, False)
    read.set()
    write.set()
    late = {driver.answers.get(timeout=60) for _ in range(3)}
    assert late == {(900, (0, 1)), (901, (0, 1)), (903, (0,))}
    wait(lambda: not any(thread.is_alive() for thread in driver.executor._threads))
    assert driver.answers.qsize() <= 1  # 905 came after the end


def test_closing_syncs_what_was_written(driver: Driver) -> None:
    assert not driver.store(items("a"))
    assert driver.files.files[segment_name(0)].pending
    assert driver.executor.close(5)
    assert not driver.files.files[segment_name(0)].pending


def test_an_answer_that_is_not_taken_stops_nothing(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    taken = driver.answers.put

    def done(io: int, failed: tuple[int, ...], kept: bool, ages: tuple[int, ...]) -> None:
        if io == 900:
            raise RuntimeError("the shell is in trouble")
        taken((io, failed))

    driver.executor._done = done
    driver.executor.submit(Write(900, 0, driver.placed(items("a")), 0, 1))
    driver.end += RECORD
    assert not driver.store(items("b"))
    assert "was not taken" in caplog.text


def test_a_mistake_of_ours_costs_one_io(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> object:
        raise KeyError("a bug")

    assert not driver.store(items("a"))
    record = driver.recover().records[0]
    with monkeypatch.context() as patch:
        patch.setattr("kvhold.tiers.ssd.reading.check_head", broken)
        patch.setattr("kvhold.tiers.ssd.writing.encode_record", broken)
        assert driver.read(record) is None
        assert driver.store(items("b")) == (0,)
    assert driver.read(record) == Item(b"a").payload
    assert not driver.store(items("b"))


def test_descriptors_are_bounded() -> None:
    driver = Driver(FakeFiles(), budget=12 * (128 << 10) + (64 << 10))
    driver.executor._handles._keep = 3
    for index in range(10):
        assert driver.begin(index)
        assert not driver.store(items(f"s{index}"))
    for record in driver.recover():
        assert driver.read(record) == Item(record[2]).payload
    assert len(driver.files.open_handles) <= 4  # and the lock
    driver.close()


def test_every_answer_comes_once_under_load(driver: Driver) -> None:
    each = items(*"abcdefg")
    objects = wanted(driver.placed(each))
    assert not driver.store(each)
    ios = [driver.io() for _ in range(500)]
    for index, io in enumerate(ios):
        driver.executor.submit(Read(io, 0, objects[index % 7 :], 0, 1))
        if index % 3 == 0:
            driver.executor.submit(Cancel(io, 0))
    assert sorted(driver.answers.get(timeout=60)[0] for _ in ios) == ios
    driver.close()
    assert executor_module.everything(Write(1, 0, objects, 0, 1)) == tuple(range(7))
