"""What a storage has counted, in SGLang's own form and as Prometheus metrics of its scheduler process."""

import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.observability.metrics_collector import StorageMetrics

log = logging.getLogger(__name__)

MISSES = (
    "not_stored",
    "detached",
    "deadline",
    "read_failed",
    "out_of_service",
    "remote_late",
    "remote_down",
    "budget",
    "too_large",
    "closed",
    "error",
)
UNSEEN = ("not_stored", "detached", "deadline", "closed", "error")
UNPUBLISHED = (
    "unflushed",
    "unreachable",
    "detached",
    "deadline",
    "no_room",
    "too_large",
    "too_many",
    "closed",
    "error",
)
METRICS = {
    "pages_looked_for": "Pages that SGLang looked for, before it decided what to restore.",
    "pages_seen": "Of those, pages that were there.",
    "pages_unseen": "Of those looked for, pages that were not there or not told of, by reason.",
    "pages_asked": "Pages that SGLang asked to restore.",
    "pages_found": "Of those, pages that were leased to be restored.",
    "pages_missed": "Of those asked for, pages that could not be had, by reason.",
    "pages_restored": "Of those found, pages that were copied into SGLang's host pool.",
    "pages_void": "Of those found, pages whose lease had ended before they were copied.",
    "pages_offered": "Pages that SGLang offered to store.",
    "pages_present": "Of those, pages that were stored already; they count as used.",
    "pages_published": "Of those offered, pages that were copied and stored.",
    "pages_unpublished": "Of those offered, pages that were not stored, by reason.",
    "restore_bytes": "Bytes copied from the arena into SGLang's host pools.",
    "restore_seconds": "Seconds that calls to restore took, waiting included.",
    "publish_bytes": "Bytes copied from SGLang's host pools into the arena.",
    "publish_seconds": "Seconds that calls to store took, waiting included.",
}
"""Counters by name, without the prefix ``kvhold:`` and the suffix ``_total``; docs/sglang.md has the same."""
BY_REASON = {"pages_unseen": UNSEEN, "pages_missed": MISSES, "pages_unpublished": UNPUBLISHED}
_LABELS = ("model_name", "tp_rank", "pp_rank", "dp_rank")
_COUNTED = {
    "looked_for": "pages_looked_for",
    "seen": "pages_seen",
    "asked": "pages_asked",
    "found": "pages_found",
    "restored": "pages_restored",
    "void": "pages_void",
    "offered": "pages_offered",
    "present": "pages_present",
    "published": "pages_published",
}
"""Metrics by the names that the blocking face has for what it counts."""
_MOST_SAMPLES = 4096
"""Batches that wait to be asked for by SGLang's scheduler; older ones are left out of its histograms."""


class _Families:
    """The counters of this process. A storage that is attached again goes on with those of the one before."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}
        self._lock = threading.Lock()

    def get(self, name: str) -> Any:
        """The counter ``kvhold:<name>``."""
        from prometheus_client import Counter

        with self._lock:
            if name not in self._made:
                labels = (*_LABELS, "reason") if name in BY_REASON else _LABELS
                self._made[name] = Counter(f"kvhold:{name}", METRICS[name], labels)
            return self._made[name]


_families = _Families()


class Stats:
    """The metrics of one rank's storage."""

    def __init__(self, config: "HiCacheStorageConfig") -> None:
        self._labels = (config.model_name or "", *map(str, (config.tp_rank, config.pp_rank, config.dp_rank)))
        self._told: dict[str, int] = {}
        self._samples: dict[str, list[tuple[int, float]]] = {"prefetch": [], "backup": []}
        self._lock = threading.Lock()
        self._show = bool(config.enable_storage_metrics)
        if self._show:  # a counter that is there from the start has a rate from the start
            for name in METRICS:
                for reason in BY_REASON.get(name, (None,)):
                    self._counter(name, reason)

    def moved(self, kind: Literal["prefetch", "backup"], pages: int, size: int, seconds: float) -> None:
        """A call has copied ``pages`` of ``size`` bytes in all within ``seconds``. From any thread; never raises."""
        if not self._show:
            return
        try:
            self._moved(kind, pages, size, seconds)
        except Exception:
            log.exception("kvhold: a copy is not counted")

    def _moved(self, kind: Literal["prefetch", "backup"], pages: int, size: int, seconds: float) -> None:
        verb = "restore" if kind == "prefetch" else "publish"
        self._counter(f"{verb}_bytes").inc(size)
        self._counter(f"{verb}_seconds").inc(seconds)
        if pages and seconds > 0:
            with self._lock:
                samples = self._samples[kind]
                samples.append((pages, size / seconds / 1e9))
                del samples[:-_MOST_SAMPLES]

    def take(self, counts: Mapping[str, int]) -> "StorageMetrics":
        """What was copied since the last call, for SGLang's histograms: pages, and gigabytes per second.

        The counters go to ``counts``, which only ever grow: those of the blocking face, with reasons as in
        ``missed_<reason>``. Waits for nothing.
        """
        from sglang.srt.observability.metrics_collector import StorageMetrics

        if self._show:
            for name, value in counts.items():
                if (more := value - self._told.get(name, 0)) > 0:
                    self._told[name] = value
                    self._count(name, more)
        with self._lock:
            taken, self._samples = self._samples, {"prefetch": [], "backup": []}
        read, written = taken["prefetch"], taken["backup"]
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in read],
            prefetch_bandwidth=[speed for _, speed in read],
            backup_pgs=[pages for pages, _ in written],
            backup_bandwidth=[speed for _, speed in written],
        )

    def _count(self, name: str, more: int) -> None:
        verb, _, reason = name.partition("_")
        if name in _COUNTED:
            self._counter(_COUNTED[name]).inc(more)
        elif f"pages_{verb}" in BY_REASON:
            self._counter(f"pages_{verb}", reason).inc(more)

    def _counter(self, name: str, reason: str | None = None) -> Any:
        return _families.get(name).labels(*self._labels, *([reason] if reason is not None else []))
