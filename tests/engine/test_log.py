"""Lines of all modules appear where vLLM's own do, which configures its own loggers alone."""

import logging
import pkgutil

import pytest

import kvhold.client
import kvhold.engines.common
import kvhold.engines.vllm
from kvhold.engines.vllm.connector import _log_like_the_engine

MODULES = [
    f"{folder.__name__}.{found.name}"
    for folder in (kvhold.client, kvhold.engines.common, kvhold.engines.vllm)
    for found in pkgutil.iter_modules(folder.__path__)
]


def _outputs(logger: logging.Logger | None) -> list[logging.Handler]:
    """Who writes a line of ``logger`` somewhere."""
    found = []
    while logger is not None:
        found += logger.handlers
        logger = logger.parent if logger.propagate else None
    return found


def test_lines_of_every_module_appear_in_the_engines_output(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = logging.getLogger("kvhold"), logging.getLogger("vllm")
    for name, value in (("level", logging.NOTSET), ("handlers", []), ("propagate", True)):
        monkeypatch.setattr(ours, name, value)  # as before any connector was made
    for name, value in (("level", logging.INFO), ("handlers", [logging.NullHandler()]), ("propagate", False)):
        monkeypatch.setattr(theirs, name, value)
    _log_like_the_engine()
    for module in MODULES:
        logger = logging.getLogger(module)
        logger.manager._clear_cache()  # type: ignore[attr-defined]
        assert _outputs(logger) == _outputs(theirs), module
        assert logger.getEffectiveLevel() == theirs.getEffectiveLevel(), module
