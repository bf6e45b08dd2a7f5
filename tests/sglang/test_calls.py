"""Calls of SGLang's storage interface with arguments that nobody expects: the answer is right, or nothing is there."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolHitPolicy, PoolName, PoolTransfer
from testbed.process.manager_process import Manager
from testbed.process.peers import status, until
from testbed.sglang.pools import PAGE, PAGES, content, fill, keys_and_values, places, states
from testbed.sglang.storages import Storages, names

from kvhold import protocol as wire
from kvhold.engines.sglang.backend import KvholdStorage

NONE = torch.zeros(0, dtype=torch.int64)


@pytest.fixture
def make(host: Manager, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storages]:
    made = Storages(host, monkeypatch)
    yield made
    assert not status(host.socket)["accounts"]["leased"], "each call ends what it leases"
    made.close()


@pytest.fixture
def pools() -> dict[str, Any]:
    return {"kv": keys_and_values("page_first"), "mamba": states("page_first")}


def transfer(name: PoolName, keys: list[str] | None, where: torch.Tensor | None) -> PoolTransfer:
    return PoolTransfer(name=name, keys=keys, host_indices=where)


def works(one: KvholdStorage, pools: dict[str, Any], of: str) -> None:
    """What is stored is found and restored."""
    until(lambda: one._face.attached, "attached")
    kv, keys = pools["kv"], names(*range(3), of=f"works {of}")
    for page in range(3):
        fill(kv, page, page)
    assert one.batch_set_v1(keys, places(kv, [0, 1, 2])) == [True] * 3
    until(lambda: one.batch_exists(keys) == 3, "stored")
    assert one.batch_get_v1(keys, places(kv, [3, 4, 5])) == [True] * 3
    assert [content(kv, page) for page in (3, 4, 5)] == [content(kv, page) for page in range(3)]


def test_no_keys(make: Storages, pools: dict[str, Any]) -> None:
    one = make(pools, "no keys")
    attached = one._face._control.attachment
    for extra in (None, HiCacheStorageExtraInfo(), HiCacheStorageExtraInfo(prefix_keys=names(1))):
        assert one.batch_exists([], extra) == 0
        assert one.batch_get_v1([], NONE, extra) == one.batch_set_v1([], NONE, extra) == []
        assert one.batch_exists_v2([], [transfer(PoolName.MAMBA, None, None)], extra).kv_hit_pages == 0
        assert one.batch_exists_v2([], None, extra).kv_hit_pages == 0
        for call in (one.batch_get_v2, one.batch_set_v2):
            assert call([], extra) == {}
            for where in (None, NONE):
                assert call([transfer(PoolName.MAMBA, None, where)], extra) == {PoolName.MAMBA: []}
    works(one, pools, "no keys")
    assert one._face._control.attachment == attached


def test_keys_that_come_twice(make: Storages, pools: dict[str, Any]) -> None:
    one = make(pools, "twice")
    attached = one._face._control.attachment
    kv, mamba = pools["kv"], pools["mamba"]
    first, second = names(1, 2, of="twice")
    fill(kv, 0, 0)
    fill(kv, 1, 1)
    fill(mamba, 0, 2)
    assert one.batch_set_v1([first, first, second, first], places(kv, [0, 0, 1, 0])) == [True] * 4
    twice = transfer(PoolName.MAMBA, [first, first], places(mamba, [0, 0]))
    assert one.batch_set_v2([twice, twice]) == {PoolName.MAMBA: [True, True]}
    until(lambda: one.batch_exists([first, second, first]) == 3, "stored")
    got = one.batch_get_v1([first, second, first, names(9)[0], first], places(kv, [5, 6, 7, 8, 9]))
    assert got == [True, True, True, False, False]
    assert [content(kv, page) for page in (5, 6, 7)] == [content(kv, page) for page in (0, 1, 0)]
    back = transfer(PoolName.MAMBA, [first, second, first], places(mamba, [5, 6, 7]))
    assert one.batch_get_v2([back]) == {PoolName.MAMBA: [True, False, True]}
    assert content(mamba, 5) == content(mamba, 7) == content(mamba, 0)
    works(one, pools, "twice")
    assert one._face._control.attachment == attached


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(torch.arange(PAGE * 2), id="too few"),
        pytest.param(torch.arange(PAGE * 4), id="too many"),
        pytest.param(torch.arange(PAGE * 3) + 1, id="between pages"),
        pytest.param(torch.arange(PAGE * 3).flip(0), id="backwards"),
        pytest.param(torch.arange(PAGE * 3) - PAGE, id="before the pool"),
        pytest.param(torch.arange(PAGE * 3) + PAGE * (2 * PAGES + 100), id="after the pool"),
        pytest.param(torch.arange(PAGE * 3 - 1), id="a torn page"),
    ],
)
def test_places_that_are_not_those_of_the_pages(make: Storages, pools: dict[str, Any], where: torch.Tensor) -> None:
    """Nothing is copied, not even to a neighbour, and what was leased is given back at once."""
    one = make(pools, "places")
    kv, keys = pools["kv"], names(*range(3), of="places")
    for page in range(6):
        fill(kv, page, page)
    assert one.batch_set_v1(keys, places(kv, [0, 1, 2])) == [True] * 3
    until(lambda: one.batch_exists(keys) == 3, "stored")
    for page in range(6):
        fill(kv, page, 10 + page)
    before = [content(kv, page) for page in range(6)]
    assert one.batch_get_v1(keys, where) == [False] * 3
    assert one.batch_get_v2([transfer(PoolName.KV, keys, where)]) == {PoolName.KV: [False] * 3}
    assert [content(kv, page) for page in range(6)] == before
    assert not one._face._control._asked
    others = names(*range(3), of=f"other places {where.tolist()}")
    assert one.batch_set_v1(others, where) == [False] * 3
    assert one.batch_set_v2([transfer(PoolName.KV, others, where)]) == {PoolName.KV: [False] * 3}
    assert one.batch_exists(others) == 0


def test_keys_that_are_none_of_sglangs(make: Storages, pools: dict[str, Any]) -> None:
    one = make(pools, "strange")
    kv = pools["kv"]
    for strange in ("", "00", "g" * 64, "0" * 63, "0" * 128, "0" * 62 + " 0", None, 7):
        assert one.batch_exists([strange]) == 0
        assert one.batch_get_v1([strange], places(kv, [0])) == [False]
        assert one.batch_set_v1([strange], places(kv, [0])) == [False]
        after = HiCacheStorageExtraInfo(prefix_keys=[strange])
        assert one.batch_set_v1(names(1), places(kv, [0]), after) == [False]
        both = [transfer(PoolName.KV, [strange], places(kv, [0])), transfer(PoolName.SWA, names(1), places(kv, [0]))]
        for call in (one.batch_get_v2, one.batch_set_v2):
            assert call(both) == {PoolName.KV: [False], PoolName.SWA: [False]}
    works(one, pools, "strange")


def test_a_pool_that_is_not_there_and_a_policy_without_a_verdict(make: Storages, pools: dict[str, Any]) -> None:
    """SGLang has block groups say nothing of the hit: a pool that is not reported has no verdict."""
    one = make(pools, "policies")
    kv, keys = pools["kv"], names(*range(2), of="policies")
    assert one.batch_set_v1(keys, places(kv, [0, 1])) == [True] * 2
    until(lambda: one.batch_exists(keys) == 2, "stored")
    groups = PoolTransfer(PoolName.MAMBA, keys=keys, hit_policy=PoolHitPolicy.BLOCK_GROUPS, block_pages=1)
    found = one.batch_exists_v2(keys, [groups])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (2, {PoolName.KV: 2})
    absent = PoolTransfer(PoolName.SWA, keys=keys)
    assert one.batch_exists_v2(keys, [absent]).kv_hit_pages == 0


def test_more_keys_than_a_message_has_room_for(make: Storages, pools: dict[str, Any]) -> None:
    """Of a chain that long its beginning is answered for, and its end is stored at the depth that it has."""
    one = make(pools, "many")
    kv, many = pools["kv"], names(*range(wire.most_keys(32) + 3), of="many")
    assert one.batch_set_v1(many[:2], places(kv, [0, 1])) == [True] * 2
    until(lambda: one.batch_exists(many) == 2, "stored")
    assert one.batch_exists_v2(many, [PoolTransfer(PoolName.MAMBA, keys=many)]).kv_hit_pages == 0
    *before, last = many
    assert one.batch_set_v1([last], places(kv, [2]), HiCacheStorageExtraInfo(prefix_keys=before)) == [False]
    works(one, pools, "many")


def test_after_the_storage_was_detached(make: Storages, pools: dict[str, Any]) -> None:
    one = make(pools, "detached")
    kv, keys = pools["kv"], names(1)
    one.close()
    one.close()
    assert one.batch_exists(keys) == 0
    assert one.exists(keys[0]) is False
    assert one.batch_get_v1(keys, places(kv, [0])) == one.batch_set_v1(keys, places(kv, [0])) == [False]
    asked = [transfer(PoolName.KV, keys, places(kv, [0]))]
    assert one.batch_get_v2(asked) == one.batch_set_v2(asked) == {PoolName.KV: [False]}
    assert one.batch_exists_v2(keys, asked).kv_hit_pages == 0
    one.register_mem_host_pool_v2(keys_and_values("page_first"), PoolName.SWA)
    assert one.clear()
    assert one.get_stats() is not None


def test_a_name_that_cannot_be_changed_is_given_up(
    make: Storages, pools: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is stored under the former one may be of other weights."""
    one = make(pools, "given up")
    keys = names(*range(2), of="given up")
    assert one.batch_set_v1(keys, places(pools["kv"], [0, 1])) == [True] * 2
    until(lambda: one.batch_exists(keys) == 2, "stored")

    def crowded(*_: object) -> None:
        raise ValueError("64 spaces are open already")

    with monkeypatch.context() as patched:
        patched.setattr(one._face, "open", crowded)
        assert one.clear()
    assert one.batch_exists(keys) == 0
    assert one.batch_get_v1(keys, places(pools["kv"], [2, 3])) == [False] * 2
    assert one.batch_set_v1(keys, places(pools["kv"], [0, 1])) == [False] * 2
    assert one.clear()
    works(one, pools, "given up")


