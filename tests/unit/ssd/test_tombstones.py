"""What was forgotten stays forgotten, and what was stored later does not."""

import errno

import pytest
from testbed.ssd.ssd_fakes import ROOT, Driver, FakeFiles, items

from kvhold.core.log.segments import BLOCK
from kvhold.tiers.ssd.format import LogHead, encode_log
from kvhold.tiers.ssd.tombstones import PER_BLOCK, Tombstones

LOG = b"L" * 16
PATH = ROOT / "kvhold.tombstones"
N, M = b"n" * 32, b"m" * 32


def record(key: bytes, seq: int, at: int, namespace: bytes = N, group: int = 0):  # type: ignore[no-untyped-def]
    return (namespace, group, key, (BLOCK,), 0, 0, seq, at, 0)


def opened(files: FakeFiles, limit: int = 1 << 20) -> Tombstones:
    stones = Tombstones(files, PATH, LOG, limit)
    stones.load()
    return stones


def test_a_position_divides_before_from_after() -> None:
    files = FakeFiles()
    stones = opened(files)
    stones.append([(N, 0, b"a"), (N, 1, b"b")], None, (5, 8192))
    for stones in (stones, opened(files)):  # noqa: B020
        assert stones.hides(record(b"a", 5, 4096))
        assert stones.hides(record(b"a", 4, 1 << 20))
        assert not stones.hides(record(b"a", 5, 8192))
        assert not stones.hides(record(b"a", 6, 4096))
        assert not stones.hides(record(b"b", 5, 4096))  # of another group
        assert stones.hides(record(b"b", 5, 4096, group=1))
        assert not stones.hides(record(b"a", 5, 4096, namespace=M))
        assert stones.newest_seq == 5


def test_a_namespace_and_everything() -> None:
    files = FakeFiles()
    opened(files).append([], N, (5, 8192))
    stones = opened(files)
    assert stones.hides(record(b"x", 5, 4096, group=3))
    assert not stones.hides(record(b"x", 5, 4096, namespace=M))
    stones.append([], b"", (3, 4096))
    stones = opened(files)
    assert stones.hides(record(b"x", 2, 4096, namespace=M))
    assert not stones.hides(record(b"x", 3, 4096, namespace=M))
    assert stones.hides(record(b"x", 5, 4096))


def test_an_earlier_position_does_not_shadow_a_later_one() -> None:
    files = FakeFiles()
    stones = opened(files)
    stones.append([(N, 0, b"a")], None, (9, 4096))
    stones.append([(N, 0, b"a")], None, (3, 4096))
    assert opened(files).hides(record(b"a", 8, 4096))


