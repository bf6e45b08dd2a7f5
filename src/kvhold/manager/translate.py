"""From messages to events, with all checked that the core relies on, and from effects to messages."""

from kvhold import protocol as wire
from kvhold.core import events as ev

MAX_KEY_BYTES = 64
MAX_PARTS = 64
MAX_LABEL = 128
"""Characters that are kept of what a namespace is called."""
MAX_NUMBER = 1 << 32
"""Groups and depths are below it: it is what a record on an SSD has room for."""

MAY_SAY: dict[str, tuple[type, ...]] = {
    "": (wire.Hello,),
    "scheduler": (
        wire.Open,
        wire.Close,
        wire.Query,
        wire.Lookup,
        wire.Prepare,
        wire.Cut,
        wire.Hurry,
        wire.Started,
        wire.Spoiled,
        wire.Release,
        wire.Commit,
        wire.Return,
        wire.Retire,
        wire.Bye,
    ),
    "worker": (wire.Mapped, wire.Retire, wire.Bye),
    "admin": (wire.Status, wire.Purge, wire.Flush, wire.Explain, wire.List, wire.Configure),
}
"""What each role may say; who has no role yet introduces itself."""

QUESTIONS = (
    wire.Open,
    wire.Query,
    wire.Lookup,
    wire.Prepare,
    wire.Status,
    wire.Purge,
    wire.Flush,
    wire.Explain,
    wire.List,
    wire.Configure,
)
"""What is answered: it is of no use to who is gone, and waits while former answers wait to be read."""
LATER, ANSWERS = (
    (wire.Status, wire.Purge, wire.Flush, wire.Explain, wire.List),
    (wire.StatusReply, wire.Purged, wire.Flushed, wire.Explained, wire.Listed),
)
"""An operator's questions that take time, and their answers: there is one at a time."""


def event_of(session: int, message: wire.ClientMessage) -> ev.Event:
    """The core event of a session's message. Raises ProtocolError where packed fields do not fit each other."""
    match message:
        case wire.Mapped():
            return ev.Mapped(session)
        case wire.Query(op, revision, space, skip, keys):
            _check_numbers(op, revision)
            if not 0 <= skip <= ev.MAX_QUERY_KEYS or len(keys) > ev.MAX_QUERY_KEYS * MAX_KEY_BYTES:
                raise wire.ProtocolError(f"query of {len(keys)} bytes from {skip}")
            return ev.Query(session, op, revision, space, skip, keys)
        case wire.Lookup(op, parts):
            _check_numbers(op)
            _check_parts(parts)
            return ev.Lookup(session, op, parts)
        case wire.Prepare(op, revision, parts, used):
            _check_numbers(op, revision)
            _check_parts((*parts, *used))
            return ev.Prepare(session, op, revision, parts, used)
        case wire.Cut(op, space, key, position):
            _check_numbers(op)
            if not 0 < len(key) <= MAX_KEY_BYTES or not 0 <= position < MAX_NUMBER:
                raise wire.ProtocolError(f"hit cut at block {position} by a key of {len(key)} bytes")
            return ev.Cut(session, op, space, key, position)
        case wire.Hurry(op, revision):
            _check_numbers(op, revision)
            return ev.Hurry(session, op, revision)
        case wire.Started(ops):
            return ev.Started(session, ops)
        case wire.Spoiled(op):
            return ev.Spoiled(session, op)
        case wire.Release(ops):
            return ev.Release(session, ops)
        case wire.Commit(space, parent, depth, keys, rows, epochs, shards):
            _check_batch(rows, epochs)
            if not 0 <= depth <= MAX_NUMBER - len(rows) // 4 or len(parent) > MAX_KEY_BYTES:
                raise wire.ProtocolError(f"commit at depth {depth} after a key of {len(parent)} bytes")
            if not rows or len(keys) % (len(rows) // 4):
                raise wire.ProtocolError("commit whose keys do not fit its rows")
            return ev.Commit(session, space, parent, depth, keys, rows, epochs, shards)
        case wire.Return(rows, epochs):
            _check_batch(rows, epochs)
            return ev.Return(session, rows, epochs)
        case wire.Open(space, namespace, group, key_bytes, shards, slots, watch, label, chain, private):
            if (
                len(namespace) != 32
                or not 0 <= group < MAX_NUMBER
                or not 0 < key_bytes <= MAX_KEY_BYTES
                or slots < 0
                or not all(0 < s < 1 << 40 and s % wire.SHARD_ALIGN == 0 for s in shards)
            ):
                raise wire.ProtocolError("space without a proper namespace, group, key length or shards")
            about = namespace, group, key_bytes, shards
            return ev.Open(session, space, *about, slots, watch, _printable(label), chain, private)
        case wire.Close(space):
            return ev.Close(session, space)
        case wire.List(namespace, group, cursor):
            _check_numbers(cursor)
            if len(namespace) != 32 or not 0 <= group < MAX_NUMBER:
                raise wire.ProtocolError("listing without a proper namespace or group")
            return ev.List(session, namespace, group, cursor)
        case _:
            raise AssertionError(message)


def message_of(effect: ev.ToSession) -> wire.ManagerMessage:
    """What a session is told of an effect that concerns it alone."""
    match effect:
        case ev.Opened(_, space, credit, note):
            return wire.Opened(space, credit, note)
        case ev.Answer(_, op, revision, resident, offsets, reason, read):
            return wire.Answer(op, revision, resident, offsets, reason, read)
        case ev.Waiting(_, op, revision, objects):
            return wire.Waiting(op, revision, objects)
        case ev.Residency(_, op, tiers):
            return wire.Residency(op, tiers)
        case ev.Expired(_, op, revision):
            return wire.Expired(op, revision)
        case ev.Recall(_, space, keep):
            return wire.Recall(space, keep)
        case ev.Grant(_, space, rows, offsets, epochs):
            return wire.Grant(space, rows, offsets, epochs)
        case ev.Added(_, space, keys):
            return wire.Stored(space, keys)
        case ev.Removed(_, space, keys):
            return wire.Removed(space, keys)
        case ev.Listed(_, keys, tiers, cursor):
            return wire.Listed(keys, tiers, cursor)
        case ev.Explained(_, lines):
            return wire.Explained(lines)
        case _:
            raise AssertionError(effect)


def _printable(label: str) -> str:
    """What can be shown of a name that a client gave: on a terminal it must do nothing."""
    shown = "".join(each if each.isprintable() else "?" for each in label[:MAX_LABEL])
    return shown[: MAX_LABEL - 3] + "..." if len(label) > MAX_LABEL else shown


def _check_batch(rows: bytes, epochs: bytes) -> None:
    if len(rows) % 4 or len(rows) * 2 != len(epochs) or len(rows) > ev.MAX_BATCH * 4:
        raise wire.ProtocolError(f"batch of {len(rows)} bytes of rows and {len(epochs)} of epochs")


def _check_numbers(*numbers: int) -> None:
    if not all(0 <= number < 1 << 62 for number in numbers):
        raise wire.ProtocolError(f"numbers out of range: {numbers}")


def _check_parts(parts: tuple[tuple[int, bytes], ...]) -> None:
    if len(parts) > MAX_PARTS or sum(len(keys) for _, keys in parts) > ev.MAX_QUERY_KEYS * MAX_KEY_BYTES:
        raise wire.ProtocolError(f"a question of {len(parts)} parts or too many keys")
