"""The client's side of a question: how long it is waited for, and when nothing is asked."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from kvhold import protocol as wire
from kvhold.client import control
from kvhold.client.budget import Budget
from kvhold.client.control import Control


class Line:
    """A session with a manager that says what it is told to."""

    def __init__(self) -> None:
        self.lost, self.drained = False, True
        self.turns, self.unsent = 0, 0
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
    asking = Control(SimpleNamespace(channel=line), 3.0)  # type: ignore[arg-type]
    asking.take_up()
    return asking, line


def test_a_manager_that_makes_no_turn_after_a_question_is_silent_until_it_makes_one(clock: list[float]) -> None:
    asking, line = attached()
    clock[0] += 100
    assert not asking.silent, "it was told nothing"
    question = asking.ask(1, 0, b"k" * 32)
    clock[0] += 0.2
    assert not asking.silent
    assert asking.overdue(question, 0.1)
    asking.release((question,))
    asking.ask(1, 0, b"k" * 32)
    clock[0] += 0.06
    assert asking.silent, "later questions do not make it any livelier"
    clock[0] += 100
    assert asking.silent
    line.turns += 1
    assert not asking.silent


def test_a_slow_manager_is_not_a_silent_one(clock: list[float]) -> None:
    asking, line = attached()
    for _ in range(20):
        question = asking.ask(1, 0, b"k" * 32)
        clock[0] += 0.1
        line.turns += 1
        assert not asking.silent
        assert not asking.overdue(question, 0.2), "it is waited for as long as the hit is worth"
        clock[0] += 0.1
        line.turns += 1
        assert asking.overdue(question, 0.15)
        assert not asking.silent, "others are asked all the same"
        asking.release((question,))


def test_a_manager_that_does_not_read_is_not_asked_more(clock: list[float]) -> None:
    asking, line = attached()
    line.unsent = control.MOST_UNSENT + 1
    assert asking.silent
    line.unsent = 0
    assert not asking.silent


def test_what_is_leased_for_a_forgone_question_is_given_up_as_its_answer_comes(clock: list[float]) -> None:
    asking, line = attached()
    question = asking.ask(1, 0, b"k" * 64)
    asking.forgo(question)
    line.inbox.append(wire.Answer(question.op, question.revision, 2, b"o" * 16, ""))
    learned = asking.answer(question)
    assert learned is not None
    assert (learned.resident, learned.offsets) == (2, b"")
    assert line.sent[-1] == wire.Release(((question.op, question.revision),))


def test_nothing_is_read_from_a_disk_for_a_forgone_question(clock: list[float]) -> None:
    asking, line = attached()
    question = asking.ask(1, 0, b"k" * 64)
    asking.forgo(question)
    line.inbox.append(wire.Waiting(question.op, question.revision, 1))
    assert asking.answer(question) is None
    assert line.sent[-1] == wire.Release(((question.op, question.revision),))
    assert asking.overdue(question, 100.0), "no answer comes"


def test_an_answer_that_waits_for_other_machines_has_no_more_time_than_any(clock: list[float]) -> None:
    asking, line = attached()
    question = asking.ask(1, 0, b"k" * 32)
    line.inbox.append(wire.Waiting(question.op, question.revision, 0))
    asking.pump()
    assert not asking.reading(question)
    clock[0] += 0.05
    assert asking.overdue(question, 0.03)
    asking.forgo(question)
    assert line.sent[-1] == wire.Release(((question.op, question.revision),))


def test_an_answer_that_waits_for_a_disk_has_more_time(clock: list[float]) -> None:
    asking, line = attached()
    question = asking.ask(1, 0, b"k" * 32)
    line.inbox.append(wire.Waiting(question.op, question.revision, 1))
    asking.pump()
    assert asking.reading(question)
    clock[0] += 2.0
    assert asking.answer(question) is None
    assert not asking.overdue(question, 0.03)
    assert not [message for message in line.sent if isinstance(message, wire.AnswerNow)]
    clock[0] += 1.0
    for _ in range(2):  # it is asked for what is there, once, and has as long to say so as for any other answer
        assert asking.answer(question) is None
        said = [m for m in line.sent if isinstance(m, wire.AnswerNow)]
        assert said == [wire.AnswerNow(question.op, question.revision)]
        assert not asking.overdue(question, 0.03)
    clock[0] += 0.05
    assert asking.overdue(question, 0.03)


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


def test_a_lease_that_ended_by_itself_is_forgotten(clock: list[float]) -> None:
    asking, line = attached()
    questions = [asking.ask(1, 0, b"k" * 32) for _ in range(3)]
    line.inbox += [wire.Answer(each.op, each.revision, 1, b"o" * 8, "") for each in questions]
    line.inbox += [wire.Expired(each.op, each.revision) for each in questions]
    asking.pump()
    assert not asking._asked
    line.sent.clear()
    asking.release(questions)
    assert not line.sent


def test_who_does_not_wait_asks_again_and_who_does_has_a_budget(clock: list[float]) -> None:
    asking, line = attached()
    question = asking.ask(1, 0, b"k" * 32)
    waits: list[float] = []

    def receive(wait: float) -> list[Any]:
        waits.append(wait)
        clock[0] += wait
        return []

    line.receive = receive  # type: ignore[method-assign]
    budget = Budget(0.25 / 16)
    assert asking.answer(question) is None
    assert waits == [0.0]
    assert asking.answer(question, budget) is None
    assert asking.answer(question, budget) is None
    assert waits == [0.0, 0.0, 0.25 / 16, 0.0], "it is spent"
    assert (budget.waited, budget.exhausted) == (0.25 / 16, 1)
    budget.renew()
    assert asking.answer(question, budget) is None
    assert (budget.waited, budget.exhausted) == (0.25 / 8, 2)


KEYS = [number.to_bytes(32, "big") for number in range(600)]


@pytest.mark.parametrize(
    ("at", "runs"),
    [
        (None, [(0, 256), (256, 512), (512, 600)]),
        (range(1, 4), [(1, 4)]),
        ([0, 1, 3, 7, 8, 9], [(0, 2), (3, 4), (7, 10)]),
        ([5], [(5, 6)]),
        ([*range(300), 400], [(0, 256), (256, 300), (400, 401)]),
        ([], []),
    ],
)
def test_a_commit_names_any_rows(clock: list[float], at: list[int] | None, runs: list[tuple[int, int]]) -> None:
    """Each key's parent and depth are those that it has in the chain, whether or not that is committed with it."""
    asking, line = attached()
    asking.open(1, control.Geometry(b"n" * 32, 0, 32, (4096,)), 600)
    held = list(range(600) if at is None else at)
    rows, wide = array("I", range(1000, 1000 + len(held))), array("Q", range(len(held)))
    line.inbox.append(wire.Grant(1, rows.tobytes(), wide.tobytes(), wide.tobytes()))
    asking.pump()
    asking.commit(1, b"p" * 32, 7, KEYS, asking.credit[1].take(len(held)), (4096,), at)
    commits = [message for message in line.sent if isinstance(message, wire.Commit)]
    assert [(c.parent, c.depth, c.keys) for c in commits] == [
        (KEYS[start - 1] if start else b"p" * 32, 7 + start, b"".join(KEYS[start:end])) for start, end in runs
    ]
    assert b"".join(c.rows for c in commits) == rows.tobytes()
    assert asking._granted[1] == 0


@pytest.mark.parametrize("how", ["in time", "late", "expired", "unsent"])
def test_a_restore_begins_only_if_its_lease_is_sure(how: str, clock: list[float]) -> None:
    asking, line = attached()
    question = asking.ask(1, 0, b"k" * 32)
    line.inbox.append(wire.Answer(question.op, question.revision, 1, b"o" * 8, ""))
    assert asking.answer(question) is not None
    if how == "late":
        clock[0] += wire.RESTORE_WITHIN
    if how == "expired":
        line.inbox.append(wire.Expired(question.op, question.revision))
        asking.pump()
    line.drained = how != "unsent"
    assert asking.start(question) is (how == "in time")


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
