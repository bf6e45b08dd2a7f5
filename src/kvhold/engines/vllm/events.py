"""vLLM's KV-cache events for routers: what this engine could restore, told in the order in which it happened.

A block is announced when the manager says that it can be found, which is after every rank's part of it was stored,
and withdrawn when the manager says that it no longer can, whoever stored it and for whatever reason. Nothing is polled.
What others have stored is announced when this engine restores it: then it knows the tokens, and asks once whether it is
still there. A lost session is a gap: the next one is asked once what of the announced is left. Of an adapter that is no
longer spoken of nothing is heard, so what was announced of it is withdrawn. Both are done by slices, one in each step:
there may be hundreds of thousands of blocks, and the scheduler's thread does it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import MEDIUM_CPU, AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash, to_event_extra_keys
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvhold.client.control import Control, QuestionId
from kvhold.engines.common.groups import Group
from kvhold.engines.common.question import LeasedBlocks
from kvhold.threads import ENGINE, belongs_to

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_PATIENCE = 1.0
"""Seconds that an engine goes on stepping for the manager's word on what was published."""
_FORGET = 60.0
"""Seconds after which no word will come: the manager did not keep it."""
_MOST_ASKED = 64
"""Restores whose blocks are asked about at once; those of more are announced when they are restored again."""
_SLICE = 1024
"""Blocks of earlier sessions that are asked about, or withdrawn, in one step."""
LOCAL = "LOCAL"
"""Where blocks are, seen from the publisher: on its host, in DRAM or on SSD."""


@dataclass(frozen=True, slots=True)
class Published:
    """A block that was stored or may be: tokens ``start`` to ``end`` of a request."""

    request: "Request"
    parent: bytes
    start: int
    end: int
    since: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class Asked:
    """A question about ``keys`` of a space: what is gone is withdrawn, what is there of ``found`` is announced."""

    id: QuestionId
    space: int
    keys: Sequence[bytes]
    found: dict[bytes, Published] = field(default_factory=dict)


