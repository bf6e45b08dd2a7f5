"""What may happen to the core (events) and what it asks of its shell (effects).

Sessions are numbered by the shell and never reused. Packed fields are little-endian machine arrays: ``rows`` of
32-bit, ``epochs`` and ``offsets`` of 64-bit unsigned integers; ``keys`` are fixed-length keys, one after the other.
"""

from dataclasses import dataclass
from enum import StrEnum

MAX_QUERY_KEYS = 65_536
"""Longest chain that one query may name."""
MAX_BATCH = 512
"""Rows in one commit or return, and the unit of work that one event may cost."""


class Role(StrEnum):
    SCHEDULER = "scheduler"
    WORKER = "worker"


class Gone(StrEnum):
    """How a session ended."""

    SAID = "said"  # its owner said that nothing of it is in use any more
    DEAD = "dead"  # its process is proved dead
    UNKNOWN = "unknown"  # the socket closed; the process may still be copying


class Reason(StrEnum):
    """Why a query's answer is shorter than its chain."""

    NONE = ""
    NOT_STORED = "not_stored"
    BUDGET = "budget"
    DETACHED = "detached"


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

    ``shards`` are the bytes of each rank's part of an object, in rank order; ``slots`` how many credits it can use.
    """

    session: int
    space: int
    namespace: bytes
    group: int
    key_bytes: int
    shards: tuple[int, ...]
    slots: int


@dataclass(slots=True, frozen=True)
class Close:
    """The session is done with ``space``; its unused credits come back."""

    session: int
    space: int


@dataclass(slots=True, frozen=True)
class Query:
    """How many leading keys of this chain are resident? Lease those from index ``skip`` on, under ``op``."""

    session: int
    op: int
    space: int
    skip: int
    keys: bytes


@dataclass(slots=True, frozen=True)
class Release:
    """The owner's word that nothing leased under these operations is read any more."""

    session: int
    ops: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class Commit:
    """Credit slots now hold complete objects: ``keys[i]`` in ``rows[i]``; each key is the parent of the next."""

    session: int
    space: int
    parent: bytes
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
    """Forget every object of ``namespace``, or all when empty. Leased bytes stay until released."""

    namespace: bytes = b""


Event = Populated | Joined | Mapped | Left | Open | Close | Query | Release | Commit | Return | Purge

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
    """``resident`` leading keys are here; ``offsets`` of those from ``skip`` on are leased under ``op``."""

    session: int
    op: int
    resident: int
    offsets: bytes
    reason: Reason


@dataclass(slots=True, frozen=True)
class Grant:
    """Anonymous slots that the session may write and then commit or return."""

    session: int
    space: int
    rows: bytes
    offsets: bytes
    epochs: bytes


@dataclass(slots=True, frozen=True)
class Part:
    """Close this session: another session of its attachment was lost, so the whole attaches anew."""

    session: int
    reason: str


Effect = Accept | Refuse | Ready | Opened | Answer | Grant | Part
