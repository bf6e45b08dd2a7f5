"""What the parts of the core have in common."""

from collections import Counter
from struct import unpack
from typing import Generic, TypeVar

from kvhold.core import events as ev
from kvhold.core.arena import Arena
from kvhold.core.catalogue import Catalogue
from kvhold.core.events import Effect
from kvhold.core.eviction import Eviction, Policy
from kvhold.core.heard import Heard
from kvhold.core.history import History
from kvhold.core.indexes import Index
from kvhold.core.limits import Limits
from kvhold.core.sessions import Attachment, Session
from kvhold.core.turns import MANAGER, Turns, Work

T = TypeVar("T")


def split(keys: bytes, width: int) -> tuple[bytes, ...]:
    return unpack(f"{width}s" * (len(keys) // width), keys)


class Common:
    """State that more than one part changes. ``capacity`` is the arena's final size in bytes."""

    def __init__(self, page: int, capacity: int, limits: Limits, policy: Policy) -> None:
        self.capacity = capacity
        self.now = 0
        self.arena = Arena(page)
        self.history = History()
        self.catalogue = Catalogue(self.arena, self.history, limits, policy)
        self.backings = self.catalogue.backings
        self.eviction = Eviction(self.catalogue)
        self.heard = Heard()
        self.counters: Counter[str] = self.catalogue.counters
        self.attachments: dict[int, Attachment] = {}
        self.sessions: dict[int, Session] = {}
        self.turns = Turns()

    @property
    def limits(self) -> Limits:
        return self.catalogue.limits

    def start(self, work: Work, owner: int = MANAGER, question: bool = False) -> list[Effect]:
        """The first slice of ``work``; the rest waits for its ``owner``'s turn, a ``question`` while that is here."""
        effects = next(work, None)
        if effects is None:
            return []
        self.turns.add(work, owner, question)
        return effects

    def departed(self) -> list[Effect]:
        """Tell watchers which keys cannot be found any more, of those that they have not been told of."""
        catalogue = self.catalogue
        if not catalogue.gone:
            return []
        gone: dict[int, tuple[Index, list[bytes]]] = {}
        for index, key in catalogue.gone:
            gone.setdefault(index.id, (index, []))[1].append(key)
        catalogue.gone = []
        return [
            ev.Removed(session, space, b"".join(keys[start : start + ev.MAX_BATCH]))
            for index, keys in gone.values()
            for session, space in index.watchers
            for start in range(0, len(keys), ev.MAX_BATCH)
        ]

    def speaker(self, session_id: int) -> Attachment | None:
        """The attachment of a scheduler session that may decide for it."""
        session = self.sessions.get(session_id)
        if session is None or not session.decides or session.attachment.broken:
            return None
        return session.attachment


class Timer(Generic[T]):
    """What ends a certain time after it began: the same for all of them, so that they are in order as they come."""

    def __init__(self) -> None:
        self._begun: dict[T, int] = {}

    def begin(self, what: T, now: int) -> None:
        self._begun.pop(what, None)
        self._begun[what] = now

    def end(self, what: T) -> None:
        self._begun.pop(what, None)

    @property
    def oldest(self) -> int | None:
        """When what has waited longest began."""
        return next(iter(self._begun.values()), None)

    def overdue(self, before: int) -> T | None:
        """Take out what began longest ago if it began by ``before``."""
        for what, begun in self._begun.items():
            if begun > before:
                return None
            del self._begun[what]
            return what
        return None
