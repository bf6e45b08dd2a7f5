"""What people see of SGLang's ranks: metrics by reason, model and rank in ``kvhold status``, pages in ``explain``."""

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from sglang.srt.runtime_context import get_context, publish
from testbed.process.manager_process import Manager
from testbed.process.peers import populated, status
from testbed.sglang.arguments import resolved, storage, write_model

from kvhold.cli.explain import explain
from kvhold.engines.sglang import updates
from kvhold.engines.sglang.backend import KvholdStorage
from kvhold.engines.sglang.updates import Updates

PAGE, PAGES, SIZE = 4, 8, 4096


class Pages:
    """A host pool of tokens, ``PAGES`` pages of ``SIZE`` bytes."""

    layout = "page_first_direct"
    page_size = PAGE
    size = PAGE * PAGES

    def __init__(self) -> None:
        self.memory = torch.zeros(PAGES, SIZE, dtype=torch.uint8)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pages = indices[::PAGE].tolist()
        return [self.memory[page // PAGE].data_ptr() for page in pages], [SIZE] * len(pages)


def indices(pages: int) -> torch.Tensor:
    return torch.arange(pages * PAGE)


def keys(prompt: str, count: int = PAGES) -> list[str]:
    return [hashlib.sha256(f"{prompt} {number}".encode()).hexdigest() for number in range(count)]


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    running = Manager(tmp_path_factory.mktemp("k"), dram="64MiB")
    populated(running.socket)
    yield running
    running.kill()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = get_context()._server_args
    publish(resolved(write_model(tmp_path_factory.mktemp("models") / "llama"), tp_size=2), role="scheduler")
    yield
    get_context()._server_args = before


@pytest.fixture(scope="module")
def ranks(manager: Manager, published: None) -> Iterator[list[KvholdStorage]]:
    """The storages of two ranks, each with its pool, as if each were in a process of its own."""
    extra: dict[str, Any] = {"interface_v1": 1, "socket": str(manager.socket)}
    extra |= {"find_deadline_ms": 20_000, "publish_deadline_ms": 20_000}  # a busy machine is no fault
    made = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(updates, "hooked", lambda: True)
        patched.setattr(updates, "updates", Updates(lambda: "engine"))
        for rank in range(2):
            config = storage(tp_rank=rank, tp_size=2, enable_storage_metrics=True, extra_config=extra)
            made.append(KvholdStorage(config, {}))
            made[-1].register_mem_pool_host(Pages())
        assert all(each._face.wait(60) for each in made)
        yield made
        for each in made:
            each.close()


def metric(name: str, rank: int, **labels: str) -> float:
    mine = {"model_name": "llama", "tp_rank": str(rank), "pp_rank": "0", "dp_rank": "0"}
    found = REGISTRY.get_sample_value(f"kvhold:{name}_total", mine | labels)
    assert found is not None, "a counter that is there from the start has a rate from the start"
    return found


def counted(each: KvholdStorage, rank: int) -> dict[str, float]:
    """The counters, after SGLang's scheduler has asked for them."""
    each.get_stats()
    names = ("looked_for", "seen", "asked", "found", "restored", "offered", "present", "published")
    return {name: metric(f"pages_{name}", rank) for name in names}


def test_each_page_is_counted_once_and_by_its_reason(ranks: list[KvholdStorage]) -> None:
    first, prompt = ranks[0], keys("counted")
    before = counted(first, 0)
    unseen = metric("pages_unseen", 0, reason="not_stored")
    assert first.batch_exists(prompt) == 0
    assert first.batch_set_v1(prompt, indices(PAGES)) == [True] * PAGES
    assert first.batch_set_v1(prompt, indices(PAGES)) == [True] * PAGES
    assert first.batch_exists(prompt) == PAGES
    assert first.batch_get_v1(prompt, indices(PAGES)) == [True] * PAGES
    stats = first.get_stats()
    assert stats.prefetch_pgs == [PAGES]
    assert stats.backup_pgs[0] == PAGES
    assert len(stats.prefetch_bandwidth) == 1
    assert counted(first, 0) == {
        name: value + PAGES * (2 if name in ("looked_for", "offered") else 1) for name, value in before.items()
    }
    assert metric("pages_unseen", 0, reason="not_stored") == unseen + PAGES
    assert metric("restore_bytes", 0) >= PAGES * SIZE
    assert not first.get_stats().prefetch_pgs, "each batch is told once"


def test_what_was_not_stored_before_a_flush_says_so(ranks: list[KvholdStorage]) -> None:
    first, second = ranks
    known, prompt = keys("known"), keys("unflushed")
    assert all(first.batch_set_v1(known, indices(PAGES)))
    assert all(second.batch_set_v1(known, indices(PAGES)))
    updates.updates.changing("update_weights_from_disk")
    before = metric("pages_unpublished", 0, reason="unflushed")
    assert first.batch_exists(known) == 0
    assert first.batch_set_v1(prompt, indices(PAGES)) == [False] * PAGES
    first.get_stats()
    assert metric("pages_unpublished", 0, reason="unflushed") == before + PAGES
    updates.updates.flushed()
    assert first.batch_set_v1(prompt, indices(PAGES)) == [True] * PAGES
    assert first.clear()
    assert first.batch_exists(prompt) == 0


def test_status_names_the_model_and_the_rank(ranks: list[KvholdStorage], manager: Manager) -> None:
    for each in ranks:
        assert all(each.batch_set_v1(keys("status"), indices(PAGES)))
    report = status(manager.socket)
    used = [space["model"] for space in report["spaces"] if space["users"]]
    assert sorted(used) == ["llama tp 0/2", "llama tp 1/2"]
    assert {"SGLang llama tp 0/2", "SGLang llama tp 1/2"} <= {session["engine"] for session in report["sessions"]}


def test_a_page_is_explained_by_its_hash(
    ranks: list[KvholdStorage], manager: Manager, capsys: pytest.CaptureFixture[str]
) -> None:
    page = keys("explained")[0]
    assert all(ranks[0].batch_set_v1([page], indices(1)))
    for name in (page, page[-16:]):
        explain(name, manager.socket)
        told = capsys.readouterr().out
        assert "stored" in told
        assert f"now: resident, {SIZE} bytes" in told
