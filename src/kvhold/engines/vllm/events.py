"""vLLM's KV-cache events for routers."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import MEDIUM_CPU, AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash, to_event_extra_keys
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvhold.client.control import Control
from kvhold.engines.common.announcements import Announcements, Published
from kvhold.engines.common.groups import Group
from kvhold.threads import ENGINE, belongs_to

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

LOCAL = "LOCAL"
"""Where blocks are, seen from the publisher: on its host, in DRAM or on SSD."""


@belongs_to(ENGINE)
class CacheEvents(Announcements["Request"]):
    """Announcements of one engine as vLLM's events, over its kept ``groups``."""

    def __init__(self, control: Control, cache: "KVCacheConfig", groups: Sequence[Group]) -> None:
        super().__init__(control, groups)
        self._cache = cache
        self._events: list[KVCacheEvent] = []

    def take(self) -> Iterable[KVCacheEvent]:
        """Events since the last call."""
        self.go_on()
        events, self._events = self._events, []
        return events

    def _say_cleared(self) -> None:
        self._events.append(AllBlocksCleared())

    def _say_removed(self, at: int, keys: Sequence[bytes]) -> None:
        hashes = [maybe_convert_block_hash(key) for key in keys]
        index = self._groups[at].index
        self._events.append(BlockRemoved(hashes, MEDIUM_CPU, group_idx=index, locality=LOCAL))

    def _say_stored(self, at: int, key: bytes, published: Published["Request"]) -> None:
        """Announce a block, together with the one before it if that is its parent."""
        request, group = published.request, self._groups[at]
        extra, _ = generate_block_hash_extra_keys(request, published.start, published.end, 0)
        extras = to_event_extra_keys([extra])
        tokens = list(request.all_token_ids[published.start : published.end])
        whole = len(tokens) == group.block_tokens
        parent = maybe_convert_block_hash(published.parent) if published.parent else None
        last = self._events[-1] if self._events else None
        if (
            isinstance(last, BlockStored)
            and whole
            and (last.group_idx, last.block_hashes[-1]) == (group.index, parent)
            and len(last.token_ids) == len(last.block_hashes) * group.block_tokens
            and last.session_id == request.session_id
            and last.extra_keys is not None
            and extras is not None
        ):
            last.block_hashes.append(maybe_convert_block_hash(key))
            last.token_ids += tokens
            last.extra_keys += extras
            return
        spec = self._cache.kv_cache_groups[group.index].kv_cache_spec
        adapter = request.lora_request
        self._events.append(
            BlockStored(
                block_hashes=[maybe_convert_block_hash(key)],
                parent_block_hash=parent,
                token_ids=tokens,
                block_size=len(tokens),  # of a block that is filled in part, the engine says the same
                lora_id=adapter.adapter_id if adapter is not None else None,
                medium=MEDIUM_CPU,
                lora_name=adapter.name if adapter is not None else None,
                extra_keys=extras,
                group_idx=group.index,
                kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
                kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(spec),
                locality=LOCAL,
                session_id=request.session_id,
            )
        )
