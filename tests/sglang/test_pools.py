"""kvhold's storage over SGLang's real host pools, with a real manager and without an engine."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from testbed.process.manager_process import Manager
from testbed.process.peers import populated, until
from testbed.sglang.arguments import storage
from testbed.sglang.pools import LAYOUTS, content, fill, keys_and_values, latent, places, states
from testbed.sglang.storages import Storages, names


@pytest.fixture
def make(host: Manager, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storages]:
    made = Storages(host, monkeypatch)
    yield made
    made.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [keys_and_values, latent, states])
def test_a_page_comes_back_as_it_was(make: Storages, kind: Callable[[str], Any], layout: str) -> None:
    """Into another place of another engine's pool, and nothing beside it is touched."""
    if kind is states and layout == "layer_first":
        pytest.skip("SGLang has no such pool of states")
    mine, others = kind(layout), kind(layout)
    one = make({"kv": mine}, f"{kind.__name__} {layout}")
    two = make({"kv": others}, f"{kind.__name__} {layout}")
    for page in range(8):
        fill(mine, page, page)
        fill(others, page, 100 + page)
    before = [content(others, page) for page in range(12)]
    keys = names(*range(8), of=f"{kind.__name__} {layout}")
    order = [3, 1, 0, 7]
    chain = [keys[page] for page in order]
    assert one.batch_set_v1(chain, places(mine, order)) == [True] * 4
    until(lambda: two.batch_exists(chain) == 4, "stored")
    to = [9, 2, 5, 6]
    assert two.batch_get_v1(chain, places(others, to)) == [True] * 4
    for source, target in zip(order, to, strict=True):
        assert content(others, target) == content(mine, source)
    untouched = [page for page in range(12) if page not in to]
    assert [content(others, page) for page in untouched] == [before[page] for page in untouched]


def test_results_are_true_page_by_page(make: Storages) -> None:
    pool = keys_and_values("page_first")
    one = make({"kv": pool}, "page by page")
    for page in range(6):
        fill(pool, page, page)
    head, tail = names(0, 1, of="pages"), names(2, 3, 4, of="pages")
    after = HiCacheStorageExtraInfo(prefix_keys=head)
    assert one.batch_set_v1(tail, places(pool, [2, 3, 4]), after) == [False] * 3, "what comes before is not stored"
    assert one.batch_set_v1(head, places(pool, [0, 1])) == [True] * 2
    assert one.batch_set_v1(tail, places(pool, [2, 3, 4]), after) == [True] * 3
    until(lambda: one.batch_exists(head + tail) == 5, "stored")
    wanted = [*tail[:2], *names(77), tail[2]]
    assert one.batch_get_v1(wanted, places(pool, [10, 11, 12, 13]), after) == [True, True, False, False]
    assert one.batch_get_v1(["not hex"], places(pool, [1])) == [False], "nothing raises"
    assert one.batch_set_v1(tail, places(pool, [1]), after) == [False] * 3


def test_ranks_that_hold_keys_and_values_alike_have_states_of_their_own(make: Storages) -> None:
    """As where layers of latent attention and of linear attention take turns: all ranks store states, one the rest."""
    pools = [{"kv": latent("page_first"), "mamba": states("page_first")} for _ in range(2)]
    ranks = [{"tp_rank": rank, "tp_size": 2, "is_mla_model": True} for rank in range(2)]
    one, two = (make(pools[rank], "alike", ranks[rank]) for rank in range(2))
    [key] = names(0, of="alike")
    for rank, mine in enumerate(pools):
        for each in mine.values():
            fill(each, 0, rank)
    state = [PoolTransfer(name=PoolName.MAMBA, keys=[key], host_indices=places(mine["mamba"], [0])) for mine in pools]
    assert one.batch_set_v1([key], places(pools[0]["kv"], [0])) == [True]
    assert one.batch_set_v2(state[:1]) == {PoolName.MAMBA: [True]}
    asked = [PoolTransfer(name=PoolName.MAMBA, keys=[key], hit_policy=PoolHitPolicy.TRAILING_PAGES)]
    until(lambda: one.batch_exists_v2([key], asked).kv_hit_pages == 1, "stored")
    found = two.batch_exists_v2([key], asked)
    assert found.extra_pool_hit_pages == {PoolName.KV: 1}
    assert found.kv_hit_pages == 0, "the first rank's state is not the second's"
    assert two.batch_set_v2(state[1:]) == {PoolName.MAMBA: [True]}
    until(lambda: two.batch_exists_v2([key], asked).kv_hit_pages == 1, "stored")
    for storage_of, mine, rank in ((one, pools[0], 0), (two, pools[1], 1)):
        back = PoolTransfer(name=PoolName.MAMBA, keys=[key], host_indices=places(mine["mamba"], [1]))
        assert storage_of.batch_get_v2([back]) == {PoolName.MAMBA: [True]}
        assert content(mine["mamba"], 1) == content(mine["mamba"], 0), rank


