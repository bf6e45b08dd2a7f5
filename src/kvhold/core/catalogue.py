"""The objects that are kept: by key and by slot, and what becomes of them.

Callers keep the order of states that ``rows`` shows; nothing here asks who may do what.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvhold.core.arena import Arena
from kvhold.core.backing import BITS, Backings
from kvhold.core.history import History, Kind, fingerprint
from kvhold.core.indexes import Index, Indexed, Namespace
from kvhold.core.limits import Limits, Quota
from kvhold.core.lru import LRU
from kvhold.core.recency import Recency
from kvhold.core.rows import Rows, State


class Catalogue(Indexed):
    """Rows over an :class:`Arena` and any number of backings. Which of them give way is ``eviction``'s to say."""

    def __init__(
        self,
        arena: Arena,
        history: History | None = None,
        limits: Limits | None = None,
        policy: Callable[[Rows], Recency[Namespace, Any]] = LRU,
    ) -> None:
        super().__init__(limits or Limits(), policy)
        self.backings = Backings()
        self.arena = arena
        self.history = history or History(1)
        self.objects = 0
        self.cold = 0  # objects that are in a backing alone
        self.backed = 0  # objects that are in a backing
        self.evicted = 0
        self.freed = 0  # what gave way or may now, ever: a reason to try again what did not fit
        self.moves = 0  # objects that were given another row, ever
        self.gone: list[tuple[Index, bytes]] = []  # keys that left a watched index since watchers were told last
        self.next_epoch = 1
        self.cold_list = self.recency.open(0, Namespace(b"", Quota()), compared=False)

    # --- slots --------------------------------------------------------------------------------------------------

    def free(self, row: int) -> None:
        """Give back the slot of a row that is in no index and in no list."""
        index = self.indexes[self.owner[row]]
        if self.drop(row):
            self._vacate_slot(row, index)
            self.drop_index_if_idle(index)

    def occupy(self, row: int, index: Index, offset: int, state: int) -> None:
        """A row without a slot has the one at ``offset``, in a new ``state``."""
        self.offset[row] = offset
        self.size[row] = index.size
        self.epoch[row] = self.next_epoch
        self.next_epoch += 1
        self.move(row, state)
        index.namespace.used += index.size
        index.slots += 1

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
        index.used_at = self.born[row] = self.recency.clock.now
        self._follow(row, index, parent)
        return True

    def recover(self, index: Index, key: bytes, place: int, born: int) -> int:
        """An object that was found in a backing: older than all that were found before, which are younger there.

        It was computed when it was ``born``, or before.
        """
        row = self.new()
        self.move(row, State.COLD)
        self.owner[row] = index.id
        self.size[row] = index.size
        self.born[row] = born
        self.put(row, place)
        self.logged[row] = 1
        self.cold += 1
        self._list(row, index, key)
        self.recency.append(row, self.cold_list)
        return row

    def expect(self, row: int, index: Index, key: bytes, parent: int | None) -> None:
        """A LOADING row is to be filled with an object that nobody has here; until it has come it cannot be listed."""
        self.leases[row] = 1
        self._list(row, index, key)
        self._follow(row, index, parent if parent is not None and self.key[parent] else None)

    def replace(self, credit: int, row: int, parent: int | None) -> bool:
        """An object that is only in a backing gets a credit's slot: its bytes were stored anew. False if not so."""
        index = self.indexes[self.owner[row]]
        offset, epoch = self.offset[credit], self.epoch[credit]
        if not self.move(row, State.RESIDENT):
            return False
        self.drop(credit)
        self.arena.rename(offset, row)
        self.recency.remove(row, self.cold_list)
        self.cold -= 1
        self.offset[row], self.epoch[row] = offset, epoch
        self.recency.insert(row, index.recency, self._near(parent), again=True)
        index.used_at = self.born[row] = self.recency.clock.now
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
            lst = self.indexes[self.owner[after]].recency
            self.recency.remove(after, lst)
            self.recency.append(after, lst)

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
        if self.expected(row):
            for backing in self.backings.asked.values():
                backing.dismiss(row)
        elif index.watchers:
            self.gone.append((index, key))
        self.objects -= 1
        self.key[row] = b""
        self.displace(row)
        if state != State.LOADING:
            self.recency.remove(row, self.cold_list if state == State.COLD else index.recency)
        self._strand(row)
        if state == State.COLD:
            self.cold -= 1
            self.drop(row)
            self.drop_index_if_idle(index)
        elif self.leases[row]:
            self.move(row, State.DOOMED)
        else:
            self.free(row)

    def expected(self, row: int) -> bool:
        """Whether this is an object that nobody has here before it has come."""
        return self.state[row] == State.LOADING and not self.kept(row)

    def note(self, kind: Kind, row: int, what: int | None = None) -> None:
        """Remember what happened to an object: with its slot's epoch, unless something else says more."""
        told = self.epoch[row] if what is None else what
        self.history.note(kind, fingerprint(self.key[row]), self.owner[row], row, told)

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

    def touch(self, rows: Sequence[int], index: Index) -> None:
        """A chain of ``index`` was used just now, its first row after its last; what is gone since is left out."""
        state, owner, id = self.state, self.owner, index.id
        resident, leased = State.RESIDENT, State.LEASED
        there = [row for row in rows if resident <= state[row] <= leased and owner[row] == id]
        if there:
            self.recency.touch(there, index.recency)
            index.used_at = self.recency.clock.now

    def used_before(self, indexes: Sequence[Index]) -> list[int | None]:
        """For each, by when its object in DRAM that was used longest ago had been used; None where there is none."""
        firsts = [self.recency.first(index.recency) for index in indexes]
        times = self.recency.clock.times_of([0 if row is None else self.stamp[row] for row in firsts])
        return [
            None if row is None else min(time, index.used_at or time)
            for index, row, time in zip(indexes, firsts, times, strict=True)
        ]

    # --- backings -----------------------------------------------------------------------------------------------

    def loaded(self, row: int, place: int, age: int | None) -> None:
        """The read of what is at ``place`` into a LOADING row has ended well. Its ``age`` may be known."""
        if self.state[row] == State.LOADING:
            if age is not None:
                self.born[row] = self.recency.clock.now - age
            if self.expected(row):
                self.put(row, place)
            self.move(row, State.LEASED)
            self.recency.insert(row, self.indexes[self.owner[row]].recency, again=True)
        self.release([row])

    def read_failed(self, row: int) -> None:
        """The read into a LOADING row has failed: the object is no more, and its slot goes with its last reader."""
        if self.state[row] == State.LOADING:
            self.remove(row)
        self.release([row])

    def unread(self, row: int) -> int:
        """A LOADING row's record could not be looked at: its slot goes with its last reader.

        The object is COLD as before and can be found all the while, but in another row, which is returned.
        """
        index, key, places = self.indexes[self.owner[row]], self.key[row], self.places(row)
        if not self.move(row, State.DOOMED):
            return row
        self.key[row] = b""
        self.displace(row)
        index.objects -= 1
        self.objects -= 1
        again = self.recover(index, key, places[0], self.born[row])
        for place in places[1:]:
            self.put(again, place)
        for place in places:
            self.backings.of(place).moved(row, again)
        self.moves += 1
        self.release([row])
        return again

    def unfill(self, row: int) -> None:
        """A LOADING row whose read has not begun, and which nobody else holds, is COLD again, or nothing."""
        if self.expected(row):
            self.leases[row] = 0
            self.remove(row)
        elif self.move(row, State.COLD):
            self.leases[row] = 0
            self._cool(row)

    def written(self, row: int, place: int) -> None:
        """A leased row is in a backing, unless the object was removed meanwhile; the write lets it go."""
        backing = self.backings.of(place)
        self.note(Kind.WRITTEN, row, place)
        self.counters["write_objects"] += 1
        if self.state[row] == State.LEASED and not (self.there[row] & backing.bit if backing.bit else self.place[row]):
            self.put(row, place)
            self.logged[row] |= not backing.bit
        self.release([row])

    def kept(self, row: int) -> bool:
        """Whether any backing has the object."""
        return bool(self.place[row] or self.there[row] & self.backings.keeping)

    def places(self, row: int, bits: int | None = None) -> list[int]:
        """Where the object is kept: first, where a backing has given it a place."""
        place, there = self.place[row], self.there[row] & (self.backings.keeping if bits is None else bits)
        found = [place] if place else []
        return found + [self.backings.place_in(1 << n) for n in range(BITS) if there >> n & 1] if there else found

    def put(self, row: int, place: int) -> None:
        """The object is in a backing, in which it was nowhere."""
        backing, before = self.backings.of(place), self.kept(row)
        if backing.bit:
            self.there[row] |= backing.bit
        else:
            self.place[row] = place
        self.backed += self.kept(row) - before
        backing.entered(row, place)

    def withdraw(self, row: int, place: int) -> None:
        """What one backing has of the object does not count any more."""
        backing, before = self.backings.of(place), self.kept(row)
        backing.left(row, place)
        if backing.bit:
            self.there[row] &= ~backing.bit
        else:
            self.place[row] = 0
        self.backed -= before - self.kept(row)

    def displace(self, row: int) -> None:
        """What backings have of the object does not count any more."""
        if self.place[row] or self.there[row]:
            for place in self.places(row, bits=-1):
                self.withdraw(row, place)

    # --- giving way ---------------------------------------------------------------------------------------------

    def evict(self, row: int) -> None:
        """A resident object loses its slot; it stays known where a backing has it."""
        self.evicted += 1
        if not self.kept(row):
            self.note(Kind.EVICTED, row)
            self.remove(row)
        elif self.move(row, State.COLD):
            self.note(Kind.COOLED, row)
            self.recency.remove(row, self.indexes[self.owner[row]].recency)
            self._cool(row)

    def _cool(self, row: int) -> None:
        """A row that is COLD now gives its slot back."""
        self._vacate_slot(row, self.indexes[self.owner[row]])
        self.cold += 1
        self.recency.insert(row, self.cold_list)

    def vacate(self, rows: Iterable[int]) -> None:
        """Evict those of ``rows`` that nobody holds any more and that keep a draining run from becoming free."""
        if self.arena.draining_pages:
            for row in rows:
                if self.state[row] == State.RESIDENT and self.arena.run_at(self.offset[row]).draining:
                    self.evict(row)
