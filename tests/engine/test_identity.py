"""Whose KV is whose: adapters, epochs, changed weights, cache salts, prompt embeddings and multimodal inputs."""

import dataclasses
import json
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.config
from safetensors.torch import save_file
from testbed.engine import bed, known_options
from testbed.engine.bed import (
    LLM,
    Output,
    Tokens,
    add,
    drain,
    free_blocks,
    generate,
    prompt,
    reference,
    running,
    settle,
    step,
)
from testbed.engine.kvhold_bed import (
    check_identity,
    check_nothing_held,
    counting,
    in_step_with_others,
    scheduler_side,
    serving,
    status,
    until,
    warm_up,
    worker_side,
)
from testbed.process.manager_process import Manager
from vllm.config import MultiModalConfig
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams

from kvhold.engines.common import adapters
from kvhold.engines.common import spaces as spaces_module
from kvhold.engines.common.adapters import Adapter, Adapters
from kvhold.engines.common.identity import PRIVATE, digest
from kvhold.engines.vllm.adapters import adapter_of
from kvhold.engines.vllm.hashes import tell_all
from kvhold.engines.vllm.identity import (
    _kv_dtypes,
    _processor,
    describe,
    is_private,
    weights_identity,
)
from kvhold.engines.vllm.layout import read_layout
from kvhold.engines.vllm.topology import Topology

PROMPTS = [prompt(400, seed) for seed in range(2)]
LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}


def ask(llm: LLM, inputs: Sequence[Any], adapter: LoRARequest | None = None) -> list[Output]:
    """Outputs of ``inputs``, each in the form that vLLM takes."""
    requests = llm.generate(list(inputs), bed._greedy(8), use_tqdm=False, lora_request=adapter)
    return [Output.of(request) for request in requests]


def tokens(prompts: Sequence[Tokens]) -> list[Any]:
    return [{"prompt_token_ids": each} for each in prompts]


def cached(outputs: Sequence[Output]) -> list[int]:
    return [output.cached for output in outputs]


def objects(manager: Manager) -> int:
    return int(status(manager.socket)["objects"])


def stored(llm: LLM, manager: Manager, count: int) -> None:
    settle(llm)
    until(lambda: objects(manager) == count, f"{count} objects are stored")


# Adapters


