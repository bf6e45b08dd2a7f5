"""The ways in which the core is broken.

Each names a function, wherever that is, a passage of it and what stands there instead (see ``change.py``). Who moves a
function need not look here; who rewrites what a fault changes gives the fault its new passage.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Fault:
    """``breaks`` is the rule that does not hold any more."""

    name: str
    function: str
    old: str
    new: str
    breaks: str


FAULTS: Final = (
    # --- leases and slots
    Fault(
        "a release is dropped",
        "_letting_go",
        "_.release(batch)",
        "",
        "what nobody leases is held by nobody",
    ),
    Fault(
        "a slot is reused under a lease",
        "victim",
        "state[row] == State.RESIDENT",
        "state[row] in (State.RESIDENT, State.LEASED)",
        "leased bytes stay",
    ),
    Fault(
        "a lease is lost when its row is passed over",
        "pass_over",
        "self.passed += 1",
        "self.passed += 1\nself._rows.leases[row] = max(0, self._rows.leases[row] - 1)",
        "leased bytes stay",
    ),
    Fault(
        "a purge frees leased bytes",
        "remove",
        "self.leases[row]",
        "state == State.LOADING",
        "leased bytes stay",
    ),
    Fault(
        "a release of another revision counts",
        "release",
        "operation.revision == revision",
        "True",
        "a late word about one revision does not touch another",
    ),
    Fault(
        "a lease expires after its restore started",
        "started",
        "self._leases.end(operation)\nself._unheard.end(operation)",
        "",
        "only its owner's word ends a restore",
    ),
    Fault(
        "an unused answer never expires",
        "_due_lease",
        "now - limits.lease_ns",
        "-1",
        "unused leases end",
    ),
    # --- sessions
    Fault(
        "a closed socket counts as a death",
        "_left",
        "attachment.limbo.add(session_id)\nreturn effects",
        "attachment.limbo.add(session_id)",
        "what a lost owner may still touch is not given away",
    ),
    Fault(
        "a dead engine keeps its leases",
        "_settle",
        "yield from _.settle(attachment)",
        "",
        "nothing is held once all owners are gone",
    ),
    Fault(
        "a dead engine's worker is not waited for",
        "_left",
        "not attachment.sessions",
        "attachment.id in self.attachments",
        "bytes stay until every half is proved gone",
    ),
    # --- credits and commits
    Fault(
        "a commit with an old epoch counts",
        "commit",
        "catalogue.epoch[row] != epoch",
        "False",
        "a late commit does not touch the slot's next use",
    ),
    Fault(
        "a commit of another engine's slot counts",
        "commit",
        "row not in credits",
        "catalogue.state[row] != State.CREDIT",
        "a slot is its owner's",
    ),
    Fault(
        "a return with an old epoch counts",
        "give_back",
        "_[row] != epoch",
        "False",
        "a late return does not touch the slot's next use",
    ),
    Fault(
        "a committed slot stays a credit",
        "commit",
        "credits.discard(row)",
        "",
        "a slot is committed once",
    ),
    Fault(
        "more is granted than a space's share",
        "feed",
        "max(0, self.target(attachment, space) - len(space.credits))",
        "self.target(attachment, space)",
        "credits are bounded",
    ),
    Fault(
        "slots that were put off for want of time are not looked for",
        "feed",
        "-1 if more else catalogue.freed",
        "catalogue.freed",
        "nobody waits for slots that are free",
    ),
    Fault(
        "a commit without a shard is taken",
        "commit",
        "event.shards != space.index.shards",
        "False",
        "an object is every shard in full",
    ),
    Fault(
        "a duplicate keeps its slot",
        "commit",
        "catalogue.free(row)",
        "",
        "bytes reconcile",
    ),
    # --- questions
    Fault(
        "an answer of an old revision is given",
        "Operations.end",
        "operation.phase = Phase.OVER",
        "",
        "an old revision is not answered",
    ),
    Fault(
        "an old revision keeps its leases",
        "begin",
        "self.end(former, Kind.SUPERSEDED)",
        "None",
        "a new revision releases what the old one held",
    ),
    Fault(
        "a part of a prepared whole is an answer",
        "_conclude",
        "if reason:\n    resident, offsets = _",
        'if cut is not None:\n    resident, offsets = 0, array("Q")',
        "all or nothing",
    ),
    Fault(
        "a question that waits has no deadline",
        "tick",
        "now - limits.answer_ns",
        "-1",
        "every question is answered",
    ),
    Fault(
        "what failed to load is not quarantined on disk",
        "spoiled",
        "_.forget(names) if names else []",
        "[]",
        "a bad object is not found again",
    ),
    Fault(
        "what the engine has itself is leased",
        "prepare",
        "work = [_ for number, keys in event.parts]",
        "work = [(spaces[number].index, keys) for number, keys in (*event.parts, *event.used)]",
        "only what was asked for is held",
    ),
    Fault(
        "what the engine has itself ages",
        "_mark",
        "_.touch(_, index)",
        "",
        "what lives in an engine's memory stays",
    ),
    # --- events
    Fault(
        "nobody is told what is gone",
        "remove",
        "self.gone.append((index, key))",
        "",
        "who watches knows what can be found",
    ),
    Fault(
        "what was not kept is told as stored",
        "_told",
        "_ is not None",
        "True",
        "who watches knows what can be found",
    ),
    Fault(
        "going to a log alone is told as a removal",
        "Catalogue.evict",
        "self.note(Kind.COOLED, row)",
        "self.note(Kind.COOLED, row)\nself.gone.append((self.indexes[self.owner[row]], self.key[row]))",
        "who watches knows what can be found",
    ),
    Fault(
        "what is gone is told after the answer",
        "_conclude",
        "_.departed()",
        "list[Effect]()",
        "events come in the order of what happened",
    ),
    Fault(
        "who closed a space is told of it",
        "_shut",
        "self._unwatch(space)",
        "",
        "only who watches is told",
    ),
    Fault(
        "a listing passes over what was given another row",
        "listing",
        "row if moves == now else 0",
        "row",
        "what can be found is listed",
    ),
    # --- budgets
    Fault(
        "the share of prepared bytes is ignored",
        "room",
        "int(limits.prepared_share * total) - held",
        "total",
        "prepared bytes are bounded",
    ),
    Fault(
        "an engine's share is ignored",
        "room",
        "int(limits.engine_share * total) - attachment.prepared",
        "total",
        "one engine's prepared bytes are bounded",
    ),
    Fault(
        "a charge is not returned",
        "Operations.end",
        "_.charge(operation, -operation.charged)",
        "",
        "every charge is returned once",
    ),
    Fault(
        "the number of open questions is not bounded",
        "crowded",
        "attachment.answering - pending >= limits.queries",
        "False",
        "questions of one engine are bounded",
    ),
    Fault(
        "a namespace's limit is ignored",
        "_place",
        "owner.used + size <= owner.quota.limit",
        "True",
        "a quota is not exceeded",
    ),
    Fault(
        "a namespace's floor is ignored",
        "spared",
        "owner is not asking and owner.used <= owner.quota.floor",
        "False",
        "a namespace keeps its floor",
    ),
    Fault(
        "max_objects is ignored",
        "commit",
        "catalogue.objects >= limit and not _.forget_one()",
        "False",
        "known objects are bounded",
    ),
    Fault(
        "the keys of one engine's questions are not bounded",
        "crowded",
        "named > limits.keys",
        "False",
        "what one engine's questions take is bounded",
    ),
    Fault(
        "spaces that nobody has open are kept for ever",
        "open",
        "forgotten = _.start(_, event.session)",
        "",
        "known spaces are bounded",
    ),
    Fault(
        "what is private outlives its engine",
        "_leave",
        "not index.users",
        "index.users",
        "what nobody can find again is forgotten",
    ),
    Fault(
        "what others can find is forgotten with an engine",
        "_leave",
        "index.private",
        "True",
        "an engine's end takes nothing from others",
    ),
    Fault(
        "what is private is forgotten although it is open again",
        "_forget",
        "not index.users",
        "True",
        "what somebody has open stays",
    ),
    # --- turns
    Fault(
        "one session's work is done before all others'",
        "slice",
        "self._pieces.move_to_end(owner)",
        "",
        "turns are fair",
    ),
    Fault(
        "questions of who is gone are answered",
        "_left",
        "_.turns.forget(session_id)",
        "",
        "nothing is done for who is gone",
    ),
    Fault(
        "a lease ends before its owner was heard",
        "tick",
        "operation.session in event.behind",
        "False",
        "what was said before a lease's end counts",
    ),
    Fault(
        "a lease whose owner was not heard never ends",
        "Operations.tick",
        "self._unheard.begin(operation, now)",
        "",
        "unused leases end",
    ),
    Fault(
        "all leases are kept while anybody is behind",
        "Operations.tick",
        "operation.session in event.behind",
        "event.behind",
        "unused leases end",
    ),
    # --- recency
    Fault(
        "a chain is evicted from its head",
        "touch",
        "reversed(pieces)",
        "pieces",
        "chains go from their ends",
    ),
    Fault(
        "what nobody can reach is kept",
        "_cut_off",
        "_ is None",
        "False",
        "what cannot be reached goes first",
    ),
    Fault(
        "what windows need is not kept without what comes before it",
        "_cut_off",
        "index.chain",
        "True",
        "only chains need what comes before",
    ),
    Fault(
        "what follows a lost object goes in its turn",
        "remove",
        "self._strand(row)",
        "",
        "what cannot be reached goes first",
    ),
    # --- reads
    Fault(
        "what is skipped is leased and read",
        "_match_chain",
        "max(0, part.skip - start)",
        "0",
        "what was not chosen is not read",
    ),
    Fault(
        "a part is read of what cannot be had whole",
        "_hold",
        "operation.exact",
        "operation.exact and not rows",
        "what cannot be used is not read",
    ),
    Fault(
        "a failed read is served",
        "done",
        "position not in failed",
        "position not in failed or not io.cancelled",
        "right bytes or a miss",
    ),
    Fault(
        "a failed read stays charged",
        "done",
        "self.bytes -= io.bytes",
        "self.bytes -= 0 if failed else io.bytes",
        "every I/O's charge is returned",
    ),
    Fault(
        "a second completion counts again",
        "done",
        "_.pop(event.io, None)",
        "self.ios.get(event.io)",
        "every I/O ends once",
    ),
    Fault(
        "one owner's cancel unqueues what another waits for",
        "unwanted",
        "if catalogue.leases[row] != 1:\n    continue",
        "",
        "a cancel touches nobody else",
    ),
    Fault(
        "one owner's cancel stops a read that another waits for",
        "unwanted",
        "all(catalogue.leases[r] == 1 for r in io.rows)",
        "True",
        "a cancel touches nobody else",
    ),
    Fault(
        "who waits for a failed read is not told",
        "done",
        "arrived.append((row, False))\ncatalogue.spoiled(row)",
        "catalogue.spoiled(row)",
        "every question is answered",
    ),
    # --- logs
    Fault(
        "a segment is reclaimed while it is read",
        "to_reclaim",
        "[segment for segment in self.sealed if not segment.readers]",
        "list(self.sealed)",
        "nothing is reused under a reader",
    ),
    Fault(
        "an object of a reclaimed segment is found again",
        "_reclaim",
        "catalogue.remove(row)",
        "",
        "an old life's records are gone",
    ),
    Fault(
        "a row is evicted while it is written",
        "_batch",
        "catalogue.lease([row])",
        "",
        "an I/O holds its slots",
    ),
    Fault(
        "another object is written in a slot's old name",
        "_batch",
        "catalogue.epoch[row] == dirty.epoch",
        "True",
        "what waits to be written is what it was",
    ),
    Fault(
        "a failed write leaves a gap",
        "written",
        "_.rewind(segment, _, _)",
        "",
        "records are without gaps",
    ),
    Fault(
        "a purged object gets a place in the log",
        "written",
        "self.state[row] == State.LEASED",
        "True",
        "what was purged is not found again",
    ),
    Fault(
        "a purge misses what is read meanwhile",
        "_purge",
        "covered or slot_is_old",
        "slot_is_old",
        "what was purged is not found again",
    ),
)
