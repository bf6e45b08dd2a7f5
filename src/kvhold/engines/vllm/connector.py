"""The connector that vLLM loads: one class for both halves, which live in other modules.

Written against vLLM 0.32 and 0.33, see docs/vllm-versions.md. Every method that the engine calls is guarded, here or,
where something must be handed on in any case, inside of the half: what goes wrong becomes a cache miss and a line in
the log, never an exception in the engine. Only the constructor and ``register_kv_caches`` may refuse.
"""

import functools
import logging
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.version import __version__ as vllm_version

from kvhold.engines.common.copies import Copies
from kvhold.engines.common.plans import CopyReport, StepPlan
from kvhold.engines.common.settings import Settings, load_settings
from kvhold.engines.vllm.callers import callers
from kvhold.engines.vllm.scheduler import SchedulerHalf
from kvhold.engines.vllm.stats import KvHoldPromMetrics, KvHoldStats
from kvhold.engines.vllm.support import check_engine, check_version
from kvhold.engines.vllm.worker import WorkerHalf

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = init_logger(__name__)

# What the two halves tell each other travels through the engine as it is.
KVConnectorMetadata.register(StepPlan)
KVConnectorWorkerMetadata.register(CopyReport)

P = ParamSpec("P")
R = TypeVar("R")


def _guarded(otherwise: Callable[[], Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Answer ``otherwise()`` instead of raising."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except Exception:
                log.exception("kvhold: %s failed; the engine goes on without its result", function.__name__)
                return otherwise()

        return guarded

    return decorate


def _log_like_the_engine() -> None:
    """Give kvhold's loggers the engine's level and output, which vLLM sets for its own loggers alone."""
    ours, theirs = logging.getLogger("kvhold"), logging.getLogger("vllm")
    if ours.level == logging.NOTSET and not ours.handlers:
        ours.setLevel(theirs.level)
        ours.handlers = list(theirs.handlers)
        ours.propagate = theirs.propagate


def _nothing() -> None:
    return None


def _compute_what_fails(config: "KVTransferConfig") -> None:
    """Have the engine compute what a restore could not bring; its default is to fail the request.

    vLLM looks at the policy once it has made the connector. Inside of ``MultiConnector``, which makes a configuration
    of its own for each child and gives it no other, that of ``MultiConnector`` counts: it is who calls.
    """
    for each in (config, *(caller._kv_transfer_config for caller in callers(MultiConnector))):
        if each.kv_load_failure_policy != "recompute":
            each.kv_load_failure_policy = "recompute"
            log.info(
                "kvhold: kv_load_failure_policy of %s is now 'recompute': no restore fails a request", each.kv_connector
            )


class KvHoldConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's KV connector for kvhold."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        """Raises ValueError for a setting, a model or a vLLM version that cannot be served, saying what to do."""
        super().__init__(vllm_config, role, kv_cache_config)
        _log_like_the_engine()
        check_version(vllm_version)
        check_engine(vllm_config, kv_cache_config)
        settings = load_settings(
            self._kv_transfer_config.kv_connector_extra_config, "kv_connector_extra_config", Settings
        )
        self._pid = os.getpid()
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(vllm_config, kv_cache_config, settings)
            _compute_what_fails(self._kv_transfer_config)
        else:
            self._worker = WorkerHalf(vllm_config, kv_cache_config, settings)

    @property
    def requires_kv_delivery(self) -> bool:
        """A publish that does not happen is a later miss, nothing more."""
        return False

    # --- worker -------------------------------------------------------------------------------------------------

    @property
    def _copies(self) -> Copies | None:
        return self._worker.copies if self._worker is not None else None

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        if self._worker is not None:
            self._worker.register(kv_caches)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: "KVTransferConfig") -> bool:
        """Sleep moves the KV cache's memory; this connector lets go of it before and looks for it afterwards."""
        return True

    @_guarded(_nothing)
    def unregister_kv_caches(self) -> None:
        if self._copies is not None:
            self._copies.unbind()

    @_guarded(_nothing)
    def restore_kv_caches(self) -> None:
        if self._worker is not None:
            self._worker.restore()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        if self.has_connector_metadata():
            self.wait_for_save()  # an earlier pipeline stage of a speculating engine does not come to it by itself
        super().bind_connector_metadata(connector_metadata)

    @_guarded(_nothing)
    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        if self._copies is not None and isinstance(self._connector_metadata, StepPlan):
            self._copies.start_loads(self._connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Restores are asynchronous: no forward pass needs to wait for one."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        """Blocks are published whole, after the step."""

    @_guarded(_nothing)
    def wait_for_save(self) -> None:
        if self._copies is not None and isinstance(self._connector_metadata, StepPlan):
            self._copies.start_publishes(self._connector_metadata)

    def clear_connector_metadata(self) -> None:
        self.wait_for_save()  # a step without a forward pass may not have called it
        super().clear_connector_metadata()

    @_guarded(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        if self._copies is not None:
            loads = self._copies.take_loads()
            results.finished_recving, results.failed_recving = loads.ended, loads.failed
        return results

    @_guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._copies.take_unfilled() if self._copies is not None else set()

    @_guarded(_nothing)
    def build_connector_worker_meta(self) -> CopyReport | None:
        return self._copies.take_report() if self._copies is not None else None

    # --- scheduler ----------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """All workers have registered their caches. ``metadata`` is another connector's, beside which this one runs.

        Raises ValueError, listing the ranks, when the workers disagree about their KV cache.
        """
        if self._scheduler is not None:
            self._scheduler.session.await_workers()

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            self._scheduler.bind_manager(kv_cache_manager)

    @_guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.restores.matched_tokens(request, num_computed_tokens)

    @_guarded(_nothing)
    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks, num_external_tokens)

    @_guarded(dict)
    def get_external_cache_hit_sources(self, request: "Request", num_external_tokens: int) -> dict[CacheHitSource, int]:
        """What was read from SSD for ``request`` came from disk, all else from host memory."""
        assert self._scheduler is not None
        disk = min(self._scheduler.restores.tokens_from_disk(request.request_id), num_external_tokens)
        sources = {CacheHitSource.HOST: num_external_tokens - disk, CacheHitSource.DISK: disk}
        return {source: tokens for source, tokens in sources.items() if tokens}

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        assert self._scheduler is not None
        return self._scheduler.plan(scheduler_output)

    @_guarded(_nothing)
    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        assert self._scheduler is not None
        self._scheduler.took_output(connector_output)

    @_guarded(lambda: (False, None))
    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        try:
            self._scheduler.finished_tables(request, block_ids)
        finally:
            self._scheduler.finished(request)
        return False, None

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @_guarded(lambda: False)
    def register_finished_partial_tail(
        self,
        request: "Request",
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        """States at the request's end are held by reference: nothing of the request has to wait for them."""
        assert self._scheduler is not None
        self._scheduler.finished_tables(request, block_ids, partial_tail_offloads)
        return False

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.holding

    @_guarded(tuple)
    def take_events(self) -> "Iterable[KVCacheEvent]":
        if self._scheduler is None or self._scheduler.events is None:
            return ()
        return self._scheduler.events.take()

    @_guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        """This engine finds nothing that was stored before, until its workers have shown what weights they have."""
        if self._scheduler is None:
            return None
        self._scheduler.resets.reset()
        return True

    # --- both ---------------------------------------------------------------------------------------------------

    @_guarded(_nothing)
    def get_kv_connector_stats(self) -> KvHoldStats | None:
        half = self._scheduler or self._worker
        return half.take_stats() if half is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvHoldStats:
        return KvHoldStats(data if data is not None else {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: "dict[type[PromMetric], type[PromMetricT]]",
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvHoldPromMetrics:
        return KvHoldPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @_guarded(_nothing)
    def shutdown(self) -> None:
        half = self._scheduler or self._worker
        if half is not None and os.getpid() == self._pid:  # a forked child that ends does not end its parent's cache
            half.shutdown()
