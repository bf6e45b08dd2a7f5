"""The state machine: one method takes what happened and returns what to do about it.

Rules of this folder: all that decides is here, and nothing here knows what carries it out. An event costs a bounded
amount of work; what is longer is left as a resumable piece, of which :meth:`Core.step` does one slice. Effects are to
be carried out in order; bytes are exposed only after the change that protects them.

Reading order: ``events``, ``arena``, ``catalogue``, ``sessions``, then this file from the top.
"""

from array import array
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from struct import unpack

from kvhold.core import events as ev
from kvhold.core.arena import Arena, align
from kvhold.core.catalogue import Catalogue, Index, State
from kvhold.core.events import Effect, Event, Gone, Reason, Role
from kvhold.core.sessions import Attachment, Lease, Session, Space

CREDIT_SHARE = 8
"""One space's credits take at most an eighth of the arena: bytes that wait for a publish hold nothing to restore."""
LEASE_SHARE = 0.75
"""What of the arena may be leased at once; the rest stays for publishing."""
LIMBO_SHARE = 0.5
"""Above this share of bytes whose owners are lost but not proved dead, new sessions are refused."""

MAX_ANSWERING = 64
"""Questions of one attachment that may wait for their answer; each keeps its keys in memory."""
MAX_LEASES = 4096
MAX_SPACES = 64

Work = Iterator[list[Effect]]


