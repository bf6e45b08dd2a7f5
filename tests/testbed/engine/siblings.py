"""Other connectors that an engine runs beside kvhold, in vLLM's ``MultiConnector``."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_events import BlockRemoved, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.cache_hit_source import CacheHitSource

OURS = "KvHoldConnector"


def beside(sibling: dict[str, Any], settings: dict[str, Any], *, first: bool) -> KVTransferConfig:
    """kvhold with ``settings`` and ``sibling`` in one ``MultiConnector``; ``first`` is whether kvhold is."""
    ours = {
        "kv_connector": OURS,
        "kv_connector_module_path": "kvhold.engines.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }
    theirs = {"kv_role": "kv_both", **sibling}
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [ours, theirs] if first else [theirs, ours]},
    )


HANDSHAKING = {"kv_connector": "Handshaking", "kv_connector_module_path": "testbed.engine.siblings"}
NIXL = {
    "kv_connector": "NixlConnector",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"backends": ["UCX"]},
}


def example(folder: Path) -> dict[str, Any]:
    """vLLM's own ``ExampleConnector``, which keeps files in ``folder``."""
    return {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": str(folder)}}


@dataclass
class Payload(KVConnectorHandshakeMetadata):
    agent: str


@dataclass
class Plan(KVConnectorMetadata):
    loads: list[str] = field(default_factory=list)


@dataclass
class Report(KVConnectorWorkerMetadata):
    steps: int = 1

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Report":
        assert isinstance(other, Report)
        return Report(self.steps + other.steps)


class Stats(KVConnectorStats):
    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> "Stats":
        self.data["steps"] = self.data.get("steps", 0) + other.data.get("steps", 0)
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class Metrics(KVConnectorPromMetrics):
    def __init__(self, config: Any, types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, Any]) -> None:
        super().__init__(config, types, labelnames, per_engine_labelvalues)
        counter = self._counter_cls(name="vllm:sibling_steps", documentation="Steps.", labelnames=labelnames)
        self._steps = {engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._steps[engine_idx].inc(transfer_stats_data["steps"])


class Handshaking(KVConnectorBase_V1, SupportsHMA):
    """Uses every channel that ``MultiConnector`` shares out as NIXL's connector does, and takes nothing of others'.

    It brings nothing: a request that asks for ``{"fail": tokens}`` in its ``kv_transfer_params`` is promised them, and
    then the load fails.
    """

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.shaken: list[Payload] = []
        self.reported = 0
        self._loads: list[str] = []
        self._steps = 0
        self._events: list[KVCacheEvent] = []

    # --- worker

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return Payload("agent")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert isinstance(self._connector_metadata, Plan)
        self._loads += self._connector_metadata.loads

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        self._steps += 1

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        failed, self._loads = set(self._loads), []
        return KVConnectorTransferResults(finished_recving=set(failed), failed_recving=failed)

    def build_connector_worker_meta(self) -> Report:
        return Report()

    def get_kv_connector_stats(self) -> Stats | None:
        steps, self._steps = self._steps, 0
        return Stats({"steps": steps}) if steps else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> "Metrics":
        return Metrics(*args)

    # --- scheduler

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        for payload in metadata.values():
            if not isinstance(payload, Payload):
                raise ValueError(f"a handshake of {type(payload).__name__}")
            self.shaken.append(payload)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = (request.kv_transfer_params or {}).pop("fail", 0)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._loads.append(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        loads, self._loads = self._loads, []
        return Plan(loads)

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if report is not None:
            assert isinstance(report, Report)
            self.reported += report.steps

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self._events.append(BlockRemoved(block_hashes=[request.request_id], medium="elsewhere"))
        return False, {"agent": "agent"}

    def take_events(self) -> Iterable[KVCacheEvent]:
        events, self._events = self._events, []
        return events
