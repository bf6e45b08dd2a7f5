"""kvhold's storages over SGLang's host pools, without an engine, told apart by a name alone."""

import hashlib
from typing import Any

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolName
from testbed.process.manager_process import Manager
from testbed.process.peers import until
from testbed.sglang.arguments import storage

from kvhold.engines.sglang import backend, updates
from kvhold.engines.sglang.backend import KvholdStorage
from kvhold.engines.sglang.identity import Identity
from kvhold.engines.sglang.updates import Updates

PATIENT = {"find_deadline_ms": 20_000, "publish_deadline_ms": 20_000, "read_deadline_ms": 20_000}
"""A busy machine is no fault."""


def names(*numbers: int, of: str = "") -> list[str]:
    """Keys of pages as SGLang makes them."""
    return [hashlib.sha256(f"{of}{number}".encode()).hexdigest() for number in numbers]


class Storages:
    """Storages on one manager; all are closed at the end."""

    def __init__(self, host: Manager, patched: pytest.MonkeyPatch) -> None:
        self._host = host
        self._patched = patched
        self._made: list[KvholdStorage] = []
        patched.setattr(updates, "updates", Updates(lambda: "engine"))  # of this process's engine, which is none

    def __call__(
        self, pools: dict[str, Any], who: str, ranks: dict[str, Any] | None = None, **extra: Any
    ) -> KvholdStorage:
        """The storage of an engine ``who`` with host ``pools`` by name, attached; those of one ``who`` share."""
        identity = Identity(hashlib.sha256(who.encode()).digest(), False, who, "", {})
        self._patched.setattr(backend, "refuse", lambda config: None)
        self._patched.setattr(backend, "identify", lambda *_: identity)
        given = {"interface_v1": 1, "socket": str(self._host.socket), **PATIENT, **extra}
        made = KvholdStorage(storage(extra_config=given, **ranks or {}), {})
        self._made.append(made)
        made.register_mem_pool_host(pools["kv"])
        for name, pool in pools.items():
            made.register_mem_host_pool_v2(pool, PoolName(name))
        made.on_host_pools_registered()
        until(lambda: made._face.attached, "attached")
        return made

    def close(self) -> None:
        for each in self._made:
            each.close()
