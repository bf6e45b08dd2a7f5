"""What a request asks the manager, and what becomes of it: one kind of question for chains, one for several groups.

A model with a single group of full attention asks for the longest prefix of one chain, which is leased as it is
matched. All others look first (which keys are there?), let the engine's own rules find where the prompt can be resumed
(:class:`Search`), and then have exactly the blocks of that hit prepared: all or none.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from kvhold.client.budget import Budget
from kvhold.client.control import Control, QuestionId
from kvhold.engines.common.groups import Group
from kvhold.protocol import MAX_KEYS, Tier
from kvhold.threads import ENGINE, belongs_to

_ATTEMPTS = 4
"""How often a hit is prepared that turns out to be too large, to have gone meanwhile, or not to come in time."""
_LATE = ("deadline", "out_of_service", "remote_late", "remote_down")
"""Why a hit cannot be had that has to be read from somewhere; the longest one in what is in DRAM can."""
_READ = (Tier.BACKING, Tier.ELSEWHERE)
"""Where something has to be read from before it can be restored."""
_LESS = ("budget", "not_stored", "read_failed", *_LATE)
"""Why a hit cannot be had, while another one may."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A prompt can be resumed after ``tokens``; if that is no more than what the engine has itself, it is no hit.

    ``needed[g]`` are the numbers of the blocks of the g-th kept group that have to be restored for that. The last may
    end inside of its block; its key is the hash of the hit's end. At ``junction``, if that is not 0, the prompt leaves
    what others have in common with it: it could be resumed there if only windows and states had been kept.
    """

    tokens: int
    needed: tuple[tuple[int, ...], ...]
    junction: int


class Search(Protocol):
    """The engine's own rules about where a prompt can be resumed, over its kept ``groups``.

    A request's hashes are one per ``hash_tokens``; hits end at multiples of ``unit`` tokens.
    """

    groups: tuple[Group, ...]
    hash_tokens: int
    unit: int

    def key_tokens(self, group: int) -> int:
        """Keys of the g-th group are the hashes at the multiples of so many tokens."""

    def best(self, hashes: Sequence[bytes], local: int, limit: int, stored: Sequence[Collection[bytes]]) -> Hit:
        """The longest hit up to ``limit`` tokens, over ``stored`` keys by group; the engine's own is of ``local``."""

    def shortest(
        self, hashes: Sequence[bytes], local: int, limit: int, stored: Sequence[Collection[bytes]]
    ) -> tuple[int, int]:
        """(group, tokens): which group ends the hit, and how far it would reach if it were alone."""


@dataclass(frozen=True, slots=True)
class LeasedBlocks:
    """Blocks of one group to be restored: ``blocks[i]`` of a request's table from byte ``offsets[i]`` of the arena."""

    group: int
    blocks: Sequence[int]
    offsets: "array[int]"


def tokens_from_disk(
    leased: Sequence[LeasedBlocks], block_tokens: Sequence[int], read: Collection[int], local: int, end: int
) -> int:
    """Of tokens ``local`` to ``end``, those in a block that was read from SSD for them: to an offset in ``read``.

    ``block_tokens`` are those of a block, by group.
    """
    spans = sorted(
        (max(local, block * block_tokens[one.group]), min(end, (block + 1) * block_tokens[one.group]))
        for one in leased
        for block, offset in zip(one.blocks, one.offsets, strict=True)
        if offset in read
    )
    tokens, reached = 0, local
    for first, last in spans:
        tokens += max(0, last - max(first, reached))
        reached = max(reached, last)
    return tokens


class Question(ABC):
    """One request's question about ``local`` up to ``limit`` tokens, in the session it was asked in.

    Once :meth:`progress` has said True, ``hit`` is how many tokens beyond ``local`` can be restored, from the blocks
    that are ``leased`` as ``id``; ``reason`` why it is not all, ``cut`` the group that ended it, ``junction`` as
    in :class:`Hit`. ``stored[g]`` has the ends, in tokens, of what the manager had of the g-th group. ``read`` are the
    offsets in ``leased`` to which it was read from SSD.
    """

    def __init__(self, id: QuestionId) -> None:
        self.id = id
        self.hit = 0
        self.leased: list[LeasedBlocks] = []
        self.reason = "not_stored"
        self.cut: int | None = None
        self.junction = 0
        self.stored: Sequence[Collection[int]] = ()
        self.read: Collection[int] = ()

    @abstractmethod
    def progress(self, budget: Budget | None) -> bool:
        """Whether the question is answered; waits for it within ``budget``, if any."""

    @abstractmethod
    def forgo(self) -> None:
        """Nothing will be restored, and nothing shall be leased for it; see :meth:`learn`."""

    @abstractmethod
    def learn(self) -> bool:
        """After :meth:`forgo`: whether ``stored`` is known now. Waits for nothing."""

    @abstractmethod
    def leased_for(self, tokens: int) -> list[LeasedBlocks] | None:
        """What of ``leased`` restores the first ``tokens`` of the hit and no more; None if it takes something else."""


