"""Rules about what nobody has here: what is asked, who waits for that, and what was heard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvhold.core.audit.owners import ATTACHMENTS
from kvhold.core.audit.rules import together
from kvhold.core.backing import PLACE_BITS
from kvhold.core.remote.backing import RemoteBacking
from kvhold.core.rows import State
from kvhold.core.sessions import Operation, Phase

if TYPE_CHECKING:
    from kvhold.core.state import Core


def _operations(core: Core) -> Iterator[Operation]:
    return (one for held in core.attachments.values() for one in held.operations.values())


@together("all and only backings that are asked have bits that keep nothing")
def keeping(core: Core) -> Iterator[str]:
    backings = core.common.backings
    for number, one in backings.all.items():
        if (number in backings.asked) == bool(one.bit & backings.keeping) and one.bit:
            yield f"backing {number}"


@together("all and only asks that are not answered are known, and no key is in two of one backing")
def asks(core: Core) -> Iterator[str]:
    asking = core.storage.asking
    numbers = {number for number, io in core.storage.ios.items() if io.kind == "ask"}
    yield from (f"I/O {number}" for number in numbers ^ asking.asks.keys())
    under_way = {mark: number for number, one in asking.asks.items() for mark in one.marks}
    if under_way != asking._under_way or len(under_way) != sum(len(one.marks) for one in asking.asks.values()):
        yield "the keys of asks"


@together("all and only questions that are ASKING wait for asks, until a deadline, and these for them")
def askers(core: Core) -> Iterator[str]:
    asking = core.storage.asking
    for one in _operations(core):
        waits = bool(one.asks)
        timed = one in asking._begun._begun
        waited = {number for number, ask in asking.asks.items() if one in ask.waiting}
        if not (waits == timed == (one.phase is Phase.ASKING)) or waited != one.asks:
            yield f"operation {one.id} of {ATTACHMENTS.named(core, one.attachment)}"
    if core.has_work:
        return  # those of an attachment that is gone may be about to end
    known = set(_operations(core))
    yield from (f"operation {one.id}" for ask in asking.asks.values() for one in ask.waiting if one not in known)


@together("what was heard is remembered of each key once")
def heard(core: Core) -> Iterator[str]:
    table = core.common.heard
    marks = [mark for mark, until in zip(table._marks, table._until, strict=True) if until]
    if len(marks) != len(set(marks)):
        yield f"{len(marks) - len(set(marks))} keys"


@together("a remote store holds all and only the rows of its I/Os, and expects those that wait to be read from it")
def remote(core: Core) -> Iterator[str]:
    storage, state = core.storage, core.catalogue.state
    for number, one in storage.backings.items():
        if not isinstance(one, RemoteBacking):
            continue
        puts = [io for io in storage.ios.values() if io.backing is one and io.kind == "write"]
        reads = {io.number: io for io in one._reading()}
        if sorted(one.writing) != sorted(row for io in puts for row in io.rows):
            yield f"rows that backing {number} is given"
        if one.putting != sum(io.bytes for io in puts) or one._puts != {io.number for io in puts}:
            yield f"puts of backing {number}"
        if (
            not one._late <= {row for io in reads.values() for row in io.rows}
            or not one._reads._begun.keys() <= reads.keys()
        ):
            yield f"reads of backing {number}"
        waiting = {row for row, place in storage.reading.queued.items() if place >> PLACE_BITS == number}
        if one.expected != {row for row in waiting if state[row] == State.LOADING}:
            yield f"rows that backing {number} expects"
