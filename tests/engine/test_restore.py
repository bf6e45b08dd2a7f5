"""What the whole thing is for: a prompt is restored, and nobody can tell from the output."""

from pathlib import Path

import pytest
from testbed.engine.bed import (
    abort,
    add,
    close,
    drain,
    engine,
    free_blocks,
    generate,
    prompt,
    reference,
    running,
    scheduler,
    settle,
    step,
)
from testbed.engine.kvhold_bed import (
    attached,
    check_identity,
    check_nothing_held,
    connect,
    counting,
    flip_byte,
    recording_offsets,
    serving,
    status,
    until,
    warm_up,
)
from testbed.engine.models import write_llama
from testbed.process.manager_process import Manager

from kvhold.engines.common.accounts import METRICS

BLOCK = 32
PROMPTS = [prompt(400, seed) for seed in range(3)]
FP8 = {"kv_cache_dtype": "fp8"}


def test_restored_after_reset_and_in_the_next_engine(llama_dir: Path, manager: Manager) -> None:
    expected = reference(llama_dir, PROMPTS)
    with counting() as counts:
        with serving(llama_dir, manager) as llm:
            free = free_blocks(llm)
            cold = generate(llm, PROMPTS)
            assert cold == expected
            assert [output.cached for output in cold] == [0, 0, 0]
            assert llm.reset_prefix_cache()
            restored = generate(llm, PROMPTS)
            assert restored == expected
            assert [output.cached for output in restored] == [384, 384, 384]
            check_nothing_held(llm, free, manager.socket)
            assert {space["model"] for space in status(manager.socket)["spaces"]} == {str(llama_dir)}
        with serving(llama_dir, manager, served_model_name=["tiny-llama", "alias"]) as llm:
            restored = generate(llm, PROMPTS)
            assert restored == expected
            assert [output.cached for output in restored] == [384, 384, 384]
        check_identity(counts)
        assert counts["tokens_hit"] == 2 * 3 * 384
    until(lambda: not status(manager.socket)["instances"], "the engines' sessions end")
    report = status(manager.socket)
    assert report["objects"] == 3 * 12
    (space,) = report["spaces"]
    assert space["model"] == "tiny-llama"
    assert (space["keys_found"], space["keys_read"]) == (2 * 3 * 12, 0)
    assert report["accounts"]["credit"] == report["accounts"]["leased"] == report["accounts"]["orphaned"] == 0


def test_one_flipped_byte_shows(llama_dir: Path, manager: Manager) -> None:
    expected = reference(llama_dir, PROMPTS[:1])
    with serving(llama_dir, manager) as llm, recording_offsets() as offsets:
        generate(llm, PROMPTS[:1])
        assert llm.reset_prefix_cache()
        flip_byte(offsets[3] + 7)
        damaged = generate(llm, PROMPTS[:1])
        assert damaged[0].cached == 384
        assert damaged != expected


def test_whole_prompt_stored_leaves_the_last_token_to_compute(llama_dir: Path, manager: Manager) -> None:
    prompts = [prompt(BLOCK * 4, 7), prompt(BLOCK * 4 + 1, 8), prompt(BLOCK, 9), prompt(BLOCK - 1, 10)]
    expected = reference(llama_dir, prompts)
    with serving(llama_dir, manager) as llm:
        assert generate(llm, prompts) == expected
        assert llm.reset_prefix_cache()
        restored = generate(llm, prompts)
        assert restored == expected
        assert [output.cached for output in restored] == [BLOCK * 3, BLOCK * 4, 0, 0]


def test_chunked_prefill(llama_dir: Path, manager: Manager) -> None:
    expected = reference(llama_dir, PROMPTS)
    options = {"max_num_batched_tokens": 96, "max_model_len": 512}
    with serving(llama_dir, manager, **options) as llm:
        assert generate(llm, PROMPTS) == expected
        assert llm.reset_prefix_cache()
        restored = generate(llm, PROMPTS)
        assert restored == expected
        assert [output.cached for output in restored] == [384, 384, 384]


