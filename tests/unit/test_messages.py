"""What is said once on each side of the core has the same name and the same fields on both."""

from dataclasses import MISSING, fields
from typing import Any, get_args

import msgspec
import pytest

from kvhold import protocol as wire
from kvhold.core import events as ev
from kvhold.manager.translate import event_of, message_of

APART = {"Purge", "Flush", "Explain", "Configure", "Ready", "Purged", "Flushed"}
"""Called alike, and not the same: the manager does something of its own about each."""
MESSAGES = {one.__name__: one for one in (*get_args(wire.ClientMessage), *get_args(wire.ManagerMessage))}
EVENTS = {one.__name__: one for one in (*get_args(ev.Event), *get_args(ev.ToSession))}
SHARED = sorted((MESSAGES.keys() & EVENTS.keys()) - APART)


def of_message(name: str) -> list[tuple[str, Any]]:
    """Names and defaults."""
    found = msgspec.structs.fields(MESSAGES[name])
    return [(one.name, MISSING if one.default is msgspec.NODEFAULT else one.default) for one in found]


def of_event(name: str) -> list[tuple[str, Any]]:
    first, *rest = fields(EVENTS[name])
    assert first.name == "session"
    return [(one.name, one.default) for one in rest]


@pytest.mark.parametrize("name", SHARED)
def test_what_is_called_alike_has_the_same_fields(name: str) -> None:
    assert of_message(name) == of_event(name)


def test_all_that_engines_say_and_hear_is_called_alike() -> None:
    sessions = {"Hello", "Retire", "Bye"}  # the server's own: they end and begin sessions
    assert MESSAGES.keys() - set(SHARED) - APART - sessions == {
        *("Status", "StatusReply", "Configured"),  # the operator's
        *("Welcome", "Refused", "Settled"),  # told of what is in no event alone
    }


@pytest.mark.parametrize("name", sorted({one.__name__ for one in get_args(ev.ToSession)} & set(SHARED)))
def test_a_message_says_what_the_effect_does(name: str) -> None:
    values = [f"{name} {field}" for field, _ in of_event(name)]
    told = message_of(EVENTS[name](9, *values))
    assert (type(told), list(msgspec.structs.astuple(told))) == (MESSAGES[name], values)


def test_an_event_says_what_the_message_does() -> None:
    query = wire.Query(1, 2, 3, 4, b"k" * 8)
    assert event_of(9, query) == ev.Query(9, 1, 2, 3, 4, b"k" * 8)
    assert event_of(9, wire.Mapped()) == ev.Mapped(9)
    assert event_of(9, wire.Release(((1, 2),))) == ev.Release(9, ((1, 2),))


def test_tiers_have_the_same_codes_on_both_sides() -> None:
    codes = [{name: value for name, value in vars(tier).items() if name.isupper()} for tier in (wire.Tier, ev.Tier)]
    assert codes[0] == codes[1] == {"NOWHERE": 0, "DRAM": 1, "BACKING": 2, "ELSEWHERE": 3}
