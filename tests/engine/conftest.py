"""Fixtures of the engine tests; without vLLM there is nothing to test here."""

import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.process.manager_process import Manager

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import testbed.engine.bed  # noqa: F401 - sets the environment before any test module imports vLLM
    from testbed.engine.models import write_llama


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny float32 Llama."""
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """For a manager's socket."""
    with tempfile.TemporaryDirectory(prefix="kvhold-") as folder:
        yield Path(folder)


@pytest.fixture
def manager() -> Iterator[Manager]:
    """A standalone manager of this test alone, with 256 MiB of DRAM."""
    with tempfile.TemporaryDirectory(prefix="kvhold-") as folder:
        process = Manager(Path(folder))
        yield process
        print(process.log_tail())
        process.kill()
