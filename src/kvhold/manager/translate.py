"""From messages to events, with all checked that the core relies on, and from effects to messages."""

from collections.abc import Callable
from typing import Any

from msgspec.structs import astuple, replace

from kvhold import protocol as wire
from kvhold.core import events as ev

MAX_PARTS = 64
MAX_LABEL = 128
"""Characters that are kept of what a namespace is called."""

MAY_SAY: dict[str, tuple[type, ...]] = {
    "": (wire.Hello,),
    "scheduler": (
        wire.Open,
        wire.Close,
        wire.Query,
        wire.Lookup,
        wire.Prepare,
        wire.Cut,
        wire.AnswerNow,
        wire.Started,
        wire.RestoreFailed,
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


_EVENTS: dict[type, Callable[..., ev.Event]] = {
    message: getattr(ev, message.__name__)
    for message in (*MAY_SAY["scheduler"], *MAY_SAY["worker"], wire.List)
    if message not in (wire.Retire, wire.Bye)
}
"""What the core hears of as it was said: an event has its message's name and, after the session, its fields."""
_MESSAGES: dict[type, type[Any]] = {
    getattr(ev, message.__name__): message
    for message in (
        wire.Opened,
        wire.Answer,
        wire.Waiting,
        wire.Residency,
        wire.Expired,
        wire.Recall,
        wire.Grant,
        wire.Added,
        wire.Removed,
        wire.Listed,
        wire.Explained,
    )
}
"""What a session is told as the core says it, by effect: a message has its effect's name and fields."""


def event_of(session: int, message: wire.ClientMessage) -> ev.Event:
    """The core event of a session's message. Raises ProtocolError where packed fields do not fit each other."""
    _check(message)
    if isinstance(message, wire.Open):
        message = replace(message, label=_printable(message.label))
    return _EVENTS[type(message)](session, *astuple(message))


def message_of(effect: ev.ToSession) -> wire.ManagerMessage:
    """What a session is told of an effect that concerns it alone."""
    kind = _MESSAGES[type(effect)]
    told: wire.ManagerMessage = kind(*[getattr(effect, name) for name in kind.__struct_fields__])
    return told


def _check(message: wire.ClientMessage) -> None:
    """All that the core relies on."""
    match message:
        case wire.Query(op, revision, _, skip, keys):
            _check_numbers(op, revision)
            if not 0 <= skip <= ev.MAX_QUERY_KEYS or len(keys) > ev.MAX_QUERY_KEYS * wire.MAX_KEY_BYTES:
                raise wire.ProtocolError(f"query of {len(keys)} bytes from {skip}")
        case wire.Lookup(op, parts):
            _check_numbers(op)
            _check_parts(parts)
        case wire.Prepare(op, revision, parts, used):
            _check_numbers(op, revision)
            _check_parts((*parts, *used))
        case wire.Cut(op, _, key, position):
            _check_numbers(op)
            if not 0 < len(key) <= wire.MAX_KEY_BYTES or not 0 <= position < wire.MAX_NUMBER:
                raise wire.ProtocolError(f"hit cut at block {position} by a key of {len(key)} bytes")
        case wire.AnswerNow(op, revision):
            _check_numbers(op, revision)
        case wire.Commit(_, parent, depth, keys, rows, epochs):
            _check_batch(rows, epochs)
            if not 0 <= depth <= wire.MAX_NUMBER - len(rows) // 4 or len(parent) > wire.MAX_KEY_BYTES:
                raise wire.ProtocolError(f"commit at depth {depth} after a key of {len(parent)} bytes")
            if not rows or len(keys) % (len(rows) // 4):
                raise wire.ProtocolError("commit whose keys do not fit its rows")
        case wire.Return(rows, epochs):
            _check_batch(rows, epochs)
        case wire.Open(_, namespace, group, key_bytes, shards, slots):
            if fault := wire.space_fault(namespace, group, key_bytes, shards, slots):
                raise wire.ProtocolError(f"space with {fault}")
        case wire.List(namespace, group, cursor):
            _check_numbers(cursor)
            if len(namespace) != wire.NAMESPACE_BYTES or not 0 <= group < wire.MAX_NUMBER:
                raise wire.ProtocolError("listing without a proper namespace or group")


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
    if len(parts) > MAX_PARTS or sum(len(keys) for _, keys in parts) > ev.MAX_QUERY_KEYS * wire.MAX_KEY_BYTES:
        raise wire.ProtocolError(f"a question of {len(parts)} parts or too many keys")
