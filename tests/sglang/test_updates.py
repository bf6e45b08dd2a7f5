"""Weight updates as SGLang's own classes make them, with kvhold's hooks around them. No engine is started."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components import weight_updater
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.plugins.hook_registry import HookRegistry

from kvhold.engines.sglang import plugin, updates
from kvhold.engines.sglang.updates import CHANGING, Updates, hooked

NOT_CHANGING = {
    "flush_cache_after_weight_update",
    "record_weight_version_after_update",
    "init_weights_update_group",
    "destroy_weights_update_group",
    "get_weights_by_name",
    "release_memory_occupation",
    "check_weights",
    "save_remote_model",
    "save_sharded_model",
}
"""Methods of the weight updater that leave the weights as they are, or have them looked after on their return."""


@pytest.fixture(scope="module", autouse=True)
def hooks() -> Iterator[None]:
    """The hooks, as SGLang's plugin loader puts them in effect."""
    classes = (Scheduler, SchedulerWeightUpdaterManager)
    before = [(holder, name, value) for holder in classes for name, value in vars(holder).items() if callable(value)]
    plugin.register()
    HookRegistry.apply_hooks()
    assert hooked()
    yield
    HookRegistry.reset()
    for holder, name, value in before:
        if name[:2] != "__" or name == "__init__":
            setattr(holder, name, value)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Updates:
    found = Updates(lambda: "engine")
    monkeypatch.setattr(updates, "updates", found)
    return found


class Runner:
    """A model runner whose weights are a number."""

    def __init__(self) -> None:
        self.weight_updater = self
        self.weights = 0

    def update_weights_from_disk(self, path: str, *args: object, **kwargs: object) -> tuple[bool, str]:
        if path == "missing":
            return False, "no such path"
        self.weights += 1
        return True, "done"

    def update_weights_from_ipc(self, request: object) -> tuple[bool, str]:
        self.weights += 1
        return True, "done"

    def update_weights_from_tensor(self, **kwargs: object) -> tuple[bool, str]:
        self.weights += 1
        return True, "done"

    def begin_weight_update(self) -> None:
        pass

    def end_weight_update(self, run_post_load: bool) -> None:
        self.weights += 1


class Beliefs:
    """What SGLang's buffer mode believes to be stored."""

    def __init__(self) -> None:
        self.cleared = 0

    def clear(self) -> None:
        self.cleared += 1


