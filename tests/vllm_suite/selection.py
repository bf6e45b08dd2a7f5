"""Which of vLLM's tests run against kvhold, and why the others do not. For vLLM 0.32 and 0.33."""

import re
from dataclasses import dataclass, field

UNIT = "tests/v1/kv_connector/unit/"
CORE = "tests/v1/core/"

MODELS = {
    "facebook/opt-125m": "opt",
    "facebook/opt-350m": "opt",
    "Qwen/Qwen2.5-VL-3B-Instruct": "opt",  # only its name is used
}
"""Configurations that the tests look up by these names, and what stands in for them."""

ABSENT_MODELS = {"llava-hf/llava": "a multimodal model, which needs torchvision"}
"""Tests that name one of these are skipped."""


@dataclass(frozen=True)
class File:
    """A file of tests. ``attach`` names what plugin.py does for it.

    Of all tests, or those whose name contains ``only``, the ones in ``without`` (by function) do not apply and are
    skipped, and from vLLM 0.33 on also those in ``without_later``; for those in ``refused`` (by the whole name) kvhold
    must refuse to start, which is what passes.
    """

    attach: str
    only: str = ""
    without: dict[str, str] = field(default_factory=dict)
    without_later: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    quick: bool = True

    def reason(self, *names: str, later: bool) -> str | None:
        """Why a test of these names does not apply; None if it does."""
        left_out = self.without | (self.without_later if later else {})
        return next((left_out[name] for name in names if name in left_out), None)

    def wants(self, test: str) -> bool:
        return re.search(self.only, test) is not None

    def refusal(self, test: str) -> str | None:
        return next((why for pattern, why in self.refused.items() if re.fullmatch(pattern, test)), None)


_HANDOFF = "hands KV to one named peer; kvhold does not"
_DELIVERY = "wants a producer to insist on delivery; to kvhold a publish that does not happen is a later miss"
_UNEQUAL = "for connectors that complete a local hit of unequal depth; kvhold does not say that it does"
_STAGES = "for connectors that know nothing of pipeline stages"
_MODE = "Mamba states of the cache mode 'none'"
_CLASS = "asks for the very class of the connector in whose place ours is"
_LOOKAHEAD = "hashes of drafters, which vLLM does not have beside a connector"
_AUXILIARY = "about outputs beside the tokens, which vLLM keeps itself"

FILES = {
    UNIT + "test_kv_load_failure_recovery.py": File("schedulers"),
    UNIT + "test_invalid_blocks_correctness.py": File("schedulers"),
    UNIT + "test_cache_pollution_prevention.py": File("schedulers"),
    UNIT + "test_error_propagation.py": File("schedulers"),
    UNIT + "test_remote_prefill_lifecycle.py": File(
        "schedulers",
        without={
            "test_basic_lifecycle": "expects the last, partial block of the prompt to be loaded",
            "test_full_block_prompt": "expects the last token of the prompt to be loaded",
        },
        refused={
            "test_p_side_chunked_prefill_mamba": _MODE,
            r"test_async_load_does_not_double_reserve_mamba_spec_blocks\[none.*\]": _MODE,
        },
    ),
    UNIT + "test_kv_connector_lifecycle.py": File(
        "recorder", without_later={"test_kv_connector_mixin_clears_metadata": _CLASS}
    ),
    UNIT + "test_hma_auto_config.py": File(
        "registry", without={"test_explicit_hma_with_non_hma_connector_errors_at_factory": "another connector's"}
    ),
    UNIT + "test_handshake_pp_aggregation.py": File(
        "handshake",
        without={
            "test_engine_unwraps_handshake_metadata_for_legacy_connector": _STAGES,
            "test_engine_rejects_pp_producer_for_legacy_connector": _STAGES,
        },
    ),
    UNIT + "test_multi_connector.py": File("children", only="hma_support_detection|divergent_local_hybrid_hit"),
    UNIT + "test_nixl_simple_cpu_offload.py": File(
        "second_child", without_later={"test_cpu_offload_wins_when_nixl_has_no_match": _CLASS}
    ),
    "tests/v1/worker/test_gpu_kv_connector.py": File(
        "runner_v2", without_later={"test_load_start_phase": "asks for the class of a mock in whose place ours is"}
    ),
    CORE + "test_scheduler.py": File(
        "all_schedulers",
        without={
            "test_reset_connector_cache_no_connector_is_no_op_success": "about an engine without a connector",
            "test_remote_kv_promotion_drains_before_grammar_prefix": "a mock replaces the connector",
            "test_scheduler_kv_connector_stats": "a mock replaces the connector",
            "test_hybrid_fa_deeper_hit_respects_connector_lookup_policy[True-16-6-80]": _UNEQUAL,
            "test_hybrid_divergent_hit_fallback_is_capped_at_retained_auxiliary_outputs[kept]": _UNEQUAL,
            "test_evicted_blocks_release_their_auxiliary_outputs_past_capacity": _AUXILIARY,
            "test_streaming_lookahead_hashes_follow_recomputed_kv": _LOOKAHEAD,
            "test_kv_cache_release_after_keep_pause_preserves_requests": "a mock stands for the workers",
            "test_block_drafters_cap_requests_instead_of_draft_slots": "its draft model has no configuration",
        },
        without_later={
            "test_async_scheduling_pp_allows_rescheduling_with_output_placeholders": "needs Triton",
        },
    ),
    CORE + "test_async_scheduler.py": File(
        "all_schedulers",
        without={
            "test_requires_kv_delivery_defaults_to_producer_role": _DELIVERY,
            "test_kv_pressure_preempt_mid_handoff[kv_producer-False]": _DELIVERY,
        },
    ),
    CORE + "test_deferred_block_free.py": File("all_schedulers"),
    CORE + "test_swa_inflight_window_free.py": File(
        "all_schedulers", only="^test_(num|swa_free|chunked_local_free|conn)"
    ),
    CORE + "test_prefix_replay.py": File("all_schedulers"),
    CORE + "test_worker_slot_overflow.py": File("all_schedulers"),
    CORE + "test_priority_preemption_bug.py": File("configured"),
    "tests/v1/spec_decode/test_dynamic_sd.py": File("all_schedulers", only="scheduler"),
    "tests/v1/streaming_input/test_scheduler_streaming.py": File("streaming"),
    CORE + "test_priority_scheduler_random.py": File(
        "random",
        only=r"one-group.*preemption-(None-|5-True)|(window|chunks|states|partial).*preemption-None-True",
        quick=False,
    ),
}