def write_adapter(path: Path, seed: int) -> Path:
    """Write a LoRA adapter for the tiny Llama, of random weights that change its output, and return its folder."""
    path.mkdir(exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(2):
        for name, size in (("q_proj", 128), ("v_proj", 64)):
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{module}.lora_A.weight"] = torch.randn(8, 128, generator=random) * 128**-0.5
            weights[f"{module}.lora_B.weight"] = torch.randn(size, 8, generator=random) * 8**-0.5
    save_file(weights, path / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def exact_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the files' clock is the engine's, and engines start soon after adapters were written."""
    monkeypatch.setattr(adapters, "CLOCK_SECONDS", 0.0)


@pytest.fixture
def adapter(tmp_path: Path, exact_clock: None) -> LoRARequest:
    return LoRARequest("tuned", 1, str(write_adapter(tmp_path / "tuned", 1)))


@pytest.fixture
def tuned(adapter: LoRARequest) -> Adapter:
    found = adapter_of(adapter)
    assert found is not None
    return found


def truth(model: Path, adapter: LoRARequest | None, prompts: Sequence[Tokens] = PROMPTS) -> list[Output]:
    """What an engine says that starts now and has no cache at all."""
    with running(model, connector=None, enable_prefix_caching=False, **LORA) as llm:
        return [ask(llm, tokens([each]), adapter)[0] for each in prompts]


def ready(llm: LLM, adapter: LoRARequest) -> None:
    """Have the adapter's spaces opened, and wait for slots to publish its blocks into."""
    ask(llm, tokens([prompt(40, 998)]), adapter)
    half = scheduler_side(llm)

    def granted() -> bool:
        half.control.take_up()
        spaces = half._spaces.of(adapter_of(adapter))
        return spaces is not None and all(len(half.control.credit[space]) >= 64 for space in spaces)

    until(granted, "slots are granted for the adapter")


def test_what_an_adapter_computed_is_restored_for_it_alone(
    llama_dir: Path, tmp_path: Path, manager: Manager, adapter: LoRARequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = LoRARequest("other", 2, str(write_adapter(tmp_path / "other", 2)))
    all_of_them = (adapter, other, None)
    expected = {each: truth(llama_dir, each) for each in all_of_them}
    assert len({tuple(outputs) for outputs in expected.values()}) == 3
    with counting() as counts, serving(llama_dir, manager, **LORA) as llm:
        free = free_blocks(llm)
        ready(llm, adapter)
        assert ask(llm, tokens(PROMPTS), adapter) == expected[adapter]
        stored(llm, manager, 1 + 24)
        assert llm.reset_prefix_cache()
        restored = ask(llm, tokens(PROMPTS), adapter)
        assert (restored, cached(restored)) == (expected[adapter], [384, 384])
        for each in (other, None):
            outputs = ask(llm, tokens(PROMPTS), each)
            assert (outputs, cached(outputs)) == (expected[each], [0, 0])
        check_nothing_held(llm, free, manager.socket)
    check_identity(counts)
    assert counts["tokens_missed_lora"] == 0
    for topology in ("alone", "data parallel in step"):
        if topology != "alone":
            in_step_with_others(monkeypatch)
        with serving(llama_dir, manager, **LORA) as llm:  # another engine's first request with it
            restored = ask(llm, tokens(PROMPTS), adapter)
            assert (restored, cached(restored)) == (expected[adapter], [384, 384]), topology


def test_more_adapters_than_are_spoken_of_at_once(
    llama_dir: Path, tmp_path: Path, manager: Manager, adapter: LoRARequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spaces_module, "_MOST_ADAPTERS", 1)
    other = LoRARequest("other", 2, str(write_adapter(tmp_path / "other", 2)))
    expected = {each: truth(llama_dir, each) for each in (adapter, other)}
    with serving(llama_dir, manager, **LORA) as llm:
        free = free_blocks(llm)
        for each in (adapter, other):
            ready(llm, each)
            assert ask(llm, tokens(PROMPTS), each) == expected[each]
        stored(llm, manager, 2 * (1 + 24))
        assert llm.reset_prefix_cache()
        for each in (adapter, other):
            restored = ask(llm, tokens(PROMPTS), each)
            assert (restored, cached(restored)) == (expected[each], [384, 384])
        check_nothing_held(llm, free, manager.socket)


def test_an_adapter_of_the_same_name_and_place_with_other_weights_finds_nothing(
    llama_dir: Path, manager: Manager, adapter: LoRARequest
) -> None:
    with serving(llama_dir, manager, **LORA) as llm:
        ready(llm, adapter)
        ask(llm, tokens(PROMPTS), adapter)
        stored(llm, manager, 1 + 24)
    write_adapter(Path(adapter.lora_path), 3)
    expected = truth(llama_dir, adapter)
    with serving(llama_dir, manager, **LORA) as llm:
        outputs = ask(llm, tokens(PROMPTS), adapter)
        assert (outputs, cached(outputs)) == (expected, [0, 0])


@pytest.mark.parametrize("how", ["told", "with a request", "dropped"])
def test_an_adapter_that_is_retrained_and_loaded_again_is_not_cached_by_this_engine(
    llama_dir: Path, tmp_path: Path, manager: Manager, adapter: LoRARequest, how: str, warnings: list[str]
) -> None:
    again = LoRARequest(adapter.lora_name, adapter.lora_int_id, adapter.lora_path, load_inplace=True)
    other = LoRARequest("other", 2, str(write_adapter(tmp_path / "other", 2)))
    with serving(llama_dir, manager, **LORA | {"max_loras": 1}) as llm:
        ready(llm, adapter)
        ask(llm, tokens(PROMPTS), adapter)
        stored(llm, manager, 1 + 24)
        write_adapter(Path(adapter.lora_path), 3)
        if how == "told":
            llm.llm_engine.add_lora(again)
        if how == "dropped":
            ask(llm, tokens([prompt(20)]), other)  # there is room for one
        assert llm.reset_prefix_cache()
        changed = ask(llm, tokens(PROMPTS), again if how == "with a request" else adapter)
        assert cached(changed) == [0, 0]
        ask(llm, tokens(PROMPTS), adapter)
        stored(llm, manager, 1 + 24)
        assert len(warnings) == 1
        assert "is not kept" in warnings[0]
        # until whatever was computed before is given up
        assert llm.reset_prefix_cache(reset_connector=True)
        ready(llm, adapter)
        assert ask(llm, tokens(PROMPTS), adapter) == changed
        assert llm.reset_prefix_cache()
        restored = ask(llm, tokens(PROMPTS), adapter)
        assert (restored, cached(restored)) == (changed, [384, 384])
    assert changed == truth(llama_dir, adapter)
    with serving(llama_dir, manager, **LORA) as llm:
        outputs = ask(llm, tokens(PROMPTS), adapter)
        assert (outputs, cached(outputs)) == (changed, [0, 0])


def test_files_that_changed_between_loading_and_the_first_request_are_not_taken_for_what_was_loaded(
    llama_dir: Path, manager: Manager, adapter: LoRARequest
) -> None:
    before = truth(llama_dir, adapter)
    with serving(llama_dir, manager, **LORA) as llm:
        llm.llm_engine.add_lora(adapter)
        write_adapter(Path(adapter.lora_path), 3)
        assert ask(llm, tokens(PROMPTS), adapter) == before
        stored(llm, manager, 0)
    after = truth(llama_dir, adapter)
    assert after != before
    with serving(llama_dir, manager, **LORA) as llm:
        assert ask(llm, tokens(PROMPTS), adapter) == after


def test_files_that_change_while_a_request_is_computed(
    llama_dir: Path, manager: Manager, adapter: LoRARequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker may have read either: nothing that was computed since the last look can be found."""
    sure, written = Adapters.sure, threading.Event()

    def rewritten(self: Adapters, *args: Any) -> bool | None:
        if not written.is_set():
            written.set()
            write_adapter(Path(adapter.lora_path), 3)
        return sure(self, *args)

    with serving(llama_dir, manager, **LORA) as llm:
        free = free_blocks(llm)
        ready(llm, adapter)
        stored(llm, manager, 1)
        monkeypatch.setattr(Adapters, "sure", rewritten)
        ask(llm, tokens(PROMPTS), adapter)
        assert written.is_set()
        check_nothing_held(llm, free, manager.socket)
        stored(llm, manager, 1)


def test_an_adapter_without_local_files_is_a_miss(
    llama_dir: Path, manager: Manager, adapter: LoRARequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = truth(llama_dir, adapter)
    monkeypatch.setattr(adapters, "_stamp", lambda folder: (_ for _ in ()).throw(FileNotFoundError(folder)))
    with counting() as counts, serving(llama_dir, manager, **LORA) as llm:
        assert ask(llm, tokens(PROMPTS), adapter) == expected
        stored(llm, manager, 0)
    check_identity(counts)
    assert counts["tokens_missed_lora"] == 2 * 384


def test_a_file_server_that_hangs_delays_a_request_once(tuned: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, asked = threading.Event(), threading.Event()

    def hangs(folder: Path) -> Any:
        asked.set()
        answers.wait()
        return stamp(folder)

    stamp = adapters._stamp
    monkeypatch.setattr(adapters, "_stamp", hangs)
    known = Adapters(b"", "")
    assert known.look("first", tuned) is None
    assert asked.wait(60)
    monkeypatch.setattr(adapters, "_PATIENCE", 0.0)
    assert known.look("first", tuned) is False
    assert known.look("second", tuned) is False
    assert known.digest(tuned) is None
    monkeypatch.setattr(adapters, "_PATIENCE", 20.0)
    answers.set()
    until(lambda: known.look("third", tuned), "the files are looked at")
    known.stop()


def test_two_adapters_under_one_id_are_both_unknown(tuned: Adapter, tmp_path: Path, warnings: list[str]) -> None:
    """Workers load what comes first under an id; it then serves whatever comes with that id."""
    known = Adapters(b"", "")
    until(lambda: known.look("first", tuned), "the files are looked at")
    other = Adapter("other", tuned.number, str(write_adapter(tmp_path / "other", 2)))
    known._born += 60
    until(lambda: known.look("second", other) is not None, "the other's files are looked at")
    assert known.digest(other) is None
    assert known.digest(tuned) is None
    assert len(warnings) == 2
    known.stop()


def test_a_digest_says_what_is_in_an_adapter_and_not_where_it_is(adapter: LoRARequest, tmp_path: Path) -> None:
    def digest(folder: Path, options: bytes = b"") -> bytes:
        known, there = Adapters(options, ""), Adapter("x", 1, str(folder))
        known._born += 60
        until(lambda: known.look("r", there), "the files are looked at")
        known.stop()
        found = known.digest(there)
        assert found is not None
        return found

    here = Path(adapter.lora_path)
    same = shutil.copytree(here, tmp_path / "copy")  # keeps times
    (tmp_path / "link").symlink_to(same)
    scaled = shutil.copytree(here, tmp_path / "scaled")
    config = scaled / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 16', '"lora_alpha": 32'))
    assert digest(here) == digest(same) == digest(tmp_path / "link")
    assert digest(scaled) != digest(here)
    assert digest(here, b"another rank") != digest(here)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(adapters.log, "warning", lambda text, *args: said.append(text % args))
    return said


# Epochs and changed weights


def test_engines_share_within_an_epoch(llama_dir: Path, manager: Manager) -> None:
    expected = reference(llama_dir, PROMPTS)
    for epoch, found in (("step-1", 0), ("step-2", 0), ("step-1", 384), (None, 0)):
        with serving(llama_dir, manager, settings={"epoch": epoch}) as llm:
            outputs = generate(llm, PROMPTS)
            assert (outputs, cached(outputs)) == (expected, [found, found])
            settle(llm)


def change_weights(llm: LLM) -> None:
    """As a trainer does that sends new weights to a running engine."""
    with torch.no_grad():
        for layer in bed.runner(llm).model.model.layers:
            layer.input_layernorm.weight.mul_(1.3)


def changed_truth(model: Path) -> list[Output]:
    with running(model, connector=None, enable_prefix_caching=False) as llm:
        change_weights(llm)
        return [generate(llm, [each])[0] for each in PROMPTS]


@pytest.mark.parametrize("named", [True, False], ids=["named", "by their files"])
def test_a_second_download_of_the_same_weights(llama_dir: Path, tmp_path: Path, manager: Manager, named: bool) -> None:
    """Files with other times are other weights, unless the operator says what they are."""
    settings = {"weights_id": "tiny-llama@1"} if named else {}
    with serving(llama_dir, manager, settings=settings) as llm:
        expected = generate(llm, PROMPTS)
        stored(llm, manager, 24)
    again = tmp_path / "again"
    shutil.copytree(llama_dir, again)
    (again / "model.safetensors").touch()
    with serving(again, manager, settings=settings) as llm:
        outputs = generate(llm, PROMPTS)
        assert outputs == expected
        assert cached(outputs) == [384 if named else 0] * 2
    if named:
        with serving(again, manager, settings={"weights_id": "tiny-llama@2"}) as llm:
            assert cached(generate(llm, PROMPTS)) == [0, 0]


def test_weights_that_change_in_a_running_engine(llama_dir: Path, manager: Manager) -> None:
    old, new = reference(llama_dir, PROMPTS), changed_truth(llama_dir)
    assert old != new
    with serving(llama_dir, manager) as llm:
        free = free_blocks(llm)
        assert generate(llm, PROMPTS) == old
        stored(llm, manager, 24)
        change_weights(llm)
        assert llm.reset_prefix_cache(reset_connector=True)
        warm_up(llm)
        outputs = generate(llm, PROMPTS)
        assert (outputs, cached(outputs)) == (new, [0, 0])
        stored(llm, manager, 48)
        assert llm.reset_prefix_cache()
        outputs = generate(llm, PROMPTS)
        assert (outputs, cached(outputs)) == (new, [384, 384])
        check_nothing_held(llm, free, manager.socket)
    with serving(llama_dir, manager) as llm:  # of the old weights, which are those in the files
        outputs = generate(llm, PROMPTS)
        assert (outputs, cached(outputs)) == (old, [384, 384])


def run_until(llm: LLM, condition: Callable[[], bool]) -> dict[str, Output]:
    """Step until ``condition`` holds; what finished meanwhile."""
    outputs: dict[str, Output] = {}
    end = time.monotonic() + bed.PATIENCE
    while not condition():
        assert time.monotonic() < end, "never"
        outputs |= {output.request_id: output for output in step(llm)}
    return outputs


def test_after_a_reset_while_requests_run_only_what_is_new_from_the_start_is_stored(
    llama_dir: Path, manager: Manager
) -> None:
    """vLLM keeps its own prefix cache then, and says so; what is computed on top of that is as old as that is."""
    expected = reference(llama_dir, PROMPTS, 40)
    with serving(llama_dir, manager, settings={"save_decode_cache": True}) as llm:
        free = free_blocks(llm)
        add(llm, "a", PROMPTS[0], 40)
        outputs = run_until(llm, lambda: objects(manager) == 12)
        assert not llm.reset_prefix_cache(reset_connector=True)
        add(llm, "b", PROMPTS[0], 40)  # from the engine's own cache
        outputs |= drain(llm)
        assert [outputs["a"], outputs["b"]] == [expected[0], expected[0]]
        assert outputs["b"].cached == 384
        stored(llm, manager, 12)
        assert generate(llm, PROMPTS[1:], 40) == expected[1:]
        stored(llm, manager, 12 + 13)
        assert llm.reset_prefix_cache(reset_connector=True)
        warm_up(llm)
        assert generate(llm, PROMPTS, 40) == expected
        stored(llm, manager, 2 * 13)
        assert llm.reset_prefix_cache()
        restored = generate(llm, PROMPTS, 40)
        assert (restored, cached(restored)) == (expected, [384, 384])
        check_nothing_held(llm, free, manager.socket)


def test_a_reset_that_begins_running_requests_anew(llama_dir: Path, manager: Manager) -> None:
    with serving(llama_dir, manager) as llm:
        add(llm, "a", PROMPTS[0])
        run_until(llm, lambda: objects(manager) == 12)
        change_weights(llm)
        assert llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        outputs = drain(llm)
        # its first tokens are of the old weights; all KV is of the new ones
        assert outputs["a"].finish_reason == "length"
        warm_up(llm)
        new = generate(llm, PROMPTS)
        assert llm.reset_prefix_cache()
        assert generate(llm, PROMPTS) == new
    assert new == changed_truth(llama_dir)


# Quantised KV


def test_how_kv_is_quantised_is_part_of_the_identity(
    llama_dir: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the description, since few processors have kernels for it."""
    with serving(llama_dir, manager):
        half = worker_side()
        [group] = half._cache.kv_cache_groups
        layers = half._config.compilation_config.static_forward_context
        caches = {name: layers[name].kv_cache for name in group.layer_names}
        layouts = [read_layout(caches, group.layer_names, half._cache.num_blocks)]

        def described() -> tuple[bytes, bytes]:
            shards = Topology.of(half._config.parallel_config).shards(1, alike=True)
            common, stage = describe(half._config, half._cache, half._groups, layouts, shards, None)
            return digest(common), digest(stage)

        of_engine, of_stage = described()
        assert half.copies is not None
        assert (of_engine, of_stage) == (half.copies._report.digest, half.copies._report.stage_digest)
        cache_config = half._config.cache_config
        for dtype in ("fp8", "fp8_e5m2"):
            monkeypatch.setattr(cache_config, "cache_dtype", dtype)
            assert described()[0] != of_engine
        monkeypatch.setattr(cache_config, "cache_dtype", "auto")
        assert described() == (of_engine, of_stage)
        monkeypatch.setattr(layers[group.layer_names[0]], "kv_cache_dtype", "fp8")
        assert described()[1] != of_stage


# Salts, embeddings, images


def test_a_cache_salt_is_part_of_the_identity(llama_dir: Path, manager: Manager) -> None:
    expected = reference(llama_dir, PROMPTS)
    with serving(llama_dir, manager) as llm:
        for salt in ("alice", "bob", None):
            outputs = generate(llm, PROMPTS, salt=salt)
            assert (outputs, cached(outputs)) == (expected, [0, 0])
        stored(llm, manager, 3 * 24)
        for salt in ("alice", "bob", None):
            assert llm.reset_prefix_cache()
            outputs = generate(llm, PROMPTS, salt=salt)
            assert (outputs, cached(outputs)) == (expected, [384, 384])
        outputs = generate(llm, PROMPTS, salt="carol")
        assert (outputs, cached(outputs)) == (expected, [0, 0])


def test_prompt_embeddings_are_part_of_the_identity(llama_dir: Path, manager: Manager) -> None:
    """Also where they differ from one token on: what lies before it is shared."""
    options = {"enable_prompt_embeds": True}
    with running(llama_dir, connector=None, enable_prefix_caching=False, **options) as llm:
        rows = bed.runner(llm).model.model.embed_tokens(torch.tensor(PROMPTS[0])).detach()
        louder, late = rows * 1.25, rows.clone()
        late[200:] *= 1.25
        inputs = [{"prompt_embeds": each} for each in (rows, louder, late)]
        expected = [ask(llm, [each])[0] for each in inputs]
    assert len(set(expected)) == 3
    with serving(llama_dir, manager, **options) as llm:
        free = free_blocks(llm)
        for each, output, found in zip(inputs, expected, (0, 0, 192), strict=True):
            outputs = ask(llm, [each])
            assert (outputs, cached(outputs)) == ([output], [found])
            settle(llm)
            assert llm.reset_prefix_cache()
        restored = ask(llm, inputs)
        assert (restored, cached(restored)) == (expected, [384, 384, 384])
        check_nothing_held(llm, free, manager.socket)


def test_prompts_that_the_engine_does_not_tell_apart_are_not_cached(llama_dir: Path, manager: Manager) -> None:
    """vLLM hashes the rows of a mixed prompt and its tokens, with 0 for a row's, but not which of both counts."""
    options = {"enable_prompt_embeds": True}
    with running(llama_dir, connector=None, enable_prefix_caching=False, **options) as llm:
        rows = bed.runner(llm).model.model.embed_tokens(torch.tensor(PROMPTS[0])).detach()
        ids = [0 if 100 <= at < 300 else token for at, token in enumerate(PROMPTS[0])]

        def mixed(given: range) -> dict[str, Any]:
            mask = [at not in given for at in range(len(ids))]
            return {"prompt_embeds": rows, "prompt_token_ids": ids, "prompt_is_token_ids": mask}

        inputs = [mixed(range(100, 300)), mixed(range(100, 200)), mixed(range(200, 300))]
        inputs += [{"prompt_embeds": rows}, {"prompt_embeds": rows.to(torch.bfloat16)}]
        expected = [ask(llm, [each])[0] for each in inputs]
    assert len(set(expected[:3])) == 3
    with serving(llama_dir, manager, **options) as llm, counting() as counts:
        for _ in range(2):
            for each, output in zip(inputs, expected, strict=True):
                assert ask(llm, [each]) == [output]
                settle(llm)
                assert llm.reset_prefix_cache()
        stored(llm, manager, 12)
    assert counts["tokens_hit"] == 384, "those of the prompt that is rows alone, of the model's own type"
    assert counts["tokens_missed_ambiguous"] == 2 * 4 * 384
    check_identity(counts)


def test_segments_of_a_pooling_request_are_in_no_hash() -> None:
    def request(**pooling: Any) -> Any:
        return SimpleNamespace(prompt_is_token_ids=None, prompt_embeds=None, pooling_params=PoolingParams(**pooling))

    assert tell_all(request(), torch.float32)
    assert tell_all(request(extra_kwargs={"other": 1}), torch.float32)
    assert not tell_all(request(extra_kwargs={"compressed_token_type_ids": 7}), torch.float32)


def test_images_are_part_of_the_identity_from_their_block_on(llama_dir: Path, manager: Manager) -> None:
    """No multimodal model runs here: the requests are vLLM's, and so are their hashes, but nothing is computed."""
    from vllm import SamplingParams
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.request import Request

    with serving(llama_dir, manager) as llm:
        generate(llm, PROMPTS[:1])
        stored(llm, manager, 12)
        half, hasher = scheduler_side(llm), llm.llm_engine.engine_core.engine_core.request_block_hasher

        def request(name: str, *images: tuple[str, int]) -> Request:
            features = [
                MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, 50))
                for identifier, offset in images
            ]
            limits = SamplingParams(max_tokens=8)
            return Request(name, PROMPTS[0], limits, None, mm_features=features or None, block_hasher=hasher)

        def found(request: Request) -> int:
            answer = None
            while answer is None:
                answer, _ = half.restores.matched_tokens(request, 0)
                half.session.end_step()
            half.finished(request)
            return answer

        assert found(request("text")) == 384
        assert found(request("image", ("cat", 100))) == 96
        assert found(request("first", ("cat", 0))) == 0
        assert found(request("last", ("cat", 384))) == 384
        cat, dog, moved, two = (
            request(str(images), *images).block_hashes
            for images in ([("cat", 100)], [("dog", 100)], [("cat", 101)], [("cat", 100), ("dog", 200)])
        )
        for other, same in ((dog, 3), (moved, 3), (two, 6)):
            assert other[:same] == cat[:same]
            assert not set(other[same:]) & set(cat[same:])


def identity_of(folder: Path, load_format: str = "auto", elsewhere: str = "", named: str | None = None) -> str:
    model: Any = SimpleNamespace(model=str(folder), revision=None, model_weights=elsewhere)
    return weights_identity(model, load_format, named)


def test_weights_that_are_not_the_folders_are_nobodys(llama_dir: Path) -> None:
    known = identity_of(llama_dir)
    assert known != PRIVATE
    assert identity_of(llama_dir, "safetensors") == known
    for load_format in ("tensorizer", "runai_streamer", "sharded_state", "ipc_cache", "modelexpress", "a_plugins_own"):
        assert identity_of(llama_dir, load_format) == PRIVATE
    assert identity_of(llama_dir, "auto", "s3://bucket/other") == PRIVATE
    named = identity_of(llama_dir, "auto", "s3://bucket/other", "llama@1")
    assert named == identity_of(llama_dir, "runai_streamer", named="llama@1") != identity_of(llama_dir, named="private")
    assert PRIVATE not in (named, identity_of(llama_dir, named=PRIVATE))


def test_weights_are_those_of_the_folder_that_the_engine_downloads_to(tmp_path: Path) -> None:
    kept = tmp_path / "cache" / "models--org--m"
    snapshot = kept / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("a" * 40)
    (snapshot / "pytorch_model.bin").write_bytes(b"a" * 64)
    model: Any = SimpleNamespace(model="org/m", revision=None, model_weights="")
    assert weights_identity(model, "auto", None) == PRIVATE
    assert weights_identity(model, "auto", None, str(tmp_path / "cache")) == identity_of(snapshot)


def test_code_alone_is_no_weights(tmp_path: Path) -> None:
    (tmp_path / "modeling.py").write_text("pass")
    assert identity_of(tmp_path) == PRIVATE


def processor_of(folder: Path, caching: bool = True, **options: Any) -> list[str]:
    model = SimpleNamespace(model=str(folder), revision=None, multimodal_config=MultiModalConfig(**options))
    return _processor(SimpleNamespace(model_config=model, cache_config=SimpleNamespace(enable_prefix_caching=caching)))  # type: ignore[arg-type]


def test_how_images_are_prepared_is_part_of_the_identity(tmp_path: Path) -> None:
    before = processor_of(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5]}')
    after = processor_of(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.0, 0.0, 0.0]}')
    assert len({str(each) for each in (before, after, processor_of(tmp_path))}) == 3


