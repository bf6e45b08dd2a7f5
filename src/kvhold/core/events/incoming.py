"""What may happen to the core: what sessions say, what becomes of I/O, and time.

``Event`` is all of it.
"""

from dataclasses import dataclass

from kvhold.core.events.shared import Gone, Role
from kvhold.core.limits import Limits


@dataclass(slots=True, frozen=True)
class Populated:
    """``pages`` more arena pages may be used."""

    pages: int


@dataclass(slots=True, frozen=True)
class Joined:
    """A session introduced itself as one half of an engine instance of ``world`` ranks."""

    session: int
    role: Role
    instance: str
    rank: int
    world: int


@dataclass(slots=True, frozen=True)
class Mapped:
    """A worker session has mapped (and pinned) the arena."""

    session: int


@dataclass(slots=True, frozen=True)
class Left:
    """A session ended, or what was unknown about its end became known."""

    session: int
    how: Gone


@dataclass(slots=True, frozen=True)
class Open:
    """A scheduler session will speak of (namespace, group) as ``space``.

    ``shards`` are the bytes of each shard of an object, in the order of the ranks that write them: at most one of each
    rank. ``slots`` is how many credits it can use.
    Who will ``watch`` is told, until it closes the space, of what can be found there and what cannot any more.
    ``label`` is what people call the namespace.
    In a ``chain`` an object is of use only beside all that come before it; elsewhere, as with windows, each may be.
    A ``private`` namespace is opened by this engine alone, ever: what it holds is forgotten once nobody has it open.
    """

    session: int
    space: int
    namespace: bytes
    group: int
    key_bytes: int
    shards: tuple[int, ...]
    slots: int
    watch: bool = False
    label: str = ""
    chain: bool = False
    private: bool = False


@dataclass(slots=True, frozen=True)
class Close:
    """The session is done with ``space``; its unused credits come back."""

    session: int
    space: int


@dataclass(slots=True, frozen=True)
class Query:
    """How many leading keys of this chain can be restored? Lease those from index ``skip`` on, under ``op``.

    What is in a log alone is read first, and so is what nobody has here and a backing that is asked has. A greater
    ``revision`` of an operation replaces the smaller one.
    """

    session: int
    op: int
    revision: int
    space: int
    skip: int
    keys: bytes


@dataclass(slots=True, frozen=True)
class Lookup:
    """Where are these keys now? ``parts`` are (space, keys). Nothing is read, leased or counted as used.

    A long answer takes time: what has left meanwhile may be in it, and was told to who watches before it. While
    backings are asked, this is an operation of revision 0: another Lookup or question under ``op`` takes its place.
    """

    session: int
    op: int
    parts: tuple[tuple[int, bytes], ...]


@dataclass(slots=True, frozen=True)
class Prepare:
    """Lease exactly these objects under ``op``, after reading what is in a log alone: all of them or none.

    What nobody has here is read from elsewhere as far as a :class:`Lookup` or a :class:`Query` heard of it just now.

    ``used`` are (space, keys) that the engine has itself: whatever becomes of the others, what of them is stored counts
    as used just now. They are not leased, not read and not answered.
    """

    session: int
    op: int
    revision: int
    parts: tuple[tuple[int, bytes], ...]
    used: tuple[tuple[int, bytes], ...] = ()


@dataclass(slots=True, frozen=True)
class Cut:
    """The longest hit of ``op`` ended at block ``position``, for want of this key. Only the history is told of it."""

    session: int
    op: int
    space: int
    key: bytes
    position: int


@dataclass(slots=True, frozen=True)
class AnswerNow:
    """Answer this revision of ``op`` with what is there now, if it still waits for reads."""

    session: int
    op: int
    revision: int


@dataclass(slots=True, frozen=True)
class Started:
    """Restores of these answered operations have been handed to workers: only their owner's word ends them now."""

    session: int
    ops: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class RestoreFailed:
    """A restore of what this operation leases has failed: its objects must not be found again."""

    session: int
    op: int


@dataclass(slots=True, frozen=True)
class Release:
    """The owner's word that nothing leased under these (operation, revision) is read any more."""

    session: int
    ops: tuple[tuple[int, int], ...]


@dataclass(slots=True, frozen=True)
class Commit:
    """Credit slots now hold complete objects: ``keys[i]`` in ``rows[i]``; each key is the parent of the next.

    The first is at ``depth`` in its chain, after ``parent``.
    """

    session: int
    space: int
    parent: bytes
    depth: int
    keys: bytes
    rows: bytes
    epochs: bytes
    shards: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class Return:
    """Credit slots that will not be committed; nothing writes to them any more."""

    session: int
    rows: bytes
    epochs: bytes


@dataclass(slots=True, frozen=True)
class Purge:
    """Forget every object of ``namespace``, or all when empty. Leased bytes stay until released.

    With ``older`` (nanoseconds) only what is older: in a log by when what holds its record was begun, so that others
    there may go as well; in DRAM alone by when it was used last.
    """

    namespace: bytes = b""
    older: int = 0
    session: int = 0  # who is to be told of its end


@dataclass(slots=True, frozen=True)
class Flush:
    """Write to the logs, durably, what is stored now; the session is told when that is done."""

    session: int


@dataclass(slots=True, frozen=True)
class Configure:
    limits: Limits


@dataclass(slots=True, frozen=True)
class Tick:
    """A deadline may have passed. All that clients had said by this event's time has been handled.

    Not so of the sessions that are ``behind``: one may have said that a restore began, so nothing that it leased ends.
    """

    behind: frozenset[int] = frozenset()


@dataclass(slots=True, frozen=True)
class Explain:
    """What happened to a key, or to an operation, of any session or only ``of`` one? With neither, the latest misses.

    A key may be named by its last 8 bytes alone.
    """

    session: int
    key: bytes = b""
    op: int = 0
    of: int = 0


@dataclass(slots=True, frozen=True)
class List:
    """Which keys of (namespace, group) can be found? From the start, or on from a :class:`Listed`'s ``cursor``."""

    session: int
    namespace: bytes
    group: int
    cursor: int = 0


@dataclass(slots=True, frozen=True)
class FromBacking:
    """Word of what one kind of backing alone has to say: each has events of its own, and knows what they mean."""

    backing: int


@dataclass(slots=True, frozen=True)
class BackingOpened(FromBacking):
    """A backing is there, of the kind that this event is of. Nothing of it comes before. Numbers are not reused."""


@dataclass(slots=True, frozen=True)
class Inventory(FromBacking):
    """Some of what a backing was found to have. There may be very many of these."""


@dataclass(slots=True, frozen=True)
class Done:
    """An I/O has ended, and touches no memory any more. ``failed`` are the positions of objects it failed for.

    Those of a read are lost, unless they are ``kept``: they could not be looked at, which says nothing about them.
    ``ages`` are the nanoseconds since each object of a read was computed, from a backing that knows it of each alone.
    """

    io: int
    failed: tuple[int, ...] = ()
    kept: bool = False
    ages: tuple[int, ...] = ()


@dataclass(slots=True, frozen=True)
class Found:
    """An ask has ended: the positions of the names that are ``there``; if it ``failed``, nothing is known of any."""

    io: int
    there: tuple[int, ...] = ()
    failed: bool = False


Event = (
    Populated
    | Joined
    | Mapped
    | Left
    | Open
    | Close
    | Query
    | Lookup
    | Prepare
    | Cut
    | AnswerNow
    | Started
    | RestoreFailed
    | Release
    | Commit
    | Return
    | Purge
    | Flush
    | Configure
    | Tick
    | Explain
    | List
    | FromBacking
    | Done
    | Found
)
