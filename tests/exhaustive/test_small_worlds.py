"""All that can happen in small worlds, as far as the time goes."""

import os
from dataclasses import replace

import pytest
from testbed.core.moves import recorded
from testbed.exhaustive.search import search
from testbed.exhaustive.small_world import A0, A1, B0, LIMITS, Setting, SmallWorld

import kvhold.core.catalogue
import kvhold.core.events
import kvhold.core.lru
import kvhold.core.placement
from kvhold.core.rows import NAMES, STATES

SECONDS = float(os.environ.get("KVHOLD_SEARCH_SECONDS", "1.2"))
"""For each search, of which there are two of each world; the least depth is searched however long it takes."""

GENEROUS = replace(LIMITS, prepared_share=1.0, engine_share=1.0)

SETTINGS = {
    setting.name: setting
    for setting in (
        # Two engines publish and read through three slots: each has one granted, one is left.
        Setting("memory", pages=1, page=3, wants=(1, 0), stored=(A0,)),
        # The same, where what was used once goes first.
        Setting("used once", pages=1, page=3, wants=(1, 0), stored=(A0,), policy="2q"),
        # Objects of two sizes in two pages; the second space is opened and closed as it goes.
        Setting("sizes", pages=2, page=2, wants=(1, None), sizes=(1, 2), stored=(A0,)),
        # Nobody publishes: everything is in the log and comes through two slots.
        Setting("log", pages=1, page=2, wants=(0, 0), segments=3, found=(A0, A1, B0), deaths=False, limits=GENEROUS),
        # One publishes through a log whose segments take one record each.
        Setting("writes", pages=1, page=3, wants=(1, 0), segments=2, stored=(A0,), deaths=False),
        # The same through a store that finds objects by their name, and through both: what one loses the other has.
        Setting("store", pages=1, page=3, wants=(1, 0), store=True, stored=(A0,), deaths=False),
        Setting("both", pages=1, page=3, wants=(1, 0), segments=2, store=True, stored=(A0,), deaths=False),
        # What others have put into a store that is asked comes from there; and beside a log, which has some of it.
        Setting("shared", pages=1, page=3, wants=(1, 0), shared=(A0, A1, B0), deaths=False),
        Setting("beside", pages=1, page=3, wants=(1,), segments=2, shared=(A0, A1), stored=(A0,), deaths=False),
        # Each engine has a namespace that nobody else comes to know, and closes and opens it as it goes.
        Setting("private", pages=1, page=3, wants=(1, 1), stored=(A0, A1), private=True),
        # Engines come and go, from the first one on.
        Setting("arrivals", pages=1, page=2, wants=(1,), present=False),
    )
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of one row, and nothing that is large to copy."""
    monkeypatch.setattr(kvhold.core.events, "MAX_BATCH", 1)
    monkeypatch.setattr(kvhold.core.placement, "_GHOSTS", 1)
    monkeypatch.setattr(kvhold.core.lru, "LOOK", 8)


def explore(name: str, events: int, seconds: float, least_depth: int, capsys: pytest.CaptureFixture[str]) -> None:
    least_depth += not SETTINGS[name].present  # who has to come first does little
    found = search(SETTINGS[name], events, seconds, least_depth)
    with capsys.disabled():
        print(f"\n{found}")
    assert found.depth >= least_depth or not found.frontier
    assert found.quiet >= 40
    assert found.answers > 0


@pytest.mark.parametrize(("events", "least_depth"), [(1, 2), (2, 2)])
@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_breaks_in_a_small_world(
    name: str, events: int, least_depth: int, quick: bool, capsys: pytest.CaptureFixture[str]
):
    explore(name, events, 0 if quick else SECONDS, least_depth, capsys)


@pytest.mark.long
@pytest.mark.parametrize(("events", "least_depth"), [(1, 3), (2, 3)])
@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_breaks_for_long(name: str, events: int, least_depth: int, capsys: pytest.CaptureFixture[str]):
    explore(name, events, 45 * SECONDS, least_depth, capsys)


def test_every_move_in_the_table_of_states_is_made_and_no_other(monkeypatch: pytest.MonkeyPatch):
    moves = recorded(monkeypatch)
    for name in ("memory", "log", "writes"):
        search(SETTINGS[name], events=1, seconds=0, least_depth=2)
    world = SmallWorld(SETTINGS["shared"])  # what comes from elsewhere, and is not wanted any more, takes four events
    world.run()
    for move in (("query", 0, (A0,), 0), ("done",), ("release", 0, 0), ("failed",)):
        ends = {"done": (), "failed": (0,)}.get(move[0])
        world.apply(move if ends is None else ("done", min(world.disk.flying), ends))
        world.run()
    table = {(former, state) for former, facts in STATES.items() for state in facts.becomes}
    assert {(NAMES[a], NAMES[b]) for a, b in moves} == {(NAMES[a], NAMES[b]) for a, b in table}


def test_a_state_is_the_same_whichever_engine_does_it():
    worlds = [SmallWorld(SETTINGS["memory"]) for _ in range(4)]
    for world, engine in zip(worlds, (0, 1, 0, 0), strict=True):
        world.run()
        world.apply(("query", engine, (A0, A1), 0))
        world.run()
    worlds[2].apply(("started", 0))
    worlds[3].apply(("tick",))
    worlds[3].run()
    names = [world.digest() for world in worlds]
    assert names[0] == names[1]
    assert len(set(names)) == 3


def test_a_state_is_the_same_in_whatever_order_it_came_about():
    names = set()
    for engines in ((0, 1), (1, 0)):
        world = SmallWorld(SETTINGS["sizes"])
        for engine in engines:
            world.run()
            world.apply(("return", engine, 0, "right"))
        world.run()
        names.add(world.digest())
    assert len(names) == 1


def test_a_state_survives_being_copied():
    world = SmallWorld(SETTINGS["writes"])
    world.run()
    again = SmallWorld.load(world.dump())
    assert again.digest() == world.digest()
    again.apply(("commit", 1, (A1,), "right"))
    again.run()
    assert again.digest() != world.digest()
