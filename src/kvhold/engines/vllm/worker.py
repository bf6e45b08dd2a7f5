"""The worker half: reads the layout of its KV cache, says what it is, and has it copied. It decides nothing."""

from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from kvhold.copy.engine import make_copier
from kvhold.copy.layout import PagedLayout
from kvhold.engines.common.accounts import Accounts
from kvhold.engines.common.attaching import make_attacher
from kvhold.engines.common.copies import Copies
from kvhold.engines.common.groups import Group
from kvhold.engines.common.identity import digest
from kvhold.engines.common.ranks import WorkerReport
from kvhold.engines.common.settings import Settings
from kvhold.engines.vllm import identity
from kvhold.engines.vllm.groups import kept_groups
from kvhold.engines.vllm.layout import read_layout
from kvhold.engines.vllm.loaded import Loaded
from kvhold.engines.vllm.names import engine_label, engine_of, instance_of
from kvhold.engines.vllm.stats import KvHoldStats
from kvhold.engines.vllm.topology import Topology, attention_alone, replicas
from kvhold.protocol import Hello
from kvhold.threads import ENGINE, belongs_to

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_FIRST_ATTACH_SECONDS = 30.0
"""How long the engine's start waits for the first session: a manager is started, and the arena pinned, within it."""

_here: "WeakValueDictionary[str, WorkerHalf]" = WeakValueDictionary()
"""This process's worker halves by the engine's id; of several ranks in one process the last."""


@belongs_to(ENGINE)
class WorkerHalf:
    """One rank's worker half, on vLLM's worker thread. ``copies`` are there once the engine has its KV cache."""

    def __init__(self, config: "VllmConfig", cache: "KVCacheConfig", settings: Settings) -> None:
        _here[instance_of(config)] = self
        self.copies: Copies | None = None
        self._config = config
        self._cache = cache
        self._settings = settings
        self._topology = Topology.of(config.parallel_config)
        self._rank = config.parallel_config.rank % self._topology.world
        self._groups = kept_groups(config, cache)
        self._accounts = Accounts()
        self._accounts.begin("rank", [self._rank])
        self._caches: dict[str, torch.Tensor] = {}
        self._weights = Loaded()

    def register(self, caches: "dict[str, torch.Tensor]") -> None:
        """Read the layout, and attach. Raises Unsupported for a layout that cannot be served."""
        self._caches = caches
        layouts = self._read_layouts()
        report = self._describe(layouts)
        instance = instance_of(self._config)
        world, label = self._topology.world, engine_label(self._config)
        self.copies = Copies(
            report,
            make_copier(layouts),
            Hello("worker", instance, self._rank, world, label, report=report.packed()),
            partial(make_attacher, engine=engine_of(instance), settings=self._settings, reads=True),
            self._accounts,
            self._weights.digest,
            # What came before a failure is of use where the engine can tell whose a block is, and where a shorter
            # prefix needs no other blocks.
            keeps_prefix=len(self._cache.kv_cache_groups) == 1 and self._groups[0].whole,
        )
        self.copies.attacher.start(_FIRST_ATTACH_SECONDS)

    def _describe(self, layouts: list[PagedLayout]) -> WorkerReport:
        same = replicas(self._config, self._cache), attention_alone(self._cache)
        shards = self._topology.shards(*same)
        common, stage = identity.describe(
            self._config, self._cache, self._groups, layouts, shards, self._settings.weights_id
        )
        sizes = tuple(layout.shard_bytes for layout in layouts)
        kinds = ", ".join(
            f"{len(self._layers(group))} layers of {group.kind} with {size} bytes a block"
            for group, size in zip(self._groups, sizes, strict=True)
        )
        return WorkerReport(
            self._rank,
            self._topology.world,
            self._topology.stage(self._rank),
            self._topology.owner(self._rank, *same),
            digest(common),
            digest(stage),
            sizes,
            identity.is_private(common),
            f"{kinds}, weights {common['weights'][:22]}",
            loaded=self._weights.digest(),
        )

    def _layers(self, group: Group) -> list[str]:
        return list(self._cache.kv_cache_groups[group.index].layer_names)

    def _read_layouts(self) -> list[PagedLayout]:
        return [read_layout(self._caches, self._layers(group), self._cache.num_blocks) for group in self._groups]

    def restore(self) -> None:
        """Copy from and to the registered caches again, wherever their memory is after the engine's sleep.

        Raises ValueError if their blocks are not what they were; then they stay unregistered, and copies fail.
        """
        if self.copies is not None and not self.copies.bound:
            self.copies.bind(self._read_layouts())

    def take_stats(self) -> KvHoldStats | None:
        """Counts since the last call."""
        return KvHoldStats.taken(self._accounts)

    def shutdown(self) -> None:
        if self.copies is not None:
            self.copies.shutdown()
        self._caches = {}


def worker_here(instance: str) -> WorkerHalf | None:
    """The worker half of an engine of one rank, if that is in this process."""
    return _here.get(instance)
