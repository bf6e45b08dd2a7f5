"""A worker half's sessions, and the arenas that are mapped for them."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvhold import protocol as wire
from kvhold.client.arena import ArenaMapping
from kvhold.client.channel import Channel
from kvhold.copy.engine import Copier

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Session:
    """One session's mapping of an arena."""

    token: int
    arena: ArenaMapping


class Mappings:
    """Arenas by session, mapped and let go on the keeper's thread; the engine's thread only looks at what there is.

    An older session's arena goes once no plan can name it any more and no copy uses it: ``running`` says whether a copy
    that was planned in a step or earlier has not ended.
    """

    def __init__(self, hello: wire.Hello, copier: Copier, running: Callable[[int], bool]) -> None:
        self._hello = hello
        self._copier = copier
        self._running = running
        # Shared by both threads; never held across a copy or a call.
        self._lock = threading.Lock()
        self._sessions: list[Session] = []  # the newest last; older ones until nothing may use them any more
        self._done_step = 0  # the last step all of whose copies were begun
        self._retired: deque[int] = deque(maxlen=64)  # tokens of sessions that were let go
        self._settled_step: int | None = None  # older sessions are used by plans up to this step only

    # --- for the keeper, on its thread --------------------------------------------------------------------------

    def hello(self) -> wire.Hello:
        return self._hello

    def attached(self, channel: Channel) -> None:
        for token in self._retired:  # the word may have been lost with the session that carried it
            channel.send(wire.Retire(token))
        try:
            arena = ArenaMapping(channel.arena_fd, channel.welcome.arena_bytes, channel.welcome.incarnation)
            try:
                self._copier.register(arena)
            except Exception:
                arena.close()
                raise
        except Exception:
            self._retired.append(channel.welcome.token)  # nothing of it was ever in use: the next session says so
            raise
        with self._lock:
            self._sessions.append(Session(channel.welcome.token, arena))
            self._settled_step = None
        channel.send(wire.Mapped())

    def readable(self, channel: Channel) -> None:
        for message in channel.receive():
            match message:
                case wire.Settled(step):
                    with self._lock:
                        self._settled_step = step
                case wire.Refused(reason):
                    log.warning("kvhold: the manager ended the session: %s", reason)
                    channel.abandon()
                case _:
                    pass

    def tick(self, channel: Channel) -> bool:
        """Let go of older sessions' arenas once no plan and no copy can name them; True while there are any."""
        with self._lock:
            settled = self._settled_step
            if len(self._sessions) < 2:
                return False
            if settled is None or self._done_step < settled or self._running(settled):
                return True
            *old, newest = self._sessions
            self._sessions = [newest]
        for session in old:
            self._unmap(session)
            self._retired.append(session.token)
            channel.send(wire.Retire(session.token))
        return False

    def _unmap(self, session: Session) -> None:
        self._copier.unregister(session.arena)
        session.arena.close()

    # --- on the engine's thread ---------------------------------------------------------------------------------

    def arena(self, incarnation: int) -> ArenaMapping | None:
        """The arena of the manager of ``incarnation``, if it is mapped."""
        with self._lock:
            found = [session.arena for session in self._sessions if session.arena.incarnation == incarnation]
        return found[-1] if found else None

    def begun(self, step: int) -> bool:
        """All copies of ``step`` were begun; whether an older arena waits for that."""
        with self._lock:
            self._done_step = step
            return len(self._sessions) > 1

    def close(self) -> None:
        """Unmap all, once nothing is copied and the keeper has ended."""
        for session in self._sessions:
            self._unmap(session)
        self._sessions = []