class Engine:
    """SGLang's weight updater over a scheduler that does nothing but be idle or busy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(weight_updater.torch.distributed, "barrier", lambda **_: None)
        self.busy = False
        self.runner = Runner()
        self.beliefs = Beliefs()
        nothing = SimpleNamespace(reset=lambda: None, clear=lambda: None, reset_aux_cache_allocator=lambda: None)
        self.scheduler = SimpleNamespace(
            forward_ct=0,
            is_fully_idle=lambda **_: not self.busy,
            _engine_paused=False,
            tree_cache=SimpleNamespace(reset=lambda: None, storage_existence_cache=self.beliefs),
            req_to_token_pool=nothing,
            token_to_kv_pool_allocator=nothing,
            grammar_manager=nothing,
            metrics_reporter=SimpleNamespace(reset_metrics=lambda: None, is_stats_logging_rank=False),
            draft_worker=None,
            waiting_queue=[],
            running_batch=SimpleNamespace(reqs=[]),
            record_weight_version_change=lambda **_: None,
        )
        manager = object.__new__(SchedulerWeightUpdaterManager)
        for name, value in {
            "tp_worker": SimpleNamespace(
                weight_update_runners=lambda: [("target", self.runner)], deserialize_own_rank=lambda given: given
            ),
            "draft_worker": None,
            "flush_cache": self.flush,
            "is_fully_idle": self.scheduler.is_fully_idle,
            "scheduler": self.scheduler,
            "metrics_collector": None,
            "offload_tags": set(),
            "tp_cpu_group": None,
            "_session": None,
        }.items():
            setattr(manager, name, value)
        self.manager: Any = manager
        self.scheduler.weight_updater = manager

    def flush(self, empty_cache: bool = True) -> bool:
        done: bool = Scheduler.flush_cache(self.scheduler, empty_cache=False)  # type: ignore[arg-type]
        return done

    def update(self, how: str = "disk", flush: bool = False, path: str = "other") -> bool:
        request = SimpleNamespace(
            flush_cache=flush,
            torch_empty_cache=False,
            weight_version=None,
            model_path=path,
            load_format="auto",
            recapture_cuda_graph=False,
            selector="all",
            serialized_named_tensors=[],
        )
        done: bool = getattr(self.manager, f"update_weights_from_{how}")(request).success
        return done

    def compute(self) -> None:
        self.scheduler.forward_ct += 1


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


def test_every_method_of_the_weight_updater_has_been_looked_at() -> None:
    """One that changes weights and has no hook would serve old KV."""
    there = {
        name
        for name, value in vars(SchedulerWeightUpdaterManager).items()
        if callable(value) and not name.startswith("_")
    }
    known = {*CHANGING, "end_weight_update", "resume_memory_occupation", *NOT_CHANGING}
    assert there == known, "decide for each whether weights may be others after it"


@pytest.mark.parametrize("how", ["disk", "ipc"])
def test_an_update_with_a_flush(engine: Engine, seen: Updates, how: str) -> None:
    assert engine.update(how, flush=True)
    assert seen.salt
    assert seen.settled, "the tree was flushed after the weights were loaded"
    assert engine.beliefs.cleared, "pages of the former namespace would never be stored again"


def test_an_update_without_a_flush_publishes_nothing_until_one_succeeds(engine: Engine, seen: Updates) -> None:
    before = seen.salt
    assert engine.update()
    assert seen.salt != before
    assert not seen.settled
    engine.busy = True
    assert not engine.flush()
    assert not seen.settled, "the flush was refused"
    engine.busy = False
    salt = seen.salt
    assert engine.flush()
    assert seen.settled
    assert seen.salt == salt


def test_each_update_is_of_its_own(engine: Engine, seen: Updates) -> None:
    salts = [seen.salt]
    for _ in range(3):
        engine.update(flush=True)
        salts.append(seen.salt)
    assert len(set(salts)) == 4


def test_an_update_that_fails_may_have_changed_something(engine: Engine, seen: Updates) -> None:
    assert not engine.update(path="missing")
    assert seen.salt
    assert not seen.settled


def test_an_update_of_many_calls(engine: Engine, seen: Updates) -> None:
    """Between its begin and its end weights may be written without a call; the end makes them ready for use."""
    engine.manager.begin_weight_update(SimpleNamespace(selector="all"))
    begun = seen.salt
    assert begun
    assert not seen.settled
    assert engine.update("tensor", flush=True)
    loaded = seen.salt
    assert loaded != begun
    assert not seen.settled, "not all weights are there"
    engine.manager.end_weight_update(SimpleNamespace())
    assert seen.salt not in (begun, loaded)
    assert seen.settled, "nothing was computed since the flush"


def test_what_was_computed_during_an_update_is_flushed_first(engine: Engine, seen: Updates) -> None:
    engine.manager.begin_weight_update(SimpleNamespace(selector="all"))
    assert engine.update("tensor", flush=True)
    engine.compute()
    engine.manager.end_weight_update(SimpleNamespace())
    assert not seen.settled
    assert engine.flush()
    assert seen.settled


@pytest.mark.parametrize(
    ("tags", "kept", "same"), [(None, False, False), (["kv_cache"], False, True), (None, True, True)]
)
def test_weights_whose_memory_was_released(
    engine: Engine, seen: Updates, monkeypatch: pytest.MonkeyPatch, tags: list[str] | None, kept: bool, same: bool
) -> None:
    monkeypatch.setattr(updates, "_kept_by_cpu", lambda: kept)
    with pytest.raises((AttributeError, KeyError)):  # nothing was released in this test
        engine.manager.resume_memory_occupation(SimpleNamespace(tags=tags))
    assert seen.settled == same
    assert (not seen.salt) == same


def test_an_adapter_of_the_start_that_has_other_files_now(seen: Updates, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/adapters/sql": "1"}
    monkeypatch.setattr(updates, "adapter_identity", files.__getitem__)
    seen.listen(lambda: None, dict(files))
    scheduler: Any = SimpleNamespace(
        tp_worker=SimpleNamespace(load_lora_adapter=lambda _: SimpleNamespace(success=False)),
        tree_cache=SimpleNamespace(storage_existence_cache=Beliefs()),
    )
    for path in ("/adapters/sql", "/adapters/of its own id"):
        Scheduler.load_lora_adapter(scheduler, SimpleNamespace(lora_path=path))  # type: ignore[arg-type]
    assert seen.settled
    files["/adapters/sql"] = "2"
    Scheduler.load_lora_adapter(scheduler, SimpleNamespace(lora_path="/adapters/sql"))  # type: ignore[arg-type]
    assert not seen.settled
    salt = seen.salt
    Scheduler.load_lora_adapter(scheduler, SimpleNamespace(lora_path="/adapters/sql"))  # type: ignore[arg-type]
    assert seen.salt == salt


def test_an_error_of_ours_does_not_reach_the_engine(
    engine: Engine, seen: Updates, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(updates, "_forget_beliefs", fails)
    assert engine.update(flush=True)
    assert not seen.settled


def test_without_the_hooks_the_storage_knows() -> None:
    patched = set(HookRegistry._patched)
    try:
        HookRegistry._patched.discard(next(each for each in patched if each.endswith("update_weights_from_tensor")))
        assert not hooked()
    finally:
        HookRegistry._patched |= patched
    assert hooked()
