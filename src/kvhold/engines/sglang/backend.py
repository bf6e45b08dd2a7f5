"""kvhold as SGLang's HiCache storage: one rank's pages, in the manager's arena and on its SSD.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvhold",
        "module_path": "kvhold.engines.sglang.backend", "class_name": "KvholdStorage", "interface_v1": 1}'

SGLang calls from up to four threads, some of which it replaces when it is flushed. Each call waits no longer than its
deadline, beside the copy, and not at all while no manager runs; none raises. Written for SGLang 0.5.23.
"""

import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from kvhold import protocol as wire
from kvhold.client.control import Geometry
from kvhold.engines.common.attaching import make_attacher
from kvhold.engines.common.blocking import Blocking, Space
from kvhold.engines.sglang import updates as hooks
from kvhold.engines.sglang.hits import ends_of
from kvhold.engines.sglang.identity import describe_pool, identify
from kvhold.engines.sglang.pools import Pool
from kvhold.engines.sglang.refusals import refuse, refuse_pool
from kvhold.engines.sglang.settings import settings_of
from kvhold.engines.sglang.stats import Stats

if TYPE_CHECKING:
    from sglang.srt.mem_cache.pool_host import HostKVCache

log = logging.getLogger(__name__)

_KEY_BYTES = 32
"""SGLang names a page by the SHA-256 of its tokens and of all before it."""
_SLOTS = 256
"""Pages for which a rank may hold room at a time: two of SGLang's batches."""

T = TypeVar("T")