class ChainQuestion(Question):
    """How far can this chain be restored?"""

    def __init__(
        self,
        control: Control,
        space: int,
        block_tokens: int,
        local: int,
        limit: int,
        hashes: Sequence[bytes],
        former: QuestionId | None,
    ) -> None:
        self._control = control
        self._block_tokens = block_tokens
        self._first, self._end = local // block_tokens, limit // block_tokens
        # The last token is computed in any case; whether its block is stored already has to be asked.
        keys = b"".join(hashes[: self._end + 1])
        super().__init__(control.ask(space, self._first, keys, former))

    def progress(self, budget: Budget | None) -> bool:
        answer = self._control.answer(self.id, budget)
        if answer is None:
            return False
        offsets = array("Q")
        offsets.frombytes(answer.offsets)
        del offsets[self._end - self._first :]
        if answer.offsets and not offsets:
            self._control.release((self.id,))
        self._take_resident(answer.resident)
        self.hit = len(offsets) * self._block_tokens
        self.read = _read(offsets, answer.read)
        self.leased = [LeasedBlocks(0, range(self._first, self._first + len(offsets)), offsets)] if offsets else []
        self.reason = answer.reason or self.reason
        self.cut = 0
        return True

    def _take_resident(self, blocks: int) -> None:
        size = self._block_tokens
        self.stored = (range(size, blocks * size + 1, size),)

    def forgo(self) -> None:
        self._control.forgo(self.id)

    def learn(self) -> bool:
        answer = self._control.answer(self.id)
        if answer is not None:
            self._take_resident(answer.resident)
        return answer is not None

    def leased_for(self, tokens: int) -> list[LeasedBlocks] | None:
        blocks, rest = divmod(tokens, self._block_tokens)
        if rest or not self.leased or blocks > len(self.leased[0].offsets):
            return None
        return [LeasedBlocks(0, self.leased[0].blocks[:blocks], self.leased[0].offsets[:blocks])]


