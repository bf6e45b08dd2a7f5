"""kvhold's storage with a fault in it that a test wants to be seen."""

import ctypes
from typing import Any

from kvhold.engines.sglang.backend import KvholdStorage


class Zeros(KvholdStorage):
    """What it restores is zeros: tokens must change, or a test of restores shows nothing."""

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        restored = super().batch_get_v1(keys, host_indices, extra_info)
        for address, size in zip(*self.mem_pool_host.get_page_buffer_meta(host_indices), strict=True):
            ctypes.memset(address, 0, size)
        return restored


class BadPage(KvholdStorage):
    """Of each batch the fourth page cannot be had; on a second rank the third."""

    def __init__(self, config: Any, kwargs: Any = None) -> None:
        super().__init__(config, kwargs)
        self._bad = 3 - config.tp_rank

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        restored = super().batch_get_v1(keys, host_indices, extra_info)
        return [good and at != self._bad for at, good in enumerate(restored)]


class BadPageOfOneRank(BadPage):
    """The first rank has all pages, the second one all but the third."""

    def __init__(self, config: Any, kwargs: Any = None) -> None:
        super().__init__(config, kwargs)
        self._bad = 2 if config.tp_rank == 1 else -1


class Deaf(KvholdStorage):
    """It hears of no weight update: old KV must be served, or a test of updates shows nothing."""

    def _rekeyed(self) -> None:
        pass
