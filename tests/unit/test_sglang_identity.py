"""What tells SGLang engines apart, as far as SGLang itself is not needed."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvhold.engines.common.identity import PRIVATE
from kvhold.engines.sglang.identity import (
    Identity,
    adapter_identity,
    describe_pool,
    files_of,
    label,
    plain,
    weights_identity,
)
from kvhold.engines.sglang.loaded import Loaded
from kvhold.engines.sglang.options import CHANGES, HARMLESS, OWN, REFUSED
from kvhold.engines.sglang.refusals import check, check_layout, check_version, refuse_pool


def config(**given: Any) -> Any:
    known = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "model_name": "llama",
        "tp_lcm_size": None,
        "should_split_heads": False,
        "dcp_size": 1,
        "extra_config": {"interface_v1": 1},
    }
    return SimpleNamespace(**known | given)


OPTIONS = {
    "hicache_mem_layout": "page_first_direct",
    "disaggregation_mode": "null",
    "tp_size": 1,
    "pp_size": 1,
    "nnodes": 1,
}


def test_no_argument_is_in_two_tables() -> None:
    tables = (CHANGES, OWN, REFUSED, HARMLESS)
    assert len(frozenset[str]().union(*tables)) == sum(map(len, tables))


def test_a_namespace_is_of_a_pool_an_epoch_and_a_salt() -> None:
    one = Identity(b"d" * 32, False, "m", "", {})
    names = {
        one.namespace("kv", "a"),
        one.namespace("mamba", "a"),
        one.namespace("kv", "b"),
        one.namespace("kv", "a", b"salt"),
        Identity(b"d" * 32, False, "m", "2", {}).namespace("kv", "a"),
        Identity(b"e" * 32, False, "m", "", {}).namespace("kv", "a"),
    }
    assert len(names) == 6
    assert one.namespace("kv", "a") == Identity(b"d" * 32, False, "another label", "", {}).namespace("kv", "a")


def test_a_label_names_the_ranks_that_there_are() -> None:
    assert label(config()) == "llama"
    assert label(config(tp_size=2, tp_rank=1, pp_size=4, pp_rank=3)) == "llama tp 1/2 pp 3/4"
    assert label(config(model_name=None, attn_cp_size=2)) == "unnamed cp 0/2"


def test_what_an_argument_names_counts_by_its_content(tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    scales.write_text('{"k": 1.0}')
    before = plain(str(scales))
    assert plain([str(scales)]) == [before] != [str(scales)]
    moved = scales.rename(tmp_path / "moved.json")
    assert plain(str(moved)) == before
    moved.write_text('{"k": 0.5}')
    assert plain(str(moved)) != before
    assert plain("fa3") == "fa3"
    assert plain({"b": 1, "a": {"z", "y"}}) == plain({"a": {"y", "z"}, "b": 1})
    assert plain(str(tmp_path)) == PRIVATE, "nothing says what is in such a folder"


def test_an_adapters_other_files_are_another_adapter(tmp_path: Path) -> None:
    assert adapter_identity(str(tmp_path)) == PRIVATE
    (tmp_path / "adapter_config.json").write_text("{}")
    weights = tmp_path / "adapter_model.bin"
    weights.write_bytes(b"a" * 64)
    first = adapter_identity(str(tmp_path))
    os.utime(weights, (1, 1))
    assert len({PRIVATE, first, adapter_identity(str(tmp_path))}) == 3


def test_weights_that_are_not_the_folders_are_nobodys(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"a" * 64)
    known = weights_identity(str(tmp_path), None, "auto", None)
    assert known != PRIVATE
    for load_format in ("remote", "remote_instance", "sharded_state", "private", "a_plugins_own"):
        assert weights_identity(str(tmp_path), None, load_format, None) == PRIVATE
    assert weights_identity(str(tmp_path / "none"), None, "auto", None) == PRIVATE
    named = weights_identity("s3://bucket/m", None, "remote", "llama@1")
    assert named == weights_identity(str(tmp_path), None, "auto", "llama@1") != known


def hub(cache: Path, content: bytes) -> Path:
    """A model ``org/m`` in a hub library's folder."""
    kept = cache / "models--org--m"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("a" * 40)
    snapshot = kept / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "pytorch_model.bin").write_bytes(content)
    return snapshot


