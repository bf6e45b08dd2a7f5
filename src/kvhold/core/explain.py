"""``kvhold explain``: what is remembered of a key or an operation, and what is so now, in lines of text."""

from collections.abc import Callable, Iterable, Iterator

from kvhold.core import events as ev
from kvhold.core.common import Common
from kvhold.core.history import MARK, Entry, Kind, fingerprint
from kvhold.core.indexes import Index
from kvhold.core.rows import NAMES, State
from kvhold.core.turns import Work

_REASONS = list(ev.Reason)
LATEST = 20
"""Misses that are told when nothing is asked for."""
MOST = 1000
"""Entries, and holders, that are told of one key or operation: the latest ones."""
_MISSES = (Kind.MISSED, Kind.CUT_SHORT, Kind.LACKED)
_LINES = 64
"""Lines that are written, and spaces that are looked at, without a pause."""
_ROWS = 8192
"""Rows of an operation that are looked at for one, without a pause."""


def explain(common: Common, event: ev.Explain) -> Work:
    """Sliced by entries, by index and by operation: an operator's question must not hold up an engine's."""
    key, op = event.key, event.op
    found: list[Entry] = []
    if not key and not op:
        yield from _find(common, found, 2 * LATEST, lambda entry: entry[1] in _MISSES)
        lines: list[str] = []
        yield from _tell_operations(common, found, lines)
        yield [ev.Explained(event.session, tuple(lines[-LATEST:]))]
        return
    lines = []
    if key:
        yield from _find(common, found, MOST + 1, lambda entry: entry[1] < Kind.ASKED, fingerprint(key))
        if len(found) > MOST:
            lines.append(f"what is older than the latest {MOST} entries is not told")
        for count, (when, kind, _, actor, a, b) in enumerate(found[-MOST:], 1):
            lines.append(f"{_ago(common, when)}  {_told(common, kind, actor, a, b)}")
            if count % _LINES == 0:
                yield []
        for count, index in enumerate(list(common.catalogue.indexes.values()), 1):
            for name in _names(index, key):
                row = index.get(name) if name else None
                if row is not None:
                    lines += _object(common, row, name != key)
                    yield []
                    yield from _holders(common, row, lines)
                if not name or count % _LINES == 0:
                    yield []
    else:
        yield from _find(
            common, found, MOST + 1, lambda entry: entry[1] >= Kind.ASKED and event.of in (0, entry[3]), op
        )
        if len(found) > MOST:
            lines.append(f"what is older than the latest {MOST} entries is not told; name one session's: SESSION/{op}")
        yield from _tell_operations(common, found[-MOST:], lines)
        for attachment in common.attachments.values():
            operation = attachment.operations.get(op)
            if operation is not None and event.of in (0, operation.session):
                rows = sum(len(part.leased) for part in operation.parts)
                lines.append(
                    f"now: operation {operation.session}/{op} {operation.phase.name.lower()} in instance "
                    f"{attachment.instance}, revision {operation.revision}, {rows} objects leased, "
                    f"{operation.missing} on their way"
                )
    yield [ev.Explained(event.session, tuple(lines))]


def _find(
    common: Common, found: list[Entry], most: int, wanted: Callable[[Entry], bool], subject: int | None = None
) -> Work:
    """Fills ``found`` with the latest ``most`` entries that are wanted, the oldest first."""
    for entry in common.history.latest(wanted, subject):
        if entry is None:
            yield []
            continue
        found.append(entry)
        if len(found) == most:
            break
    found.reverse()


def _names(index: Index, key: bytes) -> Iterator[bytes]:
    """Whole keys of ``index`` that ``key`` may mean; an empty one where a slice of the search ends."""
    if len(key) == index.key_bytes:
        yield key
    elif len(key) == MARK and len(key) < index.key_bytes:
        known = list(index.maps[key[-1] & index.mask])  # one of many maps: few even of a large index's keys
        for start in range(0, len(known), ev.MAX_BATCH):
            yield from [name for name in known[start : start + ev.MAX_BATCH] if name.endswith(key)]
            yield b""


