"""Slots granted in advance, so that publishing needs no round trip: granted, committed, returned, recalled.

A credit is anonymous: what it holds is not an object until a commit says so of all its shards. Every open space gets
the same share of what may be granted; who holds more than that after others came is asked to return what it can spare.
"""

from array import array
from collections.abc import Sequence

from kvhold.core import events as ev
from kvhold.core.arena import slot_bytes
from kvhold.core.common import Common, split
from kvhold.core.events import Effect
from kvhold.core.forgetting import Forgetting
from kvhold.core.history import Kind, fingerprint
from kvhold.core.indexes import Index
from kvhold.core.rows import State
from kvhold.core.sessions import Attachment, Space
from kvhold.core.storage import Storage
from kvhold.core.turns import MANAGER, Work


class Credits:
    def __init__(self, common: Common, storage: Storage, forgetting: Forgetting) -> None:
        self._common = common
        self._catalogue = common.catalogue
        self._storage = storage
        self._forgetting = forgetting
        self._hungry: dict[tuple[int, int], None] = {}
        self._freed = -1  # what had given way, ever, when credits were last looked for
        self._passed = 0  # and what had been looked at in vain when that last changed
        self._spaces = 0  # open ones that want credits, of all engines
        self._sharing = False  # whether somebody is being told of new shares
        self._changed = False  # and they have changed since

    # --- spaces -------------------------------------------------------------------------------------------------

    def open(self, event: ev.Open) -> list[Effect]:
        attachment = self._common.speaker(event.session)
        if attachment is None:
            return []
        size = slot_bytes(event.shards)
        if len(attachment.spaces) >= self._common.limits.spaces:
            return [ev.Refuse(event.session, f"more than {self._common.limits.spaces} spaces are open")]
        parts = len(event.shards)  # fewer than ranks where some hold the same, or nothing
        if event.space in attachment.spaces or not event.key_bytes or parts > attachment.world or not size:
            return [ev.Refuse(event.session, f"space {event.space} opened twice or without geometry")]
        forgotten: list[Effect] = []
        if is_new := self._catalogue.find(event.namespace, event.group) is None:
            namespace = self._catalogue.namespaces.get(event.namespace)
            if namespace is not None and len(namespace.indexes) >= self._common.limits.spaces:
                return [ev.Refuse(event.session, f"a namespace of more than {self._common.limits.spaces} groups")]
            crowded = len(self._catalogue.indexes) >= self._common.limits.known_spaces
            unused = self._first_brought(attachment)
            if unused is None and crowded:
                unused = self._catalogue.longest_unused()
            if unused is not None:
                forgotten = self._common.start(self._forgetting.unused(unused), event.session)
            elif crowded:
                return [ev.Refuse(event.session, f"{len(self._catalogue.indexes)} spaces are open already")]
        index = self._catalogue.index(event.namespace, event.group, event.key_bytes, event.shards, size)
        if index is None:
            return [ev.Refuse(event.session, "the same namespace is known with another geometry")]
        if is_new:
            attachment.brought.append(index.id)
        self._catalogue.use(index)
        index.namespace.label = event.label
        index.chain = index.chain or event.chain
        index.private = event.private
        note = ""
        if size > self._common.capacity:
            note = f"one object has {size} bytes, more than the whole arena of {self._common.capacity}"
        space = attachment.spaces[event.space] = Space(index, 0 if note else event.slots)
        if event.watch:
            space.watcher = event.session, event.space
            index.watchers[space.watcher] = None
        self._spaces += space.want > 0
        attachment.wanting += space.want > 0
        index.namespace.wanting += space.want > 0
        opened = ev.Opened(event.session, event.space, self.target(attachment, space), note)
        return [opened, *forgotten, *self.share()]

    def _first_brought(self, attachment: Attachment) -> Index | None:
        """Of too many spaces that an engine has brought, the first one that nobody has open."""
        while len(attachment.brought) >= self._common.limits.brought_spaces:
            if (index := self._catalogue.take_unused(attachment.brought.popleft())) is not None:
                return index
        return None

    def close(self, event: ev.Close) -> list[Effect]:
        attachment = self._common.speaker(event.session)
        space = attachment.spaces.get(event.space) if attachment else None
        if attachment is None or space is None:
            return []
        self._shut(attachment, space)
        self._drop_if_closed(attachment, event.space)
        return self.share()

    def _shut(self, attachment: Attachment, space: Space) -> None:
        """Its owner wants nothing of it any more, neither credits nor events."""
        self._unwatch(space)
        self._spaces -= space.want > 0
        attachment.wanting -= space.want > 0
        space.index.namespace.wanting -= space.want > 0
        space.want = 0

    def _drop_if_closed(self, attachment: Attachment, number: int) -> None:
        space = attachment.spaces[number]
        if space.want == 0 and not space.credits:
            del attachment.spaces[number]
            self._hungry.pop((attachment.id, number), None)
            self._unwatch(space)
            self._leave(space)

    @staticmethod
    def _unwatch(space: Space) -> None:
        if space.watcher is not None:
            del space.index.watchers[space.watcher]
            space.watcher = None

    def _leave(self, space: Space) -> None:
        index = space.index
        self._catalogue.leave(index)
        if index.private and index.objects and not index.users:
            self._common.turns.add(self._forgetting.unused(index), MANAGER, question=False)

    def lost(self, attachment: Attachment) -> list[Effect]:
        """The attachment decides nothing any more; what was granted to it may still be written."""
        for space in attachment.spaces.values():
            self._shut(attachment, space)
            for row in space.credits:
                self._catalogue.move(row, State.ORPHANED)
        return self.share()

    def detach(self, attachment: Attachment) -> list[int]:
        """Take away what an attachment has open; the credits that it held, which are still to be freed."""
        credits = [row for space in attachment.spaces.values() for row in space.credits]
        for space in attachment.spaces.values():
            self._leave(space)
        attachment.spaces.clear()
        return credits

    # --- grants -------------------------------------------------------------------------------------------------

    def target(self, attachment: Attachment, space: Space) -> int:
        """Credits that a space should hold now. Two spaces' share is kept even while there is one."""
        part, owner = self._common.limits.credit_share, space.index.namespace
        share = int(part * self._common.capacity) // max(2, self._spaces)
        # Of a namespace's quota no more than of the arena, or its credits would push out what it has stored.
        share = min(share, int(part * owner.quota.limit) // max(1, owner.wanting))
        most = self._common.limits.credits // max(1, attachment.wanting)
        return min(space.want, max(1, min(most, share // space.index.size)))

    def share(self) -> list[Effect]:
        """Shares have changed: some want more now, some have too much. Told at once if few have a space open."""
        self._changed = True
        if self._sharing:
            return []
        work = self._share()
        if sum(len(attachment.spaces) for attachment in self._common.attachments.values()) <= ev.MAX_BATCH:
            return [effect for effects in work for effect in effects]
        return self._common.start(work)

    def _share(self) -> Work:
        self._sharing = True
        while self._changed:
            self._changed = False
            effects: list[Effect] = []
            named = [(one, number) for one in self._common.attachments.values() for number in one.spaces]
            for looked, (attachment, number) in enumerate(named, 1):
                space, scheduler = attachment.spaces.get(number), attachment.scheduler
                if space is not None and scheduler is not None and not attachment.broken:
                    target = self.target(attachment, space)
                    if len(space.credits) < target:
                        self._want(attachment, number)
                    elif len(space.credits) > target and space.want:
                        effects.append(ev.Recall(scheduler.id, number, target))
                if looked % ev.MAX_BATCH == 0:
                    yield effects
                    effects = []
            if effects:
                yield effects
        self._sharing = False

    def feed(self) -> list[Effect]:
        """Top credits up, at most one batch an event and for about as many evictions; the rest is left as work.

        What cannot be had now is tried again when something gave way, or until all that is held was looked at.
        """
        if not self._hungry:
            return []
        if self._freed != self._catalogue.freed:
            self._passed = self._catalogue.recency.passed
        elif self._catalogue.recency.passed - self._passed > len(self._catalogue.state):
            return []
        effects: list[Effect] = []
        catalogue, eviction, budget, more = self._catalogue, self._common.eviction, ev.MAX_BATCH, False
        for attachment_id, number in list(self._hungry):
            if not budget:
                more = True
                break
            attachment = self._common.attachments.get(attachment_id)
            scheduler = attachment.scheduler if attachment else None
            if attachment is None or attachment.broken or scheduler is None:
                del self._hungry[attachment_id, number]
                continue
            space = attachment.spaces[number]
            rows: list[int] = []
            missing = max(0, self.target(attachment, space) - len(space.credits))
            cost = eviction.cost + ev.MAX_BATCH
            while len(rows) < missing:
                if len(rows) == budget or eviction.cost >= cost:
                    more = True
                    break
                row = eviction.take(space.index)
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
        self._freed = -1 if more else catalogue.freed  # what was only put off has not been tried in vain
        if more:
            self._common.turns.add(self._feed_on(), MANAGER, False)
        return effects

    def _feed_on(self) -> Work:
        yield self.feed()

    def _want(self, attachment: Attachment, number: int) -> None:
        self._hungry[attachment.id, number] = None
        self._freed = -1

    # --- commits ------------------------------------------------------------------------------------------------

    def commit(self, event: ev.Commit) -> list[Effect]:
        attachment, counters = self._common.speaker(event.session), self._common.counters
        if attachment is None:
            counters["stale"] += len(event.rows) // 4
            return []
        space = attachment.spaces.get(event.space)
        whole = space is not None and len(event.keys) * 4 == len(event.rows) * space.index.key_bytes
        if space is None or not whole or event.shards != space.index.shards:
            return [ev.Refuse(event.session, f"commit to space {event.space} without all of its shards")]
        catalogue, index, credits, limit = self._catalogue, space.index, space.credits, self._common.limits.max_objects
        stored: list[int] = []
        parent = index.get(event.parent) if event.parent else None
        before = event.parent
        keys = split(event.keys, index.key_bytes)
        for depth, (key, row, epoch) in enumerate(
            zip(keys, array("I", event.rows), array("Q", event.epochs), strict=True), event.depth
        ):
            known = index.get(key)
            if row not in credits or catalogue.epoch[row] != epoch:
                counters["stale"] += 1
                parent, before = known, key
                continue
            credits.discard(row)
            if known is not None and catalogue.state[known] != State.COLD:
                self._common.history.note(Kind.DUPLICATE, fingerprint(key), index.id, row, epoch)
                catalogue.free(row)
                counters["duplicates"] += 1
                self._storage.placement.stored(known, before, depth)
                parent = known
            elif known is not None:
                if catalogue.replace(row, known, parent):
                    stored.append(known)
                parent = known
            elif _cut_off(index, before):
                self._not_kept(index, key, row, "unreachable")
            elif catalogue.objects >= limit and not self._common.eviction.forget_one():
                self._not_kept(index, key, row, "over_max_objects")
                parent = None
            elif _cut_off(index, before):  # by what gave way
                self._not_kept(index, key, row, "unreachable")
                parent = None
            elif catalogue.insert(row, index, key, parent):
                catalogue.note(Kind.STORED, row)
                stored.append(row)
                parent = row
                self._storage.placement.stored(row, before, depth)
            before = key
        counters["commits"] += len(stored)
        catalogue.vacate(stored)
        if len(credits) < self.target(attachment, space):
            self._want(attachment, event.space)
        self._drop_if_closed(attachment, event.space)
        return self._told(space, keys)

    def _not_kept(self, index: Index, key: bytes, row: int, why: str) -> None:
        self._common.history.note(Kind.NOT_KEPT, fingerprint(key), index.id, row, self._catalogue.epoch[row])
        self._catalogue.free(row)
        self._common.counters[why] += 1

    def _told(self, space: Space, keys: Sequence[bytes]) -> list[Effect]:
        """What who watches a space is told after a commit of these keys: first what gave way to them."""
        if space.watcher is None:
            return []
        index, expected = space.index, self._catalogue.expected
        found = [key for key in keys if (row := index.get(key)) is not None and not expected(row)]
        parts = [found[start : start + ev.MAX_BATCH] for start in range(0, len(found), ev.MAX_BATCH)]
        return [*self._common.departed(), *(ev.Added(*space.watcher, b"".join(part)) for part in parts)]

    def give_back(self, event: ev.Return) -> list[Effect]:
        attachment = self._common.speaker(event.session)
        if attachment is None:
            return []
        for row, epoch in zip(array("I", event.rows), array("Q", event.epochs), strict=True):
            number = next((n for n, space in attachment.spaces.items() if row in space.credits), None)
            if number is None or self._catalogue.epoch[row] != epoch:
                self._common.counters["stale"] += 1
                continue
            space = attachment.spaces[number]
            space.credits.discard(row)
            self._catalogue.free(row)
            self._common.counters["returns"] += 1
            if len(space.credits) < self.target(attachment, space):
                self._want(attachment, number)
            self._drop_if_closed(attachment, number)
        return []


def _cut_off(index: Index, before: bytes) -> bool:
    """Whether nobody could reach what follows ``before``, which is empty for a chain's first object."""
    return index.chain and bool(before) and index.get(before) is None
