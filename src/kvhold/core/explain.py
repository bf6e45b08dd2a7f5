"""``kvhold explain``: what is remembered of a key or an operation, and what is so now, in lines of text."""

from kvhold.core import events as ev
from kvhold.core.common import Common, Work
from kvhold.core.rows import NAMES, State
from kvhold.core.segments import unpack
from kvhold.core.story import Kind, fingerprint

_REASONS = list(ev.Reason)
LATEST = 20
"""Misses that are told when nothing is asked for."""


def explain(common: Common, event: ev.Explain) -> Work:
    """Sliced by index and by operation: an operator's question must not hold up an engine's."""
    lines: list[str] = []
    if not event.key and not event.op:
        lines += [
            f"{(common.now - when) / 1e9:12.6f} s ago  operation {op} of session {actor} {_told(kind, actor, a, b)}"
            for when, kind, op, actor, a, b in common.story.latest((Kind.MISSED, Kind.CUT_SHORT), LATEST)
        ]
        yield [ev.Explained(event.session, tuple(lines) or ("nothing missed lately",))]
        return
    subject = fingerprint(event.key) if event.key else event.op
    for when, kind, actor, a, b in common.story.about(subject, operation=not event.key):
        lines.append(f"{(common.now - when) / 1e9:12.6f} s ago  {_told(kind, actor, a, b)}")
    yield []
    if event.key:
        for index in list(common.catalogue.indexes.values()):
            row = index.get(event.key) if len(event.key) == index.key_bytes else None
            if row is not None:
                lines += _object(common, row)
                yield []
                yield from _holders(common, row, lines)
            yield []
    else:
        for attachment in common.attachments.values():
            operation = attachment.operations.get(event.op)
            if operation is not None:
                rows = sum(len(part.leased) for part in operation.parts)
                lines.append(
                    f"now: {operation.phase.name.lower()} in instance {attachment.instance}, revision "
                    f"{operation.revision}, {rows} objects leased, {operation.missing} on their way"
                )
    yield [ev.Explained(event.session, tuple(lines) or ("nothing is known or remembered of it",))]


def _object(common: Common, row: int) -> list[str]:
    catalogue = common.catalogue
    index = catalogue.indexes[catalogue.owner[row]]
    state = catalogue.state[row]
    name = f"namespace {index.namespace.name.hex()}, group {index.group}"
    where = f"row {row}, slot epoch {catalogue.epoch[row]}, {catalogue.leases[row]} leases"
    lines = [f"now: {NAMES[state]}, {index.size} bytes, {name}" + ("" if state == State.COLD else f", {where}")]
    if place := catalogue.place[row]:
        lines.append("     in log {}, segment {}, at byte {}".format(*unpack(place)))
    return lines


def _holders(common: Common, row: int, lines: list[str]) -> Work:
    """Adds to ``lines``, an operation at a time: each may have many thousand rows."""
    for attachment in list(common.attachments.values()):
        for operation in list(attachment.operations.values()):
            if any(row in part.leased for part in operation.parts):
                held = f"operation {operation.id} of instance {attachment.instance} ({operation.phase.name.lower()})"
                lines.append(f"     held by {held}")
            yield []


def _told(kind: Kind, actor: int, a: int, b: int) -> str:
    match kind:
        case Kind.MISSING:
            what = f"operation {a} found it missing, at position {b} of its chain"
        case Kind.CUT:
            what = "cut the hit of operation {}: group {} at block {}".format(a, *divmod(b, 1 << 32))
        case Kind.CUT_SHORT:
            key = b.to_bytes(8, "little").hex()
            what = "hit cut by group {} at block {}: key ...{} was not stored".format(*divmod(a, 1 << 32), key)
        case Kind.MISSED:
            what = f"fell short for the reason {_REASONS[b]} (revision {a})"
        case Kind.ASKED:
            what = f"asked for {b} keys (revision {a}, session {actor})"
        case Kind.WAITING:
            what = f"waits for {b} objects from a log (revision {a})"
        case Kind.ANSWERED:
            what = f"answered: {b} keys (revision {a})"
        case Kind.STALLED:
            what = f"its restore has been under way for {b} s (revision {a})"
        case Kind.WRITTEN | Kind.LOADING:
            log, segment, at = unpack(b)
            what = f"{kind.name.lower()}, row {a}, log {log}, segment {segment}, byte {at}"
        case Kind.RECLAIMED:
            what = f"its segment {b} was given up"
        case _ if kind < Kind.ASKED:
            what = f"{kind.name.lower().replace('_', ' ')}, row {a}, slot epoch {b}"
        case _:
            what = f"{kind.name.lower()} (revision {a})"
    return what
