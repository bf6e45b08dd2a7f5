"""Frames out of a byte stream, however it is cut, and messages out of frames."""

import struct
from itertools import pairwise
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold import protocol as wire
from kvhold.protocol import framing


def cut(stream: bytes, at: list[int]) -> list[bytes]:
    """``stream`` in pieces that end at ``at``."""
    ends = [0, *sorted(place % (len(stream) + 1) for place in at), len(stream)]
    return [stream[start:end] for start, end in pairwise(ends)]


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


@pytest.mark.parametrize("own", [framing._OWN, 12])
@given(st.lists(st.binary(max_size=40), max_size=12), st.lists(st.integers(0, 1000), max_size=12))
def test_any_split_gives_the_same_frames(own: int, bodies: list[bytes], at: list[int]) -> None:
    """Also of frames that get memory of their own."""
    reader, given_, taken = wire.FrameReader(limit=40), 0, 0
    pieces = cut(b"".join(map(framed, bodies)), at)
    found = []
    with mock.patch.object(framing, "_OWN", own):
        for piece in pieces:
            for body in reader.feed(piece):
                found.append(body)
                taken += 4 + len(body)
            given_ += len(piece)
            assert reader.held == given_ - taken
    assert found == bodies
    assert not reader.held
    assert not reader.complete


@given(
    st.lists(st.binary(max_size=40), max_size=6),
    st.integers(41, (1 << 32) - 1),
    st.binary(max_size=20),
    st.lists(st.integers(0, 1000), max_size=8),
)
def test_a_frame_over_the_limit_is_met_where_it_begins(
    bodies: list[bytes], size: int, rest: bytes, at: list[int]
) -> None:
    """Every frame before it is delivered, nothing after it, however the stream is cut."""
    reader = wire.FrameReader(limit=40)
    pieces = cut(b"".join(map(framed, bodies)) + struct.pack("<I", size) + rest, at)
    found = []
    with pytest.raises(wire.ProtocolError, match=f"frame of {size} bytes, at most 40 are allowed"):
        found += [body for piece in pieces for body in collect(reader, piece, found)]
    assert found == bodies


def collect(reader: wire.FrameReader, piece: bytes, found: list[bytes]) -> list[bytes]:
    for body in reader.feed(piece):
        found.append(body)
    return []


def test_bodies_outlive_the_stream() -> None:
    """What was delivered does not change when its buffer is used again."""
    reader, buffer = wire.FrameReader(), bytearray(framed(b"first"))
    (body,) = reader.feed(memoryview(buffer))
    buffer[:] = framed(b"other")
    assert body == b"first"
    assert list(reader.feed(buffer)) == [b"other"]


def test_the_largest_query_fits() -> None:
    query = wire.Query(1, 1, 1, 0, b"k" * 32 * 65_536)
    (body,) = wire.FrameReader().feed(wire.frame(query))
    assert wire.FROM_CLIENT.decode(body) == query


def test_a_preamble_names_both_versions() -> None:
    wire.check_preamble(wire.PREAMBLE)
    with pytest.raises(wire.ProtocolError, match=f"speaks protocol 7, this manager speaks {wire.VERSION}; install"):
        wire.check_preamble(b"KVHOLD\7\0")
    for other in (b"GET / HT", b"", b"KVHOLX\1\0"):
        with pytest.raises(wire.ProtocolError, match="not a kvhold client"):
            wire.check_preamble(other)


