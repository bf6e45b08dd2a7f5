"""Who of the manager's clients has a turn when."""

from typing import Any

from kvhold.manager.clients import Clients


def test_in_each_turn_of_the_loop_one_who_comes_fresh_and_one_who_has_more_to_say_are_heard() -> None:
    """Also where what the other says takes longer than a turn of the loop should."""
    anything: Any = None
    clients, heard = Clients(anything, anything, anything), []
    clients._turn = heard.append  # type: ignore[method-assign]
    flood, neighbours = ["flood"] * 3, ["first", "second"]
    clients._others.extend(flood)  # type: ignore[arg-type]
    clients._fresh.extend(neighbours)  # type: ignore[arg-type]
    clients.take(0.0)
    assert heard == ["flood", "first"]
    clients.take(0.0)
    assert heard[2:] == ["flood", "second"]
    clients.take(0.0)
    assert heard[4:] == ["flood"]
