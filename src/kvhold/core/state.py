"""The state machine: one method takes what happened and returns what to do about it.

Rules of this folder: all that decides is here, and nothing here knows what carries it out. An event costs a bounded
amount of work; what is longer is left as a resumable piece, of which :meth:`Core.step` does one slice. Effects are to
be carried out in order; bytes are exposed only after the change that protects them.

Reading order: ``events``, ``rows``, ``arena``, ``recency``, ``lru``, ``backing``, ``indexes``, ``catalogue``,
``eviction``, ``sessions``, ``turns``, ``heard``, ``asking``, ``forgetting``, ``credits``, ``reading``, ``placement``,
``storage``, ``log``, ``budgets``, ``operations``, ``fetching``, ``matching``, ``looking``, then this.
"""

from collections import Counter

from kvhold.core import events as ev
from kvhold.core.audit import RULES
from kvhold.core.budgets import Budgets
from kvhold.core.catalogue import Catalogue
from kvhold.core.common import Common
from kvhold.core.credits import Credits
from kvhold.core.events import Effect, Event, Gone, Role
from kvhold.core.eviction import POLICIES, Policy
from kvhold.core.explain import explain
from kvhold.core.fetching import Fetching
from kvhold.core.forgetting import Forgetting
from kvhold.core.limits import Limits
from kvhold.core.listing import listing
from kvhold.core.looking import Looking
from kvhold.core.matching import Matching
from kvhold.core.operations import Operations
from kvhold.core.rows import State
from kvhold.core.sessions import Attachment, Operation, Phase, Session
from kvhold.core.turns import Work


