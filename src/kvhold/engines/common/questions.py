"""The questions of waiting requests: how far can this prompt be restored?

An engine asks about a waiting request in every step until it is admitted. One question is put per set of inputs; all
further calls are answered from here, and the lease that came with the answer is kept until it is used or given up.
"""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvhold.client.budget import Budget
from kvhold.client.control import Control, QuestionId
from kvhold.engines.common.accounts import Accounts
from kvhold.engines.common.question import LeasedBlocks, Question
from kvhold.threads import ENGINE, belongs_to

log = logging.getLogger(__name__)

_FRESH_SECONDS = 10.0
"""A leased answer that its request could not use by then is given up and asked for again: leases pin DRAM."""
_FRESH_MISS_SECONDS = 1.0
"""A request that still waits asks again about what was missing: others may have stored it meanwhile."""
_LATE_SECONDS = 10.0
"""An answer that came too late for its request still says what need not be stored, until then."""


class Asks(Protocol):
    """Who puts the questions."""

    def ask(
        self, spaces: Sequence[int], local: int, limit: int, hashes: Sequence[bytes], former: QuestionId | None
    ) -> Question:
        """Ask about tokens ``local`` to ``limit`` of what has ``hashes``, in place of ``former`` if that is one."""


@dataclass(slots=True)
class AskedQuestion:
    """A question about tokens ``local`` to ``limit`` and what became of it.

    ``answered`` once it is; ``closed`` once it was given up, which makes it a miss; ``late`` while its answer is still
    awaited then; ``leased`` while it holds a lease. It may be waited for for ``patience`` seconds.
    """

    question: Question | None
    attachment: int
    local: int
    limit: int
    since: float
    patience: float = 0.0
    answered: bool = False
    closed: bool = False
    late: bool = False
    leased: bool = False