def test_weights_are_those_of_the_folder_that_the_engine_downloads_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another copy of the model may lie in the hub library's own folder, of another day."""
    usual, other = hub(tmp_path / "usual", b"a" * 64), hub(tmp_path / "other", b"b" * 64)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "usual"))

    def known(*where: str | None) -> str:
        return weights_identity("org/m", None, "auto", None, *where)

    assert known() == known(None) == known(str(tmp_path / "none")) == weights_identity(str(usual), None, "auto", None)
    assert known(str(tmp_path / "other")) == weights_identity(str(other), None, "auto", None) != known()
    monkeypatch.setenv("SGLANG_USE_MODELSCOPE", "true")
    assert known() == PRIVATE, "it comes from another hub"
    assert weights_identity(str(usual), None, "auto", None) != PRIVATE


def test_files_that_were_exchanged_since_they_were_loaded(tmp_path: Path) -> None:
    """The engine has what was there when it was started, whatever is there when a storage is attached."""
    (tmp_path / "adapter").mkdir()
    model, adapter, scales = tmp_path / "m.safetensors", tmp_path / "adapter" / "a.bin", tmp_path / "scales.json"
    for file in (model, adapter, scales):
        file.write_bytes(b"1")
    options = dict.fromkeys((*CHANGES, *OWN)) | {
        "model_path": str(tmp_path),
        "lora_paths": {"sql": str(adapter.parent)},
        "quantization_param_path": str(scales),
        "speculative_draft_model_path": "org/not-here",
    }
    now = Loaded()
    assert not now.changed(files_of(options)), "nobody has said that it was loaded"
    now.begins(files_of(options))
    assert not now.changed(files_of(options))
    for file in (model, adapter, scales):
        before = file.stat()
        os.utime(file, (1, 1))
        assert now.changed(files_of(options)) == str(file)
        assert bool(now.changed(files_of(options, "named"))) == (file is not model)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    (tmp_path / "more.safetensors").write_bytes(b"2")
    assert now.changed(files_of(options)) == str(tmp_path / "more.safetensors")
    (tmp_path / "more.safetensors").unlink()
    model.rename(tmp_path / "other.safetensors")
    assert now.changed(files_of(options))
    assert not now.changed(files_of(options | {"model_path": "org/not-here"}, "named"))


def test_what_was_not_there_has_been_downloaded(tmp_path: Path) -> None:
    options = dict.fromkeys((*CHANGES, *OWN)) | {"model_path": str(tmp_path)}
    now = Loaded()
    now.begins(files_of(options))
    (tmp_path / "m.safetensors").write_bytes(b"1")
    assert not now.changed(files_of(options))


def pool(**given: Any) -> Any:
    device = SimpleNamespace(dtype="torch.float8_e4m3fn", store_dtype="torch.uint8")
    known = {"layout": "page_first", "page_size": 16, "dtype": "torch.uint8", "start_layer": 0, "device_pool": device}
    return SimpleNamespace(**known | given)


def test_pools_of_another_form_are_told_apart() -> None:
    other = SimpleNamespace(dtype="torch.float8_e5m2", store_dtype="torch.uint8")
    told = [
        pool(),
        pool(layout="layer_first"),
        pool(page_size=32),
        pool(start_layer=16),
        pool(device_pool=other),
        pool(head_num=4),
        pool(storage_format_tag="v2"),
    ]
    assert len({describe_pool(each, config()) for each in told}) == len(told)
    assert describe_pool(pool(size=1), config()) == describe_pool(pool(size=2), config()), (
        "how many pages there are makes no difference"
    )