OTHERS = {
    "test_bidirectional_kv_transfer.py": "NIXL's scheduler; needs ray",
    "test_config.py": "how vLLM's options become a `kv_transfer_config`",
    "test_decode_bench_connector.py": "DecodeBenchConnector, which fills blocks with constants",
    "test_example_connector.py": "ExampleConnector's files; needs a GPU and a multimodal model",
    "test_flexkv_connector.py": "FlexKV's connector",
    "test_hf3fs_*.py": "the 3FS connector, its client and its metadata server",
    "test_hidden_states_connector.py": "a connector that extracts hidden states",
    "test_hisparse_*.py": "HiSparse, vLLM's own host pool",
    "test_lmcache_*.py": "LMCache's connector",
    "test_mooncake_*.py": "Mooncake's connector and store: the parts of its scheduler and worker, one by one",
    "test_moriio_*.py": "MoRI-IO's connector and proxy; needs msgpack",
    "test_nixl_[!s]*.py": "NIXL's connector",
    "test_offloading_connector.py": "OffloadingConnector in a whole engine; needs a GPU and a model",
    "test_output_aggregator.py": "vLLM's aggregator of worker outputs: no connector takes part",
    "test_remote_decode_lifecycle.py": _HANDOFF,
    "test_scheduler_kv_connector_override.py": "replaces a method of vLLM's scheduler for a connector that needs it",
    "test_simple_cpu_offload_*.py": "SimpleCPUOffloadConnector: its settings and metrics",
    "test_tp_mapping.py": "how NIXL maps ranks of one engine to those of another",
    "test_transfer_topology_sharded.py": "how NIXL maps ranks of one engine to those of another",
    "test_umbp_*.py": "the UMBP connector of vLLM 0.33",
    "offloading_connector/test_*.py": "OffloadingConnector: a mock of its manager says what is stored and loaded",
}
"""The rest of vLLM's connector unit tests, by pattern under ``UNIT``."""

_POOL = "vLLM's block pool and its groups, below a connector"
_HUB = "whole engines with models from the hub, some on GPUs; `tests/engine` does the same against kvhold"
_NO_KV = "no KV cache takes part"
_MENTION = "mentions a connector's settings; none takes part"

ELSEWHERE = {
    CORE + "prefix_cache/test_hybrid_prefix_cache_hit_rate.py": _HUB,
    CORE + "prefix_cache/test_[mp]*.py": _POOL + "; what would be a connector is a stand-in of two methods",
    CORE + "test_prefix_caching.py": _POOL + ", and HiSparse",
    CORE + "test_kv_*.py": _POOL,
    CORE + "test_single_type_kv_cache_manager.py": _POOL,
    CORE + "test_mamba_align_chunk_split.py": _POOL,
    CORE + "test_contiguous_kv_packing.py": _POOL,
    CORE + "test_encoder_cache_manager.py": _NO_KV,
    CORE + "test_output.py": _NO_KV,
    CORE + "test_repetition_detection.py": _NO_KV,
    CORE + "test_scheduler_e2e.py": _HUB,
    CORE + "test_reset_prefix_cache_e2e.py": _HUB,
    "tests/v1/simple_kv_offload/*": "SimpleCPUOffloadConnector's scheduler and its pool; whole engines on a GPU",
    "tests/v1/kv_offload/*": "the insides of vLLM's own offloading",
    "tests/v1/kv_connector/*_integration/*": "two or more servers with NIXL or Mooncake between them",
    "tests/v1/ec_connector/*": "connectors for an encoder's outputs",
    "tests/v1/e2e/general/*": _HUB,
    "tests/v1/engine/test_abort_final_step.py": "needs CUDA and a model from the hub",
    "tests/v1/engine/test_engine_core.py": "its tests with a connector need a multimodal model",
    "tests/v1/engine/*": _MENTION,
    "tests/v1/executor/test_executor.py": "vLLM's aggregator of worker outputs: no connector takes part",
    "tests/v1/spec_decode/test_dflash*.py": "needs the configurations of two models from the hub",
    "tests/v1/worker/*": "GPU model runners with a stand-in for a connector",
    "tests/v1/metrics/*": _MENTION,
    "tests/v1/attention/*": _MENTION,
    "tests/models/*": _HUB,
    "tests/evals/*": _HUB,
    "tests/distributed/test_kvlayout.py": "connectors that ask for a KV layout; kvhold takes any it can read",
    **dict.fromkeys(
        (
            "tests/test_config.py",
            *(f"tests/{folder}/*" for folder in ("config", "entrypoints", "model_executor", "platforms", "tools")),
            "tests/utils_/*",
            "tests/v1/fault_tolerance/*",
        ),
        _MENTION,
    ),
}
"""Tests in other folders that name a connector or build a scheduler, and all others of ``CORE``, by pattern."""