def test_shared_prefix_mixed_hits_together(llama_dir: Path, manager: Manager) -> None:
    shared = prompt(200, 3)
    prompts = [shared + prompt(20 + 40 * i, 20 + i) for i in range(6)] + [prompt(150, 40 + i) for i in range(3)]
    expected = reference(llama_dir, prompts)
    with serving(llama_dir, manager) as llm:
        free = free_blocks(llm)
        assert generate(llm, prompts[:2]) == expected[:2]
        assert llm.reset_prefix_cache()
        together = generate(llm, prompts)
        assert together == expected
        assert [output.cached > 0 for output in together] == [True] * 6 + [False] * 3
        assert llm.reset_prefix_cache()
        assert generate(llm, prompts) == expected
        check_nothing_held(llm, free, manager.socket)
    # one copy of the shared blocks, however many prompts have them
    blocks = {tuple(p[: BLOCK * (i + 1)]) for p in prompts for i in range(len(p) // BLOCK)}
    until(lambda: status(manager.socket)["objects"] == len(blocks), "all is stored")


def test_a_prefix_that_only_the_engine_has_is_published_too(llama_dir: Path, manager: Manager) -> None:
    long = prompt(600, 5)
    expected = reference(llama_dir, [long])
    with serving(llama_dir, manager) as llm:
        generate(llm, [long[:400]])
        manager.restart()  # what was stored is gone, what the engine has in its own cache is not
        until(lambda: attached(llm), "the engine attaches again")
        assert generate(llm, [long])[0].cached == 384
        assert llm.reset_prefix_cache()
        restored = generate(llm, [long])
        assert restored == expected
        assert restored[0].cached == 576


def test_preemption_with_few_blocks(llama_dir: Path, manager: Manager) -> None:
    prompts = [prompt(180, 60 + i) for i in range(6)]
    expected = reference(llama_dir, prompts, 60)
    with serving(llama_dir, manager, num_gpu_blocks_override=26, max_model_len=512) as llm:
        free = free_blocks(llm)
        preempted = []
        preempt = scheduler(llm)._preempt_request

        def counted(request: object, *args: object, **kwargs: object) -> object:
            preempted.append(request)
            return preempt(request, *args, **kwargs)

        scheduler(llm)._preempt_request = counted
        for _ in range(2):
            assert generate(llm, prompts, 60) == expected
        assert preempted
        check_nothing_held(llm, free, manager.socket)


@pytest.mark.parametrize("steps", range(5))
def test_abort_at_any_moment(llama_dir: Path, manager: Manager, steps: int) -> None:
    expected = reference(llama_dir, PROMPTS)
    with serving(llama_dir, manager) as llm:
        free = free_blocks(llm)
        generate(llm, PROMPTS[:2])
        assert llm.reset_prefix_cache()
        for i, tokens in enumerate(PROMPTS):
            add(llm, f"r{i}", tokens)
        for _ in range(steps):
            step(llm)
        abort(llm, "r0")
        outputs = drain(llm)
        assert [outputs["r1"], outputs["r2"]] == expected[1:]
        check_nothing_held(llm, free, manager.socket)
        assert llm.reset_prefix_cache()
        assert generate(llm, PROMPTS) == expected


def test_reset_with_running_requests(llama_dir: Path, manager: Manager) -> None:
    expected = reference(llama_dir, PROMPTS, 20)
    with serving(llama_dir, manager) as llm:
        free = free_blocks(llm)
        for i, tokens in enumerate(PROMPTS):
            add(llm, f"r{i}", tokens, 20)
        for _ in range(4):
            step(llm)
        assert llm.reset_prefix_cache(reset_running_requests=True)
        for _ in range(3):
            step(llm)
        assert llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        outputs = drain(llm)
        assert [outputs[f"r{i}"] for i in range(3)] == expected
        check_nothing_held(llm, free, manager.socket)


def test_reset_of_the_connector_loses_nothing_of_weights_that_stayed(llama_dir: Path, manager: Manager) -> None:
    expected = reference(llama_dir, PROMPTS)
    with serving(llama_dir, manager) as llm:
        generate(llm, PROMPTS)
        assert llm.reset_prefix_cache(reset_connector=True)
        again = generate(llm, PROMPTS)
        assert again == expected
        assert [output.cached for output in again] == [384, 384, 384]
    with serving(llama_dir, manager) as llm:
        assert [output.cached for output in generate(llm, PROMPTS)] == [384, 384, 384]


def test_reset_of_the_connector_never_waits_for_the_manager(llama_dir: Path, manager: Manager) -> None:
    with serving(llama_dir, manager) as llm:
        generate(llm, PROMPTS)
        manager.stop()
        assert llm.reset_prefix_cache(reset_connector=True)
        manager.kill()
        assert llm.reset_prefix_cache(reset_connector=True)


def test_roles(llama_dir: Path, manager: Manager) -> None:
    with serving(llama_dir, manager, role="kv_consumer") as llm:
        generate(llm, PROMPTS)
        until(lambda: status(manager.socket)["objects"] == 0, "all is stored")
    with serving(llama_dir, manager, role="kv_producer") as llm:
        generate(llm, PROMPTS)
        until(lambda: status(manager.socket)["objects"] == 36, "all is stored")
        assert llm.reset_prefix_cache()
        assert [output.cached for output in generate(llm, PROMPTS)] == [0, 0, 0]
    with serving(llama_dir, manager, role="kv_consumer") as llm:
        assert [output.cached for output in generate(llm, PROMPTS)] == [384, 384, 384]
        until(lambda: status(manager.socket)["objects"] == 36, "all is stored")


@pytest.mark.parametrize("decode", [False, True])
def test_generated_tokens_are_kept_only_when_asked_for(llama_dir: Path, manager: Manager, decode: bool) -> None:
    first = prompt(100, 2)
    [answer] = reference(llama_dir, [first], 80)
    following = [*first, *answer.tokens[:70]]
    expected = reference(llama_dir, [following])
    with serving(llama_dir, manager, settings={"save_decode_cache": decode}) as llm:
        generate(llm, [first], 80)
        assert llm.reset_prefix_cache()
        restored = generate(llm, [following])
        assert restored == expected
        assert restored[0].cached == (160 if decode else 96)


def test_a_failed_restore_is_recomputed_and_not_tried_again(
    llama_dir: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvhold.copy.host import HostCopier

    expected = reference(llama_dir, PROMPTS)
    with serving(llama_dir, manager) as llm, counting() as counts:
        free = free_blocks(llm)
        generate(llm, PROMPTS)
        assert llm.reset_prefix_cache()
        with monkeypatch.context() as patch:
            patch.setattr(HostCopier, "restore", _raise)
            assert generate(llm, PROMPTS) == expected
        assert counts["load_failures"] == 3
        assert counts["tokens_missed_load_failed"] == 3 * 384
        check_identity(counts)
        check_nothing_held(llm, free, manager.socket)
        assert llm.reset_prefix_cache()
        assert [output.cached for output in generate(llm, PROMPTS)] == [384, 384, 384]


def test_a_failed_publish_is_a_later_miss(llama_dir: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    import kvhold.copy.host as host

    expected = reference(llama_dir, PROMPTS)
    with serving(llama_dir, manager) as llm, counting() as counts:
        free = free_blocks(llm)
        with monkeypatch.context() as patch:
            patch.setattr(host.np, "copyto", _raise)
            assert generate(llm, PROMPTS) == expected
        assert counts["publish_failures"] == counts["publishes"] > 0
        check_nothing_held(llm, free, manager.socket)
        until(lambda: status(manager.socket)["objects"] == 0, "all is stored")
        assert llm.reset_prefix_cache()
        assert [output.cached for output in generate(llm, PROMPTS)] == [0, 0, 0]
        until(lambda: status(manager.socket)["objects"] == 36, "all is stored")


def _raise(*_: object, **__: object) -> None:
    raise OSError("injected")


def skip_if_refused(folder: Path, **options: object) -> None:
    """Skip what the engine itself does not do on this processor."""
    try:
        with running(folder, connector=None, **options):
            pass
    except (NotImplementedError, ValueError) as refusal:  # vLLM 0.32, and 0.33
        pytest.skip(f"the engine refuses {options}: {refusal}")


def test_quantised_kv_is_restored(llama_dir: Path, manager: Manager) -> None:
    skip_if_refused(llama_dir, **FP8)
    with serving(llama_dir, manager, **FP8) as llm:
        cold, own = generate(llm, PROMPTS[:1]), generate(llm, PROMPTS[:1])
        assert llm.reset_prefix_cache()
        restored = generate(llm, PROMPTS[:1])
        assert restored == own
        assert [output.cached for output in (*cold, *own, *restored)] == [0, 384, 384]


@pytest.mark.parametrize(
    "other",
    [
        {"block_size": 64},
        {"dtype": "bfloat16"},
        FP8,
        {"prefix_caching_hash_algo": "sha256_cbor"},
        {"prefix_caching_hash_algo": "xxhash"},
        {"hf_overrides": {"rope_theta": 5000.0}},
    ],
    ids=lambda other: next(iter(other)) + "=" + str(next(iter(other.values()))),
)
def test_engines_that_differ_share_nothing(llama_dir: Path, manager: Manager, other: dict[str, object]) -> None:
    if other.get("prefix_caching_hash_algo") == "xxhash":
        pytest.importorskip("xxhash")
    skip_if_refused(llama_dir, **other)
    with serving(llama_dir, manager) as llm:
        generate(llm, PROMPTS[:1])
    with serving(llama_dir, manager, **other) as llm:
        assert generate(llm, PROMPTS[:1])[0].cached == 0
    with serving(llama_dir, manager) as llm:
        assert generate(llm, PROMPTS[:1])[0].cached == 384


def test_other_weights_of_the_same_shape_share_nothing(llama_dir: Path, tmp_path: Path, manager: Manager) -> None:
    other = write_llama(tmp_path / "other", seed=1)
    expected = reference(other, PROMPTS[:1])
    with serving(llama_dir, manager) as llm:
        generate(llm, PROMPTS[:1])
    with serving(other, manager) as llm:
        cold = generate(llm, PROMPTS[:1])
        assert cold == expected
        assert cold[0].cached == 0


def test_cache_salts_are_kept_apart(llama_dir: Path, manager: Manager) -> None:
    with serving(llama_dir, manager) as llm:
        generate(llm, PROMPTS[:1], salt="a")
        assert llm.reset_prefix_cache()
        assert generate(llm, PROMPTS[:1], salt="b")[0].cached == 0
        assert generate(llm, PROMPTS[:1])[0].cached == 0
        assert llm.reset_prefix_cache()
        assert generate(llm, PROMPTS[:1], salt="a")[0].cached == 384


def test_an_object_larger_than_the_arena_is_said_and_harmless(llama_dir: Path, tmp_path: Path) -> None:
    process = Manager(tmp_path, dram="2MiB")
    try:
        big = write_llama(tmp_path / "big", layers=80, kv_heads=4)
        options = {"max_model_len": 512}
        expected = reference(big, PROMPTS[:1], 2, **options)
        with running(big, connector=connect(process), **options) as llm:
            assert generate(llm, PROMPTS[:1], 2) == expected
            settle(llm)
        assert "nothing can be kept" in process.log_tail()
    finally:
        process.kill()


def test_eviction_under_a_small_arena_stays_right(llama_dir: Path, tmp_path: Path) -> None:
    process = Manager(tmp_path, dram="4MiB")
    try:
        prompts = [prompt(400, 100 + i) for i in range(16)]
        expected = reference(llama_dir, prompts)
        with serving(llama_dir, process, credits=16) as llm:
            free = free_blocks(llm)
            for _ in range(3):
                assert generate(llm, prompts) == expected
                settle(llm)
                assert llm.reset_prefix_cache()
            check_nothing_held(llm, free, process.socket)
        assert status(process.socket)["evicted"] > 0
    finally:
        process.kill()


def test_hits_are_labelled_as_host_memory(llama_dir: Path, manager: Manager) -> None:
    from prometheus_client import REGISTRY

    llm = engine(llama_dir, connector=connect(manager), disable_log_stats=False)
    try:
        warm_up(llm)
        first = {
            sample.name: sample.value
            for metric in REGISTRY.collect()
            for sample in metric.samples
            if sample.name.startswith("kvhold:") and sample.name.endswith("_total")
        }
        assert set(first) == {f"kvhold:{name}_total" for name in METRICS}, "each is there before it counts"
        assert first["kvhold:tokens_cut_total"] == first["kvhold:load_bytes_total"] == 0
        generate(llm, PROMPTS)
        assert llm.reset_prefix_cache()
        generate(llm, PROMPTS)
        settle(llm)
        samples = {
            (sample.name, sample.labels.get("source")): sample.value
            for metric in REGISTRY.collect()
            for sample in metric.samples
        }
        assert samples["vllm:prompt_tokens_cached_by_source_total", "host"] == 3 * 384
        asked = samples["kvhold:tokens_asked_total", None]
        missed = sum(v for (name, _), v in samples.items() if name.startswith("kvhold:tokens_missed_"))
        # the creation time of each counter is a sample too, under another name
        missed -= sum(
            v for (name, _), v in samples.items() if name.startswith("kvhold:tokens_missed_") and "_created" in name
        )
        assert asked == samples["kvhold:tokens_hit_total", None] + missed == 2 * 3 * 384
        assert samples["kvhold:load_bytes_total", None] == samples["kvhold:publish_bytes_total", None] > 0
    finally:
        close(llm)