class GroupsQuestion(Question):
    """Where can this prompt be resumed, over several groups or one that needs only some of its blocks?"""

    def __init__(
        self,
        control: Control,
        search: Search,
        spaces: Sequence[int],
        local: int,
        limit: int,
        hashes: Sequence[bytes],
    ) -> None:
        self._control, self._search = control, search
        self._spaces = spaces
        self._local, self._limit, self._reach = local, limit, limit
        # One key more than the limit may be needed to prove a hit: EAGLE drops the last block that it has found.
        asked = min(len(hashes), MAX_KEYS // len(spaces)) * search.hash_tokens
        self._hashes = list(hashes[: asked // search.hash_tokens])
        self._ends = [
            range(search.key_tokens(group), asked + 1, search.key_tokens(group)) for group in range(len(spaces))
        ]
        self._keys = [[self._key(end) for end in ends] for ends in self._ends]
        self._found: list[frozenset[bytes]] = []
        self._attempts = 0
        self._wanted: Hit | None = None
        self._settling = False  # for what is in DRAM
        self._awaited: set[bytes] = set()  # keys that had to be read when they were asked for
        super().__init__(self._look(None))

    def _key(self, tokens: int) -> bytes:
        return self._hashes[tokens // self._search.hash_tokens - 1]

    def _look(self, former: QuestionId | None) -> QuestionId:
        keys = tuple((space, b"".join(mine)) for space, mine in zip(self._spaces, self._keys, strict=True))
        return self._control.look(keys, former)

    def progress(self, budget: Budget | None) -> bool:
        while True:
            if self._wanted is None:
                tiers = self._control.residency(self.id, budget)
                if tiers is None:
                    return False
                self._take_residency(tiers)
                if not self._prepare():
                    return True
            answer = self._control.answer(self.id, budget)
            if answer is None:
                return False
            if self._take_answer(answer.offsets, answer.reason, answer.read):
                return True

    def forgo(self) -> None:
        if self.stored:
            self._control.release((self.id,))

    def learn(self) -> bool:
        if not self.stored:
            tiers = self._control.residency(self.id)
            if tiers is None:
                return False
            self._control.release((self.id,))
            self._take_residency(tiers)
        return True

    def _take_residency(self, tiers: Sequence[bytes]) -> None:
        tiers_now = [list(zip(keys, here, strict=False)) for keys, here in zip(self._keys, tiers, strict=True)]
        wanted = (Tier.DRAM,) if self._settling else (Tier.DRAM, *_READ)
        self._found = [frozenset(key for key, tier in group if tier in wanted) for group in tiers_now]
        self._awaited.update(key for key, tier in chain(*tiers_now) if tier in _READ)
        self.stored = [
            {end for end, tier in zip(ends, here, strict=False) if tier}
            for ends, here in zip(self._ends, tiers, strict=True)
        ]

    def _prepare(self) -> bool:
        """Ask for the longest hit; False, with the final verdict, if there is none."""
        best = self._search.best(self._hashes, self._local, self._reach, self._found)
        self._wanted = best if best.tokens > self._local else None
        if self._reach == self._limit:
            self.junction = best.junction
            if max(best.tokens, self._local) + self._search.unit <= self._limit and not self._settling:
                self._name_the_shortest()
        used = tuple(
            (space, b"".join(mine))
            for space, keys, ends, found in zip(self._spaces, self._keys, self._ends, self._found, strict=True)
            if (mine := [key for key, end in zip(keys, ends, strict=True) if end <= self._local and key in found])
        )
        if self._wanted is None:
            self._control.use(self.id, used)
            return False
        wanted = tuple(
            (space, b"".join(self._key_of(group, at) for at in needed))
            for group, (space, needed) in enumerate(zip(self._spaces, self._wanted.needed, strict=True))
            if needed
        )
        self.id = self._control.prepare(self.id, wanted, used)
        return True

    def _key_of(self, group: int, block: int) -> bytes:
        """The key under which a block of the hit is there: its own, or that of as much of it as the hit needs.

        A whole block of attention has all that a part of it has. A state is that of its own boundary alone.
        """
        assert self._wanted is not None
        kind = self._search.groups[group]
        end = (block + 1) * kind.block_tokens
        if end > self._wanted.tokens and (kind.handed or end not in self.stored[group]):
            end = self._wanted.tokens
        return self._key(end)

    def _name_the_shortest(self) -> None:
        """Which group ended the hit? For the metrics, and for ``kvhold explain``."""
        self.cut, reached = self._search.shortest(self._hashes, self._local, self._limit, self._found)
        unit = self._search.key_tokens(self.cut)
        end = min(self._local if reached < self._local else reached, self._limit) // unit * unit + unit
        if end // self._search.hash_tokens <= len(self._hashes):
            self._control.cut(self.id, self._spaces[self.cut], self._key(end), end // unit - 1)

    def _take_answer(self, packed: bytes, reason: str, read: bytes) -> bool:
        """Whether that was the last word; if not, something else was asked."""
        assert self._wanted is not None
        if packed:
            offsets = array("Q")
            offsets.frombytes(packed)
            self.hit = self._wanted.tokens - self._local
            at = 0
            for group, needed in enumerate(self._wanted.needed):
                if needed:
                    self.leased.append(LeasedBlocks(group, needed, offsets[at : at + len(needed)]))
                    at += len(needed)
            self.read = _read(offsets, read)
            if self._settling:  # what came in time was read for the question before
                keys = (self._key_of(one.group, block) for one in self.leased for block in one.blocks)
                self.read = {offset for offset, key in zip(offsets, keys, strict=True) if key in self._awaited}
            return True
        self.reason = reason
        self._attempts += 1
        if self._attempts >= _ATTEMPTS or reason not in _LESS:
            return True
        if reason == "budget":
            self._reach = self._local + (self._wanted.tokens - self._local) // 2
            return not self._prepare()
        self._wanted = None
        if reason in _LATE:
            self._settling = True
            self.id = self._look(None)
        else:
            self.id = self._look(self.id)
        return False

    def leased_for(self, tokens: int) -> list[LeasedBlocks] | None:
        if tokens == self.hit:
            return self.leased
        if self._wanted is None or not 0 < tokens < self.hit:
            return None
        leased = [
            frozenset(self._key_of(group, at) for at in needed) for group, needed in enumerate(self._wanted.needed)
        ]
        shorter = self._search.best(self._hashes, self._local, self._local + tokens, leased)
        if shorter.tokens != self._local + tokens:
            return None
        by_group = {one.group: dict(zip(one.blocks, one.offsets, strict=True)) for one in self.leased}
        try:
            return [
                LeasedBlocks(group, needed, array("Q", [by_group[group][at] for at in needed]))
                for group, needed in enumerate(shorter.needed)
                if needed
            ]
        except KeyError:
            return None


@belongs_to(ENGINE)
class Asker:
    """Puts the questions of one engine, over its ``groups``. There are none before it is known what a hit is."""

    def __init__(self, control: Control, groups: Sequence[Group]) -> None:
        self.search: Search | None = None
        self._control = control
        self._groups = groups
        self._chain = False

    def bind(self, search: Search, drops_last: bool) -> None:
        """``search`` knows what a hit is; ``drops_last`` says that the last block of one is dropped for a drafter."""
        self.search = search
        # A hit is the longest prefix of one chain, so that one question finds and leases it.
        self._chain = len(self._groups) == 1 and self._groups[0].whole and not drops_last

    def ask(
        self, spaces: Sequence[int], local: int, limit: int, hashes: Sequence[bytes], former: QuestionId | None
    ) -> Question:
        """Ask about tokens ``local`` to ``limit`` of what has ``hashes``, in place of ``former`` if that is one."""
        if self._chain:
            return ChainQuestion(self._control, spaces[0], self._groups[0].block_tokens, local, limit, hashes, former)
        if former is not None:
            self._control.release((former,))
        assert self.search is not None
        return GroupsQuestion(self._control, self.search, spaces, local, limit, hashes)


def _read(offsets: Sequence[int], positions: bytes) -> Collection[int]:
    """Of ``offsets``, those at packed 32-bit ``positions``."""
    at = array("I")
    at.frombytes(positions)
    return {offsets[position] for position in at}
