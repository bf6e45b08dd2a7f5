"""What an engine has counted, in vLLM's own form: summed over ranks and steps, and as Prometheus metrics."""

from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvhold.engines.common.accounts import LABEL_OF, METRICS, Accounts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT


class KvHoldStats(KVConnectorStats):
    """What was taken from one half's accounts, or from those of several; ``data`` as in :class:`Accounts`."""

    @classmethod
    def taken(cls, accounts: Accounts) -> "KvHoldStats | None":
        """What was counted since the last call; None for nothing."""
        data = accounts.take()
        return cls(data) if data else None

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> "KvHoldStats":
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(value, 6) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class KvHoldPromMetrics(KVConnectorPromMetrics):
    """One counter per metric, ``kvhold:<name>_total``, labelled by engine, and by group or rank where that helps."""

    def __init__(
        self,
        config: "VllmConfig",
        metric_types: "dict[type[PromMetric], type[PromMetricT]]",
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(config, metric_types, labelnames, per_engine_labelvalues)
        for former in list(
            REGISTRY._collector_to_names
        ):  # of an earlier engine of this process, as vLLM does with its own
            if getattr(former, "_name", "").startswith("kvhold:"):
                REGISTRY.unregister(former)
        self._engines = per_engine_labelvalues
        self._families = {
            name: self._counter_cls(
                name=f"kvhold:{name}",
                documentation=text,
                labelnames=[*labelnames, *([LABEL_OF[name]] if name in LABEL_OF else [])],
            )
            for name, text in METRICS.items()
        }
        for name, family in self._families.items():
            if name not in LABEL_OF:  # a counter that is there from the start has a rate from the start
                for values in per_engine_labelvalues.values():
                    family.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, value in transfer_stats_data.items():
            name, *label = key.split("/")
            self._families[name].labels(*self._engines[engine_idx], *label).inc(value)