def _split(keys: bytes, width: int) -> tuple[bytes, ...]:
    return unpack(f"{width}s" * (len(keys) // width), keys)


class Core:
    """The manager's decisions over an arena of at most ``capacity`` bytes in pages of ``page`` bytes."""

    def __init__(self, page: int, capacity: int) -> None:
        self.capacity = capacity
        self.arena = Arena(page)
        self.catalogue = Catalogue(self.arena)
        self.counters: Counter[str] = Counter()
        self.attachments: dict[int, Attachment] = {}
        self.sessions: dict[int, Session] = {}
        self._current: dict[str, Attachment] = {}
        self._next_attachment = 1
        self._work: deque[Work] = deque()
        self._hungry: dict[tuple[int, int], None] = {}

    def handle(self, event: Event) -> list[Effect]:
        """The effects of ``event``. Events of a session that is not known (any more) have none."""
        match event:
            case ev.Query():
                return self._start(self._query(event))
            case ev.Commit():
                return self._commit(event) + self._feed()
            case ev.Release():
                return self._start(self._release(event))
            case ev.Return():
                return self._return(event) + self._feed()
            case ev.Open():
                return self._open(event) + self._feed()
            case ev.Close():
                return self._close(event)
            case ev.Joined():
                return self._joined(event) + self._feed()
            case ev.Mapped():
                return self._mapped(event)
            case ev.Left():
                return self._left(event.session, event.how) + self._feed()
            case ev.Populated():
                self.arena.grow(event.pages)
                return self._feed()
            case ev.Purge():
                return self._start(self._purge(event))

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has anything to do."""
        return bool(self._work)

    def step(self) -> list[Effect]:
        """One slice of the piece of work that has waited longest."""
        return self._start(self._work.popleft()) if self._work else []

    def _start(self, work: Work) -> list[Effect]:
        effects = next(work, None)
        if effects is None:
            return []
        self._work.append(work)
        return effects

    # --- sessions -----------------------------------------------------------------------------------------------

    def _joined(self, event: ev.Joined) -> list[Effect]:
        attachment = self._current.get(event.instance)
        if self.lost_bytes(besides=event.instance) > LIMBO_SHARE * self.arena.total > 0:
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
        session = self.sessions.get(session_id)
        if session is None:
            return []
        attachment = session.attachment
        others: list[Effect] = []
        if not attachment.broken:
            attachment.broken = True
            del self._current[attachment.instance]
            for space in attachment.spaces.values():
                for row in space.credits:
                    self.catalogue.move(row, State.LIMBO)
            if how is not Gone.SAID:
                reason = f"the {session.role} session of rank {session.rank} was lost"
                others = [ev.Part(other, reason) for other in attachment.sessions if other != session_id]
        if how is Gone.UNKNOWN:
            attachment.limbo.add(session_id)
            return others
        attachment.limbo.discard(session_id)
        del attachment.sessions[session_id], self.sessions[session_id]
        if not attachment.sessions:
            del self.attachments[attachment.id]
            others += self._start(self._settle(attachment))
        return others

    def _settle(self, attachment: Attachment) -> Work:
        """All of the attachment's owners are gone for certain: what it held is free."""
        leases = list(attachment.leases.values())
        attachment.leases.clear()
        credits = [row for space in attachment.spaces.values() for row in space.credits]
        for space in attachment.spaces.values():
            self._leave(space.index)
        attachment.spaces.clear()
        yield from self._give_up(leases)
        for start in range(0, len(credits), ev.MAX_BATCH):
            for row in credits[start : start + ev.MAX_BATCH]:
                self.catalogue.free(row)
            yield self._feed()

    def _leave(self, index: Index) -> None:
        index.users -= 1
        self.catalogue.drop_index_if_idle(index)

    def _attached(self, session_id: int) -> Attachment | None:
        """The attachment of a scheduler session that may decide for it."""
        session = self.sessions.get(session_id)
        if session is None or session.role is not Role.SCHEDULER or session.attachment.broken:
            return None
        return session.attachment

    # --- spaces and credits -------------------------------------------------------------------------------------

    def _open(self, event: ev.Open) -> list[Effect]:
        attachment = self._attached(event.session)
        if attachment is None:
            return []
        size = align(sum(map(align, event.shards)))
        if len(attachment.spaces) >= MAX_SPACES:
            return [ev.Refuse(event.session, f"more than {MAX_SPACES} spaces are open")]
        if event.space in attachment.spaces or not event.key_bytes or len(event.shards) != attachment.world or not size:
            return [ev.Refuse(event.session, f"space {event.space} opened twice or without geometry")]
        index = self.catalogue.index(event.namespace, event.group, event.key_bytes, event.shards, size)
        if index is None:
            return [ev.Refuse(event.session, "the same namespace is known with another geometry")]
        index.users += 1
        note = ""
        if size > self.capacity:
            note = f"one object has {size} bytes, more than the whole arena of {self.capacity}"
        space = attachment.spaces[event.space] = Space(index, 0 if note else event.slots)
        self._hungry[attachment.id, event.space] = None
        return [ev.Opened(event.session, event.space, self._target(space), note)]

    def _close(self, event: ev.Close) -> list[Effect]:
        attachment = self._attached(event.session)
        space = attachment.spaces.get(event.space) if attachment else None
        if attachment is not None and space is not None:
            space.want = 0
            self._drop_if_closed(attachment, event.space)
        return []

    def _drop_if_closed(self, attachment: Attachment, number: int) -> None:
        space = attachment.spaces[number]
        if space.want == 0 and not space.credits:
            del attachment.spaces[number]
            self._hungry.pop((attachment.id, number), None)
            self._leave(space.index)

    def _target(self, space: Space) -> int:
        """Credits that a space should hold now."""
        return min(space.want, max(1, self.capacity // CREDIT_SHARE // space.index.size))

    def _feed(self) -> list[Effect]:
        """Top credits up, at most one batch an event and for about as many evictions; the rest is left as work.

        What cannot be had now is tried again when something is freed.
        """
        effects: list[Effect] = []
        catalogue, budget, more = self.catalogue, ev.MAX_BATCH, False
        for attachment_id, number in list(self._hungry):
            attachment = self.attachments.get(attachment_id)
            scheduler = attachment.scheduler if attachment else None
            if attachment is None or attachment.broken or scheduler is None:
                del self._hungry[attachment_id, number]
                continue
            space = attachment.spaces[number]
            rows: list[int] = []
            missing = max(0, self._target(space) - len(space.credits))
            cost = catalogue.cost + ev.MAX_BATCH
            while len(rows) < missing:
                if len(rows) == budget or catalogue.cost >= cost:
                    more = True
                    break
                row = catalogue.take(space.index.size, attachment_id)
                if row is None:
                    break
                rows.append(row)
            if len(rows) == missing:
                del self._hungry[attachment_id, number]
            if rows:
                budget -= len(rows)
                space.credits.update(rows)
                effects.append(
                    ev.Grant(
                        scheduler.id,
                        number,
                        array("I", rows).tobytes(),
                        array("Q", [catalogue.offset[row] for row in rows]).tobytes(),
                        array("Q", [catalogue.epoch[row] for row in rows]).tobytes(),
                    )
                )
        if more:
            self._work.append(self._feed_on())
        return effects

    def _feed_on(self) -> Work:
        yield self._feed()

    def _commit(self, event: ev.Commit) -> list[Effect]:
        attachment = self._attached(event.session)
        if attachment is None:
            self.counters["stale"] += len(event.rows) // 4
            return []
        space = attachment.spaces.get(event.space)
        whole = space is not None and len(event.keys) * 4 == len(event.rows) * space.index.key_bytes
        if space is None or not whole or event.shards != space.index.shards:
            return [ev.Refuse(event.session, f"commit to space {event.space} without all of its shards")]
        catalogue, index, credits, counters = self.catalogue, space.index, space.credits, self.counters
        stored: list[int] = []
        parent = index.get(event.parent) if event.parent else None
        keys = _split(event.keys, index.key_bytes)
        for key, row, epoch in zip(keys, array("I", event.rows), array("Q", event.epochs), strict=True):
            known = index.get(key)
            if row not in credits or catalogue.epoch[row] != epoch:
                counters["stale"] += 1
                parent = known
                continue
            credits.discard(row)
            if known is None:
                catalogue.insert(row, index, key, parent)
                stored.append(row)
                parent = row
            else:
                catalogue.free(row)
                counters["duplicates"] += 1
                parent = known
        counters["commits"] += len(stored)
        catalogue.vacate(stored)
        if len(credits) < self._target(space):
            self._hungry[attachment.id, event.space] = None
        self._drop_if_closed(attachment, event.space)
        return []

    def _return(self, event: ev.Return) -> list[Effect]:
        attachment = self._attached(event.session)
        if attachment is None:
            return []
        for row, epoch in zip(array("I", event.rows), array("Q", event.epochs), strict=True):
            number = next((n for n, space in attachment.spaces.items() if row in space.credits), None)
            if number is None or self.catalogue.epoch[row] != epoch:
                self.counters["stale"] += 1
                continue
            attachment.spaces[number].credits.discard(row)
            self.catalogue.free(row)
            self.counters["returns"] += 1
            self._hungry[attachment.id, number] = None
            self._drop_if_closed(attachment, number)
        return []

    # --- queries and leases -------------------------------------------------------------------------------------

    def _query(self, event: ev.Query) -> Work:
        """Match the chain in slices, leasing as it goes; answer; then mark it as used just now, its end first."""
        attachment = self._attached(event.session)
        space = attachment.spaces.get(event.space) if attachment else None
        if attachment is None or not attachment.ready or space is None:
            self.counters["queries"] += 1
            yield [ev.Answer(event.session, event.op, 0, b"", Reason.DETACHED)]
            return
        index, width = space.index, space.index.key_bytes
        asked, torn = divmod(len(event.keys), width)
        if event.op in attachment.leases or torn or asked > ev.MAX_QUERY_KEYS:
            yield [ev.Refuse(event.session, f"operation {event.op} is in use, or its keys are torn or too many")]
            return
        if attachment.answering >= MAX_ANSWERING or len(attachment.leases) >= MAX_LEASES:
            self.counters["queries"] += 1
            self.counters["keys_asked"] += asked
            self.counters["keys_budget"] += asked
            yield [ev.Answer(event.session, event.op, 0, b"", Reason.BUDGET)]
            return
        attachment.answering += 1
        lease = attachment.leases[event.op] = Lease(index, event.skip)
        rows, maps, offset = lease.rows, index.maps, self.catalogue.offset
        offsets = array("Q")
        reason = Reason.NONE
        for start in range(0, asked, ev.MAX_BATCH):
            found: list[int] = []
            try:
                for key in _split(event.keys[start * width : (start + ev.MAX_BATCH) * width], width):
                    found.append(maps[key[-1]][key])
            except KeyError:
                reason = Reason.NOT_STORED
            wanted = found[max(0, event.skip - start) :]
            if len(wanted) * index.size > self._lease_room() and (over := len(wanted) - self._affordable(wanted)):
                del found[-over:], wanted[-over:]
                reason = Reason.BUDGET
            self.catalogue.lease(wanted)
            rows += found
            offsets += array("Q", [offset[row] for row in wanted])
            if reason or start + ev.MAX_BATCH >= asked:
                break
            yield []
            if attachment.broken or attachment.leases.get(event.op) is not lease:
                attachment.answering -= 1
                return  # released, or its owner lost, while it was being answered; who holds the lease ends it
        attachment.answering -= 1
        self.counters["queries"] += 1
        self.counters["keys_asked"] += asked
        self.counters["keys_resident"] += len(rows)
        if reason:
            self.counters[f"keys_{reason}"] += asked - len(rows)
        if not offsets:
            del attachment.leases[event.op]
        yield [ev.Answer(event.session, event.op, len(rows), offsets.tobytes(), reason)]
        for end in range(len(rows), 0, -ev.MAX_BATCH):
            self.catalogue.touch(rows[max(0, end - ev.MAX_BATCH) : end])
            if end > ev.MAX_BATCH:
                yield []

    def _lease_room(self) -> int:
        held = self.catalogue.bytes[State.LEASED] + self.catalogue.bytes[State.DOOMED]
        return int(LEASE_SHARE * self.arena.total) - held

    def _affordable(self, rows: Sequence[int]) -> int:
        """How many leading ones of ``rows`` may be leased now; what somebody holds already costs nothing more."""
        catalogue, room = self.catalogue, self._lease_room()
        for count, row in enumerate(rows):
            if catalogue.state[row] == State.RESIDENT:
                room -= catalogue.size[row]
                if room < 0:
                    return count
        return len(rows)

    def _release(self, event: ev.Release) -> Work:
        session = self.sessions.get(event.session)
        if session is None or session.role is not Role.SCHEDULER:
            return
        yield from self._give_up([lease for op in event.ops if (lease := session.attachment.leases.pop(op, None))])

    def _give_up(self, leases: list[Lease]) -> Work:
        for lease in leases:
            for start in range(lease.skip, len(lease.rows), ev.MAX_BATCH):
                self.catalogue.release(lease.rows[start : start + ev.MAX_BATCH])
                yield self._feed()

    def _purge(self, event: ev.Purge) -> Work:
        """Forget what is stored now; what is granted while this runs stays."""
        catalogue = self.catalogue
        last = catalogue.next_epoch
        for start in range(0, len(catalogue.state), ev.MAX_BATCH):
            for row in range(start, min(start + ev.MAX_BATCH, len(catalogue.state))):
                if State.RESIDENT <= catalogue.state[row] <= State.LEASED and catalogue.epoch[row] < last:
                    index = catalogue.indexes[catalogue.owner[row]]
                    if event.namespace in (b"", index.namespace):
                        catalogue.remove(row)
                        self.counters["purged"] += 1
            yield self._feed()

    # --- accounts -----------------------------------------------------------------------------------------------

    def lost_bytes(self, besides: str | None = None) -> int:
        """Bytes held by attachments, ``besides`` those of one instance, of which a session is lost, not proved dead.

        Not exact where leases share rows: but never more than all that is held.
        """
        lost = (a for a in self.attachments.values() if a.limbo and a.instance != besides)
        states = self.catalogue.bytes
        held = states[State.LIMBO] + states[State.LEASED] + states[State.DOOMED]
        return min(held, sum(attachment.held_bytes for attachment in lost))

    @property
    def limbo_bytes(self) -> int:
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
            "doomed": states[State.DOOMED],
            "limbo": states[State.LIMBO],
        }

    @property
    def objects(self) -> int:
        return sum(map(len, self.catalogue.indexes.values()))
