"""The messages. Packed fields are little-endian machine arrays.

A message that has the name of an event or effect in ``kvhold.core.events`` has its meaning and, but for the session,
its fields: those are told there, and a test holds the two together.
"""

from typing import Annotated, Final, Literal

import msgspec

from kvhold.protocol.framing import MAX_OPS


class Tier:
    """Where a key is: the bytes of :class:`Residency` and :class:`Listed`."""

    NOWHERE: Final = 0
    DRAM: Final = 1
    BACKING: Final = 2  # not in DRAM, but on SSD
    ELSEWHERE: Final = 3  # not on this host, but a store that others fill as well says that it has it


class _Message(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    pass


# What is longer is refused before it takes memory: a number of one byte becomes an object of thirty.
_Shards = Annotated[tuple[int, ...], msgspec.Meta(max_length=1024)]
_Parts = Annotated[tuple[tuple[int, bytes], ...], msgspec.Meta(max_length=64)]


# --- client -> manager ------------------------------------------------------------------------------------------


class Hello(_Message):
    """First frame. ``engine`` is said in logs.

    ``step`` is the last engine step in which the scheduler half may have planned against an earlier attachment.
    ``report`` is a worker's word on its KV cache, at most :data:`~kvhold.protocol.MAX_REPORT` bytes. The scheduler half
    of its instance hears it in :class:`Ready`; the manager does not look at it.
    """

    role: Literal["scheduler", "worker", "admin"]
    instance: str = ""
    rank: int = 0
    world: int = 1
    engine: str = ""
    step: int = 0
    report: bytes = b""


class Mapped(_Message):
    """The worker has mapped, and where there is a GPU pinned, the arena."""


class Retire(_Message):
    """The owner's word: nothing of the earlier session that was given ``token`` is in use any more."""

    token: int


class Open(_Message):
    """``label`` is the name under which the model is served."""

    space: int
    namespace: bytes
    group: int
    key_bytes: int
    shards: _Shards
    slots: int
    watch: bool = False
    label: str = ""
    chain: bool = False
    private: bool = False


class Close(_Message):
    space: int


class Query(_Message):
    op: int
    revision: int
    space: int
    skip: int
    keys: bytes


class Lookup(_Message):
    op: int
    parts: _Parts


class Prepare(_Message):
    op: int
    revision: int
    parts: _Parts
    used: _Parts = ()


class Cut(_Message):
    op: int
    space: int
    key: bytes
    position: int


class AnswerNow(_Message):
    op: int
    revision: int


class Started(_Message):
    ops: Annotated[tuple[int, ...], msgspec.Meta(max_length=256)]


class RestoreFailed(_Message):
    op: int


class Release(_Message):
    ops: Annotated[tuple[tuple[int, int], ...], msgspec.Meta(max_length=MAX_OPS)]


class Commit(_Message):
    space: int
    parent: bytes
    depth: int
    keys: bytes
    rows: bytes
    epochs: bytes
    shards: _Shards


class Return(_Message):
    rows: bytes
    epochs: bytes


class Bye(_Message):
    """The owner's word: nothing of this session is in use any more."""


class Status(_Message):
    """Admin: where every byte is, who is attached, the counters, and the spaces used last: of all, or a namespace's."""

    namespace: bytes = b""


class Purge(_Message):
    """Admin: forget every object, or those of one namespace; with ``older`` only what is older than so many seconds."""

    namespace: bytes = b""
    older: float = 0.0


class Flush(_Message):
    """Admin: write to SSD, durably, what is stored now."""


class Explain(_Message):
    """Admin: what happened to a key, or to an operation, perhaps only ``of`` one session?"""

    key: bytes = b""
    op: int = 0
    of: int = 0


class List(_Message):
    """Admin: which keys of (namespace, group) can be found? ``cursor`` is 0, or that of the :class:`Listed` before."""

    namespace: bytes
    group: int
    cursor: int = 0


class Configure(_Message):
    """Admin: change these limits, and the (floor, limit) of these namespaces; what is not named stays."""

    limits: Annotated[dict[str, float], msgspec.Meta(max_length=64)]
    quotas: Annotated[dict[bytes, tuple[int, int]], msgspec.Meta(max_length=4096)]


ClientMessage = (
    Hello
    | Mapped
    | Retire
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
    | Bye
    | Status
    | Purge
    | Flush
    | Explain
    | List
    | Configure
)

# --- manager -> client ------------------------------------------------------------------------------------------


class Welcome(_Message):
    """``incarnation`` is random per manager start, ``token`` names this session; the arena's size is in bytes."""

    incarnation: int
    token: int
    arena_bytes: int


class Refused(_Message):
    """Last frame of a connection that the manager ends."""

    reason: str


class Ready(_Message):
    """Every worker of this scheduler session's instance has mapped the arena: plans may be made against it.

    ``reports`` are those that the workers introduced themselves with, in no particular order.
    """

    reports: tuple[bytes, ...] = ()


class Settled(_Message):
    """To a worker: its scheduler half plans against earlier managers no more after engine step ``step``."""

    step: int


class Opened(_Message):
    space: int
    credit: int
    note: str


class Answer(_Message):
    op: int
    revision: int
    resident: int
    offsets: bytes
    reason: str
    read: bytes = b""


class Waiting(_Message):
    op: int
    revision: int
    objects: int


class Residency(_Message):
    op: int
    tiers: tuple[bytes, ...]


class Expired(_Message):
    op: int
    revision: int


class Recall(_Message):
    space: int
    keep: int


class Grant(_Message):
    space: int
    rows: bytes
    offsets: bytes
    epochs: bytes


class Added(_Message):
    """Of the keys of a commit to a watched space, those that can be found now."""

    space: int
    keys: bytes


class Removed(_Message):
    """These keys of a watched space cannot be found any more, whoever stored them."""

    space: int
    keys: bytes


class StatusReply(_Message):
    """A JSON document."""

    document: bytes


class Purged(_Message):
    """Nothing that was stored before the purge can be found any more, by this manager or by one after a crash.

    That were ``objects`` of ``bytes`` together.
    """

    objects: int = 0
    bytes: int = 0


class Flushed(_Message):
    """What waited to be written when the flush was asked for has been.

    ``kept`` are, by kind of backing, how many there are and how many of the ``objects`` they have now: "log" is a
    directory on an SSD. The other objects were stored since, are not to be written, or have no room there.
    """

    objects: int = 0
    kept: dict[str, tuple[int, int]] = {}


class Explained(_Message):
    lines: tuple[str, ...]


class Listed(_Message):
    keys: bytes
    tiers: bytes
    cursor: int


class Configured(_Message):
    """The limits that hold now, as a JSON document."""

    document: bytes


ManagerMessage = (
    Welcome
    | Refused
    | Ready
    | Settled
    | Opened
    | Answer
    | Waiting
    | Residency
    | Expired
    | Recall
    | Grant
    | Added
    | Removed
    | StatusReply
    | Purged
    | Flushed
    | Explained
    | Listed
    | Configured
)

FROM_CLIENT: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
FROM_MANAGER: msgspec.msgpack.Decoder[ManagerMessage] = msgspec.msgpack.Decoder(ManagerMessage)