class KvholdStorage(HiCacheStorage):  # type: ignore[misc]
    """The storage of one rank, which is an engine instance of its own to the manager.

    Raises ValueError at the start for what cannot be served. ``kwargs`` are SGLang's, and nothing is in them.
    """

    def __init__(self, config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        refuse(config)
        settings = settings_of(config.extra_config)
        self._find_seconds = settings.find_deadline_ms / 1e3
        self._publish_seconds = settings.publish_deadline_ms / 1e3
        self._read_seconds = settings.read_deadline_ms / 1e3
        self._pools: dict[str, Pool] = {}
        self._lock = threading.Lock()  # of what follows
        self._own: Counter[str] = Counter()  # pages, beside those that the face counts
        self._stats = Stats(config)
        self._config = config
        self._identity = identify(config, settings.epoch or "", settings.weights_id)
        self._face = Blocking(
            uuid.uuid4().hex,
            f"SGLang {self._identity.label}",
            partial(make_attacher, engine=hooks.engine(), settings=settings, reads=True),
            self._read_seconds,
        )
        hooks.updates.listen(self._rekeyed, self._identity.adapters)

    # --- pools --------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: "HostKVCache") -> None:
        """The pool of all pages of keys and values. Raises ValueError for one that cannot be served."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(mem_pool_host, PoolName.KV.value)

    def register_mem_host_pool_v2(self, host_pool: "HostKVCache", host_pool_name: str) -> None:
        """One more pool. Raises ValueError for one that cannot be served."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool, _name(host_pool_name))

    def _register(self, pages: "HostKVCache", name: str) -> None:
        former = self._pools.get(name)
        if former is not None and former.pages is pages:
            return
        refuse_pool(pages, name, self._config)
        pool = Pool(name, pages, describe_pool(pages, self._config))
        pool.page_bytes()
        if former is not None and former.space is not None:
            self._face.close_space(former.space)
        self._open(pool)
        self._pools[name] = pool

    def _open(self, pool: Pool) -> None:
        namespace = self._identity.namespace(pool.name, pool.described, hooks.updates.salt)
        geometry = Geometry(
            namespace,
            0,
            _KEY_BYTES,
            (pool.page_bytes(),),
            self._identity.label if pool.name == PoolName.KV.value else f"{self._identity.label} {pool.name}",
            chain=pool.name == PoolName.KV.value,  # others may be there for the end of a prefix alone
            private=self._identity.private or bool(hooks.updates.salt),  # which has something random in it
        )
        pool.space = self._face.open(geometry, _SLOTS)

    def _rekeyed(self) -> None:
        """Other weights may be loaded from now on, or nothing stored so far is wanted."""
        for pool in list(self._pools.values()):
            former = pool.space
            try:
                self._open(pool)
            except Exception:
                pool.space = None  # under no name rather than under the former one
                log.exception("kvhold: nothing of the host pool %r is stored or found any more", pool.name)
            if former is not None:
                self._face.close_space(former)

    # --- pages of keys and values -------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many of ``keys`` are stored before the first that is not. Nothing is leased."""
        return self._safely("unseen", len(keys), 0, lambda: _run(self._look(PoolName.KV.value, _packed(keys))))

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Copy pages to the places ``host_indices`` of the host pool: of each whether it was, up to the first."""

        def restore() -> list[bool]:
            pool, space = self._pool(PoolName.KV.value)
            (before, _), begun = _before(extra_info, len(keys)), time.perf_counter()
            buffers = pool.buffers(host_indices, len(keys))
            hit = self._face.find(space, [*before, *_packed(keys)], self._find_seconds, len(before))
            copied = self._face.restore(hit, buffers[: hit.count])
            self._stats.moved("prefetch", copied, copied * space.size, time.perf_counter() - begun)
            return [at < copied for at in range(len(keys))]

        return self._safely("missed", len(keys), [False] * len(keys), restore)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store the pages at ``host_indices`` of the host pool: of each whether it is stored."""
        end = time.monotonic() + self._publish_seconds
        return self._publish(PoolName.KV.value, keys, host_indices, extra_info, end)

    # --- several pools ------------------------------------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """For how long a prefix all pools have what they need to resume from its end."""

        def look() -> PoolTransferResult:
            end = time.monotonic() + self._find_seconds
            packed = _packed(keys)
            pages = _run(self._look(PoolName.KV.value, packed))
            hits = {PoolName.KV: pages} if pages else {}
            ends: Sequence[int] = range(1, pages + 1)
            for transfer in pool_transfers or ():
                if not ends:
                    break
                if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                    continue  # such a pool never gates a hit, and one that is not told of has no verdict
                left = max(0.0, end - time.monotonic())
                there = self._look(_name(transfer.name), packed[:pages], left)
                trailing = transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
                good = ends_of(there, max(1, len(transfer.keys or ())) if trailing else None)
                if good:
                    hits[transfer.name] = good[-1]
                wanted = set(good)
                ends = [each for each in ends if each in wanted]
            return PoolTransferResult(ends[-1] if ends else 0, hits, list(ends))

        return self._safely("unseen", len(keys), PoolTransferResult(0, {}, []), look)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Copy pages of several pools: by pool, of each page whether it was."""
        end = time.monotonic() + self._find_seconds
        return {each.name: self._get(each, end) for each in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of several pools: by pool, of each page whether it is stored."""
        end = time.monotonic() + self._publish_seconds
        return {
            each.name: self._publish(_name(each.name), each.keys or [], each.host_indices, extra_info, end)
            for each in transfers
        }

    def _get(self, transfer: PoolTransfer, end: float) -> list[bool]:
        keys = transfer.keys or []

        def restore() -> list[bool]:
            pool, space = self._pool(_name(transfer.name))
            begun, restored = time.perf_counter(), [False] * len(keys)
            buffers = pool.buffers(transfer.host_indices, len(keys))
            left = max(0.0, end - time.monotonic())
            hit, at = self._face.pick(space, _packed(keys), left, left + self._read_seconds)
            copied = self._face.restore(hit, [buffers[position] for position in at])
            for position in at[:copied]:
                restored[position] = True
            self._stats.moved("prefetch", copied, copied * space.size, time.perf_counter() - begun)
            return restored

        return self._safely("missed", len(keys), [False] * len(keys), restore)

    def _publish(
        self,
        name: str,
        keys: list[str],
        places: torch.Tensor | None,
        extra_info: HiCacheStorageExtraInfo | None,
        end: float,
    ) -> list[bool]:
        """Beside the copies it waits until ``end``, of the monotonic clock."""

        def publish() -> list[bool]:
            pool, space = self._pool(name)
            # The space first: one that is open only since an update must not be given what is from before.
            if not hooks.updates.settled:
                self._count("offered", "unpublished_unflushed", len(keys))
                return [False] * len(keys)
            (before, depth), begun = _before(extra_info, len(keys)), time.perf_counter()
            buffers = pool.buffers(places, len(keys))
            left = max(0.0, end - time.monotonic())
            stored = self._face.publish(space, [*before, *_packed(keys)], buffers, left, len(before), depth)
            done = sum(stored)
            self._stats.moved("backup", done, done * space.size, time.perf_counter() - begun)
            return stored

        return self._safely("unpublished", len(keys), [False] * len(keys), publish)

    def _look(self, name: str, keys: Sequence[bytes], seconds: float | None = None) -> bytes:
        _, space = self._pool(name)
        return self._face.look(space, keys, self._find_seconds if seconds is None else seconds)

    def _pool(self, name: str) -> tuple[Pool, Space]:
        pool = self._pools.get(name)
        if pool is None or (space := pool.space) is None:
            raise LookupError(f"SGLang has registered no host pool {name!r}")
        return pool, space

    def _safely(self, what: str, pages: int, otherwise: T, work: Callable[[], T]) -> T:
        """What ``work`` says; where it raises, ``otherwise``, and its pages count as ``what`` by error."""
        try:
            return work()
        except Exception:
            of = {"unseen": "looked_for", "missed": "asked", "unpublished": "offered"}[what]
            self._count(of, f"{what}_error", pages)
            log.exception("kvhold: a call of SGLang's failed; its %d pages are %s", pages, what)
            return otherwise

    def _count(self, of: str, what: str, pages: int) -> None:
        with self._lock:
            self._own[of] += pages
            self._own[what] += pages

    # --- the rest of SGLang's interface -------------------------------------------------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Nothing: pages are copied by the batched calls alone."""
        return None

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Nothing, as :meth:`get`."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Nothing is stored, as :meth:`get`."""
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Nothing is stored, as :meth:`get`."""
        return False

    def exists(self, key: str) -> bool:
        """Whether the page is stored."""
        return self.batch_exists([key]) == 1

    def clear(self) -> bool:
        """Find nothing any more that this engine has stored or found before; others keep what they share."""
        hooks.updates.clear()
        return True

    def get_stats(self) -> StorageMetrics:
        """What was copied since the last call. Waits for nothing, and does not raise: SGLang's scheduler asks."""
        try:
            counts = Counter(dict(self._face.counts))
            with self._lock:
                counts.update(self._own)
            return self._stats.take(counts)
        except Exception:
            log.exception("kvhold: nothing can be told of what was copied")
            return StorageMetrics()

    def close(self) -> None:
        """The engine goes on without; copies that run are waited for."""
        hooks.updates.forget(self._rekeyed)
        self._face.close()


def _name(pool: str) -> str:
    return pool.value if isinstance(pool, PoolName) else str(pool)


def _packed(keys: Iterable[str]) -> list[bytes]:
    return [bytes.fromhex(key) for key in keys]


def _before(extra_info: HiCacheStorageExtraInfo | None, count: int) -> tuple[list[bytes], int]:
    """The keys before a call's ``count`` own ones, and how many are left out of them.

    They are from the beginning of the chain; the last of them where a message takes no more.
    """
    keys = (extra_info.prefix_keys if extra_info is not None else None) or []
    out = max(0, len(keys) + count - wire.most_keys(_KEY_BYTES))
    return _packed(keys[out:]), min(out, len(keys))


def _run(tiers: bytes) -> int:
    """How many are there before the first that is not."""
    missing = tiers.find(0)
    return missing if missing >= 0 else len(tiers)