MESSAGES = [
    wire.Hello("worker", "engine", 1, 2, "vLLM", 7, b"report"),
    wire.Mapped(),
    wire.Retire(1 << 62),
    wire.Open(1, b"n" * 32, 0, 32, (4096, 8192), 64, True),
    wire.Close(1),
    wire.Query(1, 1, 2, 3, b"k" * 64),
    wire.Lookup(1, ((1, b"k" * 64), (2, b""))),
    wire.Prepare(1, 2, ((1, b"k" * 64),), ((2, b"k" * 32),)),
    wire.Cut(1, 2, b"k" * 32, 14),
    wire.AnswerNow(1, 2),
    wire.Started((1, 2)),
    wire.RestoreFailed(3),
    wire.Release(((1, 1), (2, 1), (3, 2))),
    wire.Commit(1, b"", 0, b"k" * 8, b"rows", b"epochs..", (4096,)),
    wire.Return(b"rows", b"epochs.."),
    wire.Bye(),
    wire.Status(),
    wire.Purge(b"n" * 32),
    wire.Flush(),
    wire.Explain(b"k" * 32, 0),
    wire.List(b"n" * 32, 2, 1 << 61),
    wire.Configure({"max_objects": 5.0}, {b"n" * 32: (1, 2)}),
]
ANSWERS = [
    wire.Welcome(1, 2, 1 << 40),
    wire.Refused("no"),
    wire.Ready((b"one", b"")),
    wire.Settled(3),
    wire.Opened(1, 2, ""),
    wire.Answer(1, 2, 3, b"", "not_stored", b"read"),
    wire.Waiting(1, 2, 3),
    wire.Residency(1, (b"\0\1\2",)),
    wire.Expired(1, 2),
    wire.Recall(1, 2),
    wire.Flushed(),
    wire.Flushed(3, {"log": (1, 2), "store": (1, 3)}),
    wire.Explained(("one", "two")),
    wire.Listed(b"k" * 64, b"\1\2", 4096),
    wire.Added(1, b"k" * 64),
    wire.Removed(1, b"k" * 64),
    wire.Configured(b"{}"),
    wire.Grant(1, b"rows", b"offsets.", b"epochs.."),
    wire.StatusReply(b"{}"),
    wire.Purged(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_a_client_says_arrives_and_is_only_a_clients(message: wire.ClientMessage) -> None:
    (body,) = wire.FrameReader().feed(wire.frame(message))
    assert wire.FROM_CLIENT.decode(body) == message
    with pytest.raises(ValueError):
        wire.FROM_MANAGER.decode(body)


@pytest.mark.parametrize("message", ANSWERS, ids=lambda message: type(message).__name__)
def test_what_a_manager_says_arrives_and_is_only_a_managers(message: wire.ManagerMessage) -> None:
    (body,) = wire.FrameReader().feed(wire.frame(message))
    assert wire.FROM_MANAGER.decode(body) == message
    with pytest.raises(ValueError):
        wire.FROM_CLIENT.decode(body)


def test_every_message_is_tried_above() -> None:
    assert {type(message) for message in MESSAGES} == set(wire.ClientMessage.__args__)
    assert {type(message) for message in ANSWERS} == set(wire.ManagerMessage.__args__)


@given(st.sampled_from([*MESSAGES, *ANSWERS]), st.data())
def test_a_torn_message_is_no_message(message: wire.ClientMessage | wire.ManagerMessage, data: st.DataObject) -> None:
    body = wire.frame(message)[4:]
    torn = body[: data.draw(st.integers(0, len(body) - 1))]
    for decoder in (wire.FROM_CLIENT, wire.FROM_MANAGER):
        with pytest.raises(ValueError):
            decoder.decode(torn)


@given(st.binary(max_size=200))
def test_garbage_is_no_message_or_one_of_ours(body: bytes) -> None:
    """Nothing but a ValueError ever comes out of a decoder."""
    for decoder in (wire.FROM_CLIENT, wire.FROM_MANAGER):
        try:
            decoder.decode(body)
        except ValueError:
            pass


def test_a_frame_for_which_there_is_no_memory_is_the_end_of_its_client_alone() -> None:
    data = struct.pack("<I", framing._OWN + 1) + bytes(8)
    reader = wire.FrameReader()
    reader.add(data)
    failing = mock.patch.object(framing.mmap, "mmap", side_effect=OSError(12, "Cannot allocate memory"))
    with failing, pytest.raises(wire.ProtocolError, match="no memory for a frame of"):
        reader.add(data)
