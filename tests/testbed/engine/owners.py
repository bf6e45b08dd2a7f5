"""Looks at which thread calls which object, for as long as :func:`watched` is open: see ``kvhold.threads``."""

import functools
import importlib
import inspect
import pkgutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import kvhold.client
import kvhold.engines.common
import kvhold.engines.vllm
from kvhold.threads import ATTACHER, ENGINE

FOLDERS = (kvhold.client, kvhold.engines.common, kvhold.engines.vllm)


@functools.cache
def owned() -> tuple[type, ...]:
    """All classes that say which thread they belong to."""
    modules = [
        importlib.import_module(f"{folder.__name__}.{found.name}")
        for folder in FOLDERS
        for found in pkgutil.iter_modules(folder.__path__)
    ]
    kinds = {kind for module in modules for _, kind in inspect.getmembers(module, inspect.isclass)}
    return tuple(sorted((kind for kind in kinds if "thread_of" in vars(kind)), key=lambda kind: kind.__qualname__))


@contextmanager
def watched() -> Iterator[None]:
    """Calls by a thread that the object does not belong to are an error at the end: here ours would swallow it."""
    wrong: set[str] = set()
    with ExitStack() as patches:
        for kind in owned():
            threads: dict[str, str] = kind.thread_of  # type: ignore[attr-defined]
            for name, function in list(vars(kind).items()):
                if inspect.isfunction(function) and not name.startswith("_"):
                    thread = threads.get(name, threads[""])
                    patches.enter_context(patch.object(kind, name, _checked(function, thread, wrong)))
        yield
    assert not wrong, "\n".join(sorted(wrong))


def _checked(function: Any, thread: str, wrong: set[str]) -> Any:
    @functools.wraps(function)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        now = threading.current_thread()
        right = now.name.startswith("kvhold-attacher") if thread == ATTACHER else not now.name.startswith("kvhold-")
        if thread == ENGINE and right and hasattr(self, "__dict__"):
            right = vars(self).setdefault("engine's thread, for tests", now.ident) == now.ident
        if thread and not right:
            wrong.add(f"{function.__qualname__} belongs to the {thread}'s thread, and {now.name} has called it")
        return function(self, *args, **kwargs)

    return checked
