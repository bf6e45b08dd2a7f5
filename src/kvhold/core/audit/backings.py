"""Rules about backings: where objects are there, what is read and written; and about a log and its segments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvhold.core.audit.memory import ROWS, named, rows_in
from kvhold.core.audit.objects import FOUND
from kvhold.core.audit.rules import Things, counted, each, together
from kvhold.core.backing import PLACE_BITS, Backing, Io
from kvhold.core.log.backing import LogBacking
from kvhold.core.log.device import LogIo
from kvhold.core.log.segments import HEADER, Segment, pack, unpack
from kvhold.core.rows import State

if TYPE_CHECKING:
    from kvhold.core.state import Core


def _logs(core: Core) -> list[LogBacking]:
    return [one for one in core.storage.backings.values() if isinstance(one, LogBacking)]


def _segments(core: Core) -> list[tuple[LogBacking, Segment]]:
    return [(log, one) for log in _logs(core) for one in log.device.log.segments.values()]


def _ios(core: Core, backing: Backing, kind: str) -> list[Io]:
    return [io for io in core.storage.ios.values() if io.backing is backing and io.kind == kind]


LOGS: Things[LogBacking] = Things(_logs, lambda _, log: f"log {log.number}")
SEGMENTS: Things[tuple[LogBacking, Segment]] = Things(
    _segments, lambda _, one: f"segment {one[1].number} of log {one[0].number}"
)

# --- any backing ------------------------------------------------------------------------------------------------


@each(ROWS, "what has no slot, or is being read, is in a backing, or comes from one that is asked")
def backed(core: Core, row: int) -> bool:
    cat = core.catalogue
    if cat.expected(row):
        return core.storage.reading.source(row).number in cat.backings.asked
    return cat.state[row] not in (State.COLD, State.LOADING) or cat.kept(row)


@each(ROWS, "only what can be found is in a backing")
def in_backings(core: Core, row: int) -> bool:
    cat = core.catalogue
    return cat.state[row] in FOUND or not (cat.place[row] or cat.there[row])


@together("no two objects are in the same place")
def places(core: Core) -> Iterator[str]:
    counts = Counter(place for place in core.catalogue.place if place)
    return (core.common.backings.of(place).where(place) for place, count in counts.items() if count > 1)


@together("a backing counts its objects")
def kept(core: Core) -> Iterator[str]:
    cat = core.catalogue
    places, bits = Counter(place >> PLACE_BITS for place in cat.place if place), Counter(cat.there)
    for number, one in core.storage.backings.items():
        named = sum(count for there, count in bits.items() if there & one.bit)
        if one.objects != (named if one.bit else places[number]):
            yield f"backing {number}"


@together("a backing has its number, and its I/Os theirs")
def numbered(core: Core) -> Iterator[str]:
    storage = core.storage
    yield from (f"backing {number}" for number, one in storage.backings.items() if one.number != number)
    yield from (f"I/O {number}" for number, io in storage.ios.items() if io.number != number)


@together("all and only rows that are LOADING wait to be read or are being read; some were tried elsewhere")
def loading(core: Core) -> Iterator[str]:
    state, reading, rows = core.catalogue.state, core.storage.reading, set(rows_in(core, State.LOADING))
    under_way = {row for row in {**reading.queued, **reading._reading} if state[row] != State.DOOMED}
    yield from (named(core, row) for row in (rows ^ under_way) | (set(reading._tried) - rows))


@together("what is being read is counted, in bytes and by row")
def being_read(core: Core) -> Iterator[str]:
    reading = core.storage.reading
    reads = [io for io in core.storage.ios.values() if io.kind == "read"]
    yield from counted(bytes=(sum(io.bytes for io in reads), reading.bytes))
    yield from (named(core, row) for row in {row for io in reads for row in io.rows} ^ reading._reading.keys())


# --- logs -------------------------------------------------------------------------------------------------------


@each(ROWS, "a record is within its segment")
def within(core: Core, row: int) -> bool:
    cat = core.catalogue
    number, segment, at = unpack(cat.place[row])
    backing = core.storage.backings.get(number) if cat.place[row] else None
    if not isinstance(backing, LogBacking):
        return not cat.place[row] or backing is not None
    there = backing.device.log.segments.get(segment)
    return there is not None and at >= HEADER and at + HEADER + cat.size[row] <= there.end


@each(SEGMENTS, "a segment counts the bytes of those of its records that can be found")
def live(core: Core, one: tuple[LogBacking, Segment]) -> bool:
    (log, segment), cat = one, core.catalogue
    here = pack(log.number, segment.number, 0) >> 28
    rows = [row for row in set(segment.rows) if cat.place[row] and cat.place[row] >> 28 == here]
    return segment.live == sum(HEADER + cat.size[row] for row in rows)


@together("all records that can be found are in a segment")
def all_live(core: Core) -> Iterator[str]:
    cat, logs = core.catalogue, _logs(core)
    mine = {log.number for log in logs}
    places = zip(cat.size, cat.place, strict=True)
    placed = sum(HEADER + size for size, place in places if place and unpack(place)[0] in mine)
    return counted(bytes=(sum(log.device.log.live for log in logs), placed))


@each(LOGS, "a segment counts the objects that are read from it or wait for that, and its seal")
def readers(core: Core, log: LogBacking) -> bool:
    device = log.device
    reading = Counter(segment.number for segment in device.expected.values())
    for io in _ios(core, log, "read"):
        reading[device.reading[io.number].number] += len(io.rows)
    for io in _ios(core, log, "seal"):
        if isinstance(io, LogIo) and io.segment is not None:
            reading[io.segment.number] += 1
    return all(one.readers == reading[number] for number, one in device.log.segments.items())


@each(LOGS, "a log expects to read all and only what waits to be read from it")
def expected(core: Core, log: LogBacking) -> bool:
    state, queued = core.catalogue.state, core.storage.reading.queued
    mine = [row for row, place in queued.items() if place >> PLACE_BITS == log.number]
    waiting = {row for row in mine if state[row] == State.LOADING}
    return log.device.expected.keys() == waiting


@each(LOGS, "a log knows its reads")
def reads(core: Core, log: LogBacking) -> bool:
    numbers = {io.number for io in _ios(core, log, "read")}
    return log.device.reading.keys() == log.device.reads._begun.keys() == numbers


@each(LOGS, "a log has one write at a time, and knows its rows")
def writes(core: Core, log: LogBacking) -> bool:
    writes = _ios(core, log, "write")
    return len(writes) == log.device.writing and log.device.rows == {row for io in writes for row in io.rows}


@each(LOGS, "each number of a segment is used once")
def numbers(_: Core, log: LogBacking) -> bool:
    its = log.device.log
    every = [*its.free, *its.fresh, *its.segments]
    return its.number == log.number and len(every) == len(set(every))


@each(LOGS, "a segment is sealed, open, next, being begun or being given up, and one of these alone")
def roles(_: Core, log: LogBacking) -> bool:
    its = log.device.log
    used = [*its.sealed, *(one for one in (its.open, its.next, its.erasing) if one is not None)]
    used += [segment for segment in its.segments.values() if segment.closing]
    return sorted(segment.number for segment in used) == sorted(its.segments)


@each(LOGS, "sealed segments are in the order in which they were begun")
def sealed(_: Core, log: LogBacking) -> bool:
    order = [segment.seq for segment in log.device.log.sealed]
    return order == sorted(order)
