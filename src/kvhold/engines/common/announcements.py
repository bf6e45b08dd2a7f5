"""What an engine announces to routers: what it could restore, told in the order in which it happened.

A block is announced when the manager says that it can be found, which is after every rank's shard of it was stored,
and withdrawn when the manager says that it no longer can, whoever stored it and for whatever reason. Nothing is polled.
What others have stored is announced when this engine restores it: then it knows the tokens, and asks once whether it is
still there. A lost session is a gap: the next one is asked once what of the announced is left. Of an adapter that is no
longer spoken of nothing is heard, so what was announced of it is withdrawn. Both are done by slices, one in each step:
there may be hundreds of thousands of blocks, and the scheduler's thread does it.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvhold.client.control import Control, QuestionId
from kvhold.engines.common.groups import Group
from kvhold.engines.common.question import LeasedBlocks
from kvhold.protocol import Tier
from kvhold.threads import ENGINE, belongs_to

R = TypeVar("R")
"""An engine's own request."""

_PATIENCE = 1.0
"""Seconds that an engine goes on stepping for the manager's word on what was published."""
_FORGET = 60.0
"""Seconds after which no word will come: the manager did not keep it."""
_MOST_ASKED = 64
"""Restores whose blocks are asked about at once; those of more are announced when they are restored again."""
_HERE = (Tier.DRAM, Tier.BACKING)
"""What other machines have is theirs to announce."""
_SLICE = 1024
"""Blocks of earlier sessions that are asked about, or withdrawn, in one step."""


@dataclass(frozen=True, slots=True)
class Published(Generic[R]):
    """A block that was stored or may be: tokens ``start`` to ``end`` of a request."""

    request: R
    parent: bytes
    start: int
    end: int
    since: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class Asked(Generic[R]):
    """A question about ``keys`` of a space: what is gone is withdrawn, what is there of ``found`` is announced."""

    id: QuestionId
    space: int
    keys: Sequence[bytes]
    found: dict[bytes, Published[R]] = field(default_factory=dict)


@belongs_to(ENGINE)
class Announcements(ABC, Generic[R]):
    """What one engine announces of its kept ``groups``; how it says that is its own."""

    def __init__(self, control: Control, groups: Sequence[Group]) -> None:
        self._control = control
        self._groups = groups
        self._plain: Sequence[int] = ()
        self._group_of: dict[int, int] = {}  # by space that is watched
        # By space, what was announced, without what is doubted: what an earlier session was told, and this one was not
        # asked yet. By group, of spaces that are closed, what has yet to be withdrawn. The manager's objects bound all.
        self._announced: dict[int, dict[bytes, None]] = {}
        self._doubted: dict[int, dict[bytes, None]] = {}
        self._leaving: dict[int, dict[bytes, None]] = {}
        self._under_way: dict[tuple[int, bytes], Published[R]] = {}  # by space and key; no more than there are credits
        self._asked: list[Asked[R]] = []
        self._open: dict[tuple[int, bytes], Asked[R]] = {}  # that of which the manager has not said more since
        control.watcher = self

    @abstractmethod
    def _say_stored(self, at: int, key: bytes, published: Published[R]) -> None:
        """Say that ``key`` of the group can be found from now on."""

    @abstractmethod
    def _say_removed(self, at: int, keys: Sequence[bytes]) -> None:
        """Say that ``keys`` of the group cannot be found any more."""

    @abstractmethod
    def _say_cleared(self) -> None:
        """Say that nothing can be found any more."""

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
        self._say_cleared()

    # --- what this engine does ----------------------------------------------------------------------------------

    def expect(self, space: int, key: bytes, published: Published[R]) -> None:
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
        request: R,
        spaces: Sequence[int],
        leased: Sequence[LeasedBlocks],
        tokens: int,
        key: Callable[[R, int], bytes],
    ) -> None:
        """``leased`` are being restored, of a hit that ends after ``tokens``; ``key`` is that of so many tokens."""
        for one in leased:
            space, size = spaces[one.group], self._groups[one.group].block_tokens
            if space not in self._group_of or len(self._asked) >= _MOST_ASKED:
                continue
            found: dict[bytes, Published[R]] = {}
            for block in one.blocks:
                start, end = block * size, min((block + 1) * size, tokens)
                if end % size == 0 or self._groups[one.group].handed:
                    name, parent = key(request, end), key(request, start) if start else b""
                    if name not in self._announced[space] and (space, name) not in self._open:
                        found[name] = Published(request, parent, start, end)
            if found:
                self._ask(space, list(found), found)

    def _ask(self, space: int, keys: Sequence[bytes], found: dict[bytes, Published[R]] | None = None) -> None:
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

    def _end(self, asked: Asked[R]) -> None:
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

    def go_on(self) -> None:
        """Say what has come to be known, and a slice of what is due, once in each step."""
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
                self._withdraw(each.space, [key for key, tier in told if tier not in _HERE])
                for key, tier in told:
                    if tier in _HERE and key in each.found:
                        self._announce(each.space, key, each.found[key])
        self._ask_about_doubted()
        if self._leaving:
            at, leaving = next(iter(self._leaving.items()))
            self._say_removed(at, _slice(leaving))
            if not leaving:
                del self._leaving[at]

    # --- events -------------------------------------------------------------------------------------------------

    def _withdraw(self, space: int, keys: Sequence[bytes]) -> None:
        announced, doubted = self._announced[space], self._doubted[space]
        gone = [key for key in keys if announced.pop(key, self) is None or doubted.pop(key, self) is None]
        if gone:
            self._say_removed(self._group_of[space], gone)

    def _leave(self, space: int, announced: dict[bytes, None]) -> None:
        """Withdraw all that was ``announced`` of a space, bit by bit."""
        if announced:
            at = self._group_of[space]
            self._leaving[at] = _merged(self._leaving.get(at, {}), announced)

    def _announce(self, space: int, key: bytes, published: Published[R]) -> None:
        if key in self._announced[space]:
            return
        self._announced[space][key] = None
        at = self._group_of[space]
        known = [self._doubted[space], self._leaving.get(at, {})]  # still, by whoever listens
        if all(announced.pop(key, self) is self for announced in known):
            self._say_stored(at, key, published)


def _merged(some: dict[bytes, None], others: dict[bytes, None]) -> dict[bytes, None]:
    """Both, in the larger of the two."""
    less, more = sorted((some, others), key=len)
    more.update(less)
    return more


def _slice(keys: dict[bytes, None]) -> list[bytes]:
    """Some of ``keys``, which they leave."""
    return [keys.popitem()[0] for _ in range(min(len(keys), _SLICE))]
