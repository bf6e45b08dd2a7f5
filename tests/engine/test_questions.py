"""Questions of waiting requests: when one is asked, taken, given up."""

from array import array
from types import SimpleNamespace
from typing import Any

from kvhold.client.budget import Budget
from kvhold.client.control import QuestionId
from kvhold.engines.common.accounts import Accounts
from kvhold.engines.common.question import LeasedBlocks
from kvhold.engines.common.questions import Questions


class Answer:
    """A question that was answered: ``hit`` tokens, of which all blocks are there."""

    def __init__(self, number: int, hit: int, fails: bool = False) -> None:
        self.id = QuestionId(number, 1, 1, 1e12)
        self.hit, self.fails = hit, fails
        self.leased = [LeasedBlocks(0, range(hit // 16), array("Q", range(hit // 16)))]
        self.reason, self.cut, self.junction = "not_stored", None, 0
        self.stored = (range(16, hit + 1, 16),)

    def progress(self, budget: Budget | None) -> bool:
        if self.fails:
            raise IndexError("an answer of a wrong length")
        return True

    def leased_for(self, tokens: int) -> list[LeasedBlocks] | None:
        return self.leased if tokens == self.hit else None


class Asking:
    """Each of its questions is an :class:`Answer`; ``asked`` counts them, ``released`` are those given up."""

    def __init__(self, hit: int = 64, fails: bool = False) -> None:
        self.asked = 0
        self.released: list[int] = []
        self.control: Any = SimpleNamespace(
            attachment=1,
            silent=False,
            overdue=lambda question, patience: False,
            reading=lambda question: False,
            start=lambda question: True,
            release=lambda questions: self.released.extend(question.op for question in questions),
        )
        self.hit, self.fails = hit, fails
        self.accounts = Accounts()
        self.questions = Questions(self.control, Budget(0.0), self.accounts, self, patience=lambda tokens: 1.0)

    def ask(self, *_: Any) -> Any:
        self.asked += 1
        return Answer(self.asked, self.hit, self.fails)

    def find(self, request: str = "r", local: int = 0, limit: int = 96) -> int | None:
        return self.questions.find(request, local, limit, (), ())


def test_a_request_asks_once_until_what_it_asks_about_changes() -> None:
    asking = Asking()
    assert [asking.find() for _ in range(5)] == [64] * 5
    assert asking.asked == 1
    asking.find(local=16)
    assert asking.asked == 2, "the engine's own hit has grown"
    asking.find(local=16, limit=112)
    assert asking.asked == 3, "the request has become longer"
    asking.control.attachment = 2
    asking.find(local=16, limit=112)
    assert asking.asked == 4, "what another session said is void"
    asking.find("other", local=16, limit=112)
    assert asking.asked == 5


def test_the_end_of_a_request_and_a_reset_give_questions_up() -> None:
    asking = Asking()
    for name in ("a", "b", "c"):
        asking.find(name)
    asking.questions.drop("b")
    assert asking.released == [2]
    asking.questions.drop("b")
    asking.questions.drop_all()
    assert asking.released == [2, 1, 3]
    assert asking.questions.take("a", 64) is None
    asking.find("a")
    assert asking.asked == 4, "a request of the same name is another one"


def test_a_search_that_fails_is_a_miss_and_leaves_nothing_to_others() -> None:
    asking = Asking(fails=True)
    assert asking.find("a") == 0
    assert asking.released == [1]
    assert asking.questions.take("a", 64) is None
    assert asking.accounts.data["tokens_missed_error"] == 96
    asking.fails = False
    assert asking.find("b") == 64


def test_an_admission_without_a_restore_gives_the_lease_back_and_keeps_what_is_known() -> None:
    """The engine says so, too, when a restore has arrived; what is there must not be stored once more."""
    asking = Asking()
    asking.find()
    asking.questions.settle("r")
    asking.questions.settle("r")
    assert asking.released == [1]
    assert asking.questions.take("r", 64) is None
    assert asking.questions.stored("r") == (range(16, 65, 16),)
    restored = Asking()
    restored.find()
    taken = restored.questions.take("r", 64)
    assert taken is not None
    restored.questions.settle("r")  # the second call, of a restore that arrived
    assert restored.released == [], "whoever took the lease ends it"
    assert restored.questions.stored("r") == (range(16, 65, 16),)


def test_only_what_was_found_is_taken() -> None:
    asking = Asking()
    asking.find()
    assert asking.questions.take("r", 80) is None
    assert asking.questions.take("nobody", 64) is None
    taken = asking.questions.take("r", 64)
    assert taken is not None
    assert asking.questions.take("r", 64) is None, "once"