def test_metrics_that_cannot_be_told_do_not_reach_the_scheduler(
    make: Storages, pools: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where their files are on a disk that is full."""
    one = make(pools, "metrics")

    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(one._stats, "_show", True)
    monkeypatch.setattr(one._stats, "_counter", full)
    assert one.batch_exists(names(1)) == 0
    assert one.batch_set_v1(names(1), places(pools["kv"], [0])) == [True]
    until(lambda: one.batch_exists(names(1)) == 1, "stored")
    assert one.batch_get_v1(names(1), places(pools["kv"], [1])) == [True]
    assert one.get_stats().prefetch_pgs == []


def test_a_forked_child_neither_ends_the_session_nor_keeps_it(
    make: Storages, pools: dict[str, Any], host: Manager
) -> None:
    one = make(pools, "forks")
    ended = os.fork()
    if not ended:
        os._exit(0)
    os.waitpid(ended, 0)
    read, write = os.pipe()
    living = os.fork()
    if not living:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        works(one, pools, "forks")
        one.close()
        until(lambda: not any("forks" in each["engine"] for each in status(host.socket)["sessions"]), "it is over")
    finally:
        os.kill(living, signal.SIGKILL)
        os.waitpid(living, 0)
        os.close(read)
        os.close(write)


def test_clearing_again_and_again_while_threads_store_and_restore(
    make: Storages, pools: dict[str, Any], host: Manager
) -> None:
    """Each time the namespace is another: neither side may gather what is over."""
    one = make(pools, "cleared")
    kv, stop, wrong = pools["kv"], threading.Event(), []

    def work(number: int) -> None:
        keys, mine, other = names(number, of="cleared"), 2 * number, 2 * number + 1
        fill(kv, mine, number)
        while not stop.is_set():
            one.batch_set_v1(keys, places(kv, [mine]))
            fill(kv, other, 99)
            if one.batch_get_v1(keys, places(kv, [other])) == [True] and content(kv, mine) != content(kv, other):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(200):
            assert one.clear()
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert not wrong
    assert len(one._face._spaces) == len(pools)
    works(one, pools, "cleared")
    until(lambda: sum("cleared" in each["model"] for each in status(host.socket)["spaces"]) <= 2 * len(pools), "gone")
