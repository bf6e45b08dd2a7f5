"""The namespaces that one engine speaks of: one space per cache group, and again for each LoRA adapter."""

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from typing import Protocol

from kvhold.client.control import Control, Geometry
from kvhold.engines.common.adapters import Adapter, Adapters
from kvhold.engines.common.groups import Group
from kvhold.engines.common.identity import Hashing, namespace, variant
from kvhold.engines.common.ranks import Ranks, agree
from kvhold.threads import ENGINE, belongs_to

log = logging.getLogger(__name__)

_MOST_ADAPTERS = 8
"""Adapters that have spaces at once; each is granted slots of its own."""


class Audience(Protocol):
    """Who is told of the spaces that are spoken of."""

    def begun(self, spaces: Sequence[int]) -> None:
        """A session has begun: ``spaces``, by group, are those without an adapter; no other is open yet."""

    def opened(self, spaces: Sequence[int]) -> None:
        """``spaces``, by group, are spoken of from now on."""

    def closed(self, spaces: Sequence[int]) -> None:
        """Nothing more will be heard of ``spaces``."""


@belongs_to(ENGINE)
class Spaces:
    """Spaces by group, opened in each session when they are first asked for.

    ``hashing`` says how keys are made, and is asked when that is needed first; ``label`` is what people call the model.
    Of each space slots are wanted for what ``step_tokens`` fill in two steps; 0 for an engine that stores nothing.
    ``ranks`` is the latest word on which all workers agreed; where they do not, no space is opened in that session.
    ``salt`` sets this engine apart from all others, if it is not empty. ``weights`` stands for what is loaded: empty
    for what the engine has started with, None while that is in doubt and nothing is spoken of.
    """

    def __init__(
        self,
        control: Control,
        groups: Sequence[Group],
        adapters: Adapters,
        hashing: Callable[[], Hashing],
        label: str,
        epoch: str,
        step_tokens: int,
        events: Audience | None,
    ) -> None:
        self.adapters = adapters
        self.ranks: Ranks | None = None
        self.salt = b""
        self.weights: bytes | None = b""
        self._former = b""  # what the weights were before they were in doubt
        self._unknown = False  # what they are now, so that their name is random
        self._control = control
        self._groups = groups
        self._hashing = hashing
        self._label = label
        self._epoch = epoch
        self._step_tokens = step_tokens
        self._events = events
        self._attachment = 0
        self._plain: tuple[int, ...] = ()
        self._adapted: dict[tuple[str, bytes], tuple[int, ...]] = {}  # by adapter; the last used last
        self._next = 1

    @property
    def opened(self) -> bool:
        """Whether spaces are open in the session as it is."""
        return self.weights is not None and bool(self._plain) and 0 < self._attachment == self._control.attachment

    @property
    def plain(self) -> tuple[int, ...] | None:
        """Those without an adapter; None without a session."""
        if not self._control.attachment or self.weights is None:
            return None
        if self._attachment != self._control.attachment:
            self._attachment = self._control.attachment
            self._adapted.clear()
            self._plain = self._begin()
        return self._plain or None

    def agreed(self) -> Ranks | None:
        """What all workers have agreed on, in this session or an earlier one."""
        if self.ranks is None:
            with contextlib.suppress(ValueError):  # said when spaces are opened
                self.ranks = agree(self._control.reports)
        return self.ranks

    def _begin(self) -> tuple[int, ...]:
        try:
            self.ranks = agree(self._control.reports)
        except ValueError as error:
            log.error("%s; nothing is cached", error)
            return ()
        if self.ranks.private and not self.salt:
            self.salt = os.urandom(16)
        opened = self._open(self.ranks)
        if self._events is not None:
            self._events.begun(opened)
        return opened

    def of(self, adapter: Adapter | None) -> tuple[int, ...] | None:
        """Those of what is computed with ``adapter``; None without a session, or while its weights are unknown."""
        if adapter is None or self.plain is None:
            return self.plain
        digest, path = self.adapters.digest(adapter), self.adapters.path(adapter)
        if digest is None or self.ranks is None:
            for key in [key for key in self._adapted if key[0] == path]:
                self._close(self._adapted.pop(key))
            return None
        key = path, digest
        spaces = self._adapted.pop(key, None)
        if spaces is None:
            while len(self._adapted) >= _MOST_ADAPTERS:
                self._close(self._adapted.pop(next(iter(self._adapted))))
            private = self.adapters.private(adapter)
            spaces = self._open(self.ranks, digest, adapter.name, private)
            if self._events is not None:
                self._events.opened(spaces)
        self._adapted[key] = spaces
        return spaces

    def sure(self, space: int, since: float) -> bool | None:
        """Whether what was computed for ``space`` until ``since`` is what it stands for; None: ask again.

        Spaces that were closed meanwhile take nothing, whatever the answer.
        """
        for (path, _), spaces in self._adapted.items():
            if space in spaces:
                return self.adapters.sure(path, since)
        return True

    def doubt(self) -> None:
        """Speak of nothing from now on: other weights may be loaded."""
        if self.weights is not None:
            self._former = self.weights
        self.weights = None

    def settle(self, weights: bytes | None) -> None:
        """These weights are loaded, None where that cannot be told: speak of what was computed with them."""
        self._unknown = weights is None
        weights = self.weights = os.urandom(16) if weights is None else weights
        mine = bool(self._plain) and 0 < self._attachment == self._control.attachment
        if weights != self._former:
            for spaces in (self._plain, *self._adapted.values()) if mine else ():
                self._close(spaces)
            self._adapted.clear()
            self._attachment = 0
        elif mine and self._events is not None:
            self._events.begun(self._plain)
            for spaces in self._adapted.values():
                self._events.opened(spaces)
        self.plain  # noqa: B018 - opened now, so that slots are there when something is to be published

    def _close(self, spaces: Sequence[int]) -> None:
        for space in spaces:
            self._control.close(space)
        if self._events is not None:
            self._events.closed(spaces)

    def namespace(self, ranks: Ranks, adapter: bytes = b"") -> bytes:
        """What sets what is stored now apart from all that is incompatible with it."""
        salt = variant(self._epoch, self.salt + (self.weights or b""), adapter)
        return namespace(ranks.digests, self._hashing(), salt)

    def _open(self, ranks: Ranks, adapter: bytes = b"", label: str = "", private: bool = False) -> tuple[int, ...]:
        name, hashing = self.namespace(ranks, adapter), self._hashing()
        # With something random in its name no other engine comes to speak of it.
        private = private or bool(self.salt) or self._unknown or hashing.private
        spaces = tuple(range(self._next, self._next + len(self._groups)))
        self._next += len(self._groups)
        for space, group, shards in zip(spaces, self._groups, ranks.shards, strict=True):
            wanted = 2 * max(1, self._step_tokens // group.block_tokens) if self._step_tokens else 0
            sizes = tuple(shards.writes.values())
            label = label or self._label
            geometry = Geometry(name, group.index, hashing.key_bytes, sizes, label, group.whole, private)
            self._control.open(space, geometry, wanted)
        return spaces