@pytest.mark.parametrize("count", [1, PER_BLOCK, PER_BLOCK + 1, 3 * PER_BLOCK + 1])
def test_no_flipped_bit_brings_anything_back(count: int) -> None:
    files = FakeFiles()
    keys = [b"k%d" % index for index in range(count)]
    opened(files).append([(N, 0, key) for key in keys], None, (5, 4096))
    data = files.files[PATH.name].now
    assert len(data) == 2 * BLOCK * -(-count // PER_BLOCK)
    for at in range(0, len(data), 61):
        data[at] ^= 1
        stones = opened(files)
        assert all(stones.hides(record(key, 4, 4096)) for key in keys)
        assert stones.damaged == 1
        data[at] ^= 1
    assert opened(files).damaged == 0


def test_damage_is_skipped_and_the_file_goes_on() -> None:
    files = FakeFiles()
    opened(files).append([(N, 0, b"a")], None, (5, 4096))
    data = files.files[PATH.name].now
    data += b"torn tail" * 100
    stones = opened(files)
    stones.append([(N, 0, b"b")], None, (5, 4096))
    stones = opened(files)
    assert stones.hides(record(b"a", 4, 0))
    assert stones.hides(record(b"b", 4, 0))
    other = Tombstones(files, PATH, b"M" * 16, 1 << 20)
    other.load()
    assert (len(other), other.damaged) == (0, 4)  # those of another log mean nothing


def test_compaction_lets_go_of_what_hides_nothing() -> None:
    files = FakeFiles()
    stones = opened(files)
    for seq in range(1, 41):
        stones.append([(N, 0, b"key %d" % seq)], None, (seq, 4096))
    assert len(files.files[PATH.name].now) == 80 * BLOCK
    stones.compact(31)
    assert len(files.files[PATH.name].now) == 2 * BLOCK
    stones = opened(files)
    assert len(stones) == 10
    assert stones.hides(record(b"key 40", 31, 4096))
    stones.append([(N, 0, b"more")], None, (41, 4096))
    assert len(opened(files)) == 11
    stones.compact(99)
    assert len(opened(files)) == 0


@pytest.mark.parametrize("operation", ["create", "write", "sync", "replace", "sync_names"])
def test_compaction_that_fails_loses_nothing(operation: str) -> None:
    files = FakeFiles()
    stones = opened(files)
    for seq in range(1, 41):
        stones.append([(N, 0, b"key %d" % seq)], None, (seq, 4096))
    files.fault = lambda called, name: errno.EIO if called == operation else 0
    with pytest.raises(OSError, match="error"):
        stones.compact(31)
    files.fault = lambda called, name: 0
    stones.append([(N, 0, b"more")], None, (41, 4096))
    after = opened(files)
    assert all(after.hides(record(b"key %d" % seq, seq - 1, 0)) for seq in range(31, 41))
    assert after.hides(record(b"more", 40, 0))


def test_too_many_become_one_that_hides_more(caplog: pytest.LogCaptureFixture) -> None:
    files = FakeFiles()
    limit = 16 * BLOCK
    stones = opened(files, limit)
    for seq in range(1, 20 * PER_BLOCK):
        stones.append([(N, 0, b"key %d" % seq)], None, (seq, 4096))
        assert len(files.files[PATH.name].now) <= limit
    stones = opened(files, limit)
    assert all(stones.hides(record(b"key %d" % seq, seq - 1, 0)) for seq in range(1, 20 * PER_BLOCK))
    assert not stones.hides(record(b"key 1", 20 * PER_BLOCK, 0))
    assert "a restart will be cold" in caplog.text


def test_a_torn_append_hides_all_or_is_not_acknowledged() -> None:
    """Power loss while tombstones are written: those acknowledged before stay."""
    for fate in range(6):
        files = FakeFiles()
        stones = opened(files)
        stones.append([(N, 0, b"a")], None, (5, 4096))
        files.fault = lambda called, name: errno.EIO if called == "sync" else 0
        with pytest.raises(OSError, match="error"):
            stones.append([(N, 0, b"b")], None, (5, 4096))
        after = opened(files.after_power_loss(lambda n, fate=fate: fate % n))  # type: ignore[misc]
        assert after.hides(record(b"a", 4, 0))


def test_what_could_not_be_written_is_written_with_the_next() -> None:
    files = FakeFiles()
    stones = opened(files)
    files.fault = lambda operation, name: errno.ENOSPC if operation == "write" else 0
    with pytest.raises(OSError, match="No space"):
        stones.append([(N, 0, b"a")], None, (5, 8192))
    files.fault = lambda operation, name: 0
    stones.append([(N, 0, b"b")], None, (6, 4096))
    again = opened(files)
    assert again.hides(record(b"a", 5, 4096))
    assert not again.hides(record(b"a", 5, 8192)), "it was stored anew meanwhile"
    assert again.hides(record(b"b", 6, 0))


def test_forgetting_in_a_log() -> None:
    files = FakeFiles()
    driver = Driver(files)
    assert driver.begin(0)
    assert not driver.store(items("a", "b", "c") + items("p", namespace=M))
    assert driver.forget(*items("a", "c"))
    assert not driver.store(items("a", "d"))  # again, and later
    assert driver.forget(namespace=M)
    driver.close()
    files = files.after_kill()
    driver = Driver(files)
    found = driver.recover()
    assert sorted(record[2] for record in found) == [b"a", b"b", b"d"]
    assert found.counts["tombstoned"] == 3
    assert driver.forget(namespace=b"")
    assert driver.begin(1)
    assert not driver.store(items("e"))
    driver.close()
    driver = Driver(files.after_kill())
    assert driver.recover().keys == {b"e"}
    driver.close()


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("rewritten", [False, True])
def test_what_was_acknowledged_outlasts_a_loss_of_power_after_names_were_not_synced(
    rewritten: bool, killed: bool
) -> None:
    files = FakeFiles()
    stones = opened(files)
    if rewritten:
        stones.append([(N, 0, b"a")], None, (1, BLOCK))
    files.fault = lambda operation, name: errno.EIO if operation == "sync_names" else 0
    with pytest.raises(OSError, match="Input/output error"):
        stones.rewrite() if rewritten else stones.append([(N, 0, b"a")], None, (1, BLOCK))
    files.fault = lambda operation, name: 0
    if killed:
        files = files.after_kill()
        stones = opened(files)
    stones.append([(N, 0, b"b")], None, (1, BLOCK))
    stones = opened(files.after_power_loss(lambda count: 0))
    assert stones.hides(record(b"b", 1, 0))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_a_forgetting_that_fails_says_so(code: int) -> None:
    files = FakeFiles()
    driver = Driver(files)
    assert driver.begin(0)
    assert not driver.store(items("a"))
    files.fault = lambda operation, name: code if name == PATH.name else 0
    assert not driver.forget(*items("a"))
    files.fault = lambda operation, name: 0
    assert driver.executor.counters().errors == {errno.errorcode[code]: 1}
    assert driver.forget(*items("a"))
    driver.close()


@pytest.mark.parametrize(
    "bad", [(N, 1 << 40, b"key"), (N, -2, b"key"), (N, 0, b""), (N, 0, b"k" * 65), (b"short", 0, b"key")]
)
def test_a_name_that_does_not_fit_fails_alone(bad: tuple[bytes, int, bytes]) -> None:
    files = FakeFiles()
    stones = opened(files, 16 * BLOCK)
    with pytest.raises(ValueError, match="no name of an object"):
        stones.append([(N, 0, b"with it"), bad], None, (5, 4096))
    assert len(stones) == 0
    for index in range(200):  # the file is rewritten on the way
        stones.append([(N, 0, b"%d" % index)], None, (5, index))
    assert opened(files).newest_seq == 5


def test_a_namespace_that_no_record_can_have_hides_nothing() -> None:
    files = FakeFiles()
    stones = opened(files)
    stones.append([], N[:7], (5, 4096))
    stones.append([], N + b"n", (5, 4096))
    assert not opened(files).hides(record(b"a", 4, 4096, namespace=N[:7].ljust(32, b"\0")))
    assert not opened(files).hides(record(b"a", 4, 4096))


@pytest.mark.parametrize("count", [3, 40])
def test_a_file_above_a_smaller_limit_is_rewritten_at_once(count: int) -> None:
    files = FakeFiles()
    stones = opened(files)
    for index in range(count):
        stones.append([(N, 0, b"key %d" % index)], None, (7, 4096))
    assert len(files.files[PATH.name].now) == 2 * count * BLOCK
    stones = opened(files, 5 * BLOCK)
    stones.compact(0)
    assert len(files.files[PATH.name].now) <= 5 * BLOCK
    after = opened(files)
    assert all(after.hides(record(b"key %d" % index, 6, 0)) for index in range(count))


def purged(names: str, *, then: str = "") -> FakeFiles:
    """A log that has stored ``names`` and forgotten the first of them, and after that stored ``then`` elsewhere."""
    files = FakeFiles()
    driver = Driver(files)
    assert driver.begin(0)
    assert not driver.store(items(*names))
    assert driver.forget(*items(names[0]))
    if then:
        assert driver.begin(1)
        assert not driver.store(items(*then))
    driver.close()
    return files.after_kill()


def reopened(files: FakeFiles) -> tuple[set[bytes], int]:
    """What the next manager finds, and whether it has noticed that tombstones are lost."""
    driver = Driver(files)
    found = driver.recover()
    driver.close()
    return found.keys, found.counts["lost_tombstones"]


@pytest.mark.parametrize("how", ["removed", "emptied", "an older one", "removed with kvhold.log"])
def test_tombstones_that_are_lost_bring_nothing_back(how: str, caplog: pytest.LogCaptureFixture) -> None:
    files = purged("ab", then="cd")
    assert reopened(files) == ({b"b", b"c", b"d"}, 0)
    older = bytes(files.files[PATH.name].now)
    driver = Driver(files.after_kill())
    assert driver.begin(2)
    assert not driver.store(items("e"))
    assert driver.forget(*items("c"))
    assert driver.begin(3)
    assert not driver.store(items("f"))
    driver.close()
    assert reopened(files) == ({b"b", b"d", b"e", b"f"}, 0)
    if how == "emptied":
        files.files[PATH.name].now.clear()
    elif how == "an older one":
        files.files[PATH.name].now[:] = older
    else:
        del files.files[PATH.name]
    if how == "removed with kvhold.log":
        del files.files["kvhold.log"]
    assert reopened(files) == ({b"f"}, 1)
    assert "kvhold.tombstones is missing or out of date" in caplog.text
    for _ in range(3):  # all is as it should be again, and stays so
        assert reopened(files) == ({b"f"}, 0)
    driver = Driver(files.after_kill())
    assert driver.begin(0)
    assert not driver.store(items("g"))
    driver.close()
    assert reopened(files) == ({b"f", b"g"}, 0)


def test_a_log_from_before_this_was_noted_is_noted_when_it_is_opened() -> None:
    files = purged("ab")
    head = files.files["kvhold.log"].now
    encode_log(head, LogHead(bytes(head[16:32]), 128 << 10, 1, 0))
    assert reopened(files) == ({b"b"}, 0)
    del files.files[PATH.name]
    assert reopened(files) == (set(), 1)


def test_tombstones_that_hide_nothing_any_more_are_not_missed() -> None:
    files = purged("ab", then="cd")
    driver = Driver(files.after_kill())
    assert driver.begin(0)  # what was purged is gone for good
    driver.close()
    assert reopened(files) == ({b"c", b"d"}, 0)
    del files.files[PATH.name]
    assert reopened(files) == ({b"c", b"d"}, 0)


def test_tombstones_that_are_removed_while_a_manager_runs_are_written_again() -> None:
    files = FakeFiles()
    driver = Driver(files)
    assert driver.begin(0)
    assert not driver.store(items("a", "b", "c"))
    assert driver.forget(*items("a"))
    del files.files[PATH.name]
    assert driver.forget(*items("b"))
    driver.close()
    assert reopened(files.after_kill()) == ({b"c"}, 0)
