"""A worker half's sessions, and the arenas that are mapped for them."""

import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from kvhold import protocol as wire
from kvhold.client.arena import ArenaMapping
from kvhold.client.channel import Channel
from kvhold.threads import ANY, ATTACHER, ENGINE, belongs_to

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Session:
    """One session's mapping of an arena."""

    token: int
    arena: ArenaMapping


class Copying(Protocol):
    """Who copies to and from the arenas, by plans that have growing numbers: an engine's steps, or single copies."""

    def register(self, arena: ArenaMapping) -> None:
        """Make ``arena`` ready to be copied to and from; may take seconds, on the attacher's thread, and may raise."""

    def unregister(self, arena: ArenaMapping) -> None:
        """Undo :meth:`register`; no copy of ``arena`` runs any more."""

    def ended(self, plan: int) -> bool:
        """Whether all copies of plans up to this one were begun and have ended. Called on the attacher's thread."""


@belongs_to(ATTACHER, but={ENGINE: ("close",), ANY: ("arena",)})
class Mappings:
    """Arenas by session, mapped and let go on the attacher's thread; other threads only look at what there is.

    An older session's arena goes once its scheduler half has attached again, so that no later plan can name it, and
    all ``copies`` of earlier plans have ended.
    """

    def __init__(self, hello: wire.Hello, copies: Copying) -> None:
        self._hello = hello
        self._copies = copies
        # Shared by the threads; never held across a copy or a call.
        self._lock = threading.Lock()
        self._sessions: list[Session] = []  # the newest last; older ones until nothing may use them any more
        self._retired: deque[int] = deque(maxlen=64)  # tokens of sessions that were let go
        self._settled: int | None = None  # older sessions are used by plans up to this one only

    # --- for the attacher, on its thread --------------------------------------------------------------------------

    def hello(self) -> wire.Hello:
        return self._hello

    def attached(self, channel: Channel) -> None:
        for token in self._retired:  # the word may have been lost with the session that carried it
            channel.send(wire.Retire(token))
        try:
            arena = ArenaMapping(channel.arena_fd, channel.welcome.arena_bytes, channel.welcome.incarnation)
            try:
                self._copies.register(arena)
            except Exception:
                arena.close()
                raise
        except Exception:
            self._retired.append(channel.welcome.token)  # nothing of it was ever in use: the next session says so
            raise
        with self._lock:
            self._sessions.append(Session(channel.welcome.token, arena))
        self._settled = None
        channel.send(wire.Mapped())

    def readable(self, channel: Channel) -> None:
        for message in channel.receive():
            match message:
                case wire.Settled(plan):
                    self._settled = plan
                case wire.Refused(reason):
                    log.warning("kvhold: the manager ended the session: %s", reason)
                    channel.abandon()
                case _:
                    pass

    def tick(self, channel: Channel) -> bool:
        """Let go of older sessions' arenas once no plan and no copy can name them; True while there are any."""
        if not self.has_old:
            return False
        if self._settled is None or not self._copies.ended(self._settled):
            return True
        with self._lock:
            *old, newest = self._sessions
            self._sessions = [newest]
        for session in old:
            self._unmap(session)
            self._retired.append(session.token)
            channel.send(wire.Retire(session.token))
        return False

    def _unmap(self, session: Session) -> None:
        self._copies.unregister(session.arena)
        session.arena.close()

    # --- on any thread ------------------------------------------------------------------------------------------

    @property
    def has_old(self) -> bool:
        """Whether an older session's arena waits for its end."""
        with self._lock:
            return len(self._sessions) > 1

    def arena(self, incarnation: int) -> ArenaMapping | None:
        """The arena of the manager of ``incarnation``, if it is mapped."""
        with self._lock:
            found = [session.arena for session in self._sessions if session.arena.incarnation == incarnation]
        return found[-1] if found else None

    def close(self) -> None:
        """Unmap all, once nothing is copied and the attacher has ended."""
        for session in self._sessions:
            self._unmap(session)
        self._sessions = []
