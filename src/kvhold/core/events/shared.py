"""What events and effects both speak of: bounds, and what a session's half, an end, a tier and a short answer are."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

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
    ELSEWHERE: Final = 3  # nobody has it here, but a backing that others store into as well says that it has it


class Reason(StrEnum):
    """Why an answer is shorter than what was asked for."""

    NONE = ""
    NOT_STORED = "not_stored"
    BUDGET = "budget"  # too much is being read or restored already
    TOO_LARGE = "too_large"  # more than could ever be had at once
    DETACHED = "detached"
    DEADLINE = "deadline"  # a backing did not give it, or did not say whether it has it, in time
    READ_FAILED = "read_failed"  # a log gave something else
    OUT_OF_SERVICE = "out_of_service"  # the log that has it is not asked at present
    REMOTE_LATE = "remote_late"  # a store that hosts share did not say whether it has it, or did not give it, in time
    REMOTE_DOWN = "remote_down"  # it is not here, and such a store is out of service


@dataclass(slots=True, frozen=True)
class Stored:
    """One object as an I/O needs it. ``parent`` and ``depth`` (in its chain) are only known when it is written.

    ``offset`` is its slot's in the arena. ``age`` is the nanoseconds since it was computed, when it is written.
    """

    namespace: bytes
    group: int
    key: bytes
    parent: bytes
    depth: int
    shards: tuple[int, ...]
    offset: int
    age: int