class Core:
    """The manager's decisions over an arena of at most ``capacity`` bytes in pages of ``page`` bytes.

    ``policy`` makes what decides which objects give way: one of ``eviction.POLICIES``.
    """

    def __init__(
        self, page: int, capacity: int, limits: Limits | None = None, policy: Policy = POLICIES["lru"]
    ) -> None:
        self.common = Common(page, capacity, limits or Limits(), policy)
        self.arena = self.common.arena
        self.catalogue: Catalogue = self.common.catalogue
        self.counters: Counter[str] = self.common.counters
        self.attachments: dict[int, Attachment] = self.common.attachments
        self.sessions: dict[int, Session] = self.common.sessions
        self.budgets = Budgets(self.common)
        self.operations = Operations(self.common, self.budgets)
        self.storage = self.operations.storage
        fetching = Fetching(self.common, self.operations, self.budgets)
        self.matching = Matching(self.common, self.operations, self.budgets, fetching)
        self.looking = Looking(self.common, self.operations, self.budgets, fetching)
        self.forgetting = Forgetting(self.common, self.storage.asking)
        self.credits = Credits(self.common, self.storage, self.forgetting)
        self._current: dict[str, Attachment] = {}
        self._next_attachment = 1

    def handle(self, event: Event, now: int) -> list[Effect]:
        """The effects of ``event`` at ``now``, in nanoseconds of a clock that never goes back.

        Events of a session that is not known (any more) have none.
        """
        if now < self.common.now:
            self.counters["clock_went_back"] += 1
        self.common.now = self.common.history.now = max(now, self.common.now)
        self.catalogue.recency.clock.note_time(self.common.now)
        return self._follow(self._handle(event))

    def _handle(self, event: Event) -> list[Effect]:
        common = self.common
        match event:
            case ev.Query():
                return common.start(self.matching.query(event), event.session, question=True)
            case ev.Commit():
                return self.credits.commit(event)
            case ev.Release():
                return common.start(self.operations.release(event), event.session)
            case ev.Cut():
                return self.matching.cut(event)
            case ev.Started():
                self.operations.started(event)
            case ev.Done():
                return self.storage.done(event) + self.forgetting.done(event)
            case ev.Found():
                for operation in self.storage.found(event):
                    self._go_on(operation)
            case ev.Tick():
                self._ask_no_longer()
                return self._wait_no_longer() + self.operations.tick(event)
            case ev.Return():
                return self.credits.give_back(event)
            case ev.AnswerNow():
                return common.start(self.operations.answer_now(event), event.session, question=True)
            case ev.Lookup():
                return common.start(self.looking.lookup(event), event.session, question=True)
            case ev.Prepare():
                return common.start(self.matching.prepare(event), event.session, question=True)
            case ev.RestoreFailed():
                return common.start(self.forgetting.restore_failed(event), event.session)
            case ev.Open():
                return self.credits.open(event)
            case ev.Close():
                return self.credits.close(event)
            case ev.Joined():
                return self._joined(event)
            case ev.Mapped():
                return self._mapped(event)
            case ev.Left():
                return self._left(event.session, event.how)
            case ev.Populated():
                self.arena.grow(event.pages)
                self.catalogue.freed += 1
            case ev.Purge():
                return common.start(self.forgetting.purge(event), event.session)
            case ev.Flush():
                return self.storage.flush(event.session)
            case ev.Configure():
                self.catalogue.configure(event.limits)
                return self.credits.share() + common.start(common.eviction.shrink())
            case ev.Explain():
                return common.start(explain(common, event), event.session, question=True)
            case ev.List():
                return common.start(listing(common, event), event.session, question=True)
            case ev.FromBacking():
                self.storage.told(event)
        return []

    def _go_on(self, operation: Operation) -> None:
        """Others have said what they have, or not in time: in its owner's turn, go on with what was heard."""
        operation.phase = Phase.MATCHING
        way = self.looking if operation.looks else self.matching
        self.common.turns.add(way.go_on(operation), operation.session, question=True)

    def _ask_no_longer(self) -> None:
        """Go on with those that have waited for others for too long: they are few, as all that wait are."""
        while (operation := self.storage.asking.overdue()) is not None:
            assert operation.search is not None
            operation.search.late = True
            self._go_on(operation)

    def _wait_no_longer(self) -> list[Effect]:
        """Go on without what others take too long to give."""
        effects: list[Effect] = []
        for one in self.common.backings.asked.values():
            while rows := one.too_late():
                effects += self.operations.wait_no_longer(rows)
        return effects

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has anything to do."""
        return bool(self.common.turns)

    def step(self) -> list[Effect]:
        """One slice of work that is not finished, for whoever has waited longest."""
        turns = self.common.turns
        return self._follow(turns.slice()) if turns else []

    def unfinished(self, session: int) -> int:
        """Pieces of work that a session has asked for and that are not finished."""
        return self.common.turns.of(session)

    @property
    def unfinished_work(self) -> int:
        """The same of all sessions, and of the manager itself."""
        return len(self.common.turns)

    @property
    def purges(self) -> int:
        """Purges under way."""
        return self.forgetting.purges

    def _follow(self, effects: list[Effect]) -> list[Effect]:
        """``effects``, and what can be done now that could not before; then all watchers know what is gone."""
        return effects + self.storage.pump() + self.credits.feed() + self.common.departed()

    @property
    def next_deadline(self) -> int | None:
        """When to send a :class:`~kvhold.core.events.Tick`; None if nothing waits for time alone."""
        ends = [self.operations.next_deadline, self.storage.next_deadline]
        return min((end for end in ends if end is not None), default=None)

    # --- sessions -----------------------------------------------------------------------------------------------

    def _joined(self, event: ev.Joined) -> list[Effect]:
        attachment = self._current.get(event.instance)
        if self.lost_bytes(besides=event.instance) > self.common.limits.lost_share * self.arena.total > 0:
            reason = "too many bytes wait for the end of lost engines; see `kvhold status` for their processes"
        elif attachment is not None and attachment.world != event.world:
            reason = f"instance {event.instance} has {attachment.world} ranks, not {event.world}"
        elif attachment is not None and self._taken(attachment, event):
            reason = (
                f"instance {event.instance} already has a live {event.role} of rank {event.rank}; "
                "give each engine its own kv_transfer_config.engine_id"
            )
        else:
            reason = ""
        if reason:
            self.counters["refused"] += 1
            return [ev.Refuse(event.session, reason)]
        if attachment is None:
            attachment = Attachment(self._next_attachment, event.instance, event.world)
            self._next_attachment += 1
            self.attachments[attachment.id] = self._current[event.instance] = attachment
        session = Session(event.session, event.role, attachment, event.rank)
        self.sessions[event.session] = attachment.sessions[event.session] = session
        return [ev.Accept(event.session), *self._ready(attachment)]

    @staticmethod
    def _taken(attachment: Attachment, event: ev.Joined) -> bool:
        """There is one scheduler half, whatever rank it says it has, and one worker half of each rank."""
        return any(
            s.role is event.role and (s.rank == event.rank or s.role is Role.SCHEDULER)
            for s in attachment.sessions.values()
        )

    def _mapped(self, event: ev.Mapped) -> list[Effect]:
        session = self.sessions.get(event.session)
        if session is None:
            return []
        session.mapped = True
        return self._ready(session.attachment)

    @staticmethod
    def _ready(attachment: Attachment) -> list[Effect]:
        scheduler = attachment.scheduler
        if attachment.broken or attachment.ready or scheduler is None or not attachment.complete:
            return []
        attachment.ready = True
        return [ev.Ready(scheduler.id, tuple(s.id for s in attachment.sessions.values() if s.role is Role.WORKER))]

    def _left(self, session_id: int, how: Gone) -> list[Effect]:
        self.common.turns.forget(session_id)
        self.storage.forget_flushes(session_id)
        self.forgetting.left(session_id)
        session = self.sessions.get(session_id)
        if session is None:
            return []
        attachment = session.attachment
        effects: list[Effect] = []
        if not attachment.broken:
            attachment.broken = True
            attachment.since = self.common.now
            del self._current[attachment.instance]
            if how is not Gone.SAID:
                reason = f"the {session.role} session of rank {session.rank} was lost"
                effects += [ev.Detach(other, reason) for other in attachment.sessions if other != session_id]
            effects += self.credits.lost(attachment)
        if how is Gone.UNKNOWN:
            attachment.lost.add(session_id)
            return effects
        attachment.lost.discard(session_id)
        del attachment.sessions[session_id], self.sessions[session_id]
        if not attachment.sessions:
            del self.attachments[attachment.id]
            effects += self.common.start(self._settle(attachment))
        return effects

    def _settle(self, attachment: Attachment) -> Work:
        """All of the attachment's owners are gone for certain: what it held is free."""
        credits = self.credits.detach(attachment)
        yield from self.operations.settle(attachment)
        for start in range(0, len(credits), ev.MAX_BATCH):
            for row in credits[start : start + ev.MAX_BATCH]:
                self.catalogue.free(row)
            yield []

    # --- accounts -----------------------------------------------------------------------------------------------

    def lost_bytes(self, besides: str | None = None) -> int:
        """Bytes held by attachments, ``besides`` those of one instance, of which a session is lost, not proved dead.

        Not exact where leases share rows: but never more than all that is held.
        """
        lost = (a for a in self.attachments.values() if a.lost and a.instance != besides)
        states = self.catalogue.bytes
        held = states[State.ORPHANED] + states[State.LEASED] + states[State.DOOMED]
        return min(held, sum(attachment.held_bytes for attachment in lost))

    @property
    def orphaned_bytes(self) -> int:
        """All of :meth:`lost_bytes`."""
        return self.lost_bytes()

    def accounts(self) -> dict[str, int]:
        """Where every byte of the arena is; the values make up ``arena.total``."""
        states = self.catalogue.bytes
        return {
            "free_pages": self.arena.free_pages * self.arena.page,
            "free_slots": self.arena.free_slot_bytes,
            "slack": self.arena.slack_bytes,
            "credit": states[State.CREDIT],
            "resident": states[State.RESIDENT],
            "leased": states[State.LEASED],
            "loading": states[State.LOADING],
            "doomed": states[State.DOOMED],
            "orphaned": states[State.ORPHANED],
        }

    def audit(self) -> list[str]:
        """In words, every rule about the core's collections that does not hold, and of what."""
        return [str(finding) for finding in RULES.findings(self)]

    @property
    def objects(self) -> int:
        return self.catalogue.objects
