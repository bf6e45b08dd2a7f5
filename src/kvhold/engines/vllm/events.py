"""vLLM's KV-cache events for routers: what this engine could restore, told in the order in which it happened.

A block is announced when the manager says that it can be found, which is after every rank's part of it was stored, and
withdrawn when the manager says that it no longer can, whoever stored it and for whatever reason. Nothing is polled. A
lost session is a gap: the next one is asked once what of the announced is still there.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import MEDIUM_CPU, AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash, to_event_extra_keys
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvhold.client.control import Control, Ticket
from kvhold.engines.vllm.groups import Group
from kvhold.protocol import MAX_KEYS

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_PATIENCE = 1.0
"""Seconds that an engine goes on stepping for the manager's word on what was published."""
_FORGET = 60.0
"""Seconds after which no word will come: the manager did not keep it."""
LOCAL = "LOCAL"
"""Where blocks are, seen from the publisher: on its host, in DRAM or on SSD."""


@dataclass(frozen=True, slots=True)
class Published:
    """A block on its way: tokens ``start`` to ``end`` of a request."""

    request: "Request"
    parent: bytes
    start: int
    end: int
    since: float = field(default_factory=time.monotonic)


class CacheEvents:
    """Events of one engine, over its kept ``groups``."""

    def __init__(self, control: Control, cache: "KVCacheConfig", groups: Sequence[Group]) -> None:
        self._control = control
        self._cache = cache
        self._groups = groups
        self._group_of: dict[int, int] = {}  # by space
        self._under_way: dict[tuple[int, bytes], Published] = {}  # by space and key; no more than there are credits
        self._announced: list[dict[bytes, None]] = [{} for _ in groups]  # no more than the manager has objects
        self._asked: list[tuple[Ticket, int, list[bytes]]] = []  # with group and keys
        self._heard: set[tuple[int, bytes]] = set()  # stored since that was asked
        self._events: list[KVCacheEvent] = []
        control.watcher = self

    def opened(self, spaces: Sequence[int]) -> None:
        """A session has begun: ``spaces``, by group, are watched from now on."""
        self._group_of = {space: at for at, space in enumerate(spaces)}
        self._under_way.clear()
        self._asked.clear()
        self._heard.clear()
        for space, announced in zip(spaces, self._announced, strict=True):
            keys = list(announced)
            for start in range(0, len(keys), MAX_KEYS):
                part = keys[start : start + MAX_KEYS]
                ticket = self._control.look(((space, b"".join(part)),))
                self._asked.append((ticket, self._group_of[space], part))

    def expect(self, space: int, key: bytes, published: Published) -> None:
        """This key will be stored. A space that is not announced is an adapter's, which may be closed any time."""
        if space not in self._group_of:
            return
        self._under_way.pop((space, key), None)
        self._under_way[space, key] = published

    def expect_no_more(self, space: int, keys: Sequence[bytes]) -> None:
        """These will not."""
        for key in keys:
            self._under_way.pop((space, key), None)

    @property
    def awaited(self) -> bool:
        """Whether the manager's word on something that was published is awaited."""
        if not self._control.attachment or self._control.silent:
            return False
        newest = next(reversed(self._under_way.values()), None)
        awaited = [ticket.since for ticket, _, _ in self._asked] + ([newest.since] if newest is not None else [])
        return bool(awaited) and time.monotonic() - max(awaited) < _PATIENCE

    def stored(self, space: int, keys: Sequence[bytes]) -> None:
        at = self._group_of.get(space)
        if at is None:
            return
        if self._asked:
            self._heard.update((at, key) for key in keys)
        for key in keys:
            published = self._under_way.pop((space, key), None)
            if published is not None and key not in self._announced[at]:
                self._announced[at][key] = None
                self._append(at, key, published)

    def removed(self, space: int, keys: Sequence[bytes]) -> None:
        at = self._group_of.get(space)
        if at is not None:
            self._withdraw(at, keys)

    def cleared(self) -> None:
        """This engine was re-keyed: it finds nothing any more."""
        self._under_way.clear()
        self._asked.clear()
        self._group_of.clear()
        for announced in self._announced:
            announced.clear()
        self._events.append(AllBlocksCleared())

    def take(self) -> Iterator[KVCacheEvent]:
        """Events since the last call."""
        long_ago = time.monotonic() - _FORGET
        while self._under_way and next(iter(self._under_way.values())).since < long_ago:
            del self._under_way[next(iter(self._under_way))]
        for ticket, at, keys in list(self._asked):
            tiers = self._control.residency(ticket, patient=False)
            if tiers is not None:
                self._asked.remove((ticket, at, keys))
                self._control.release((ticket,))
                [here] = tiers
                gone = [key for key, tier in zip(keys, here, strict=False) if not tier]
                self._withdraw(at, [key for key in gone if (at, key) not in self._heard])
        if not self._asked:
            self._heard.clear()
        events, self._events = self._events, []
        yield from events

    def _withdraw(self, at: int, keys: Sequence[bytes]) -> None:
        gone = [key for key in keys if self._announced[at].pop(key, self) is None]
        if gone:
            hashes = [maybe_convert_block_hash(key) for key in gone]
            index = self._groups[at].index
            self._events.append(BlockRemoved(hashes, MEDIUM_CPU, group_idx=index, locality=LOCAL))

    def _append(self, at: int, key: bytes, published: Published) -> None:
        """Announce a block, together with the one before it if that is its parent."""
        request, group = published.request, self._groups[at]
        extra, _ = generate_block_hash_extra_keys(request, published.start, published.end, 0)
        extras = to_event_extra_keys([extra])
        tokens = list(request.all_token_ids[published.start : published.end])
        parent = maybe_convert_block_hash(published.parent) if published.parent else None
        last = self._events[-1] if self._events else None
        if (
            isinstance(last, BlockStored)
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
                block_size=group.block_tokens,
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
