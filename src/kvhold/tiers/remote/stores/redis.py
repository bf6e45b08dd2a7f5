"""Valkey or Redis. It may evict what it likes: ``maxmemory-policy allkeys-lru`` is what suits a cache."""

from collections.abc import Sequence
from typing import Any, Final

from redis import Redis as Client
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from kvhold.tiers.remote.stores import ABSENT, Slot
from kvhold.tiers.remote.url import RemoteConfig

_SCANNED: Final = 1000
_SECONDS: Final = 10.0
"""Longer than any call has: its deadline is the executor's, which ends the process."""


class Redis:
    def __init__(self, client: Any) -> None:
        self._client = client

    def exists(self, names: Sequence[str]) -> list[bool]:
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            pipe.exists(name)
        return [bool(there) for there in pipe.execute()]

    def get(self, names: Sequence[str], slots: Sequence[Slot]) -> list[int]:
        pipe = self._client.pipeline(transaction=False)
        for name, slot in zip(names, slots, strict=True):
            pipe.getrange(name, 0, slot.length)  # the last byte is counted in: what is longer than its slot shows
        return [_fill(value, slot) for value, slot in zip(pipe.execute(raise_on_error=False), slots, strict=True)]

    def put(self, names: Sequence[str], slots: Sequence[Slot]) -> list[bool]:
        pipe = self._client.pipeline(transaction=False)
        for name, slot in zip(names, slots, strict=True):
            pipe.set(name, b"".join(slot))
        outcomes = pipe.execute(raise_on_error=False)
        if outcomes and all(isinstance(outcome, Exception) for outcome in outcomes):
            raise OSError(_said(outcomes[0]))
        return [outcome is True for outcome in outcomes]

    def remove(self, names: Sequence[str], prefix: str) -> None:
        if names:
            self._client.unlink(*names)
        if prefix:
            found = []
            for name in self._client.scan_iter(match=f"{prefix}*", count=_SCANNED):
                found.append(name)
                if len(found) == _SCANNED:
                    self._client.unlink(*found)
                    found = []
            if found:
                self._client.unlink(*found)


def _fill(value: Any, slot: Slot) -> int:
    if isinstance(value, ResponseError):
        return 0  # something of another type: no value of ours
    if isinstance(value, Exception):
        raise value
    return slot.fill(memoryview(value)) if value else ABSENT


def _said(error: Exception) -> str:
    """What a server said, with what helps."""
    text = str(error)
    if isinstance(error, RedisError) and "maxmemory" in text:
        return f"{text} Set maxmemory-policy allkeys-lru: noeviction refuses what is new once the store is full."
    return text


def connect(config: RemoteConfig) -> Redis:
    options: dict[str, Any] = {
        "db": int(config.path) if config.scheme != "unix" else 0,
        "username": config.secret("KVHOLD_REMOTE_USER") or None,
        "password": config.secret("KVHOLD_REMOTE_PASSWORD") or None,
        "protocol": 2,
        "socket_timeout": _SECONDS,
        "socket_connect_timeout": _SECONDS,
        "retry": Retry(NoBackoff(), 0),  # a call that is tried again is one that takes too long
    }
    if config.scheme == "unix":
        return Redis(Client(unix_socket_path=config.path, **options))
    return Redis(Client(host=config.host, port=config.port, ssl=config.scheme == "rediss", **options))
