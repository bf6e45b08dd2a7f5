"""The objects that are kept: by key, by slot, and in which order they go.

Callers keep the order of states that ``rows`` shows; nothing here asks who may do what.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from kvhold.core.arena import Arena, Run
from kvhold.core.backing import Backings
from kvhold.core.limits import Limits, Quota
from kvhold.core.recency import Recency, RecencyList
from kvhold.core.rows import Rows, State
from kvhold.core.story import Kind, Story, fingerprint

_NO_QUOTA = Quota()
_SPREAD = 256
"""Dictionaries of a large space: growing one of many stalls for microseconds, a big one for tens of milliseconds."""
_SMALL = 1024
"""Keys of a space for which one dictionary is enough: most spaces stay below, and collecting garbage looks at all."""
_TRIES = 4
"""Evictions for one slot: held neighbours must not make one slot cost the whole cache."""
_DRAIN_SHARE = 8
"""At most this part of the arena drains at once: what it held is lost before its pages are of use to anybody."""


class Namespace:
    """``used`` are the slot bytes of everything under this name, granted credits included.

    ``label`` is what people call it, as who opened it last said. ``wanting`` counts the open spaces that want credits.
    """

    __slots__ = ("indexes", "label", "name", "quota", "used", "wanting")

    def __init__(self, name: bytes, quota: Quota) -> None:
        self.name = name
        self.label = ""
        self.quota = quota
        self.used = 0
        self.wanting = 0
        self.indexes: dict[int, Index] = {}


class Index:
    """The keys of one (namespace, group): objects of one geometry. ``slots`` counts its rows that have one.

    ``watchers`` are the (session, space) that are told what leaves it, in the order in which they came. Of the keys
    ``asked`` for, ``found`` were here, ``read`` of them in a log alone. ``used_at`` is when any was stored or used.
    In a ``chain`` an object is of use only beside all that come before it. A ``private`` one is of no use to anybody
    once its only engine has left it.
    """

    __slots__ = (
        "asked",
        "chain",
        "found",
        "group",
        "id",
        "key_bytes",
        "maps",
        "mask",
        "namespace",
        "objects",
        "private",
        "read",
        "recency",
        "shards",
        "size",
        "slots",
        "used_at",
        "users",
        "watchers",
    )

    def __init__(
        self, id: int, namespace: Namespace, group: int, key_bytes: int, shards: tuple[int, ...], size: int
    ) -> None:
        self.id = id
        self.namespace = namespace
        self.group = group
        self.key_bytes = key_bytes
        self.shards = shards
        self.size = size
        self.chain = False
        self.private = False
        self.users = 0
        self.objects = 0
        self.slots = 0
        self.asked = self.found = self.read = 0
        self.used_at: int | None = None
        self.watchers: dict[tuple[int, int], None] = {}
        self.maps: list[dict[bytes, int]] = [{}]  # by as much of a key's last byte as :attr:`mask` leaves
        self.mask = 0
        self.recency: RecencyList[Namespace]

    def get(self, key: bytes) -> int | None:
        return self.maps[key[-1] & self.mask].get(key)

    def put(self, key: bytes, row: int) -> None:
        self.objects += 1
        self.maps[key[-1] & self.mask][key] = row
        if self.objects > _SMALL and not self.mask:
            known = self.maps[0]
            self.maps, self.mask = [{} for _ in range(_SPREAD)], _SPREAD - 1
            for one, at in known.items():
                self.maps[one[-1] & self.mask][one] = at

    def pop(self, key: bytes) -> None:
        self.objects -= 1
        del self.maps[key[-1] & self.mask][key]

    def some(self, count: int) -> list[bytes]:
        """Up to ``count`` keys; none if there are none."""
        return list(islice(next(filter(None, self.maps), ()), count))

    def __len__(self) -> int:
        return self.objects


class Catalogue(Rows):
    """Rows over an :class:`Arena` and any number of backings."""

    def __init__(self, arena: Arena, story: Story | None = None, limits: Limits | None = None) -> None:
        super().__init__()
        self.backings = Backings()
        self.arena = arena
        self.limits = limits or Limits()
        self.story = story or Story(1)
        self.indexes: dict[int, Index] = {}
        self.namespaces: dict[bytes, Namespace] = {}
        self.recency: Recency[Namespace] = Recency(self)
        self.objects = 0
        self.cold = 0  # objects that are in a backing alone
        self.backed = 0  # objects that are in a backing
        self.evicted = 0
        self.freed = 0  # what gave way or may now, ever: a reason to try again what did not fit
        self.moves = 0  # objects that were given another row, ever
        self.gone: list[tuple[Index, bytes]] = []  # keys that left a watched index since watchers were told last
        self.next_epoch = 1
        self._by_name: dict[tuple[bytes, int], Index] = {}
        self._next_index = 1
        self._unused: OrderedDict[int, Index] = OrderedDict()  # that nobody has open, as they were left
        nobody = Namespace(b"", Quota())
        self._cold: RecencyList[Namespace] = self.recency.open(0, nobody, compared=False)

    @property
    def cost(self) -> int:
        """Rows evicted or passed over, ever: what an event's share of work is measured in."""
        return self.evicted + self.recency.passed

    # --- spaces -------------------------------------------------------------------------------------------------

    def index(self, namespace: bytes, group: int, key_bytes: int, shards: tuple[int, ...], size: int) -> Index | None:
        """The index of (namespace, group), made when new; None if it exists with another geometry."""
        found = self._by_name.get((namespace, group))
        if found is None:
            owner = self.namespaces.get(namespace)
            if owner is None:
                quota = self.limits.quotas.get(namespace, _NO_QUOTA)
                owner = self.namespaces[namespace] = Namespace(namespace, quota)
            found = Index(self._next_index, owner, group, key_bytes, shards, size)
            found.recency = self.recency.open(size, owner)
            self._next_index += 1
            self._unused[found.id] = found
            owner.indexes[found.id] = self._by_name[namespace, group] = self.indexes[found.id] = found
        elif found.shards != shards or found.key_bytes != key_bytes:
            return None
        return found

    def find(self, namespace: bytes, group: int) -> Index | None:
        return self._by_name.get((namespace, group))

    def use(self, index: Index) -> None:
        """Somebody opens it."""
        index.users += 1
        self._unused.pop(index.id, None)

    def leave(self, index: Index) -> None:
        """Somebody who had it open has not any more."""
        index.users -= 1
        if not index.users:
            self._unused[index.id] = index
            self.drop_index_if_idle(index)

    def longest_unused(self) -> Index | None:
        """Take out, of those that nobody has open, the one that was left longest ago: it is about to be forgotten."""
        return self._unused.popitem(last=False)[1] if self._unused else None

    def drop_index_if_idle(self, index: Index) -> None:
        """Forget an index that nobody uses and nothing is stored under."""
        if index.users or index.objects or index.slots or self.indexes.pop(index.id, None) is None:
            return
        self._unused.pop(index.id, None)
        del self._by_name[index.namespace.name, index.group]
        self.recency.close(index.recency)
        owner = index.namespace
        del owner.indexes[index.id]
        if not owner.indexes:
            del self.namespaces[owner.name]

    def configure(self, limits: Limits) -> None:
        self.limits = limits
        for namespace in self.namespaces.values():
            namespace.quota = limits.quotas.get(namespace.name, _NO_QUOTA)

    # --- slots --------------------------------------------------------------------------------------------------

    def take(self, index: Index) -> int | None:
        """A row in state CREDIT with a slot for an object of ``index``, at the cost of what was used longest ago.

        None when all that could give way is held.
        """
        row = self.new()
        if not self._place(row, index, State.CREDIT):
            self.spare.append(row)
            return None
        self.owner[row] = index.id
        return row

    def free(self, row: int) -> None:
        """Give back the slot of a row that is in no index and in no list."""
        index = self.indexes[self.owner[row]]
        if self.drop(row):
            self._vacate_slot(row, index)
            self.drop_index_if_idle(index)

    def _place(self, row: int, index: Index, state: int) -> bool:
        """Give a row without a slot one, in a new ``state``."""
        size, owner = index.size, index.namespace
        for _ in range(_TRIES):
            if owner.used + size <= owner.quota.limit:
                break
            if not self.evict_own(owner):
                return False
        else:
            return False
        offset = self.arena.take(size, row)
        for _ in range(_TRIES):
            if offset is not None or not self._make_room(size, owner):
                break
            offset = self.arena.take(size, row)
        if offset is None:
            return False
        self.offset[row] = offset
        self.size[row] = size
        self.epoch[row] = self.next_epoch
        self.next_epoch += 1
        self.move(row, state)
        owner.used += size
        index.slots += 1
        return True

    def _vacate_slot(self, row: int, index: Index) -> None:
        self.arena.give(self.offset[row])
        index.namespace.used -= index.size
        index.slots -= 1
        self.freed += 1

    # --- objects ------------------------------------------------------------------------------------------------

    def insert(self, row: int, index: Index, key: bytes, parent: int | None) -> bool:
        """A credit becomes a resident object, just older than its parent: chains are evicted from their ends.

        False if the row is no credit.
        """
        if not self.move(row, State.RESIDENT):
            return False
        self.freed += 1
        self._list(row, index, key)
        self.recency.insert(row, index.recency, self._near(parent))
        index.used_at = self.recency.now
        self._follow(row, index, parent)
        return True

    def recover(self, index: Index, key: bytes, place: int) -> int:
        """An object that was found in a backing: older than all that were found before, which are younger there."""
        row = self.new()
        self.move(row, State.COLD)
        self.owner[row] = index.id
        self.size[row] = index.size
        self.put(row, place)
        self.logged[row] = 1
        self.cold += 1
        self._list(row, index, key)
        self.recency.append(row, self._cold)
        return row

    def replace(self, credit: int, row: int, parent: int | None) -> bool:
        """An object that is only in a backing gets a credit's slot: its bytes were stored anew. False if not so."""
        index = self.indexes[self.owner[row]]
        offset, epoch = self.offset[credit], self.epoch[credit]
        if not self.move(row, State.RESIDENT):
            return False
        self.drop(credit)
        self.arena.rename(offset, row)
        self.recency.remove(row)
        self.cold -= 1
        self.offset[row], self.epoch[row] = offset, epoch
        self.recency.insert(row, index.recency, self._near(parent))
        index.used_at = self.recency.now
        self._follow(row, index, parent)
        return True

    def _follow(self, row: int, index: Index, parent: int | None) -> None:
        if index.chain and parent is not None:
            self.before[row], self.after[parent] = parent, row

    def _strand(self, row: int) -> None:
        """What follows ``row``, which is gone, is of no use any more: in DRAM it goes first of its list."""
        after = self.after[row]
        if after < 0 or self.before[after] != row:
            return
        self.before[after] = -1
        if self.state[after] == State.RESIDENT:
            self.recency.remove(after)
            self.recency.append(after, self.indexes[self.owner[after]].recency)

    def _list(self, row: int, index: Index, key: bytes) -> None:
        self.owner[row] = index.id
        self.key[row] = key
        index.put(key, row)
        self.objects += 1

    def _near(self, parent: int | None) -> int | None:
        """``parent`` if it is in its index's list."""
        return parent if parent is not None and State.RESIDENT <= self.state[parent] <= State.LEASED else None

    def remove(self, row: int) -> None:
        """Take an object out of its index, list and backings; one that is held becomes DOOMED, any other is freed."""
        index, key, state = self.indexes[self.owner[row]], self.key[row], self.state[row]
        index.pop(key)
        if index.watchers:
            self.gone.append((index, key))
        self.objects -= 1
        self.key[row] = b""
        self.displace(row)
        if state != State.LOADING:
            self.recency.remove(row)
        self._strand(row)
        if state == State.COLD:
            self.cold -= 1
            self.drop(row)
            self.drop_index_if_idle(index)
        elif self.leases[row]:
            self.move(row, State.DOOMED)
        else:
            self.free(row)

    def forget_one(self) -> bool:
        """Give up the object that is least worth keeping altogether; False when all are held."""
        row = self.recency.first(self._cold)
        if row is None:
            found = [self.recency.oldest(size, lambda _: False) for size in self.recency.sizes]
            row = min((one for one in found if one is not None), key=self.stamp.__getitem__, default=None)
        if row is None:
            return False
        self.note(Kind.EVICTED, row)
        self.evicted += 1
        self.remove(row)
        return True

    def note(self, kind: Kind, row: int, what: int | None = None) -> None:
        """Remember what happened to an object: with its slot's epoch, unless something else says more."""
        told = self.epoch[row] if what is None else what
        self.story.note(kind, fingerprint(self.key[row]), self.owner[row], row, told)

    # --- leases -------------------------------------------------------------------------------------------------

    def lease(self, rows: Sequence[int]) -> tuple[Sequence[int], int]:
        """Keep these rows, all of one size and with a slot, where they are until :meth:`release`.

        Returns those that are kept, up to the first that cannot be, and the bytes of them that nobody held before.
        """
        if not rows:
            return rows, 0
        leases, state, resident, leased = self.leases, self.state, State.RESIDENT, State.LEASED
        first = 0
        for row in rows:
            if state[row] == resident:
                state[row] = leased
                leases[row] = 1
                first += 1
            elif leases[row]:
                leases[row] += 1
            else:
                self.refuse(row, leased)
                rows = rows[: rows.index(row)]
                break
        taken = first * self.size[rows[0]] if first else 0
        self.bytes[State.RESIDENT] -= taken
        self.bytes[State.LEASED] += taken
        return rows, taken

    def release(self, rows: Sequence[int]) -> None:
        """Undo one :meth:`lease` of these rows."""
        if not rows:
            return
        leases, state, leased, resident = self.leases, self.state, State.LEASED, State.RESIDENT
        last = 0
        size = self.size[rows[0]]
        for row in rows:
            count = leases[row] - 1
            leases[row] = count
            if count:
                continue
            if state[row] == leased:
                state[row] = resident
                last += 1
            else:
                self.free(row)
        self.bytes[State.LEASED] -= last * size
        self.bytes[State.RESIDENT] += last * size
        self.freed += last
        self.vacate(rows)

    def vacate(self, rows: Iterable[int]) -> None:
        """Evict those of ``rows`` that nobody holds any more and that keep a draining run from becoming free."""
        if self.arena.draining_pages:
            for row in rows:
                if self.state[row] == State.RESIDENT and self.arena.run_at(self.offset[row]).draining:
                    self._evict(row)

    def touch(self, rows: Sequence[int], index: Index) -> None:
        """A chain of ``index`` was used just now, its first row after its last; what is gone since is left out."""
        state, owner, id = self.state, self.owner, index.id
        resident, leased = State.RESIDENT, State.LEASED
        there = [row for row in rows if resident <= state[row] <= leased and owner[row] == id]
        if there:
            self.recency.touch(there, index.recency)
            index.used_at = self.recency.now

    def used_before(self, indexes: Sequence[Index]) -> list[int | None]:
        """For each, by when its object in DRAM that was used longest ago had been used; None where there is none."""
        firsts = [self.recency.first(index.recency) for index in indexes]
        times = self.recency.times_of([0 if row is None else self.stamp[row] for row in firsts])
        return [
            None if row is None else min(time, index.used_at or time)
            for index, row, time in zip(indexes, firsts, times, strict=True)
        ]

    # --- backings -----------------------------------------------------------------------------------------------

    def fill(self, row: int) -> bool:
        """Give a COLD row a slot to be read into, which its read holds; False when none can be had."""
        index = self.indexes[self.owner[row]]
        if self.state[row] != State.COLD:
            return self.refuse(row, State.LOADING)
        self.recency.remove(row)  # making room must not give up the very object
        self.cold -= 1
        if not self._place(row, index, State.LOADING):
            self.cold += 1
            self.recency.insert(row, self._cold)
            return False
        self.leases[row] = 1
        return True

    def loaded(self, row: int) -> None:
        """The read into a LOADING row has ended well."""
        if self.state[row] == State.LOADING:
            self.move(row, State.LEASED)
            self.recency.insert(row, self.indexes[self.owner[row]].recency)
        self.release([row])

    def spoiled(self, row: int) -> None:
        """The read into a LOADING row has failed: the object is no more, and its slot goes with its last reader."""
        if self.state[row] == State.LOADING:
            self.remove(row)
        self.release([row])

    def unread(self, row: int) -> int:
        """A LOADING row's record could not be looked at: its slot goes with its last reader.

        The object is COLD as before and can be found all the while, but in another row, which is returned.
        """
        index, key, place = self.indexes[self.owner[row]], self.key[row], self.place[row]
        if not self.move(row, State.DOOMED):
            return row
        self.key[row] = b""
        self.displace(row)
        index.objects -= 1
        self.objects -= 1
        again = self.recover(index, key, place)
        self.backings.of(place).moved(row, again)
        self.moves += 1
        self.release([row])
        return again

    def unfill(self, row: int) -> None:
        """A LOADING row whose read has not begun, and which nobody else holds, is COLD again."""
        if self.move(row, State.COLD):
            self.leases[row] = 0
            self._cool(row)

    def written(self, row: int, place: int) -> None:
        """A leased row is in a backing, unless the object was removed meanwhile; the write lets it go."""
        if self.state[row] == State.LEASED and not self.place[row]:
            self.put(row, place)
            self.logged[row] = 1
        self.release([row])

    def put(self, row: int, place: int) -> None:
        """The object is in a backing, in which it was nowhere."""
        self.place[row] = place
        self.backed += 1
        self.backings.of(place).entered(row, place)

    def displace(self, row: int) -> None:
        """What backings have of the object does not count any more."""
        if place := self.place[row]:
            self.backings.of(place).left(row, place)
            self.place[row] = 0
            self.backed -= 1

    # --- eviction -----------------------------------------------------------------------------------------------

    def _make_room(self, size: int, asking: Namespace) -> bool:
        """Free bytes so that a slot of ``size`` may fit now; False when what could go is held.

        The object used longest ago goes, whatever its size. One of another size takes along all that stands between
        it and a run of the new size, because only empty pages can change their size. Where something held stands
        there too, the oldest of the new size goes instead; without one, the run around is emptied as far as it can
        be, and drains; and when enough is draining already, that run's objects are passed over. Namespaces within
        their floor are spared, but for the one that asks.
        """

        def spared(owner: Namespace) -> bool:
            return owner is not asking and owner.used <= owner.quota.floor

        oldest = own = None
        for listed in self.recency.sizes:
            row = self.recency.oldest(listed, spared)
            if row is None:
                continue
            if listed == size:
                own = row
            if oldest is None or self.stamp[row] < self.stamp[oldest]:
                oldest = row
        if oldest is None:
            return False
        if oldest == own:
            self._evict(oldest)
            return True
        pages, span = len(self.arena.runs), self.arena.span_of(size)
        if span > pages:
            return False
        run = self.arena.run_at(self.offset[oldest])
        if window := self._window(self.offset[oldest] // self.arena.page, span, spared):
            for run in window:
                self._empty(run)
        elif own is not None:
            self._evict(own)
        elif self.arena.draining_pages < max(span, pages // _DRAIN_SHARE):
            self._empty(run)
        else:
            # None of them can make room, so not each is to be found oldest in its turn. A chain fills slots from its
            # start on, and its end stays older.
            for row in sorted(run.used_rows(), key=lambda row: (self.stamp[row], -self.offset[row])):
                if self.state[row] == State.RESIDENT:
                    self.recency.pass_over(row, self.indexes[self.owner[row]].recency)
        return True

    def _window(self, page: int, span: int, spared: Callable[[Namespace], bool]) -> list[Run]:
        """The runs to empty for ``span`` free pages around ``page``, fewest objects first; [] if all hold something."""
        best: list[Run] = []
        fewest = -1
        for start in range(max(0, page - span + 1), min(page, len(self.arena.runs) - span) + 1):
            runs = list({run.base: run for run in self.arena.runs[start : start + span] if run is not None}.values())
            count = sum(run.used for run in runs)
            if (fewest < 0 or count < fewest) and not any(self._holds(run, spared) for run in runs):
                best, fewest = runs, count
        return best

    def _holds(self, run: Run, spared: Callable[[Namespace], bool]) -> bool:
        """Whether anything in ``run`` cannot be evicted, or should not."""
        state, used = self.state, run.used_rows()
        if any(state[row] != State.RESIDENT for row in used):
            return True
        return bool(self.limits.quotas) and any(spared(self.indexes[self.owner[row]].namespace) for row in used)

    def _empty(self, run: Run) -> None:
        """Evict what can be evicted from ``run``; what is held there goes with its last owner, nothing new comes."""
        self.arena.drain(run)
        self.vacate(run.used_rows())

    def evict_own(self, owner: Namespace) -> bool:
        """Evict the object of a namespace that was used longest ago; False when all are held."""
        rows = [row for index in owner.indexes.values() if (row := self.recency.victim(index.recency)) is not None]
        if not rows:
            return False
        self._evict(min(rows, key=self.stamp.__getitem__))
        return True

    def _evict(self, row: int) -> None:
        """A resident object loses its slot; it stays known where a backing has it."""
        self.evicted += 1
        if not self.place[row]:
            self.note(Kind.EVICTED, row)
            self.remove(row)
        elif self.move(row, State.COLD):
            self.note(Kind.COOLED, row)
            self.recency.remove(row)
            self._cool(row)

    def _cool(self, row: int) -> None:
        """A row that is COLD now gives its slot back."""
        self._vacate_slot(row, self.indexes[self.owner[row]])
        self.cold += 1
        self.recency.insert(row, self._cold)
