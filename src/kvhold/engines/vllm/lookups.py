"""The questions of waiting requests: how far can this prompt be restored?

vLLM asks about a waiting request in every step until it is admitted. One question is sent per set of inputs; all
further calls are answered from here, and the lease that came with the answer is kept until it is used or given up.
"""

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvhold.client.control import Control, Ticket
from kvhold.engines.vllm.stats import KvHoldStats

_FRESH_SECONDS = 10.0
"""A leased answer that its request could not use by then is given up and asked for again: leases pin DRAM."""
_FRESH_MISS_SECONDS = 1.0
"""A request that still waits asks again about what was missing: others may have stored it meanwhile."""


@dataclass(slots=True)
class Lookup:
    """One question and what became of it. Counts are blocks from the prompt's start, ``offsets`` bytes in the arena.

    ``resident`` is None until the question is answered; ``closed`` once it was given up, which makes it a miss.
    """

    ticket: Ticket | None
    attachment: int
    first: int
    last: int
    since: float
    resident: int | None = None
    closed: bool = False
    offsets: "array[int]" = field(default_factory=lambda: array("Q"))


class Lookups:
    """Questions by request id, over blocks of ``block_tokens``. ``patient`` engines defer a request for a step."""

    def __init__(self, control: Control, stats: KvHoldStats, block_tokens: int, patient: bool) -> None:
        self._control = control
        self._stats = stats
        self._block_tokens = block_tokens
        self._patient = patient
        self._by_request: dict[str, Lookup] = {}

    def find(self, request: str, space: int, first: int, last: int, hashes: Sequence[bytes]) -> int | None:
        """Blocks from ``first`` up to ``last`` that can be restored; None to be asked again in the next step.

        ``hashes`` are those of the prompt's blocks; the ones before ``first`` only say that their objects are in use.
        """
        lookup = self._current(request, first, last)
        if lookup is None:
            lookup = self._by_request[request] = self._ask(request, space, first, last, hashes)
        if lookup.closed:
            return 0
        wanted = last > first
        if lookup.resident is None and not self._take_answer(lookup, patient=wanted):
            if not wanted:
                return 0
            # Reading from a disk is worth a wait to everybody.
            patient = self._patient or (lookup.ticket is not None and self._control.reading(lookup.ticket))
            if patient and not self._overdue(lookup):
                return None
            self._stats.add("answers_overdue")
            self._stats.add("tokens_missed_deadline", (last - first) * self._block_tokens)
            lookup.closed = True
            self._release(lookup)
        return len(lookup.offsets)

    def miss(self, request: str, first: int, last: int, reason: str) -> None:
        """Account once for blocks that are not asked for because of ``reason``."""
        lookup = self._current(request, first, last)
        if lookup is None or not lookup.closed:
            self.drop(request)
            self._by_request[request] = self._missed(first, last, reason)

    def resident(self, request: str) -> int | None:
        """Leading blocks of the prompt that the manager has, as far as it said; None while its answer is awaited."""
        lookup = self._by_request.get(request)
        if lookup is None or lookup.closed or lookup.attachment != self._control.attachment:
            return 0
        if lookup.resident is None and not self._take_answer(lookup, patient=True):
            return 0 if self._overdue(lookup) else None
        return lookup.resident

    def settle(self, request: str) -> None:
        """The request is admitted without a restore: give the lease back, keep what is known."""
        lookup = self._by_request.get(request)
        if lookup is not None and lookup.offsets:
            lookup.offsets = array("Q")
            self._release(lookup)

    def take(self, request: str, blocks: int) -> "tuple[Ticket, int, array[int]] | None":
        """(question, first block, offsets) of a restore of ``blocks``; the caller now owns the lease. None without."""
        lookup = self._by_request.get(request)
        if lookup is None or lookup.closed or len(lookup.offsets) < blocks or lookup.ticket is None:
            return None
        if lookup.attachment != self._control.attachment or not self._control.start(lookup.ticket):
            return None
        taken = lookup.ticket, lookup.first, lookup.offsets[:blocks]
        lookup.offsets = array("Q")
        return taken

    def drop(self, request: str) -> None:
        """Give up a request's question and lease, if it has any."""
        lookup = self._by_request.pop(request, None)
        if lookup is not None and not lookup.closed:
            self._count_unanswered(lookup)
            if lookup.resident is None or lookup.offsets:
                self._release(lookup)

    def _count_unanswered(self, lookup: Lookup) -> None:
        if lookup.resident is None:
            self._stats.add("tokens_missed_cancelled", (lookup.last - lookup.first) * self._block_tokens)

    def drop_all(self) -> None:
        for request in list(self._by_request):
            self.drop(request)

    def _current(self, request: str, first: int, last: int) -> Lookup | None:
        """The request's question if it was about the same blocks in the same session and is fresh."""
        lookup = self._by_request.get(request)
        if lookup is None:
            return None
        same = (lookup.first, lookup.last, lookup.attachment) == (first, last, self._control.attachment)
        age = time.monotonic() - lookup.since
        missing = not lookup.closed and lookup.resident is not None and lookup.resident < last
        if same and not (lookup.offsets and age > _FRESH_SECONDS) and not (missing and age > _FRESH_MISS_SECONDS):
            return lookup
        return None

    def _overdue(self, lookup: Lookup) -> bool:
        return lookup.ticket is None or self._control.overdue(lookup.ticket)

    def _ask(self, request: str, space: int, first: int, last: int, hashes: Sequence[bytes]) -> Lookup:
        if self._control.silent:
            self.drop(request)
            return self._missed(first, last, "deadline")
        former = self._by_request.pop(request, None)
        if former is not None and not former.closed:
            self._count_unanswered(former)
        self._count_asked(first, last)
        # A lease that was taken for a restore is not given up by asking anew.
        again = former is not None and not former.closed and (former.resident is None or former.offsets)
        ticket = self._control.ask(space, first, b"".join(hashes[:last]), former.ticket if former and again else None)
        return Lookup(ticket, self._control.attachment, first, last, ticket.since)

    def _count_asked(self, first: int, last: int) -> None:
        self._stats.add("lookups", last > first)
        self._stats.add("tokens_asked", (last - first) * self._block_tokens)

    def _missed(self, first: int, last: int, reason: str) -> Lookup:
        self._count_asked(first, last)
        self._stats.add(f"tokens_missed_{reason}", (last - first) * self._block_tokens)
        return Lookup(None, self._control.attachment, first, last, time.monotonic(), closed=True)

    def _take_answer(self, lookup: Lookup, patient: bool) -> bool:
        answer = self._control.answer(lookup.ticket, patient) if lookup.ticket is not None else None
        if answer is None:
            return False
        lookup.resident = answer.resident
        lookup.offsets.frombytes(answer.offsets)
        hit = len(lookup.offsets)
        self._stats.add("tokens_hit", hit * self._block_tokens)
        reason = answer.reason or "not_stored"
        self._stats.add(f"tokens_missed_{reason}", (lookup.last - lookup.first - hit) * self._block_tokens)
        return True

    def _release(self, lookup: Lookup) -> None:
        if lookup.attachment == self._control.attachment and lookup.ticket is not None:
            self._control.release((lookup.ticket,))
