"""Rules about who may touch what: sessions, leases, credits, and what is counted of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvhold.core.audit.memory import ROWS, named, rows_in
from kvhold.core.audit.objects import INDEXES, NAMESPACES
from kvhold.core.audit.rules import Things, counted, each, together
from kvhold.core.rows import State
from kvhold.core.sessions import Attachment, Operation, Phase, Space

if TYPE_CHECKING:
    from kvhold.core.state import Core

HELD = frozenset((State.LEASED, State.DOOMED, State.LOADING))

ATTACHMENTS: Things[Attachment] = Things(
    lambda core: list(core.attachments.values()), lambda _, held: f"instance {held.instance}, attachment {held.id}"
)


def spaces_of(core: Core) -> Iterator[tuple[Attachment, int, Space]]:
    return ((held, number, space) for held in core.attachments.values() for number, space in held.spaces.items())


# --- sessions ---------------------------------------------------------------------------------------------------


@together("all and only sessions of an attachment are known")
def sessions(core: Core) -> Iterator[str]:
    theirs = {id: one for held in core.attachments.values() for id, one in held.sessions.items()}
    return (f"session {id}" for id in theirs.keys() ^ core.sessions.keys())


@each(ATTACHMENTS, "an attachment has sessions that know it, and those that are lost are among them")
def members(_: Core, held: Attachment) -> bool:
    known = all(one.attachment is held for one in held.sessions.values())
    return bool(held.sessions) and known and held.lost <= held.sessions.keys()


@together("all and only attachments that are whole are joined by who comes")
def current(core: Core) -> Iterator[str]:
    whole = {held.instance: held for held in core.attachments.values() if not held.broken}
    names = whole.keys() | core._current.keys()
    return (f"instance {name}" for name in names if whole.get(name) is not core._current.get(name))


# --- leases -----------------------------------------------------------------------------------------------------


@each(ROWS, "all and only rows that are LEASED, DOOMED or LOADING are held by somebody")
def held(core: Core, row: int) -> bool:
    return (core.catalogue.leases[row] > 0) == (core.catalogue.state[row] in HELD)


@together("a row counts the operations and I/Os that hold it, and more only while a release is under way")
def leases(core: Core) -> Iterator[str]:
    holders: Counter[int] = Counter()
    for attachment in core.attachments.values():
        for operation in attachment.operations.values():
            for part in operation.parts:
                holders.update(part.leased)
    for io in core.storage.ios.values():
        holders.update(io.rows)
    holders.update(list(core.storage.reading.queued))
    counts, busy = core.catalogue.leases, core.has_work
    for row in holders.keys() | {row for row, count in enumerate(counts) if count}:
        if counts[row] != holders[row] and not (busy and counts[row] > holders[row]):
            yield f"{named(core, row)}: {counts[row]} instead of {holders[row]}"


@each(ATTACHMENTS, "an attachment is charged what its operations are, and counts their keys and those not answered")
def charged(_: Core, held: Attachment) -> bool:
    operations = held.operations.values()
    return (
        held.prepared == sum(one.charged for one in operations)
        and held.asked == sum(one.asked for one in operations)
        and held.answering == sum(one.phase < Phase.ANSWERED for one in operations)
    )


def _right(core: Core, held: Attachment, one: Operation) -> bool:
    within = 0 <= one.charged <= sum(len(part.leased) * part.index.size for part in one.parts)
    # One that lacks nothing is answered in its turn, or never if its owner is lost.
    waits = one.phase is not Phase.WAITING or one.missing > 0 or held.broken or core.has_work
    return within and waits and one.attachment is held


@each(ATTACHMENTS, "an operation is charged no more than it leases, and waits only for what it lacks")
def operations(core: Core, held: Attachment) -> bool:
    return all(one.id == id and _right(core, held, one) for id, one in held.operations.items())


@together("the questions that are not answered are those of all attachments")
def answering(core: Core) -> Iterator[str]:
    theirs = sum(held.answering for held in core.attachments.values())
    said = core.budgets.answering
    return counted(questions=(theirs, said)) if not core.has_work else iter(())


@together("who waits for a row waits for one that is LOADING")
def waiters(core: Core) -> Iterator[str]:
    state, busy = core.catalogue.state, core.has_work
    for row, waiting in core.operations._waiters.items():
        if not waiting or (state[row] not in (State.LOADING, State.DOOMED) and not busy):
            yield named(core, row)


# --- credits ----------------------------------------------------------------------------------------------------


@together("all and only rows that are CREDIT or ORPHANED are granted, to one space; or are about to be freed")
def credits(core: Core) -> Iterator[str]:
    granted = Counter(row for _, _, space in spaces_of(core) for row in space.credits)
    busy = core.has_work
    waiting = set(rows_in(core, State.CREDIT, State.ORPHANED))
    for row in granted.keys() | waiting:
        if granted[row] > 1 or row not in waiting or (not granted[row] and not busy):
            yield named(core, row)


@each(ATTACHMENTS, "what a lost attachment was granted is ORPHANED, and what a whole one was is CREDIT")
def orphaned(core: Core, held: Attachment) -> bool:
    state, right = core.catalogue.state, State.ORPHANED if held.broken else State.CREDIT
    return all(state[row] == right for space in held.spaces.values() for row in space.credits)


@together("an index counts the spaces by which it is open, and knows those that watch it")
def users(core: Core) -> Iterator[str]:
    users, watchers = Counter[int](), dict[int, set[tuple[int, int]]]()
    for _, _, space in spaces_of(core):
        users[space.index.id] += 1
        if space.watcher is not None:
            watchers.setdefault(space.index.id, set()).add(space.watcher)
    for index in core.catalogue.indexes.values():
        if index.users != users.pop(index.id, 0) or watchers.get(index.id, set()) != index.watchers.keys():
            yield INDEXES.named(core, index)
    yield from (f"index {id} is open, and not known" for id in users)


@each(ATTACHMENTS, "a space is watched under its own number, by the scheduler session that opened it")
def watched(_: Core, held: Attachment) -> bool:
    scheduler = held.scheduler
    return all(
        scheduler is not None and space.watcher == (scheduler.id, number)
        for number, space in held.spaces.items()
        if space.watcher is not None
    )


@together("spaces that want credits are counted of each attachment, each namespace and all")
def wanting(core: Core) -> Iterator[str]:
    wants = [(held, space.index.namespace) for held, _, space in spaces_of(core) if space.want > 0]
    mine, named = Counter(held.id for held, _ in wants), Counter(id(owner) for _, owner in wants)
    yield from (ATTACHMENTS.named(core, h) for h in core.attachments.values() if h.wanting != mine[h.id])
    yield from (NAMESPACES.named(core, n) for n in core.catalogue.namespaces.values() if n.wanting != named[id(n)])
    yield from counted(spaces=(len(wants), core.credits._spaces))