def _ago(common: Common, when: int) -> str:
    return f"{(common.now - when) / 1e9:12.6f} s ago"


def _tell_operations(common: Common, entries: Iterable[Entry], lines: list[str]) -> Work:
    """Adds a line for each of what happened to operations; a miss and what it lacked are one."""
    for count, (when, kind, op, session, a, b) in enumerate(entries, 1):
        if count % _LINES == 0:
            yield []
        if kind is not Kind.LACKED:
            lines.append(f"{_ago(common, when)}  operation {session}/{op}: {_told(common, kind, session, a, b)}")
        elif lines:  # what it follows may be forgotten
            lines[-1] += ", at key ...{2}, position {1} of group {0}".format(*divmod(a, 1 << 32), _hex(b))


def _object(common: Common, row: int, named: bool) -> list[str]:
    catalogue = common.catalogue
    index = catalogue.indexes[catalogue.owner[row]]
    state = catalogue.state[row]
    name = f"namespace {index.namespace.name.hex()}, group {index.group}"
    where = f"row {row}, slot epoch {catalogue.epoch[row]}, {catalogue.leases[row]} leases"
    lines = [f"now: {NAMES[state]}, {index.size} bytes, {name}" + ("" if state == State.COLD else f", {where}")]
    if named:
        lines.append(f"     key {catalogue.key[row].hex()}")
    return lines + [f"     in {common.backings.of(place).where(place)}" for place in catalogue.places(row)]


def _holders(common: Common, row: int, lines: list[str]) -> Work:
    """Adds to ``lines``, some rows of operations at a time: each may have many thousand."""
    looked, holders = 0, 0
    for attachment in list(common.attachments.values()):
        for operation in list(attachment.operations.values()):
            for part in operation.parts:
                for start in range(part.skip, len(part.rows), _ROWS):
                    some = part.rows[start : start + _ROWS]
                    looked += len(some)
                    if row in some:
                        holders += 1
                        held = f"operation {operation.session}/{operation.id} of instance {attachment.instance}"
                        lines.append(f"     held by {held} ({operation.phase.name.lower()})")
                        break
                    if looked >= _ROWS:
                        looked = 0
                        yield []
                else:
                    continue
                break
            if holders == MOST:
                lines.append("     and perhaps by others")
                return


def _told(common: Common, kind: Kind, actor: int, a: int, b: int) -> str:
    match kind:
        case Kind.MISSING:
            what = f"operation {actor}/{a} found it missing, at position {b} of its chain"
        case Kind.CUT:
            what = "cut the hit of operation {}/{}: group {} at block {}".format(actor, a, *divmod(b, 1 << 32))
        case Kind.CUT_SHORT:
            what = "hit cut by group {} at block {}: key ...{} was not stored".format(*divmod(a, 1 << 32), _hex(b))
        case Kind.MISSED:
            what = f"fell short for the reason {_REASONS[b]} (revision {a})"
        case Kind.ASKED:
            what = f"asked for {b} keys (revision {a})"
        case Kind.WAITING:
            objects = f"{b} objects from backings" if b else "backings to say what they have"
            what = f"waits for {objects} (revision {a})"
        case Kind.ANSWERED:
            what = f"answered: {b} keys (revision {a})"
        case Kind.STALLED:
            what = f"its restore has been under way for {b} s (revision {a})"
        case Kind.WRITTEN | Kind.LOADING:
            what = f"{kind.name.lower()}, row {a}, {common.backings.of(b).where(b)}"
        case Kind.RECLAIMED:
            what = f"its place was given up: {common.backings.of(b).where(b)}"
        case _ if kind < Kind.ASKED:
            what = f"{kind.name.lower().replace('_', ' ')}, row {a}, slot epoch {b}"
        case _:
            what = f"{kind.name.lower()} (revision {a})"
    return what


def _hex(mark: int) -> str:
    """The end of a key, which is what the history remembers of it."""
    return mark.to_bytes(MARK, "little").hex()