PRESENT = st.sets(st.integers(0, 5))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kv=PRESENT, extra=PRESENT, window=st.integers(0, 3), example=st.integers(0, 10**9))
def test_several_pools_are_answered_for_as_by_sglangs_file_backend(
    make: Storages, tmp_path: Path, kv: set[int], extra: set[int], window: int, example: int
) -> None:
    pools = {"kv": keys_and_values("page_first"), "mamba": states("page_first")}
    ours = make(pools, f"several {example}")
    theirs = HiCacheFile(storage(extra_config={}), str(tmp_path / str(example)))
    keys = names(*range(6), of=f"{example}")
    for one in (theirs,):
        one.register_mem_pool_host(pools["kv"])
        for name, pool in pools.items():
            one.register_mem_host_pool_v2(pool, PoolName(name))
    for name, present in (("kv", kv), ("mamba", extra)):
        for page in sorted(present):
            fill(pools[name], page, page)
            stored = PoolTransfer(name=PoolName(name), keys=[keys[page]], host_indices=places(pools[name], [page]))
            assert theirs.batch_set_v2([stored]) == ours.batch_set_v2([stored]) == {PoolName(name): [True]}
    policy = PoolHitPolicy.TRAILING_PAGES if window else PoolHitPolicy.ALL_PAGES
    asked = [PoolTransfer(name=PoolName.MAMBA, keys=keys[6 - window :] if window else keys, hit_policy=policy)]
    assert ours.batch_exists_v2(keys, asked) == theirs.batch_exists_v2(keys, asked)
    for name, pool in pools.items():
        wanted = PoolTransfer(name=PoolName(name), keys=keys, host_indices=places(pool, list(range(10, 16))))
        assert ours.batch_get_v2([wanted]) == theirs.batch_get_v2([wanted])
    ours.close()


def test_threads_get_right_pages_or_none_while_managers_are_killed(make: Storages, host: Manager) -> None:
    pool = keys_and_values("page_first_direct")
    one = make({"kv": pool}, "threads", find_deadline_ms=500, publish_deadline_ms=500)
    wrong: list[str] = []
    restored = [0] * 4
    stop = threading.Event()

    def work(number: int) -> None:
        mine = [20 * number // 2 + at for at in range(5)]
        turn = 0
        while not stop.is_set():
            turn += 1
            seeds = [1000 * number + 10 * (turn % 7) + at for at in range(4)]
            keys = names(*seeds, of="threads")
            for page, seed in zip(mine, seeds, strict=False):
                fill(pool, page, seed)
            wanted = [content(pool, page) for page in mine[:4]]
            one.batch_set_v1(keys, places(pool, mine[:4]))
            for page in mine[:4]:
                fill(pool, page, 5)
            got = one.batch_get_v1(keys, places(pool, mine[:4]))
            restored[number] += sum(got)
            if [content(pool, page) for page, good in zip(mine, got, strict=False) if good] != wanted[: sum(got)]:
                wrong.append(f"thread {number}, turn {turn}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            seen = list(restored)
            until(lambda: all(now > then for now, then in zip(restored, seen, strict=True)), "all restore")  # noqa: B023
            host.restart()
            populated(host.socket)
        seen = list(restored)
        until(lambda: all(now > then for now, then in zip(restored, seen, strict=True)), "all restore again")
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert not wrong
