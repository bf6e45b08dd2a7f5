"""What may happen to the core (events) and what it asks of its shell (effects).

Sessions are numbered by the shell and never reused. Packed fields are little-endian machine arrays: ``rows`` of
32-bit, ``epochs`` and ``offsets`` of 64-bit unsigned integers; ``keys`` are fixed-length keys, one after the other.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvhold.core.limits import Limits

MAX_QUERY_KEYS = 65_536
"""Longest chain that one query may name."""
MAX_BATCH = 256
"""Rows in one commit or return, and the unit of work that one event may cost."""
MAX_LISTED = 4096
"""Rows that are looked at for one part of a listing."""


class Role(StrEnum):
    SCHEDULER = "scheduler"
    WORKER = "worker"


class Gone(StrEnum):
    """How a session ended."""

    SAID = "said"  # its owner said that nothing of it is in use any more
    DEAD = "dead"  # its process is proved dead
    UNKNOWN = "unknown"  # the socket closed; the process may still be copying


class Tier:
    """Where a key is, as a byte."""

    NOWHERE: Final = 0
    DRAM: Final = 1
    BACKING: Final = 2  # in a backing alone, or on its way from there


class Reason(StrEnum):
    """Why an answer is shorter than what was asked for."""

    NONE = ""
    NOT_STORED = "not_stored"
    BUDGET = "budget"  # too much is being read or restored already
    TOO_LARGE = "too_large"  # more than could ever be had at once
    DETACHED = "detached"
    DEADLINE = "deadline"  # a log did not give it in time
    READ_FAILED = "read_failed"  # a log gave something else
    OUT_OF_SERVICE = "out_of_service"  # the log that has it is not asked at present


@dataclass(slots=True, frozen=True)
class Stored:
    """One object as an I/O needs it. ``parent`` and ``depth`` (in its chain) are only known when it is written.

    ``offset`` is its slot's in the arena.
    """

    namespace: bytes
    group: int
    key: bytes
    parent: bytes
    depth: int
    shards: tuple[int, ...]
    offset: int


# --- events -----------------------------------------------------------------------------------------------------


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

    What is in a log alone is read first. A greater ``revision`` of an operation replaces the smaller one.
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

    A long answer takes time: what has left meanwhile may be in it, and was told to who watches before it.
    """

    session: int
    op: int
    parts: tuple[tuple[int, bytes], ...]


@dataclass(slots=True, frozen=True)
class Prepare:
    """Lease exactly these objects under ``op``, after reading what is in a log alone: all of them or none.

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
    """

    io: int
    failed: tuple[int, ...] = ()
    kept: bool = False


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
)

# --- effects ----------------------------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class Accept:
    session: int


@dataclass(slots=True, frozen=True)
class Refuse:
    """End the session and tell its owner why."""

    session: int
    reason: str


@dataclass(slots=True, frozen=True)
class Ready:
    """Tell this scheduler session that every worker of its instance, ``workers``, has mapped the arena."""

    session: int
    workers: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class Opened:
    """``credit`` slots will be kept granted; 0 with a ``note`` when this space cannot be stored here."""

    session: int
    space: int
    credit: int
    note: str


@dataclass(slots=True, frozen=True)
class Answer:
    """``resident`` leading keys are here; ``offsets`` of those from ``skip`` on are leased under ``op``.

    To a :class:`Prepare`, the offsets of all of its keys, part by part, or none. ``read`` are the positions among the
    offsets, as 32-bit integers, of what had to be waited for until it was read from a log.
    """

    session: int
    op: int
    revision: int
    resident: int
    offsets: bytes
    reason: Reason
    read: bytes = b""


@dataclass(slots=True, frozen=True)
class Waiting:
    """The answer will come, after ``objects`` were read from a log."""

    session: int
    op: int
    revision: int
    objects: int


