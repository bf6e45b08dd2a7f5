"""Weight updates while an engine runs: what they make of what is stored, and of what the engine still has.

SGLang tells no storage that weights were changed, and its keys say nothing about it. So kvhold hooks the methods that
change them, by SGLang's plugin entry point. From such a call on the engine speaks of other namespaces. Pages in
its own tree may be from before, until it has been flushed: nothing is published before that.
"""

import hashlib
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from kvhold.engines.sglang.identity import adapter_identity, effective, files_of
from kvhold.engines.sglang.loaded import loaded

log = logging.getLogger(__name__)

_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
CHANGING = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "begin_weight_update",
)
"""Methods of SGLang's weight updater after which other weights may be loaded, beside the end of an update and the
return of released memory. Between its begin and its end an update may write them without a call."""


class Updates:
    """The weight updates of one scheduler process.

    ``salt`` sets apart what is computed from now on; it is empty until something has changed, and equal on all ranks
    of an engine, which see the same updates in the same order. ``settled`` says whether all that the engine has in its
    tree was computed with the weights of now: where it was not, nothing may be published.

    ``flushed_at`` is the number of the last forward pass before the tree was emptied last.

    All but ``salt`` and ``settled`` belongs to the scheduler's thread; these may be read on any.
    """

    def __init__(self, engine: Callable[[], str]) -> None:
        self.salt = b""
        self.settled = True
        self.flushed_at = -1
        self.adapters: dict[str, str] = {}
        self._engine = engine
        self._listeners: list[Callable[[], None]] = []

    def listen(self, rekeyed: Callable[[], None], adapters: Mapping[str, str]) -> None:
        """Have ``rekeyed`` called at each change, on the scheduler's thread. It must wait for nothing.

        ``adapters`` are what the files of the adapters hold that were loaded at the start, by path.
        """
        self._listeners.append(rekeyed)
        self.adapters.update(adapters)

    def forget(self, rekeyed: Callable[[], None]) -> None:
        """Call ``rekeyed`` no more."""
        if rekeyed in self._listeners:
            self._listeners.remove(rekeyed)

    def clear(self) -> None:
        """The operator wants nothing found that was stored before. What the engine has may be stored anew."""
        self._rekey("clear")

    def changing(self, what: str) -> None:
        """Other weights may be loaded from now on, by ``what``."""
        self.settled = False
        self._rekey(what)

    def flushed(self) -> bool:
        """The engine's tree is empty; whether anything in it was from before a change."""
        before, self.settled = self.settled, True
        return not before

    def _rekey(self, what: str) -> None:
        self.salt = hashlib.sha256((self.salt or self._engine().encode()) + what.encode()).digest()
        for rekeyed in list(self._listeners):
            try:
                rekeyed()
            except Exception:
                log.exception("kvhold: a storage could not change its namespaces")


def engine_token() -> str:
    """A text that is equal on all ranks of an engine's world, and new at each start. Asks rank 0's store."""
    import torch.distributed

    mine = uuid.uuid4().hex
    if not torch.distributed.is_initialized():
        return mine
    store = torch.distributed.distributed_c10d._get_default_store()
    return bytes(store.compare_set("kvhold", "", mine)).decode()


@cache
def engine() -> str:
    """The :func:`engine_token` of this process's engine. Asked for at the start, so that later nobody waits for it."""
    try:
        return engine_token()
    except Exception as error:  # noqa: BLE001 - whatever is the matter with the store, a text of its own is no lie
        log.warning("kvhold: ranks cannot agree on a name (%s): after a weight update each is on its own", error)
        return uuid.uuid4().hex


updates = Updates(engine)
"""Those of this process."""


def register() -> None:
    """Put the hooks around SGLang's methods."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in _hooks().items():
        HookRegistry.register(target, hook, HookType.AROUND)


def hooked() -> bool:
    """Whether all hooks are in effect, so that no update goes unnoticed."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    registered = HookRegistry._hooks
    return all(
        target in HookRegistry._patched
        and any(getattr(hook, "func", hook).__module__ == __name__ for _, hook, _ in registered.get(target, ()))
        for target in _hooks()
    )


def _hooks() -> dict[str, Callable[..., Any]]:
    """By what they are put around."""
    return {
        **{f"{_MANAGER}.{name}": partial(_around_change, name) for name in CHANGING},
        f"{_MANAGER}.resume_memory_occupation": _around_resume,
        f"{_MANAGER}.end_weight_update": _around_end,
        f"{_SCHEDULER}.__init__": _around_start,
        f"{_SCHEDULER}.flush_cache": _around_flush,
        f"{_SCHEDULER}.load_lora_adapter": _around_adapter,
    }


def _around_start(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The scheduler is set up: what its arguments name is loaded now."""
    try:
        from sglang.srt.runtime_context import get_server_args

        loaded.begins(files_of(effective(get_server_args())))
    except Exception:
        log.exception("kvhold: it is not known which files SGLang loads")
    return original(*args, **kwargs)


def _around_change(what: str, original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    """An update, of which nothing but its call is known: it may fail half-way."""
    changing(manager.scheduler, what)
    return original(manager, *args, **kwargs)


def _around_end(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    """The end of an update of many calls, after which loaded weights are made ready for use.

    If the tree was flushed meanwhile and nothing was computed since, there is nothing old in it.
    """
    changing(manager.scheduler, "end_weight_update")
    done = original(manager, *args, **kwargs)
    with _contained():
        scheduler = manager.scheduler
        if manager._session is None and updates.flushed_at == scheduler.forward_ct and manager.is_fully_idle():
            flushed(scheduler)
    return done


def _around_resume(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """The memory of weights is given back: without a copy of them, it holds anything."""
    with _contained():
        if (not request.tags or "weights" in request.tags) and not _kept_by_cpu():
            changing(manager.scheduler, "resume_memory_occupation")
    return original(manager, request)


def _around_flush(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    done = original(scheduler, *args, **kwargs)
    if done:
        with _contained():
            updates.flushed_at = scheduler.forward_ct
            if scheduler.weight_updater._session is None:
                flushed(scheduler)
    return done


def _around_adapter(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """An adapter is loaded. One of those of the start may have been dropped, and have other files now."""
    done = original(scheduler, request)
    with _contained():
        path = request.lora_path
        if path in updates.adapters and (found := adapter_identity(path)) != updates.adapters[path]:
            updates.adapters[path] = found
            changing(scheduler, "load_lora_adapter")
    return done


def changing(scheduler: Any, what: str) -> None:
    """Other weights may be loaded into the engine of ``scheduler``."""
    with _contained():
        updates.changing(what)
        _forget_beliefs(scheduler)


def flushed(scheduler: Any) -> None:
    """The tree of ``scheduler`` is empty, and its weights stay as they are."""
    if updates.flushed():
        _forget_beliefs(scheduler)


@contextmanager
def _contained() -> Iterator[None]:
    """What goes wrong in it does not reach the engine."""
    try:
        yield
    except Exception:
        log.exception("kvhold: a weight update or a flush was not followed; nothing is published before the next flush")
        updates.settled = False


def _forget_beliefs(scheduler: Any) -> None:
    """Have the engine write again what it believes to be stored. All ranks do so in the same step."""
    beliefs = getattr(scheduler.tree_cache, "storage_existence_cache", None)
    if beliefs is not None:
        beliefs.clear()


def _kept_by_cpu() -> bool:
    """Whether SGLang keeps a copy of the weights while their memory is released."""
    from sglang.srt.arg_groups.overrides import resolution_result
    from sglang.srt.runtime_context import get_server_args

    return bool(resolution_result(get_server_args(), "enable_weights_cpu_backup"))