@belongs_to(ENGINE)
class Questions:
    """Questions by request id, put by ``asker``. ``patience`` says how many seconds an answer about so many tokens
    is worth; ``budget`` is what a step may wait for all of them.

    Every engine defers, also one that runs in step with others: a step without work costs it less than a prompt.
    """

    def __init__(
        self,
        control: Control,
        budget: Budget,
        accounts: Accounts,
        asker: Asks,
        patience: Callable[[int], float],
    ) -> None:
        self._control = control
        self._budget = budget
        self._accounts = accounts
        self._asker = asker
        self._patience = patience
        self._by_request: dict[str, AskedQuestion] = {}

    def find(self, request: str, local: int, limit: int, spaces: Sequence[int], hashes: Sequence[bytes]) -> int | None:
        """Tokens beyond ``local`` up to ``limit`` that can be restored; None to be asked again in the next step.

        ``spaces``, by group, are where to look for what has ``hashes``.
        """
        asked = self._current(request, local, limit)
        if asked is None:
            asked = self._by_request[request] = self._ask(request, local, limit, spaces, hashes)
        if asked.closed or asked.question is None:
            return 0
        wanted = limit > local
        if not asked.answered and not self._take_answer(asked, self._budget if wanted else None):
            if not wanted or asked.closed:
                return 0
            if not self._control.overdue(asked.question.id, asked.patience):
                return None
            self._accounts.add("answers_overdue")
            self._accounts.add("tokens_missed_deadline", limit - local)
            asked.closed = asked.late = True
            asked.question.forgo()
        return asked.question.hit if asked.leased else 0

    def miss(self, request: str, local: int, limit: int, reason: str) -> None:
        """Account once for tokens that are not asked for because of ``reason``."""
        asked = self._current(request, local, limit)
        if asked is None or not asked.closed:
            self.drop(request)
            self._by_request[request] = self._missed(local, limit, reason)

    def stored(self, request: str) -> Sequence[Collection[int]] | None:
        """By group, the ends of the prompt's blocks that the manager has, as far as it said; empty if nothing is known.

        None while its answer is awaited."""
        asked = self._by_request.get(request)
        if asked is None or asked.question is None or asked.attachment != self._control.attachment:
            return ()
        if asked.late and asked.question.learn():
            asked.late, asked.answered = False, True
        if not asked.answered and not asked.closed:
            self._take_answer(asked, self._budget)
        if asked.answered:
            return asked.question.stored
        if asked.closed and not asked.late:
            return ()
        return () if self._control.overdue(asked.question.id, _LATE_SECONDS) else None

    def junction(self, request: str) -> int:
        """Where the request's prompt leaves what others have in common with it, if that was found out; else 0."""
        asked = self._by_request.get(request)
        return asked.question.junction if asked is not None and asked.question is not None else 0

    def settle(self, request: str) -> None:
        """The request is admitted without a restore: give the lease back, keep what is known."""
        asked = self._by_request.get(request)
        if asked is not None and asked.leased:
            self._release(asked)

    def take(self, request: str, tokens: int) -> tuple[Question, int, list[LeasedBlocks]] | None:
        """(question, its ``local``, what to restore) for ``tokens`` of a hit; the caller now owns the lease."""
        asked = self._by_request.get(request)
        if asked is None or asked.closed or not asked.leased or asked.question is None:
            return None
        if asked.attachment != self._control.attachment:
            return None
        whole = tokens == asked.question.hit
        leased = asked.question.leased if whole else asked.question.leased_for(tokens)
        if leased is None or not self._control.start(asked.question.id):
            return None
        asked.leased = False
        return asked.question, asked.local, leased

    def drop(self, request: str) -> None:
        """Give up a request's question and lease, if it has any."""
        asked = self._by_request.pop(request, None)
        if asked is not None and asked.late:
            self._release(asked)
        elif asked is not None and not asked.closed:
            self._count_unanswered(asked)
            if not asked.answered or asked.leased:
                self._release(asked)

    def drop_all(self) -> None:
        for request in list(self._by_request):
            self.drop(request)

    def _count_unanswered(self, asked: AskedQuestion) -> None:
        if not asked.answered:
            self._accounts.add("tokens_missed_cancelled", asked.limit - asked.local)

    def _current(self, request: str, local: int, limit: int) -> AskedQuestion | None:
        """The request's question if it was about the same tokens in the same session and is fresh."""
        asked = self._by_request.get(request)
        if asked is None:
            return None
        same = (asked.local, asked.limit, asked.attachment) == (local, limit, self._control.attachment)
        age = time.monotonic() - asked.since
        missing = asked.answered and asked.question is not None and local + asked.question.hit < limit
        if same and not (asked.leased and age > _FRESH_SECONDS) and not (missing and age > _FRESH_MISS_SECONDS):
            return asked
        return None

    def _ask(
        self, request: str, local: int, limit: int, spaces: Sequence[int], hashes: Sequence[bytes]
    ) -> AskedQuestion:
        if self._control.silent:
            self.drop(request)
            return self._missed(local, limit, "deadline")
        if (late := self._by_request.get(request)) is not None and late.late:
            self.drop(request)
        former = self._by_request.pop(request, None)
        former_id = None
        if former is not None and not former.closed:
            self._count_unanswered(former)
            # A lease that was taken for a restore is not given up by asking anew.
            if (former.leased or not former.answered) and former.question is not None:
                former_id = former.question.id
        self._count_asked(local, limit)
        question = self._asker.ask(spaces, local, limit, hashes, former_id)
        patience = self._patience(limit - local)
        return AskedQuestion(question, self._control.attachment, local, limit, question.id.since, patience)

    def _count_asked(self, local: int, limit: int) -> None:
        self._accounts.add("lookups", limit > local)
        self._accounts.add("tokens_asked", limit - local)

    def _missed(self, local: int, limit: int, reason: str) -> AskedQuestion:
        self._count_asked(local, limit)
        self._accounts.add(f"tokens_missed_{reason}", limit - local)
        return AskedQuestion(None, self._control.attachment, local, limit, time.monotonic(), closed=True)

    def _give_up(self, asked: AskedQuestion, reason: str) -> None:
        self._accounts.add(f"tokens_missed_{reason}", asked.limit - asked.local)
        asked.closed = True
        self._release(asked)

    def _take_answer(self, asked: AskedQuestion, budget: Budget | None) -> bool:
        question = asked.question
        assert question is not None
        try:
            if not question.progress(budget):
                return False
        except Exception:
            log.exception("kvhold: a search for a hit failed; its request is computed")
            self._give_up(asked, "error")
            return False
        asked.answered = True
        asked.leased = question.hit > 0
        short = asked.limit - asked.local - question.hit
        self._accounts.add("tokens_hit", question.hit)
        self._accounts.add(f"tokens_missed_{question.reason}", short)
        if short and question.cut is not None:
            self._accounts.add("tokens_cut", short, group=question.cut)
        return True

    def _release(self, asked: AskedQuestion) -> None:
        asked.leased = False
        if asked.attachment == self._control.attachment and asked.question is not None:
            self._control.release((asked.question.id,))
