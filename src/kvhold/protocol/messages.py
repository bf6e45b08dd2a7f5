"""The messages. Meanings are those of ``kvhold.core.events``; packed fields are little-endian machine arrays."""

from typing import Literal

import msgspec


class _Message(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    pass


# --- client -> manager ------------------------------------------------------------------------------------------


class Hello(_Message):
    """First frame. ``engine`` is said in logs.

    ``step`` is the last engine step in which the scheduler half may have planned against an earlier attachment.
    """

    role: Literal["scheduler", "worker", "admin"]
    instance: str = ""
    rank: int = 0
    world: int = 1
    engine: str = ""
    step: int = 0


class Mapped(_Message):
    """The worker has mapped, and where there is a GPU pinned, the arena."""


class Retire(_Message):
    """The owner's word: nothing of the earlier session that was given ``token`` is in use any more."""

    token: int


class Open(_Message):
    space: int
    namespace: bytes
    group: int
    key_bytes: int
    shards: tuple[int, ...]
    slots: int


class Close(_Message):
    space: int


class Query(_Message):
    op: int
    space: int
    skip: int
    keys: bytes


class Release(_Message):
    ops: tuple[int, ...]


class Commit(_Message):
    space: int
    parent: bytes
    keys: bytes
    rows: bytes
    epochs: bytes
    shards: tuple[int, ...]


class Return(_Message):
    rows: bytes
    epochs: bytes


class Bye(_Message):
    """The owner's word: nothing of this session is in use any more."""


class Status(_Message):
    """Admin: where every byte is, who is attached, and the counters."""


class Purge(_Message):
    """Admin: forget every object, or those of one namespace."""

    namespace: bytes = b""


ClientMessage = Hello | Mapped | Retire | Open | Close | Query | Release | Commit | Return | Bye | Status | Purge

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
    """Every worker of this scheduler session's instance has mapped the arena: plans may be made against it."""


class Settled(_Message):
    """To a worker: its scheduler half plans against earlier managers no more after engine step ``step``."""

    step: int


class Opened(_Message):
    space: int
    credit: int
    note: str


class Answer(_Message):
    op: int
    resident: int
    offsets: bytes
    reason: str


class Grant(_Message):
    space: int
    rows: bytes
    offsets: bytes
    epochs: bytes


class StatusReply(_Message):
    """A JSON document."""

    document: bytes


class Purged(_Message):
    """The purge has begun; what was stored before it can no longer be found once it ends."""


ManagerMessage = Welcome | Refused | Ready | Settled | Opened | Answer | Grant | StatusReply | Purged

FROM_CLIENT: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
FROM_MANAGER: msgspec.msgpack.Decoder[ManagerMessage] = msgspec.msgpack.Decoder(ManagerMessage)
