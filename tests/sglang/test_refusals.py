"""What is refused at the start, on SGLang's own arguments and classes. No engine is started."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_context, publish
from testbed.sglang.arguments import resolved, storage, write_model

from kvhold.engines.sglang.refusals import refuse, refuse_pool


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def published() -> Iterator[Any]:
    before = get_context()._server_args
    yield lambda args: publish(args, role="scheduler")
    get_context()._server_args = before


def test_arguments_as_sglang_has_resolved_them(folder: Path, published: Any) -> None:
    """SGLang makes another layout of the one that was given where that does not go with the I/O backend."""
    published(resolved(folder, hicache_mem_layout="page_first", hicache_io_backend="direct"))
    with pytest.raises(ValueError, match="plugin"):
        refuse(storage())
    published(resolved(folder, hicache_mem_layout="page_head", hicache_io_backend="kernel"))
    with pytest.raises(ValueError, match="--hicache-mem-layout has the value 'page_head'"):
        refuse(storage())


def test_an_engine_without_the_hooks_is_refused(folder: Path, published: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with SGLANG_PLUGINS naming others, or kvhold on the path but not installed."""
    published(resolved(folder))
    assert not HookRegistry._patched
    with pytest.raises(ValueError, match="SGLANG_PLUGINS"):
        refuse(storage())
    monkeypatch.setattr("kvhold.engines.sglang.updates.hooked", lambda: True)
    refuse(storage())


def test_a_pool_that_only_counts_is_refused() -> None:
    pool = object.__new__(LogicalHostPool)
    pool.page_size = 16
    pool.layout = "page_first"
    with pytest.raises(ValueError, match="does not say where its pages are"):
        refuse_pool(pool, "kv", storage())