@pytest.mark.parametrize(
    ("given", "options", "names", "remedy"),
    [
        ({"extra_config": {}}, {}, "interface_v1", '"interface_v1": 1'),
        ({"extra_config": None}, {}, "interface_v1", '"interface_v1": 1'),
        ({"extra_config": {"interface_v1": 0}}, {}, "interface_v1", '"interface_v1": 1'),
        ({}, {"hicache_mem_layout": "page_head"}, "'page_head'", "page_first_direct"),
        ({}, {"hicache_mem_layout": "page_first_kv_split"}, "'page_first_kv_split'", "page_first_direct"),
        ({}, {"hicache_mem_layout": "page_unified"}, "'page_unified'", "page_first_direct"),
        ({"tp_lcm_size": 8, "should_split_heads": True}, {}, "'tp_lcm_size' has the value 8", "remove it"),
        ({"dcp_size": 2, "is_mla_model": True}, {}, "--dcp-size has the value 2", "Give 1"),
        ({}, {"disaggregation_mode": "prefill"}, "'prefill'", "Give 'null'"),
        ({}, {"disaggregation_mode": "decode"}, "'decode'", "Give 'null'"),
        (
            {"is_mla_model": True, "tp_size": 16},
            {"tp_size": 16, "nnodes": 2},
            "--nnodes has the value 2",
            "--pp-size 2",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    given: dict[str, Any], options: dict[str, Any], names: str, remedy: str
) -> None:
    with pytest.raises(ValueError, match=r"^kvhold: ") as refused:
        check(config(**given), OPTIONS | options)
    assert names in str(refused.value)
    assert remedy in str(refused.value)


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, {}),
        ({}, {"hicache_mem_layout": "layer_first"}),
        ({"tp_size": 16}, {"tp_size": 16, "nnodes": 2}),  # each host's ranks have heads of their own
        ({"is_mla_model": True, "tp_size": 8}, {"tp_size": 8, "nnodes": 1}),
        ({"is_mla_model": True, "tp_size": 8}, {"tp_size": 8, "pp_size": 2, "nnodes": 2}),
        ({"is_mla_model": True, "tp_size": 8}, {"tp_size": 16, "nnodes": 2}),  # attention of each host for itself
    ],
)
def test_what_can_be_served_is_not_refused(given: dict[str, Any], options: dict[str, Any]) -> None:
    check(config(**given), OPTIONS | options)


def test_other_versions_are_refused() -> None:
    check_version("0.5.23")
    check_version("0.5.23.post1")
    for version in ("0.5.22", "0.5.24", "0.5.230", "0.6.0"):
        with pytest.raises(ValueError, match=f"SGLang {version} is not supported; install sglang 0.5.23"):
            check_version(version)


def test_layouts_of_pools_are_looked_at_themselves() -> None:
    for layout in ("layer_first", "page_first", "page_first_direct"):
        check_layout(layout)
    with pytest.raises(ValueError, match="'page_unified'"):
        refuse_pool(pool(layout="page_unified"), "kv", config())


def test_a_pool_without_addresses_is_refused() -> None:
    def fails(indices: object) -> None:
        raise NotImplementedError

    for each in (pool(), pool(get_page_buffer_meta=fails), pool(get_page_buffer_meta=lambda indices: ([], []))):
        with pytest.raises(ValueError, match=r"'mamba'.*does not say where its pages are"):
            refuse_pool(each, "mamba", config())
    with pytest.raises(ValueError, match="--enable-unified-memory"):
        refuse_pool(pool(stores_page_envelope=True), "kv", config())
    refuse_pool(pool(get_page_buffer_meta=lambda indices: ([64], [512])), "kv", config())


class MLATokenToKVPoolHost(SimpleNamespace):
    """Named as SGLang's pool of latent keys and values."""


def test_pools_that_ranks_do_not_hold_alike_are_each_ranks_own() -> None:
    known = {"layout": "page_first", "page_size": 16, "get_page_buffer_meta": lambda indices: ([64], [512])}
    latent, states = MLATokenToKVPoolHost(**known), SimpleNamespace(**known)
    first, second = (config(tp_rank=rank, tp_size=2, is_mla_model=True) for rank in range(2))
    assert describe_pool(latent, first) == describe_pool(latent, second)
    assert describe_pool(states, first) != describe_pool(states, second)
    for each in (latent, states):
        refuse_pool(each, "mamba", first)
    refuse_pool(latent, "draft", first)
    refuse_pool(states, "draft", config(is_mla_model=True))
    with pytest.raises(ValueError, match=r"'draft'.*each rank's own.*--tp-size 1"):
        refuse_pool(states, "draft", first)
