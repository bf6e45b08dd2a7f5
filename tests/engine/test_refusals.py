"""What cannot be served is refused at the start, by name, with what to do."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bed import engine, prompt, reference, running
from engine_process import EngineProcess
from kvhold_bed import connect
from manager_process import Manager
from models import write_config

from kvhold.engines.vllm.config import Settings, load_settings
from kvhold.engines.vllm.stats import METRICS
from kvhold.engines.vllm.support import Unsupported, check_version, kind_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("mistral", {}, "sliding-window attention"),
        ("gemma3", {}, "groups"),
        ("deepseek_v2", {"block_size": 16}, "MLA"),
        ("mamba2", {"block_size": None}, "Mamba"),
    ],
)
def test_models_that_are_not_served_yet(tmp_path: Path, kind: str, options: dict[str, Any], says: str) -> None:
    folder = write_config(tmp_path / kind, kind)
    with pytest.raises(ValueError, match=says):
        engine(folder, connector={"socket": "/nowhere.sock"}, **options)


@pytest.mark.parametrize("role", ["scheduler", "worker"])
def test_both_halves_refuse(role: str, monkeypatch: pytest.MonkeyPatch, llama_dir: Path) -> None:
    """Each half asks for itself: the other one's refusal is in another process."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from kvhold.engines.vllm.connector import KvHoldConnector

    with running(llama_dir, connector={"socket": "/nowhere.sock"}) as llm:
        config = llm.llm_engine.vllm_config
        cache = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
        monkeypatch.setattr(cache.kv_cache_groups[0], "kv_cache_spec", SimpleNamespace(block_size=32))
        with pytest.raises(Unsupported, match="SimpleNamespace"):
            KvHoldConnector(config, KVConnectorRole[role.upper()], cache)
        monkeypatch.undo()
        monkeypatch.setattr(config.parallel_config, "pipeline_parallel_size", 2)
        with pytest.raises(Unsupported, match="pipeline_parallel_size=2"):
            KvHoldConnector(config, KVConnectorRole[role.upper()], cache)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"sokcet": "/a"}, "unknown setting 'sokcet' .*'/a'.*socket"),
        ({"save_decode_cache": "yes"}, "'save_decode_cache' has the value 'yes'"),
        ({"step_budget_ms": "1"}, "'step_budget_ms' has the value '1'"),
        ({"step_budget_ms": -1}, "'step_budget_ms' has the value -1"),
        ({"step_budget_ms": True}, "'step_budget_ms' has the value True"),
        ({"dram": 4}, "'dram' has the value 4"),
        ({"dram": "lots"}, "'dram'.*'lots' is not a size"),
        ({"socket": "relative.sock"}, "'socket' has the value 'relative.sock'"),
        ({"socket": "/a.sock", "dram": "1GiB"}, "'dram'.*cannot go with 'socket'"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_wrong_settings(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"^kvhold: .*{says}"):
        load_settings(extra)


def test_a_wrong_setting_stops_the_start(llama_dir: Path) -> None:
    with pytest.raises(ValueError, match="unknown setting 'capacity'"):
        engine(llama_dir, connector={"capacity": "4GiB"})


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.0", "dev"])
def test_other_versions_of_vllm(version: str) -> None:
    with pytest.raises(Unsupported, match=r"vllm>=0.32,<0.33"):
        check_version(version)


def test_supported_versions_of_vllm() -> None:
    for version in ("0.32.0", "0.32.1", "0.32.0+cpu", "0.32.3.dev1+gabc"):
        check_version(version)


def test_draft_models_are_refused(llama_dir: Path) -> None:
    from kvhold.engines.vllm.support import check_engine

    parallel = SimpleNamespace(
        pipeline_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1, nnodes=1
    )
    config: Any = SimpleNamespace(parallel_config=parallel, speculative_config=SimpleNamespace(method="eagle3"))
    with pytest.raises(Unsupported, match="'eagle3'"):
        check_engine(config, SimpleNamespace(kv_cache_groups=[]))  # type: ignore[arg-type]


def test_prompt_lookup_decoding_is_served(llama_dir: Path, manager: Manager) -> None:
    """In a process of its own: the proposer changes how many threads a whole process computes with."""
    prompts = [prompt(100, 1) * 3, prompt(310, 2)]
    expected = [list(output.tokens) for output in reference(llama_dir, prompts, 20)]
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    child = EngineProcess(llama_dir, connector=connect(manager), speculative_config=speculation)
    child.ready()
    for _ in range(2):
        outputs = child.generate(prompts, 20)
        assert [output["tokens"] for output in outputs] == expected
        assert child.ask({"reset": True})["reset"]
    assert [output["cached"] for output in outputs] == [288, 288]
    assert child.close() == 0


def test_kinds_are_named() -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs

    full = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float16)
    wide = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float16)
    window = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float16, sliding_window=64)
    sliding = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float16, sliding_window=64)
    assert kind_of(full) == "full attention"
    assert kind_of(window) == kind_of(sliding) == "sliding-window attention"
    assert kind_of(UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": full, "b": wide})) == "full attention"


def test_the_failure_policy_is_recommended_once(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvhold.engines.vllm import connector

    said: list[str] = []
    monkeypatch.setattr(connector.log, "warning", lambda text, *args: said.append(text % args))
    with running(llama_dir, connector={"socket": "/nowhere.sock"}, policy="fail"):
        pass
    assert len(said) == 1
    assert '"kv_load_failure_policy": "recompute"' in said[0]
    with running(llama_dir, connector={"socket": "/nowhere.sock"}, policy="recompute"):
        pass
    assert len(said) == 1


def test_documented_settings_are_the_real_ones() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    engine_part = text.split("## The engine")[1].split("What vLLM itself")[0]
    documented = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", engine_part, re.MULTILINE))
    shown = {None: "none", True: "`true`", False: "`false`"}
    defaults = Settings()
    expected = {
        name: shown[value] if value in (None, True, False) and not isinstance(value, float) else f"`{value}`"
        for name in Settings.__struct_fields__
        for value in [getattr(defaults, name)]
    }
    assert documented == expected


def test_documented_metrics_are_the_real_ones() -> None:
    from kvhold.manager.metrics import COUNTERS, LOG_COUNTERS, LOG_GAUGES, LOG_KINDS

    text = (ROOT / "docs" / "operations.md").read_text()
    engine_part, manager_part = text.split("The engine exports")[1].split("The manager exports")
    assert dict(re.findall(r"^\| `kvhold:(\w+)_total` \| (.*) \|$", engine_part, re.MULTILINE)) == METRICS
    documented = dict(re.findall(r"^\| `kvhold_(\w+)_total` \| (.*) \|$", manager_part, re.MULTILINE))
    assert documented == COUNTERS | {"evicted": "Objects evicted to make room."}
    labelled = dict(re.findall(r"^\| `kvhold_ssd_(\w+)\{.*\}` \| (.*) \|$", manager_part, re.MULTILINE))
    totals = {f"{name}_total": text for name, text in (LOG_COUNTERS | LOG_KINDS).items()}
    assert labelled == LOG_GAUGES | totals