@belongs_to(ENGINE)
class CacheEvents:
    """Events of one engine, over its kept ``groups``."""

    def __init__(self, control: Control, cache: "KVCacheConfig", groups: Sequence[Group]) -> None:
        self._control = control
        self._cache = cache
        self._groups = groups
        self._plain: Sequence[int] = ()
        self._group_of: dict[int, int] = {}  # by space that is watched
        # By space, what was announced, without what is doubted: what an earlier session was told, and this one was not
        # asked yet. By group, of spaces that are closed, what has yet to be withdrawn. The manager's objects bound all.
        self._announced: dict[int, dict[bytes, None]] = {}
        self._doubted: dict[int, dict[bytes, None]] = {}
        self._leaving: dict[int, dict[bytes, None]] = {}
        self._under_way: dict[tuple[int, bytes], Published] = {}  # by space and key; no more than there are credits
        self._asked: list[Asked] = []
        self._open: dict[tuple[int, bytes], Asked] = {}  # that of which the manager has not said more since
        self._events: list[KVCacheEvent] = []
        control.watcher = self

    # --- spaces -------------------------------------------------------------------------------------------------

    def begun(self, spaces: Sequence[int]) -> None:
        """A session has begun: ``spaces``, by group, are those without an adapter; no other is open yet."""
        self._under_way.clear()
        self._asked.clear()
        self._open.clear()
        former = [_merged(self._announced.pop(space), self._doubted.pop(space)) for space in self._plain]
        for space, announced in self._announced.items():
            self._leave(space, announced)
        self._announced.clear()
        self._doubted.clear()
        self._group_of.clear()
        self._plain = spaces
        self.opened(spaces)
        if former:
            self._doubted.update(zip(spaces, former, strict=True))
        self._ask_about_doubted()

    def opened(self, spaces: Sequence[int]) -> None:
        """``spaces``, by group, are watched from now on."""
        for at, space in enumerate(spaces):
            self._group_of[space] = at
            self._announced[space], self._doubted[space] = {}, {}

    def closed(self, spaces: Sequence[int]) -> None:
        """Nothing more will be heard of ``spaces``."""
        for space in spaces:
            if space in self._group_of:
                self._leave(space, _merged(self._announced.pop(space), self._doubted.pop(space)))
                del self._group_of[space]
        for each in [each for each in self._asked if each.space in spaces]:
            self._end(each)
        for name in [name for name in self._under_way if name[0] in spaces]:
            del self._under_way[name]

    def cleared(self) -> None:
        """This engine was re-keyed: it finds nothing any more."""
        for each in list(self._asked):
            self._end(each)
        self._under_way.clear()
        self._group_of.clear()
        for announced in (self._announced, self._doubted, self._leaving):
            announced.clear()
        self._plain = ()
        self._events.append(AllBlocksCleared())

    # --- what this engine does ----------------------------------------------------------------------------------

    def expect(self, space: int, key: bytes, published: Published) -> None:
        """This key will be stored."""
        if space in self._group_of:
            self._under_way.pop((space, key), None)
            self._under_way[space, key] = published

    def expect_no_more(self, space: int, keys: Sequence[bytes]) -> None:
        """These will not."""
        for key in keys:
            self._under_way.pop((space, key), None)

    def restored(
        self,
        request: "Request",
        spaces: Sequence[int],
        leased: Sequence[LeasedBlocks],
        tokens: int,
        key: Callable[["Request", int], bytes],
    ) -> None:
        """``leased`` are being restored, of a hit that ends after ``tokens``; ``key`` is that of so many tokens."""
        for one in leased:
            space, size = spaces[one.group], self._groups[one.group].block_tokens
            if space not in self._group_of or len(self._asked) >= _MOST_ASKED:
                continue
            found: dict[bytes, Published] = {}
            for block in one.blocks:
                start, end = block * size, min((block + 1) * size, tokens)
                if end % size == 0 or self._groups[one.group].handed:
                    name, parent = key(request, end), key(request, start) if start else b""
                    if name not in self._announced[space] and (space, name) not in self._open:
                        found[name] = Published(request, parent, start, end)
            if found:
                self._ask(space, list(found), found)

    def _ask(self, space: int, keys: Sequence[bytes], found: dict[bytes, Published] | None = None) -> None:
        question = self._control.look(((space, b"".join(keys)),))
        asked = Asked(question, space, keys, found or {})
        self._asked.append(asked)
        self._open.update(((space, key), asked) for key in keys)

    def _ask_about_doubted(self) -> None:
        """Ask about the next slice, unless an answer about one is awaited."""
        if not self._control.attachment or any(not each.found for each in self._asked):
            return
        for space, doubted in self._doubted.items():
            if doubted:
                keys = _slice(doubted)
                self._announced[space].update(dict.fromkeys(keys))
                self._ask(space, keys)
                return

    def _end(self, asked: Asked) -> None:
        self._asked.remove(asked)
        for key in asked.keys:
            if self._open.get((asked.space, key)) is asked:
                del self._open[asked.space, key]
        self._control.release((asked.id,))

    @property
    def awaited(self) -> bool:
        """Whether something is to be said of what is closed, or the manager's word on what was published is awaited."""
        if self._leaving:
            return True
        if not self._control.attachment or self._control.silent:
            return False
        newest = next(reversed(self._under_way.values()), None)
        awaited = [each.id.since for each in self._asked] + ([newest.since] if newest is not None else [])
        return bool(awaited) and time.monotonic() - max(awaited) < _PATIENCE

    # --- what the manager says ----------------------------------------------------------------------------------

    def stored(self, space: int, keys: Sequence[bytes]) -> None:
        if space not in self._group_of:
            return
        for key in keys:
            self._open.pop((space, key), None)
            published = self._under_way.pop((space, key), None)
            if published is not None:
                self._announce(space, key, published)

    def removed(self, space: int, keys: Sequence[bytes]) -> None:
        if space in self._group_of:
            for key in keys:
                self._open.pop((space, key), None)
            self._withdraw(space, keys)

    def take(self) -> Iterator[KVCacheEvent]:
        """Events since the last call."""
        long_ago = time.monotonic() - _FORGET
        while self._under_way and next(iter(self._under_way.values())).since < long_ago:
            del self._under_way[next(iter(self._under_way))]
        for each in list(self._asked):
            tiers = self._control.residency(each.id)
            if tiers is not None:
                [here] = tiers
                pairs = zip(each.keys, here, strict=False)
                told = [(key, tier) for key, tier in pairs if self._open.get((each.space, key)) is each]
                self._end(each)
                self._withdraw(each.space, [key for key, tier in told if not tier])
                for key, tier in told:
                    if tier and key in each.found:
                        self._announce(each.space, key, each.found[key])
        self._ask_about_doubted()
        if self._leaving:
            at, leaving = next(iter(self._leaving.items()))
            self._append_removed(at, _slice(leaving))
            if not leaving:
                del self._leaving[at]
        events, self._events = self._events, []
        yield from events

    # --- events -------------------------------------------------------------------------------------------------

    def _withdraw(self, space: int, keys: Sequence[bytes]) -> None:
        announced, doubted = self._announced[space], self._doubted[space]
        gone = [key for key in keys if announced.pop(key, self) is None or doubted.pop(key, self) is None]
        if gone:
            self._append_removed(self._group_of[space], gone)

    def _leave(self, space: int, announced: dict[bytes, None]) -> None:
        """Withdraw all that was ``announced`` of a space, bit by bit."""
        if announced:
            at = self._group_of[space]
            self._leaving[at] = _merged(self._leaving.get(at, {}), announced)

    def _append_removed(self, at: int, keys: Sequence[bytes]) -> None:
        hashes = [maybe_convert_block_hash(key) for key in keys]
        index = self._groups[at].index
        self._events.append(BlockRemoved(hashes, MEDIUM_CPU, group_idx=index, locality=LOCAL))

    def _announce(self, space: int, key: bytes, published: Published) -> None:
        if key in self._announced[space]:
            return
        self._announced[space][key] = None
        at = self._group_of[space]
        known = [self._doubted[space], self._leaving.get(at, {})]  # still, by whoever listens
        if all(announced.pop(key, self) is self for announced in known):
            self._append(at, key, published)

    def _append(self, at: int, key: bytes, published: Published) -> None:
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


def _merged(some: dict[bytes, None], others: dict[bytes, None]) -> dict[bytes, None]:
    """Both, in the larger of the two."""
    less, more = sorted((some, others), key=len)
    more.update(less)
    return more


def _slice(keys: dict[bytes, None]) -> list[bytes]:
    """Some of ``keys``, which they leave."""
    return [keys.popitem()[0] for _ in range(min(len(keys), _SLICE))]
