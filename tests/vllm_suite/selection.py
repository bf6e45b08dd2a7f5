"""Which of vLLM's tests run against kvhold, and why the others do not. For vLLM 0.32.0."""

import re
from dataclasses import dataclass, field

UNIT = "tests/v1/kv_connector/unit/"
CORE = "tests/v1/core/"

MODELS = {
    "facebook/opt-125m": "opt",
    "Qwen/Qwen2.5-VL-3B-Instruct": "opt",  # only its name is used
}
"""Configurations that the tests look up by these names, and what stands in for them."""

ABSENT_MODELS = {"llava-hf/llava": "a multimodal model, which needs torchvision"}
"""Tests that name one of these are skipped."""


@dataclass(frozen=True)
class File:
    """A file of tests. ``attach`` names what plugin.py does for it.

    Of all tests, or those whose name contains ``only``, the ones in ``without`` (by function) do not apply and are
    skipped; for those in ``refused`` (by the whole name) kvhold must refuse to start, which is what passes.
    """

    attach: str
    only: str = ""
    without: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    quick: bool = True

    def wants(self, test: str) -> bool:
        return re.search(self.only, test) is not None

    def refusal(self, test: str) -> str | None:
        return next((why for pattern, why in self.refused.items() if re.fullmatch(pattern, test)), None)


_GROUPS = "more than one KV-cache group"
_WINDOW = "a sliding or chunked window"
_STAGES = "pipeline parallelism"
_HANDOFF = "hands KV to one named peer; kvhold does not"
_DELIVERY = "wants a producer to insist on delivery; to kvhold a publish that does not happen is a later miss"

FILES = {
    UNIT + "test_kv_load_failure_recovery.py": File(
        "schedulers", refused={"test_block_level_load_failure_fails_closed_with_multiple_groups": _GROUPS}
    ),
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
            "test_p_side_chunked_prefill_mamba": _GROUPS,
            r"test_async_load_reserves_blocks_for_promotion_margin\[(multiple-groups|different-block-sizes)\]": _GROUPS,
            r"test_async_load_does_not_double_reserve_mamba_spec_blocks\[.*\]": _GROUPS,
        },
    ),
    UNIT + "test_kv_connector_lifecycle.py": File("recorder"),
    UNIT + "test_hma_auto_config.py": File(
        "registry", without={"test_explicit_hma_with_non_hma_connector_errors_at_factory": "another connector's"}
    ),
    UNIT + "test_handshake_pp_aggregation.py": File(
        "handshake",
        without={
            "test_engine_passes_handshake_metadata_through_for_pp_aware_connector": "for connectors that know of stages"
        },
    ),
    UNIT + "test_multi_connector.py": File("children", only="hma_support_detection|divergent_local_hybrid_hit"),
    "tests/v1/worker/test_gpu_kv_connector.py": File("runner_v2"),
    CORE + "test_scheduler.py": File(
        "all_schedulers",
        without={
            "test_reset_connector_cache_no_connector_is_no_op_success": "about an engine without a connector",
            "test_remote_kv_promotion_drains_before_grammar_prefix": "a mock replaces the connector",
            "test_scheduler_kv_connector_stats": "a mock replaces the connector",
        },
        refused={
            "test_async_scheduling_pp_allows_rescheduling_with_output_placeholders": _STAGES,
            "test_diffusion_read_deferral_keeps_a_longer_pp_wait": _STAGES,
            r"test_hybrid_per_group_hit_divergence_with_connector\[.*\]": _GROUPS,
            r"test_hybrid_fa_deeper_hit_respects_connector_lookup_policy\[.*\]": _GROUPS,
        },
    ),
    CORE + "test_async_scheduler.py": File(
        "all_schedulers",
        without={
            "test_requires_kv_delivery_defaults_to_producer_role": _DELIVERY,
            "test_kv_pressure_preempt_mid_handoff[kv_producer-False]": _DELIVERY,
        },
        refused={},
    ),
    CORE + "test_deferred_block_free.py": File("all_schedulers"),
    CORE + "test_swa_inflight_window_free.py": File(
        "all_schedulers",
        only="^test_(swa_free|chunked_local_free|connector_finish)",
        refused={".*": _WINDOW},
    ),
    CORE + "test_prefix_replay.py": File(
        "schedulers",
        only="remote_kv|kv_load|ignored.True",
        refused={".*": _GROUPS},
    ),
    CORE + "test_priority_scheduler_random.py": File(
        "random", only=r"\[preemption-None-(True|False)\]|\[preemption-5-True\]", quick=False
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
    "test_mooncake_*.py": "Mooncake's connector and store",
    "test_moriio_*.py": "MoRI-IO's connector and proxy; needs msgpack",
    "test_nixl_*.py": "NIXL's connector",
    "test_offloading_connector.py": "OffloadingConnector in a whole engine; needs a GPU and a model",
    "test_output_aggregator.py": "vLLM's aggregator of worker outputs: no connector takes part",
    "test_remote_decode_lifecycle.py": _HANDOFF,
    "test_scheduler_kv_connector_override.py": "replaces a method of vLLM's scheduler for a connector that needs it",
    "test_simple_cpu_offload_*.py": "SimpleCPUOffloadConnector",
    "test_tp_mapping.py": "how NIXL maps ranks of one engine to those of another",
    "test_transfer_topology_sharded.py": "how NIXL maps ranks of one engine to those of another",
    "offloading_connector/test_*.py": "OffloadingConnector",
}
"""The rest of vLLM's connector unit tests, by pattern under ``UNIT``."""

ELSEWHERE = {
    CORE + "prefix_cache/, test_prefix_caching.py, test_kv_cache_*.py": "vLLM's block pool, below a connector",
    CORE + "test_priority_preemption_bug.py": "builds its scheduler without a connector, in one function",
    CORE + "test_scheduler_e2e.py, test_reset_prefix_cache_e2e.py": "whole engines with models from the hub; "
    "`tests/engine` does the same against kvhold",
    "tests/v1/engine/test_abort_final_step.py": "needs CUDA and a model from the hub",
    "tests/v1/engine/test_engine_core.py": "its tests with a connector need a multimodal model",
    "tests/v1/kv_offload/, tests/v1/simple_kv_offload/": "the insides of vLLM's own offloading",
    "tests/v1/kv_connector/*_integration/": "two or more servers with NIXL or Mooncake between them",
    "tests/distributed/test_kvlayout.py": "connectors that ask for a KV layout; kvhold takes any it can read",
}
"""Tests in other folders that mention connectors."""
