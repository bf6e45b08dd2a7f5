"""What happened lately, in fixed memory: one ring of packed integer entries, of which ``kvhold explain`` tells.

An entry is about an object, known by a fingerprint of its key, or about an operation, known by its number. Entries are
written where things happen anyway; nothing is formatted before somebody asks.
"""

from array import array
from collections.abc import Callable, Iterator
from enum import IntEnum

ENTRIES = 1 << 16
"""Entries of 40 bytes that a manager remembers."""


class Kind(IntEnum):
    """What happened. ``a`` and ``b`` of an entry are what the comment says."""

    # to an object; actor is its index, of MISSING and CUT the session that asked
    STORED = 1  # row, slot epoch
    DUPLICATE = 2  # row, slot epoch of the copy that was not needed
    EVICTED = 3  # row, slot epoch
    COOLED = 4  # row, slot epoch: evicted, a backing has it
    WRITTEN = 5  # row, place
    NOT_WRITTEN = 6  # row, place
    LOADING = 7  # row, place
    LOADED = 8  # row, slot epoch
    NOT_LOADED = 9  # row, slot epoch
    PURGED = 10  # row, slot epoch
    QUARANTINED = 11  # row, slot epoch
    RECLAIMED = 12  # row, place
    MISSING = 13  # operation, position in its chain: a question ended here
    CUT = 14  # operation, block_of: its longest hit ended here
    NOT_KEPT = 15  # row, slot epoch: one object too many, or what comes before it in its chain is gone
    # to an operation; actor is its session
    ASKED = 20  # revision, keys
    WAITING = 21  # revision, objects on their way
    ANSWERED = 22  # revision, keys that can be restored
    MISSED = 23  # revision, reason's number
    STARTED = 24  # revision, 0
    RELEASED = 25  # revision, 0
    EXPIRED = 26  # revision, 0
    SUPERSEDED = 27  # revision, the next one
    STALLED = 28  # revision, seconds
    CUT_SHORT = 29  # block_of, fingerprint of the key that was missing
    LACKED = 30  # the same of the first key that a MISSED lacked: right after that


Entry = tuple[int, Kind, int, int, int, int]
"""When, kind, subject, actor, a, b."""

LOOK = 256
"""Entries that are looked at without a pause."""

MARK = 8
"""Bytes of a key's end that an entry has."""


def fingerprint(key: bytes) -> int:
    return int.from_bytes(key[-MARK:], "little")


def block_of(group: int, position: int) -> int:
    """A cache group and a block's position in its chain as one number; both have 32 bits."""
    return group << 32 | position


class History:
    """A ring of ``entries``; ``now`` is the time of what is being noted, in nanoseconds of the shell's clock."""

    def __init__(self, entries: int = ENTRIES) -> None:
        self.now = 0
        self._next = 0
        self._entries = entries
        self._when, self._what = array("Q", bytes(8 * entries)), array("Q", bytes(8 * entries))
        self._a, self._b = array("Q", bytes(8 * entries)), array("Q", bytes(8 * entries))
        self._subject = array("Q", bytes(8 * entries))

    def note(self, kind: int, subject: int, actor: int, a: int, b: int) -> None:
        at = self._next % self._entries
        self._next += 1
        self._when[at] = self.now
        self._what[at] = kind | actor << 8
        self._subject[at] = subject
        self._a[at] = a
        self._b[at] = b

    def latest(self, wanted: Callable[[Entry], bool], subject: int | None = None) -> Iterator[Entry | None]:
        """What is remembered and ``wanted``, perhaps only of one subject, the latest first.

        None after each :data:`LOOK` entries: whoever looks may do something else meanwhile, and misses what is
        forgotten by then.
        """
        for looked, number in enumerate(range(self._next - 1, -1, -1), 1):
            if number < self._next - self._entries:
                return
            at = number % self._entries
            if subject is None or self._subject[at] == subject:
                what = self._what[at]
                entry = (self._when[at], Kind(what & 0xFF), self._subject[at], what >> 8, self._a[at], self._b[at])
                if wanted(entry):
                    yield entry
            if looked % LOOK == 0:
                yield None
