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

    def buffers(self, places: torch.Tensor | None, count: int) -> list[Buffer]:
        """Where ``count`` pages are, whose tokens have these ``places`` in the pool.

        Raises ValueError for places that are not those of so many whole pages of the pool: what would be copied there
        belongs to others.
        """
        self._check(places, count)
        if not count:
            return []
        addresses, sizes = self.pages.get_page_buffer_meta(places)
        each = len(addresses) // count  # pieces of a page
        pieces = list(zip(addresses, sizes, strict=True))
        return [pieces[start : start + each] for start in range(0, len(pieces), each)]

    def _check(self, places: torch.Tensor | None, count: int) -> None:
        size, given = self.pages.page_size, 0 if places is None else len(places)
        if given != count * size:
            raise ValueError(f"{given} places of tokens for {count} pages of {size} in {self.name!r}")
        if places is None or not count:
            return
        each = places.reshape(count, size)
        first = each[:, 0]
        whole = bool(((first % size == 0) & (first >= 0) & (first + size <= self.pages.size)).all())
        if not whole or not bool((each == first[:, None] + torch.arange(size, device=places.device)).all()):
            raise ValueError(f"places of tokens that are not those of whole pages in {self.name!r}")

    def page_bytes(self) -> int:
        """Raises ValueError for a pool without pages of its own."""
        if not (found := self.pages.get_page_buffer_meta(torch.arange(self.pages.page_size))) or not found[0]:
            raise ValueError(
                f"kvhold: the host pool {self.name!r} ({type(self.pages).__name__}) has no pages of its own; serve "
                "that model without kvhold"
            )
        return sum(found[1])
