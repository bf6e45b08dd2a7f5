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
from kvhold.client.control import Control, Ticket
from kvhold.engines.common.accounts import Accounts
from kvhold.engines.common.questions import LeasedBlocks, Question
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
        self, spaces: Sequence[int], local: int, limit: int, hashes: Sequence[bytes], former: Ticket | None
    ) -> Question:
        """Ask about tokens ``local`` to ``limit`` of what has ``hashes``, in place of ``former`` if that is one."""


@dataclass(slots=True)
class Lookup:
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
class Lookups:
    """Questions by request id, put by ``questions``. ``patience`` says how many seconds an answer about so many tokens
    is worth; ``budget`` is what a step may wait for all of them.

    Every engine defers, also one that runs in step with others: a step without work costs it less than a prompt.
    """

    def __init__(
        self,
        control: Control,
        budget: Budget,
        accounts: Accounts,
        questions: Asks,
        patience: Callable[[int], float],
    ) -> None:
        self._control = control
        self._budget = budget
        self._accounts = accounts
        self._questions = questions
        self._patience = patience
        self._by_request: dict[str, Lookup] = {}

    def find(self, request: str, local: int, limit: int, spaces: Sequence[int], hashes: Sequence[bytes]) -> int | None:
        """Tokens beyond ``local`` up to ``limit`` that can be restored; None to be asked again in the next step.

        ``spaces``, by group, are where to look for what has ``hashes``.
        """
        lookup = self._current(request, local, limit)
        if lookup is None:
            lookup = self._by_request[request] = self._ask(request, local, limit, spaces, hashes)
        if lookup.closed or lookup.question is None:
            return 0
        wanted = limit > local
        if not lookup.answered and not self._take_answer(lookup, self._budget if wanted else None):
            if not wanted or lookup.closed:
                return 0
            if not self._control.overdue(lookup.question.ticket, lookup.patience):
                return None
            self._accounts.add("answers_overdue")
            self._accounts.add("tokens_missed_deadline", limit - local)
            lookup.closed = lookup.late = True
            lookup.question.forgo()
        return lookup.question.hit if lookup.leased else 0

    def miss(self, request: str, local: int, limit: int, reason: str) -> None:
        """Account once for tokens that are not asked for because of ``reason``."""
        lookup = self._current(request, local, limit)
        if lookup is None or not lookup.closed:
            self.drop(request)
            self._by_request[request] = self._missed(local, limit, reason)

    def stored(self, request: str) -> Sequence[Collection[int]] | None:
        """By group, the ends of the prompt's blocks that the manager has, as far as it said; empty if nothing is known.

        None while its answer is awaited."""
        lookup = self._by_request.get(request)
        if lookup is None or lookup.question is None or lookup.attachment != self._control.attachment:
            return ()
        if lookup.late and lookup.question.learn():
            lookup.late, lookup.answered = False, True
        if not lookup.answered and not lookup.closed:
            self._take_answer(lookup, self._budget)
        if lookup.answered:
            return lookup.question.stored
        if lookup.closed and not lookup.late:
            return ()
        return () if self._control.overdue(lookup.question.ticket, _LATE_SECONDS) else None

    def junction(self, request: str) -> int:
        """Where the request's prompt leaves what others have in common with it, if that was found out; else 0."""
        lookup = self._by_request.get(request)
        return lookup.question.junction if lookup is not None and lookup.question is not None else 0

    def settle(self, request: str) -> None:
        """The request is admitted without a restore: give the lease back, keep what is known."""
        lookup = self._by_request.get(request)
        if lookup is not None and lookup.leased:
            self._release(lookup)

    def take(self, request: str, tokens: int) -> tuple[Question, int, list[LeasedBlocks]] | None:
        """(question, its ``local``, what to restore) for ``tokens`` of a hit; the caller now owns the lease."""
        lookup = self._by_request.get(request)
        if lookup is None or lookup.closed or not lookup.leased or lookup.question is None:
            return None
        if lookup.attachment != self._control.attachment:
            return None
        whole = tokens == lookup.question.hit
        leased = lookup.question.leased if whole else lookup.question.leased_for(tokens)
        if leased is None or not self._control.start(lookup.question.ticket):
            return None
        lookup.leased = False
        return lookup.question, lookup.local, leased

    def drop(self, request: str) -> None:
        """Give up a request's question and lease, if it has any."""
        lookup = self._by_request.pop(request, None)
        if lookup is not None and lookup.late:
            self._release(lookup)
        elif lookup is not None and not lookup.closed:
            self._count_unanswered(lookup)
            if not lookup.answered or lookup.leased:
                self._release(lookup)

    def drop_all(self) -> None:
        for request in list(self._by_request):
            self.drop(request)

    def _count_unanswered(self, lookup: Lookup) -> None:
        if not lookup.answered:
            self._accounts.add("tokens_missed_cancelled", lookup.limit - lookup.local)

    def _current(self, request: str, local: int, limit: int) -> Lookup | None:
        """The request's question if it was about the same tokens in the same session and is fresh."""
        lookup = self._by_request.get(request)
        if lookup is None:
            return None
        same = (lookup.local, lookup.limit, lookup.attachment) == (local, limit, self._control.attachment)
        age = time.monotonic() - lookup.since
        missing = lookup.answered and lookup.question is not None and local + lookup.question.hit < limit
        if same and not (lookup.leased and age > _FRESH_SECONDS) and not (missing and age > _FRESH_MISS_SECONDS):
            return lookup
        return None

    def _ask(self, request: str, local: int, limit: int, spaces: Sequence[int], hashes: Sequence[bytes]) -> Lookup:
        if self._control.silent:
            self.drop(request)
            return self._missed(local, limit, "deadline")
        if (late := self._by_request.get(request)) is not None and late.late:
            self.drop(request)
        former = self._by_request.pop(request, None)
        ticket = None
        if former is not None and not former.closed:
            self._count_unanswered(former)
            # A lease that was taken for a restore is not given up by asking anew.
            if (former.leased or not former.answered) and former.question is not None:
                ticket = former.question.ticket
        self._count_asked(local, limit)
        question = self._questions.ask(spaces, local, limit, hashes, ticket)
        patience = self._patience(limit - local)
        return Lookup(question, self._control.attachment, local, limit, question.ticket.since, patience)

    def _count_asked(self, local: int, limit: int) -> None:
        self._accounts.add("lookups", limit > local)
        self._accounts.add("tokens_asked", limit - local)

    def _missed(self, local: int, limit: int, reason: str) -> Lookup:
        self._count_asked(local, limit)
        self._accounts.add(f"tokens_missed_{reason}", limit - local)
        return Lookup(None, self._control.attachment, local, limit, time.monotonic(), closed=True)

    def _give_up(self, lookup: Lookup, reason: str) -> None:
        self._accounts.add(f"tokens_missed_{reason}", lookup.limit - lookup.local)
        lookup.closed = True
        self._release(lookup)

    def _take_answer(self, lookup: Lookup, budget: Budget | None) -> bool:
        question = lookup.question
        assert question is not None
        try:
            if not question.progress(budget):
                return False
        except Exception:
            log.exception("kvhold: a search for a hit failed; its request is computed")
            self._give_up(lookup, "error")
            return False
        lookup.answered = True
        lookup.leased = question.hit > 0
        short = lookup.limit - lookup.local - question.hit
        self._accounts.add("tokens_hit", question.hit)
        self._accounts.add(f"tokens_missed_{question.reason}", short)
        if short and question.cut is not None:
            self._accounts.add("tokens_cut", short, group=question.cut)
        return True

    def _release(self, lookup: Lookup) -> None:
        lookup.leased = False
        if lookup.attachment == self._control.attachment and lookup.question is not None:
            self._control.release((lookup.question.ticket,))
