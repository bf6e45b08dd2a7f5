"""Each rule of the audit notices what it is about, and says so in words."""

from collections.abc import Callable

import pytest
from testbed.core.core_world import NAMESPACE, SLOT, Engine, World, chain
from testbed.core.shared_store import opened

from kvhold.core import events as ev
from kvhold.core.audit import RULES
from kvhold.core.eviction import POLICIES
from kvhold.core.heard import Heard
from kvhold.core.indexes import Index, Namespace
from kvhold.core.limits import Quota
from kvhold.core.log.segments import HEADER, Segment
from kvhold.core.rows import State

Spoil = Callable[[World], object]


def world(policy: str = "lru") -> World:
    """Two engines that watch a space, of which one holds a lease; objects in DRAM, in a log, and on their way."""
    made = World(pages=8, policy=POLICIES[policy])
    made.open_log([*chain(3, "log"), *chain(1, "on")])
    one = made.engine("one", slots=4, watch=True)
    one.store(chain(6))
    one.query(chain(6), op=1)
    made.settle(one.query_event(chain(1, "on"), op=2))
    made.engine("two", slots=4, watch=True)
    for event in opened(1):
        made.handle(event)
    made.settle(one.query_event(chain(2, "what"), op=3))
    made.settle(ev.Lookup(one.scheduler, 4, ((0, b"".join(chain(9, "else"))),)))
    made.settle(made.disk.finish(max(made.disk.flying)))
    assert made.core.audit() == []
    assert {*made.core.catalogue.state} >= {State.CREDIT, State.LEASED, State.LOADING, State.COLD, State.HEAD}
    return made


def row(made: World, state: int) -> int:
    return made.core.catalogue.state.index(state)


def index(made: World) -> Index:
    return made.core.catalogue.find(NAMESPACE, 0)


def engine(made: World) -> Engine:
    return next(iter(made.engines.values()))


def held(made: World):
    return made.core.sessions[engine(made).scheduler].attachment


def device(made: World):
    return made.core.storage.backings[0].device


def segment(made: World) -> Segment:
    return next(iter(device(made).log.segments.values()))


def put(of: object, name: str, value: object) -> None:
    setattr(of, name, value)


def add(of: object, name: str, by: int = 1) -> None:
    setattr(of, name, getattr(of, name) + by)


def set_row(column: str, state: int, value: Callable[[World], int]) -> Spoil:
    def spoil(made: World) -> None:
        getattr(made.core.catalogue, column)[row(made, state)] = value(made)

    return spoil


def run(made: World):
    return next(run for run in made.core.arena.runs if run is not None)


def other_list(made: World) -> None:
    """A list's oldest is another list's."""
    cat = made.core.catalogue
    cat.newer[index(made).recency.head] = cat.newer[cat.cold_list.head]


def heard_twice(heard: Heard) -> None:
    at = heard._until.index(max(heard._until))
    heard._marks[at - 1], heard._until[at - 1] = heard._marks[at], 1


def two_events(made: World) -> None:
    catalogue = made.core.catalogue
    catalogue.gone.append((index(made), b"k"))


