"""What the executor and the process that speaks to a store tell each other: MessagePack, one datagram each."""

from typing import Annotated, Final

from msgspec import Meta, Struct, msgpack

from kvhold.tiers.remote.record import MAX_NAME, MAX_SHARDS

PART: Final = 64
"""Objects of one message."""
NAMES: Final = 512
"""Names of one message."""
LARGEST: Final = 200_000
"""Bytes of a datagram."""

Name = tuple[bytes, int, bytes]
Key = Annotated[bytes, Meta(max_length=MAX_NAME)]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Names = Annotated[tuple[tuple[Key, Count, Key], ...], Meta(max_length=NAMES)]
Positions = Annotated[tuple[Count, ...], Meta(max_length=NAMES)]


class Item(Struct, frozen=True, array_like=True):
    """An object and where its bytes are.

    ``time`` is when a put's was computed, or before when a get's is too old, in ns of wall time.
    """

    namespace: Key
    group: Count
    key: Key
    parent: Key
    depth: Count
    shards: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MAX_SHARDS)]
    offset: Count
    time: Count


class Exists(Struct, frozen=True, array_like=True, tag="exists"):
    call: int
    names: Names


class Get(Struct, frozen=True, array_like=True, tag="get"):
    call: int
    items: Annotated[tuple[Item, ...], Meta(max_length=PART)]


class Put(Struct, frozen=True, array_like=True, tag="put"):
    call: int
    items: Annotated[tuple[Item, ...], Meta(max_length=PART)]


class Remove(Struct, frozen=True, array_like=True, tag="remove"):
    """``namespace`` b"" is all of the pool; None: the ``names`` alone."""

    call: int
    names: Names
    namespace: Key | None


class Probe(Struct, frozen=True, array_like=True, tag="probe"):
    call: int


class Answer(Struct, frozen=True, array_like=True):
    """How a call ended. An ``error`` is one of all of it, ``refusing`` that the store answers but takes nothing.

    ``good`` are the positions that are there, came, or are proved to be there. ``created`` has of each of a get's good
    ones when it was computed. ``unknown`` are those that could not be looked at, ``refused`` those not taken. ``wrong``
    counts what was there and was something else, by kind.
    """

    call: int
    error: Annotated[str, Meta(max_length=2000)] = ""
    refusing: bool = False
    good: Positions = ()
    created: Positions = ()
    unknown: Positions = ()
    refused: Positions = ()
    wrong: dict[str, Count] = {}
    bytes: Count = 0
    seconds: float = 0.0


Call = Exists | Get | Put | Remove | Probe

encode = msgpack.Encoder().encode
decode_call = msgpack.Decoder(Call).decode
decode_answer = msgpack.Decoder(Answer).decode
