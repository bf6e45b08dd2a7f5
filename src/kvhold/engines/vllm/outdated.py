"""What the engine's own cache keeps from before a reset, which vLLM refuses to clear while requests use it.

Whether a request gets any of that is decided by what is in the block pool when it is admitted: blocks are found by
their hashes, and a block that was stored under a hash before the reset counts as long as that hash finds one. Requests
that were running go on with what they have, and what they compute is stored on top of it.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import BlockHash, get_block_hash, make_block_hash_with_group_id

from kvhold.threads import ENGINE, belongs_to

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

_GROWTH = 4
"""Hashes that are remembered, for each block of the pool."""


@belongs_to(ENGINE)
class Outdated:
    """Hashes and requests from before the last reset; ``groups`` numbers all of the engine's cache groups."""

    def __init__(self, pool: "BlockPool", groups: Sequence[int]) -> None:
        self._pool = pool
        self._groups = groups
        self._hashes: set[bytes] = set()
        self._requests: dict[str, tuple[Request, int]] = {}  # with how many of their hashes are among those
        self._unknown = False

    def begin(self) -> None:
        """A reset has begun: until it is known what is left, all that the engine has counts as outdated."""
        self._unknown = True

    def mark(self, running: Iterable["Request"]) -> bool:
        """All that the pool has now, and ``running`` requests, are outdated; whether the engine keeps anything."""
        secondary = self._pool.cached_block_hashes_by_block.values()
        primary = [block.block_hash for block in self._pool.blocks if block.block_hash is not None]
        self._hashes = {bytes(get_block_hash(key)) for keys in (primary, *secondary) for key in keys}
        self._requests.update((request.request_id, (request, 0)) for request in running)
        self._unknown = False
        return bool(self._hashes) or self._pool.get_num_free_blocks() < self._pool.num_gpu_blocks - 1

    def admits(self, request: "Request") -> bool:
        """Whether ``request``, which is about to be given blocks, gets none that are outdated."""
        name = request.request_id
        self._requests.pop(name, None)  # it has none now: it was preempted
        if self._unknown:
            return False
        if not self._hashes and not self._requests:
            return True
        if len(self._pool.cached_block_hash_to_block) == 0:
            self._hashes.clear()
        for other in list(self._requests):
            self._take_hashes(other)
        for key in request.block_hashes:
            if bytes(key) in self._hashes:
                if self._found(key):
                    self._requests[name] = request, 0
                    return False
                self._hashes.discard(bytes(key))
        return True

    def has(self, request: str) -> bool:
        """Whether the request's KV is outdated, in part or all of it."""
        return self._unknown or request in self._requests

    def finished(self, request: str) -> None:
        """The request is over; what it has stored in the pool stays there for a while."""
        if request in self._requests:
            self._take_hashes(request)
            del self._requests[request]

    def _take_hashes(self, name: str) -> None:
        request, known = self._requests[name]
        self._hashes.update(bytes(key) for key in request.block_hashes[known:])
        self._requests[name] = request, len(request.block_hashes)
        if len(self._hashes) > _GROWTH * self._pool.num_gpu_blocks:
            self._hashes = {key for key in self._hashes if self._found(BlockHash(key))}

    def _found(self, key: BlockHash) -> bool:
        find = self._pool.cached_block_hash_to_block.get_one_block
        return any(find(make_block_hash_with_group_id(key, group)) is not None for group in self._groups)
