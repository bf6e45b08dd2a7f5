"""The client's side of a question: when it stops to ask, and when it asks again."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvhold import protocol as wire
from kvhold.client import control
from kvhold.client.control import Control


class Line:
    """A session with a manager that says what it is told to."""

    def __init__(self) -> None:
        self.lost, self.drained = False, True
        self.welcome = wire.Welcome(7, 1, 1 << 20)
        self.sent: list[Any] = []
        self.inbox: list[Any] = [wire.Ready()]

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def receive(self, wait: float) -> list[Any]:
        said, self.inbox = self.inbox, []
        return said


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(control.time, "monotonic", lambda: now[0])
    return now


def attached() -> tuple[Control, Line]:
    line = Line()
    asking = Control(SimpleNamespace(channel=line), 0.0, 0.03, 3.0)  # type: ignore[arg-type]
    asking.new_step()
    return asking, line


def test_a_manager_that_stays_silent_is_asked_again_after_a_while_and_then_less_often(clock: list[float]) -> None:
    asking, line = attached()
    for pause in (1, 2, 4, 8):
        assert not asking.silent
        ticket = asking.ask(1, 0, b"k" * 32)
        clock[0] += 0.05
        assert asking.overdue(ticket)
        assert asking.silent
        asking.release((ticket,))
        clock[0] += pause - 0.01
        assert asking.silent
        clock[0] += 0.02
    line.inbox.append(wire.Expired(99, 1))  # whatever it says, it is there
    asking.pump()
    assert not asking.silent


def test_an_answer_that_waits_for_a_disk_has_more_time(clock: list[float]) -> None:
    asking, line = attached()
    ticket = asking.ask(1, 0, b"k" * 32)
    line.inbox.append(wire.Waiting(ticket.op, ticket.revision, 1))
    asking.pump()
    assert asking.reading(ticket)
    clock[0] += 2.0
    assert asking.answer(ticket) is None
    assert not asking.overdue(ticket)
    assert not [message for message in line.sent if isinstance(message, wire.Hurry)]
    clock[0] += 1.0
    for _ in range(2):  # it is asked for what is there, once, and has as long to say so as for any other answer
        assert asking.answer(ticket) is None
        assert [m for m in line.sent if isinstance(m, wire.Hurry)] == [wire.Hurry(ticket.op, ticket.revision)]
        assert not asking.overdue(ticket)
    clock[0] += 0.05
    assert asking.overdue(ticket)


def test_the_answer_of_an_earlier_revision_is_not_the_later_ones(clock: list[float]) -> None:
    asking, line = attached()
    first = asking.ask(1, 0, b"k" * 32)
    second = asking.ask(1, 0, b"k" * 64, first)
    line.inbox.append(wire.Answer(first.op, first.revision, 1, b"o" * 8, ""))
    assert (second.op, second.revision) == (first.op, first.revision + 1)
    assert asking.answer(first) is None
    assert asking.answer(second) is None
    line.inbox.append(wire.Answer(second.op, second.revision, 2, b"o" * 16, ""))
    found = asking.answer(second)
    assert found is not None
    assert found.resident == 2


@pytest.mark.parametrize("how", ["in time", "late", "expired", "unsent"])
def test_a_restore_begins_only_if_its_lease_is_sure(how: str, clock: list[float]) -> None:
    asking, line = attached()
    ticket = asking.ask(1, 0, b"k" * 32)
    line.inbox.append(wire.Answer(ticket.op, ticket.revision, 1, b"o" * 8, ""))
    assert asking.answer(ticket) is not None
    if how == "late":
        clock[0] += wire.RESTORE_WITHIN
    if how == "expired":
        line.inbox.append(wire.Expired(ticket.op, ticket.revision))
        asking.pump()
    line.drained = how != "unsent"
    assert asking.start(ticket) is (how == "in time")


def test_credits_that_are_asked_back_are_returned_as_far_as_they_are_idle(clock: list[float]) -> None:
    asking, line = attached()
    asking.open(1, control.Geometry(b"n" * 32, 0, 32, (4096,)), 10)
    line.inbox.append(wire.Grant(1, bytes(4 * 6), bytes(8 * 6), bytes(8 * 6)))
    asking.pump()
    asking.credit[1].take(3)  # being written
    line.inbox.append(wire.Recall(1, 1))
    asking.pump()
    assert len(asking.credit[1]) == 0
    (returned,) = [message for message in line.sent if isinstance(message, wire.Return)]
    assert len(returned.rows) == 4 * 3, "what is being written stays"
