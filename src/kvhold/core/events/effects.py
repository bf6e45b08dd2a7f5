"""What the core asks of its shell: to tell a session something (``ToSession``), or a backing to do it (``ToBacking``).

``Effect`` is all of it.
"""

from dataclasses import dataclass

from kvhold.core.events.shared import Reason, Stored


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
    """The answer will come, after ``objects`` were read from backings.

    With 0 of them, backings are being asked what they have; that may be followed by a second one.
    """

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
    """To who watches a space: of the keys of its commit, in order, those that can be found now, new or not.

    Everybody who watches it is told so of what came from elsewhere, too.
    """

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
    """An I/O of a backing, answered by exactly one :class:`Done` with its number: also when it was cancelled.

    An :class:`Ask` is answered by a :class:`Found` instead.
    """

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
class Ask(ToBacking):
    """Which of these (namespace, group, key) does it have, after all that it was told to forget before this?"""

    names: tuple[tuple[bytes, int, bytes], ...]


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
