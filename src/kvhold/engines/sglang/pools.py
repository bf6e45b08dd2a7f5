"""SGLang's host pools: where their pages are, and under which space they are stored."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvhold.engines.common.blocking import Space
from kvhold.engines.common.buffers import Buffer

if TYPE_CHECKING:
    from sglang.srt.mem_cache.pool_host import HostKVCache


@dataclass(slots=True)
class Pool:
    """One host pool and, once it is open, the ``space`` of the rank's namespace that its pages are stored in."""

    name: str
    pages: "HostKVCache"
    described: str
    space: Space | None = None

    def buffers(self, host_indices: torch.Tensor) -> list[Buffer]:
        """Where the pages are whose tokens' places in the pool are ``host_indices``, as many as whole pages."""
        count = len(host_indices) // self.pages.page_size
        if not count:
            return []
        addresses, sizes = self.pages.get_page_buffer_meta(host_indices)
        each = len(addresses) // count  # pieces of a page
        pieces = list(zip(addresses, sizes, strict=True))
        return [pieces[start : start + each] for start in range(0, len(pieces), each)]

    def page_bytes(self) -> int:
        """Raises ValueError for a pool without pages of its own."""
        if not (found := self.pages.get_page_buffer_meta(torch.arange(self.pages.page_size))) or not found[0]:
            raise ValueError(
                f"kvhold: the host pool {self.name!r} ({type(self.pages).__name__}) has no pages of its own; serve "
                "that model without kvhold"
            )
        return sum(found[1])
