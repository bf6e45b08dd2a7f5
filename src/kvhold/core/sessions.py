"""Who may still touch which bytes.

An *attachment* is one engine instance's scheduler session and worker sessions of one generation. It owns leases and
credits as a whole: the scheduler half decides, but it is the workers that read and write. So what it owns is freed
only when every one of its sessions has said so or is proved dead; a closed socket proves nothing.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from kvhold.core import events as ev
from kvhold.core.events import Lookup, Query, Reason, Role
from kvhold.core.indexes import Index


class Phase(IntEnum):
    """Where an operation is. Its leases are its own in all but the last."""

    MATCHING = 0  # its keys are being looked up, slice by slice
    ASKING = 1  # backings are asked for what nobody has here; then it is matched on
    WAITING = 2  # for reads
    ANSWERED = 3
    STARTED = 4  # workers may be reading
    OVER = 5


@dataclass(slots=True)
class Part:
    """``rows`` found of one index, of ``asked`` keys; those from ``skip`` on are leased."""

    index: Index
    skip: int = 0
    rows: list[int] = field(default_factory=list)
    asked: int = 0

    @property
    def leased(self) -> list[int]:
        return self.rows[self.skip :] if self.skip else self.rows


@dataclass(slots=True)
class Search:
    """How far others were asked for the keys of a question, part by part."""

    event: Lookup | Query
    part: int = 0  # which part is looked through
    start: int = 0  # and from which of its keys on
    reached: int = 0  # its keys that come before were asked for, if they had to be
    asked: int = 0  # keys, of all parts
    late: bool = False  # some did not say in time what they have
    told: bool = False  # its owner knows that others are asked


@dataclass(slots=True, eq=False)
class Operation:
    """One revision of one request's question, and what it holds."""

    attachment: "Attachment"
    session: int
    id: int
    revision: int
    exact: bool  # all or nothing
    parts: list[Part] = field(default_factory=list)
    phase: Phase = Phase.MATCHING
    offsets: "array[int]" = field(default_factory=lambda: array("Q"))  # of what is leased, in order
    charged: int = 0  # bytes of its engine's share
    missing: int = 0  # rows that are on their way
    failed: set[int] = field(default_factory=set)  # of those, rows that will not come
    read: list[int] = field(default_factory=list)  # rows that had to be waited for
    asked: int = 0
    lacked: tuple[int, int] | None = None  # block_of and fingerprint of the first key that it did not get
    reason: Reason = Reason.NONE
    search: Search | None = None  # once others were asked
    asks: set[int] = field(default_factory=set)  # that it waits for

    @property
    def looks(self) -> bool:
        """Whether it is a lookup: it leases nothing, and its answer is a :class:`Residency`."""
        return self.search is not None and isinstance(self.search.event, Lookup)

    @property
    def ended(self) -> bool:
        """Whether it is over, or nobody may decide for it any more."""
        return self.phase is Phase.OVER or self.attachment.broken


@dataclass(slots=True)
class Space:
    """One index as one attachment sees it, with the credits it holds there."""

    index: Index
    want: int  # credits its owner can use; 0 once closed
    credits: set[int] = field(default_factory=set)
    watcher: tuple[int, int] | None = None  # the session that watches it, and how that calls it


@dataclass(slots=True)
class Session:
    id: int
    role: Role
    attachment: "Attachment"
    rank: int
    mapped: bool = False

    @property
    def decides(self) -> bool:
        return self.role is Role.SCHEDULER


@dataclass(slots=True)
class Attachment:
    id: int
    instance: str
    world: int
    broken: bool = False  # a session was lost: nobody joins it any more, and it decides nothing
    since: int = 0  # when it was lost
    ready: bool = False
    sessions: dict[int, Session] = field(default_factory=dict)  # those not proved gone
    lost: set[int] = field(default_factory=set)  # sessions whose socket closed without a word
    operations: dict[int, Operation] = field(default_factory=dict)
    spaces: dict[int, Space] = field(default_factory=dict)
    brought: deque[int] = field(default_factory=deque)  # indexes that it was the first to open, in that order
    answering: int = 0  # questions that are not answered yet
    wanting: int = 0  # its spaces that want credits
    asked: int = 0  # keys that its operations name
    prepared: int = 0  # bytes that its operations are charged with

    @property
    def held_bytes(self) -> int:
        return self.prepared + sum(len(space.credits) * space.index.size for space in self.spaces.values())

    @property
    def scheduler(self) -> Session | None:
        return next((s for s in self.sessions.values() if s.role is Role.SCHEDULER), None)

    @property
    def complete(self) -> bool:
        """The scheduler half and every rank are here, and every rank has mapped the arena."""
        mapped = sum(s.mapped for s in self.sessions.values() if s.role is Role.WORKER)
        return self.scheduler is not None and mapped == self.world


def nonsense(attachment: Attachment, op: int, parts: Sequence[tuple[int, bytes]]) -> str:
    """What is wrong with keys that cannot be meant; nothing is said of spaces that are not open."""
    asked = 0
    for number, keys in parts:
        space = attachment.spaces.get(number)
        count, torn = divmod(len(keys), space.index.key_bytes) if space is not None else (0, 0)
        asked += count
        if torn:
            return f"operation {op}: keys are torn"
    return f"operation {op} names {asked} keys, more than {ev.MAX_QUERY_KEYS}" if asked > ev.MAX_QUERY_KEYS else ""