def test_where_images_are_numbered_an_engine_is_alone(tmp_path: Path) -> None:
    """With both of vLLM's caches off, the first image of each engine has the same name in its blocks' hashes."""
    assert PRIVATE in processor_of(tmp_path, caching=False, mm_processor_cache_gb=0)
    assert PRIVATE not in processor_of(tmp_path, caching=True, mm_processor_cache_gb=0)
    assert PRIVATE not in processor_of(tmp_path, caching=False)
    identity = {"weights": "w", "drafter": [], "processor": [PRIVATE]}
    assert is_private(identity)


def kv_dtypes(cache_dtype: str, indexer: str = "auto") -> list[str]:
    told = SimpleNamespace(indexer_kv_dtype=indexer)
    return _kv_dtypes(SimpleNamespace(cache_config=SimpleNamespace(cache_dtype=cache_dtype), attention_config=told))  # type: ignore[arg-type]


def test_how_kv_is_stored_is_part_of_the_identity() -> None:
    assert len({str(each) for each in (kv_dtypes("auto"), kv_dtypes("fp8"), kv_dtypes("auto", "fp8"))}) == 3


def test_a_platforms_own_kv_dtype_is_told_by_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import cache

    if not hasattr(cache, "register_kv_cache_dtype"):
        pytest.skip("this vLLM knows no such dtypes")
    told = []
    for number in range(2):
        handler = type(f"Handler{number}", (), {"torch_dtype": lambda self: torch.uint8})
        monkeypatch.setitem(cache._KV_CACHE_DTYPE_HANDLERS, "own", handler())
        told.append(str(kv_dtypes("own")))
    assert len(set(told)) == 2


@pytest.mark.parametrize("name", known_options.KNOWN)
def test_every_option_has_been_looked_at(name: str) -> None:
    """An option that changes KV bytes and is not in the identity would let engines share what they must not."""
    options = {each.name for each in dataclasses.fields(getattr(vllm.config, name))}
    unknown = options - set(known_options.KNOWN[name].split())
    assert not unknown, f"decide for each whether it belongs into the identity, and list it: {sorted(unknown)}"
