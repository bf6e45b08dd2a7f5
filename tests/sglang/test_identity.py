"""What tells SGLang engines apart, on SGLang's own arguments and model configuration. No engine is started."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.runtime_context import get_context, publish
from sglang.srt.server_args import ServerArgs
from testbed.sglang.arguments import resolved, storage, write_model

from kvhold.engines.common.identity import PRIVATE, digest
from kvhold.engines.sglang.identity import describe, effective, files_of, identify, is_private
from kvhold.engines.sglang.loaded import Loaded
from kvhold.engines.sglang.options import CHANGES, HARMLESS, OWN, REFUSED


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def args(folder: Path) -> Any:
    return resolved(folder)


@pytest.fixture(scope="module")
def options(args: Any) -> dict[str, Any]:
    return effective(args)


def told(args: Any, options: dict[str, Any], config: HiCacheStorageConfig | None = None) -> bytes:
    return digest(describe(config or storage(), options, model_config_of(args), None))


def test_every_argument_has_been_looked_at() -> None:
    """An argument that changes KV bytes and is not in the identity would let engines share what they must not."""
    there = {field.name for field in record_fields(ServerArgs)}
    known = CHANGES | OWN | REFUSED | HARMLESS
    unknown = there - known
    assert not unknown, f"decide for each whether it changes KV, and list it in options.py: {sorted(unknown)}"
    assert not known - there, "SGLang has these no more"


def test_every_argument_that_changes_kv_is_in_the_identity(args: Any, options: dict[str, Any]) -> None:
    before = told(args, options)
    shared = [name for name in CHANGES if told(args, options | {name: "something else"}) == before]
    assert not shared
    apart = [name for name in HARMLESS if told(args, options | {name: "something else"}) != before]
    assert not apart, "engines do not share what they could"


def test_an_argument_that_nobody_knows_sets_engines_apart(args: Any, options: dict[str, Any]) -> None:
    assert told(args, options | {"added_tomorrow": True}) != told(args, options)


def test_ranks_that_hold_the_same_kv_have_one_identity(args: Any, options: dict[str, Any]) -> None:
    def rank(**given: Any) -> bytes:
        return told(args, options, storage(**given))

    assert rank(tp_size=2, tp_rank=0, is_mla_model=True) == rank(tp_size=2, tp_rank=1, is_mla_model=True)
    apart = [
        rank(),
        rank(tp_size=2, tp_rank=0),
        rank(tp_size=2, tp_rank=1),
        rank(tp_size=2, is_mla_model=True),
        rank(pp_size=2, pp_rank=0),
        rank(pp_size=2, pp_rank=1),
        rank(attn_cp_size=2, attn_cp_rank=0),
        rank(attn_cp_size=2, attn_cp_rank=1),
    ]
    assert len(set(apart)) == len(apart)


def test_stages_of_other_layers_are_told_apart(
    args: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three has as many layers in both, and others."""
    middle, found, alone = storage(pp_rank=1, pp_size=3), set(), set()
    for partition in ("1,1,2", "2,1,1"):
        monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", partition)
        found.add(told(args, options, middle))
        alone.add(told(args, options))
    assert (len(found), len(alone)) == (2, 1)


def test_other_weights_and_configurations_are_other_engines(
    args: Any, options: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    before = told(args, options)
    other = write_model(tmp_path / "same name", b"y" * 999)
    assert told(args, options | {"model_path": str(other)}) != before
    overridden = resolved(folder, json_model_override_args='{"rope_theta": 5000.0}')
    assert told(overridden, options) != before, "the configuration as overridden counts"
    drafted = options | {"speculative_draft_model_path": str(other)}
    assert told(args, drafted) != before
    (other / "pytorch_model.bin").write_bytes(b"z" * 999)
    assert told(args, drafted) != told(args, options | {"speculative_draft_model_path": str(folder)})


def test_scales_count_by_what_their_file_says(args: Any, options: dict[str, Any], tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    found = set()
    for value in (1.0, 0.5):
        scales.write_text(json.dumps({"kv_cache": value}))
        found.add(told(args, options | {"quantization_param_path": str(scales)}))
    assert len(found) == 2


def test_lora_files_under_one_name_and_path(args: Any, options: dict[str, Any], tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    found = set()
    for content in (b"a" * 64, b"b" * 64):
        (adapter / "adapter_model.bin").write_bytes(content)
        forms: list[Any] = [
            {"sql": str(adapter)},
            [f"sql={adapter}"],
            [{"lora_name": "sql", "lora_path": str(adapter)}],
        ]
        assert len({told(args, options | {"lora_paths": form}) for form in forms}) == 1
        found.add(told(args, options | {"lora_paths": forms[0]}))
    assert len(found) == 2


@pytest.fixture
def published(args: Any) -> Iterator[Any]:
    before = get_context()._server_args
    publish(args, role="scheduler")
    yield args
    get_context()._server_args = before


def test_two_engines_alike_share(published: Any) -> None:
    first, second = (identify(storage(), "", None) for _ in range(2))
    assert first == second
    assert not first.private
    assert first.namespace("kv", "p") != identify(storage(), "2", None).namespace("kv", "p")


def test_an_engine_whose_files_were_exchanged_is_nobodys(
    published: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = Loaded()
    monkeypatch.setattr("kvhold.engines.sglang.identity.loaded", now)
    now.begins(files_of(effective(published)))
    assert not identify(storage(), "", None).private
    weights = folder / "pytorch_model.bin"
    before = weights.stat()
    os.utime(weights, (1, 1))
    first, second = (identify(storage(), "", None) for _ in range(2))
    assert first.private
    assert first.digest != second.digest
    assert f"{weights} is not what it was when SGLang loaded it" in caplog.text
    assert not identify(storage(), "", "llama@1").private
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_what_cannot_be_identified_is_nobodys(
    args: Any,
    options: dict[str, Any],
    published: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("kvhold.engines.sglang.identity.effective", lambda _: options | {"load_format": "remote"})
    first, second = (identify(storage(), "", None) for _ in range(2))
    assert first.private
    assert first.digest != second.digest
    assert "cannot be identified; this engine shares its KV cache with no other" in caplog.text
    assert "weights_id" in caplog.text
    named = identify(storage(), "", "llama@1")
    assert not named.private
    described = describe(storage(), options | {"lora_paths": {"a": "/none"}}, model_config_of(published), None)
    assert described["adapters"] == [["a", "/none", PRIVATE]]
    assert is_private(described)