@dataclass(slots=True, frozen=True)
class Residency:
    """Answer to a :class:`Lookup`: per part, the :class:`Tier` of each key as a byte."""

    session: int
    op: int
    tiers: tuple[bytes, ...]


@dataclass(slots=True, frozen=True)
class Expired:
    """An answer was not used in time and holds nothing any more."""

    session: int
    op: int
    revision: int


@dataclass(slots=True, frozen=True)
class Stalled:
    """For the operator: a restore has been under way for so long. Nothing is taken from it."""

    session: int
    op: int
    seconds: int


@dataclass(slots=True, frozen=True)
class Explained:
    """No ``lines``: nothing is known."""

    session: int
    lines: tuple[str, ...]


@dataclass(slots=True, frozen=True)
class Listed:
    """Some ``keys`` and, for each, a byte of ``tiers`` as in :class:`Residency`; ``cursor`` is 0 after the last ones.

    A key that can be found during the whole listing is in it, and once: going to a log and coming back changes no
    object's row. But one whose record could not be looked at while somebody waited for it is given another row; a
    listing that goes on after that starts over, and names keys twice rather than miss one.
    """

    session: int
    keys: bytes
    tiers: bytes
    cursor: int


@dataclass(slots=True, frozen=True)
class Purged:
    """A purge has ended: nothing of it can be found any more, nor, if ``durable``, by a manager after this one.

    So many ``objects`` that could be found before, of so many ``bytes`` together, wherever they were.
    """

    session: int
    durable: bool
    objects: int = 0
    bytes: int = 0


@dataclass(slots=True, frozen=True)
class Flushed:
    """Nothing that was stored before the flush waits for a log any more; ``durable`` unless a log failed to say so."""

    session: int
    durable: bool


@dataclass(slots=True, frozen=True)
class Grant:
    """Anonymous slots that the session may write and then commit or return."""

    session: int
    space: int
    rows: bytes
    offsets: bytes
    epochs: bytes


@dataclass(slots=True, frozen=True)
class Added:
    """To who watches a space: of the keys of its commit, in order, those that can be found now, new or not."""

    session: int
    space: int
    keys: bytes


@dataclass(slots=True, frozen=True)
class Removed:
    """To everybody who watches a space: these keys cannot be found any more, in DRAM or in a log."""

    session: int
    space: int
    keys: bytes


@dataclass(slots=True, frozen=True)
class Recall:
    """The session should return unused credits of a space until it holds ``keep``: others need them."""

    session: int
    space: int
    keep: int


@dataclass(slots=True, frozen=True)
class Detach:
    """Close this session: another session of its attachment was lost, so the whole attaches anew."""

    session: int
    reason: str


@dataclass(slots=True, frozen=True)
class ToBacking:
    """An I/O of a backing, answered by exactly one :class:`Done` with its number: also when it was cancelled."""

    io: int
    backing: int


@dataclass(slots=True, frozen=True)
class Write(ToBacking):
    """Take these objects from their slots."""

    objects: tuple[Stored, ...]


@dataclass(slots=True, frozen=True)
class Read(ToBacking):
    """Fill slots with these objects, and check each for itself."""

    objects: tuple[Stored, ...]


@dataclass(slots=True, frozen=True)
class Forget(ToBacking):
    """Remember durably that these (namespace, group, key), or all of ``namespace`` (empty: everything), are gone.

    What is written after this may be there again.
    """

    names: tuple[tuple[bytes, int, bytes], ...]
    namespace: bytes | None


@dataclass(slots=True, frozen=True)
class Cancel(ToBacking):
    """Nobody waits for the read with this number any more; it is no I/O of its own."""


ToSession = (
    Accept
    | Refuse
    | Ready
    | Opened
    | Answer
    | Waiting
    | Residency
    | Expired
    | Stalled
    | Explained
    | Listed
    | Purged
    | Flushed
    | Grant
    | Added
    | Removed
    | Recall
    | Detach
)
Effect = ToSession | ToBacking