SPOILED: dict[str, tuple[Spoil, str]] = {
    # --- rows and the arena
    "spare twice": (
        lambda w: w.core.catalogue.spare.append(row(w, State.LEASED)),
        "all and only rows that are FREE are spare",
    ),
    "another's slot": (
        set_row("offset", State.CREDIT, lambda w: w.core.catalogue.offset[row(w, State.LEASED)]),
        "a row whose state has a slot owns one of its size in the arena",
    ),
    "a slot that nobody owns": (
        lambda w: w.core.arena.take(SLOT, row(w, State.COLD)),
        "all and only rows whose state has a slot own one",
    ),
    "bytes": (
        lambda w: w.core.catalogue.bytes.__setitem__(State.LEASED, 5),
        "the bytes of each state are those of its rows' slots",
    ),
    "accounts": (
        lambda w: add(w.core.arena, "slack_bytes"),
        "what the accounts name makes up the arena to the byte, and none of it is negative",
    ),
    "counts of the arena": (
        lambda w: add(w.core.arena, "free_pages"),
        "free pages, free slots, what drains and the slack are counted",
    ),
    "a run without a page": (
        lambda w: add(run(w), "span"),
        "a run has whole pages, one after the other, and all slots that fit",
    ),
    "a free slot": (lambda w: run(w).free.append(0), "a run's free slots are those that no row owns"),
    "an empty run": (
        lambda w: put(run(w), "free", list(range(run(w).count))),
        "a run that no row needs has given its pages back",
    ),
    "draining": (
        lambda w: (engine(w).release(1), put(run(w), "draining", True)),
        "a run that drains holds nothing that may be evicted",
    ),
    "open runs": (
        lambda w: w.core.arena._open.setdefault(SLOT, {}).update({run(w).base: run(w)}) or put(run(w), "free", []),
        "all and only runs that have a free slot and do not drain take more",
    ),
    # --- what can be found
    "a key": (
        lambda w: index(w).maps[0].pop(chain(1)[0]),
        "a row that can be found is in its index, under its key and with its size",
    ),
    "a key too many": (set_row("key", State.CREDIT, lambda w: b"k"), "a row that cannot be found has no key"),
    "cold ones": (lambda w: add(w.core.catalogue, "cold"), "all and only rows that can be found are in an index"),
    "keys": (lambda w: add(index(w), "objects"), "an index counts its keys"),
    "an idle index": (
        lambda w: w.core.catalogue.index(b"idle", 0, 8, (SLOT,), SLOT),
        "an index that nobody has open and that holds nothing is forgotten",
    ),
    "names": (lambda w: put(index(w), "group", 7), "an index is found by its namespace and group"),
    "asked": (
        lambda w: add(index(w), "found", 100),
        "of the keys asked for some were found, and of those some were read",
    ),
    "used": (lambda w: put(index(w), "used_at", 1 << 60), "an index was used in the past"),
    "totals": (
        lambda w: add(index(w), "asked", 100),
        "the keys that all indexes were asked for are among those that the counters count",
    ),
    "slots": (lambda w: add(index(w), "slots"), "an index counts its rows that have a slot"),
    "used bytes": (lambda w: add(index(w).namespace, "used"), "a namespace counts the bytes of its slots"),
    "an empty namespace": (
        lambda w: w.core.catalogue.namespaces.update({b"x": Namespace(b"x", Quota())}),
        "all and only namespaces that have an index are known",
    ),
    "a namespace": (
        lambda w: w.core.catalogue.namespaces.clear(),
        "each index belongs to a namespace that is known",
    ),
    "gone": (two_events, "whoever watches was told of all that has left"),
    # --- the order of eviction
    "stamps": (
        set_row("stamp", State.LEASED, lambda w: 1 << 40),
        "a row in a list stands between two of the same list, and the newer one was used later",
    ),
    "lists": (other_list, "all and only rows that are RESIDENT, LEASED or COLD are in a list, once"),
    "heads": (
        lambda w: w.core.catalogue.move(w.core.catalogue.new(), State.HEAD),
        "all and only rows that are HEAD begin a list",
    ),
    "heaps": (
        lambda w: w.core.catalogue.recency._heaps.clear(),
        "a list that has objects is looked at, by a stamp that is no newer than its oldest",
    ),
    "closed lists": (
        lambda w: w.core.catalogue.recency._closed.update({SLOT: 9}),
        "lists that are closed are not looked at for long",
    ),
    "2Q": (
        lambda w: index(w).recency.count.reverse(),
        "2Q counts what is on probation and what is not, of each list and each size",
    ),
    # --- who may touch what
    "sessions": (
        lambda w: w.core.sessions.pop(engine(w).scheduler),
        "all and only sessions of an attachment are known",
    ),
    "orphaned": (
        lambda w: held(w).lost.add(999),
        "an attachment has sessions that know it, and those that are lost are among them",
    ),
    "joined": (lambda w: w.core._current.clear(), "all and only attachments that are whole are joined by who comes"),
    "no lease": (
        set_row("leases", State.LEASED, lambda w: 0),
        "all and only rows that are LEASED, DOOMED or LOADING are held by somebody",
    ),
    "a lease too many": (
        set_row("leases", State.LEASED, lambda w: 7),
        "a row counts the operations and I/Os that hold it, and more only while a release is under way",
    ),
    "charges": (
        lambda w: add(held(w), "prepared"),
        "an attachment is charged what its operations are, and counts their keys and those not answered",
    ),
    "an operation": (
        lambda w: put(held(w).operations[2], "missing", 0),
        "an operation is charged no more than it leases, and waits only for what it lacks",
    ),
    "questions": (
        lambda w: add(w.core.budgets, "answering"),
        "the questions that are not answered are those of all attachments",
    ),
    "waiters": (
        lambda w: w.core.operations._waiters.update({row(w, State.COLD): {held(w).operations[2]: 1}}),
        "who waits for a row waits for one that is LOADING",
    ),
    "a credit of nobody": (
        lambda w: held(w).spaces[0].credits.clear(),
        "all and only rows that are CREDIT or ORPHANED are granted, to one space; or are about to be freed",
    ),
    "credits": (
        lambda w: put(held(w), "broken", True),
        "what a lost attachment was granted is ORPHANED, and what a whole one was is CREDIT",
    ),
    "users": (
        lambda w: add(index(w), "users"),
        "an index counts the spaces by which it is open, and knows those that watch it",
    ),
    "watchers": (
        lambda w: put(held(w).spaces[0], "watcher", (999, 0)),
        "a space is watched under its own number, by the scheduler session that opened it",
    ),
    "wanting": (
        lambda w: add(held(w), "wanting"),
        "spaces that want credits are counted of each attachment, each namespace and all",
    ),
    # --- backings
    "no record": (
        set_row("place", State.COLD, lambda w: 0),
        "what has no slot, or is being read, is in a backing, or comes from one that is asked",
    ),
    "a record of nothing": (
        set_row("place", State.CREDIT, lambda w: w.core.catalogue.place[row(w, State.COLD)]),
        "only what can be found is in a backing",
    ),
    "one record of two": (
        set_row("place", State.LEASED, lambda w: w.core.catalogue.place[row(w, State.COLD)]),
        "no two objects are in the same place",
    ),
    "its objects": (lambda w: add(w.core.storage.backings[0], "objects"), "a backing counts its objects"),
    "an I/O's number": (
        lambda w: add(next(iter(w.core.storage.ios.values())), "number"),
        "a backing has its number, and its I/Os theirs",
    ),
    "on its way": (
        lambda w: w.core.storage.reading._reading.clear(),
        "all and only rows that are LOADING wait to be read or are being read; some were tried elsewhere",
    ),
    "bytes under way": (
        lambda w: add(w.core.storage.reading, "bytes"),
        "what is being read is counted, in bytes and by row",
    ),
    "a record elsewhere": (lambda w: put(segment(w), "end", HEADER), "a record is within its segment"),
    "live bytes": (
        lambda w: add(segment(w), "live"),
        "a segment counts the bytes of those of its records that can be found",
    ),
    "records of no segment": (
        lambda w: (segment(w).rows.pop(), add(segment(w), "live", -HEADER - SLOT)),
        "all records that can be found are in a segment",
    ),
    "readers": (
        lambda w: add(segment(w), "readers"),
        "a segment counts the objects that are read from it or wait for that, and its seal",
    ),
    "expected": (
        lambda w: device(w).expected.update({0: segment(w)}),
        "a log expects to read all and only what waits to be read from it",
    ),
    "reads": (lambda w: device(w).reads.begin(999, 1), "a log knows its reads"),
    "two writes": (
        lambda w: put(device(w), "writing", not device(w).writing),
        "a log has one write at a time, and knows its rows",
    ),
    "numbers": (lambda w: device(w).log.free.append(0), "each number of a segment is used once"),
    "roles": (
        lambda w: device(w).log.sealed.clear(),
        "a segment is sealed, open, next, being begun or being given up, and one of these alone",
    ),
    # --- elsewhere
    "a bit that keeps": (
        lambda w: put(w.core.common.backings, "keeping", 0xFF),
        "all and only backings that are asked have bits that keep nothing",
    ),
    "an ask that nobody knows": (
        lambda w: w.core.storage.asking.asks.clear(),
        "all and only asks that are not answered are known, and no key is in two of one backing",
    ),
    "a question that waits for nothing": (
        lambda w: held(w).operations[3].asks.clear(),
        "all and only questions that are ASKING wait for asks, until a deadline, and these for them",
    ),
    "heard twice": (
        lambda w: heard_twice(w.core.common.heard),
        "what was heard is remembered of each key once",
    ),
    "a row that no store expects": (
        lambda w: w.core.storage.backings[1].expected.add(0),
        "a remote store holds all and only the rows of its I/Os, and expects those that wait to be read from it",
    ),
    "order": (
        lambda w: device(w).log.sealed.append(Segment(0, 0, 0)),
        "sealed segments are in the order in which they were begun",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_what_is_wrong_is_said(name: str):
    made = world("2q" if name == "2Q" else "lru")
    spoil, rule = SPOILED[name]
    spoil(made)
    said = [finding.rule for finding in RULES.findings(made.core)]
    assert rule in said
    assert any(line.startswith(f"{rule}; not so: ") for line in made.core.audit())
    bit_by_bit = [finding.rule for part in RULES.slices(made.core) for finding in part]
    assert set(bit_by_bit) == set(said)


def test_every_rule_is_among_them_and_said_once():
    assert len(set(RULES.sentences)) == len(RULES.sentences)
    assert {rule for _, rule in SPOILED.values()} == set(RULES.sentences)


def test_it_names_what_a_rule_does_not_hold_of():
    made = world()
    catalogue = made.core.catalogue
    leased = [at for at, state in enumerate(catalogue.state) if state == State.LEASED]
    for at in leased:
        catalogue.leases[at] = 0
    (line,) = [line for line in made.core.audit() if line.startswith("all and only rows that are LEASED")]
    named = ", ".join(f"row {at} (leased)" for at in leased[:3])
    assert line.endswith(f"; not so: {named}, and {len(leased) - 3} more")


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_said_of_a_core_that_is_busy(policy: str):
    made = world(policy)
    made.handle(ev.Purge())
    assert made.core.has_work
    assert [part for part in RULES.slices(made.core) if part] == []
    made.run()
    made.finish()
    assert made.core.audit() == []


def test_a_rule_that_cannot_be_looked_at_does_not_hold():
    """Books that are wrong may be so wrong that looking at them fails; the manager serves on."""
    made = world()
    made.core.catalogue.indexes.clear()
    (line,) = [line for line in made.core.audit() if line.startswith("a row in a list stands between two")]
    assert line.endswith("; not so: it cannot be looked at (KeyError: 1)")
