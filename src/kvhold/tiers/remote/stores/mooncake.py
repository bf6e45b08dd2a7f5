"""Mooncake Store. This process gives it no memory: what a pool holds would die with it."""

import ctypes
import re
from collections.abc import Sequence
from typing import Any, Final

from mooncake.store import MooncakeDistributedStore

from kvhold.tiers.remote.stores import ABSENT, UNKNOWN, Slot
from kvhold.tiers.remote.url import RemoteConfig

_NO_SUCH: Final = -704
_BUFFER: Final = 16 << 20
"""Bytes for what the client moves by itself."""


class Mooncake:
    """Over TCP it reads and writes wherever it is told to, and nothing is registered.

    Memory that is registered there can be read and written by whoever reaches the client's port.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def exists(self, names: Sequence[str]) -> list[bool]:
        told = self._client.batch_is_exist(list(names))
        if len(told) != len(names) or min(told, default=0) < 0:
            raise OSError(f"batch_is_exist: {_said(min(told, default=-1))}")
        return [one == 1 for one in told]

    def get(self, names: Sequence[str], slots: Sequence[Slot]) -> list[int]:
        sizes = [[len(part) for part in slot] for slot in slots]
        told = self._client.batch_get_into_multi_buffers(list(names), [_addresses(slot) for slot in slots], sizes)
        if told and all(one < 0 and one != _NO_SUCH for one in told):
            # Perhaps they have another length, which is no fault of the store; or it does not even say what it has.
            self.exists(names)
        return [
            one if one >= 0 else ABSENT if one == _NO_SUCH else self._length(name, slot)
            for name, slot, one in zip(names, slots, told, strict=True)
        ]

    def put(self, names: Sequence[str], slots: Sequence[Slot]) -> list[bool]:
        sizes = [[len(part) for part in slot] for slot in slots]
        told = self._client.batch_put_from_multi_buffers(list(names), [_addresses(slot) for slot in slots], sizes)
        return [one == 0 for one in told]

    def remove(self, names: Sequence[str], prefix: str) -> None:
        """Also what is leased, which exists() makes it for a while."""
        if names:
            told = self._client.batch_remove(list(names), True)
            if bad := [one for one in told if one not in (0, _NO_SUCH)]:
                raise OSError(f"batch_remove: {_said(bad[0])}")
        if prefix and (told := self._client.remove_by_regex("^" + re.escape(prefix) + ".*", True)) < 0:
            raise OSError(f"remove_by_regex: {_said(told)}")

    def _length(self, name: str, slot: Slot) -> int:
        """What the store says of a value that could not be got."""
        size = int(self._client.get_size(name))
        return UNKNOWN if size < 0 or size == slot.length else size


def _addresses(slot: Slot) -> list[int]:
    return [ctypes.addressof(ctypes.c_char.from_buffer(part)) for part in slot]


def _said(code: int) -> str:
    return f"the store's client says {code}; is its master there, and does its address lead to it?"


def connect(config: RemoteConfig) -> Mooncake:
    client = MooncakeDistributedStore()
    master = f"{config.host}:{config.port}"
    if code := client.setup(config.local, "P2PHANDSHAKE", 0, _BUFFER, "tcp", "", master):
        raise OSError(f"{master}: setup: {_said(code)}")
    return Mooncake(client)
