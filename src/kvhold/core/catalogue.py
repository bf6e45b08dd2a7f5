"""The objects that are kept, as integer rows in columns, with one recency list per slot size.

A row is in exactly one state. Its slot's bytes are counted under that state, so that the states' sums and the arena's
free bytes always make up the arena. Only keys are Python objects: a million rows must not be a million things for the
garbage collector to look at.

                    take                commit                  evict, purge
            (free) ------> CREDIT -----------------> RESIDENT ----------------> (free)
                             | | return, duplicate    |    ^                      ^
                             | +----> (free)     lease|    |last release          |
                             | owner lost             v    |        purge         |last release
                             v                      LEASED --------------> DOOMED +
                           LIMBO ----> (free) when the owner is proved gone

Every resident or leased row is in its size's recency list; a leased one that comes up for eviction is passed over and
counts as used just now, so that leasing and releasing cost no list work at all.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Final

from kvhold.core.arena import Arena, Run

_SPREAD = 256
"""Dictionaries per space: growing one of many stalls for microseconds, growing a big one for tens of milliseconds."""
_LOOK = 512
"""Rows that one search for a victim looks at before it gives up."""
_TRIES = 4
"""Evictions for one slot: held neighbours must not make one slot cost the whole cache."""
_DRAIN_SHARE = 8
"""At most this part of the arena drains at once: what it held is lost before its pages are of use to anybody."""


class State:
    """Plain integers: an enum's members would double the cost of every loop over rows."""

    FREE: Final = 0
    CREDIT: Final = 1
    RESIDENT: Final = 2
    LEASED: Final = 3
    DOOMED: Final = 4
    LIMBO: Final = 5
    HEAD: Final = 6  # a recency list's own row; it has no slot


class Index:
    """The keys of one space: (namespace, group), objects of one geometry."""

    __slots__ = ("group", "id", "key_bytes", "maps", "namespace", "objects", "shards", "size", "users")

    def __init__(self, id: int, namespace: bytes, group: int, key_bytes: int, shards: tuple[int, ...], size: int):
        self.id = id
        self.namespace = namespace
        self.group = group
        self.key_bytes = key_bytes
        self.shards = shards
        self.size = size
        self.users = 0
        self.objects = 0
        self.maps: list[dict[bytes, int]] = [{} for _ in range(_SPREAD)]

    def get(self, key: bytes) -> int | None:
        return self.maps[key[-1]].get(key)

    def __len__(self) -> int:
        return self.objects


class Catalogue:
    """Rows over an :class:`Arena`. Callers keep the states' order; nothing here asks who may do what."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.indexes: dict[int, Index] = {}
        self.bytes = [0] * (State.HEAD + 1)  # slot bytes by state
        self.evicted = 0
        self.cost = 0  # rows evicted or passed over, ever: what an event's share of work is measured in
        self._by_name: dict[tuple[bytes, int], Index] = {}
        self._next_index = 1
        self.next_epoch = 1
        self._clock = 0
        self._heads: dict[int, int] = {}
        self._spare: list[int] = []
        self.state = bytearray()
        self.leases: list[int] = []  # small integers are shared: no objects of their own, and faster than an array
        self.epoch = array("Q")
        self.offset = array("Q")
        self.owner = array("Q")  # a credit's attachment, an object's index
        self.size = array("Q")
        self.stamp = array("Q")  # recency, comparable between lists
        self.older = array("i")
        self.newer = array("i")
        self.key: list[bytes] = []

    # --- spaces -------------------------------------------------------------------------------------------------

    def index(self, namespace: bytes, group: int, key_bytes: int, shards: tuple[int, ...], size: int) -> Index | None:
        """The index of (namespace, group), made when new; None if it exists with another geometry."""
        found = self._by_name.get((namespace, group))
        if found is None:
            found = Index(self._next_index, namespace, group, key_bytes, shards, size)
            self._next_index += 1
            self._by_name[namespace, group] = self.indexes[found.id] = found
        elif found.shards != shards or found.key_bytes != key_bytes:
            return None
        return found

    def drop_index_if_idle(self, index: Index) -> None:
        """Forget an index that nobody uses and nothing is stored under."""
        if index.users == 0 and index.objects == 0 and self.indexes.pop(index.id, None) is not None:
            del self._by_name[index.namespace, index.group]

    # --- slots --------------------------------------------------------------------------------------------------

    def take(self, size: int, owner: int) -> int | None:
        """A row in state CREDIT with a slot of ``size`` bytes, at the cost of what was used longest ago.

        None when all that could give way is held.
        """
        row = self._spare.pop() if self._spare else self._new_row()
        offset = self.arena.take(size, row)
        for _ in range(_TRIES):
            if offset is not None or not self._make_room(size):
                break
            offset = self.arena.take(size, row)
        if offset is None:
            self._spare.append(row)
            return None
        self.offset[row] = offset
        self.size[row] = size
        self.epoch[row] = self.next_epoch
        self.owner[row] = owner
        self.next_epoch += 1
        self.state[row] = State.CREDIT
        self.bytes[State.CREDIT] += size
        return row

    def free(self, row: int) -> None:
        """Give back the slot of a row that is in no index and in no list."""
        self.bytes[self.state[row]] -= self.size[row]
        self.state[row] = State.FREE
        self.arena.give(self.offset[row])
        self._spare.append(row)

    def move(self, row: int, state: int) -> None:
        size = self.size[row]
        self.bytes[self.state[row]] -= size
        self.bytes[state] += size
        self.state[row] = state

    # --- objects ------------------------------------------------------------------------------------------------

    def insert(self, row: int, index: Index, key: bytes, parent: int | None) -> None:
        """A credit becomes a resident object, just older than its parent: chains are evicted from their ends."""
        self.move(row, State.RESIDENT)
        self.owner[row] = index.id
        self.key[row] = key
        index.maps[key[-1]][key] = row
        index.objects += 1
        if parent is None:
            self._renew(row, self._head(index.size))
        else:
            self.stamp[row] = self.stamp[parent]
            self._link(row, parent)

    def remove(self, row: int) -> None:
        """Take an object out of its index and list; a leased one becomes DOOMED, any other is freed."""
        index, key = self.indexes[self.owner[row]], self.key[row]
        del index.maps[key[-1]][key]
        index.objects -= 1
        self.key[row] = b""
        self._unlink(row)
        if self.state[row] == State.LEASED:
            self.move(row, State.DOOMED)
        else:
            self.free(row)
        if not index.objects:
            self.drop_index_if_idle(index)

    def lease(self, rows: Sequence[int]) -> None:
        """Keep these resident or leased rows, all of one size, where they are until :meth:`release`."""
        if not rows:
            return
        leases, state, leased = self.leases, self.state, State.LEASED
        first = 0
        for row in rows:
            if leases[row]:
                leases[row] += 1
            else:
                leases[row] = 1
                state[row] = leased
                first += 1
        size = self.size[rows[0]]
        self.bytes[State.RESIDENT] -= first * size
        self.bytes[State.LEASED] += first * size

    def release(self, rows: Sequence[int]) -> None:
        """Undo one :meth:`lease` of these rows."""
        if not rows:
            return
        leases, state, leased, resident = self.leases, self.state, State.LEASED, State.RESIDENT
        last = 0
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
        size = self.size[rows[0]]
        self.bytes[State.LEASED] -= last * size
        self.bytes[State.RESIDENT] += last * size
        self.vacate(rows)

    def vacate(self, rows: Iterable[int]) -> None:
        """Evict those of ``rows`` that nobody holds any more and that keep a draining run from becoming free."""
        if self.arena.draining_pages:
            for row in rows:
                if self.state[row] == State.RESIDENT and self.arena.run_at(self.offset[row]).draining:
                    self._evict(row)

    def touch(self, rows: Sequence[int]) -> None:
        """Make a chain's rows the most recent of their list, its first row before its last.

        Rows that already follow each other are moved as one piece. A row that was evicted meanwhile is left out, and
        so is one that the chain names a second time.
        """
        if not rows:
            return
        size = self.size[rows[0]]
        head = self._heads.get(size)
        if head is None:
            return
        self._clock += 1
        older, newer, stamp, clock = self.older, self.newer, self.stamp, self._clock
        state, sizes, resident, leased = self.state, self.size, State.RESIDENT, State.LEASED
        pieces: list[tuple[int, int]] = []
        first = last = -1
        for row in rows:
            if not resident <= state[row] <= leased or sizes[row] != size or stamp[row] == clock:
                continue
            stamp[row] = clock
            if last < 0 or older[last] != row:
                if last >= 0:
                    pieces.append((first, last))
                first = row
            last = row
        if last >= 0:
            pieces.append((first, last))
        for first, last in reversed(pieces):
            before, after = newer[first], older[last]
            older[before], newer[after] = after, before
            front = older[head]
            older[head], newer[first] = first, head
            older[last], newer[front] = front, last

    # --- eviction -----------------------------------------------------------------------------------------------

    def _make_room(self, size: int) -> bool:
        """Free bytes so that a slot of ``size`` may fit now; False when what could go is held.

        The object used longest ago goes, whatever its size. One of another size takes along all that stands between
        it and a run of the new size, because only empty pages can change their size. Where something held stands
        there too, the oldest of the new size goes instead; without one, the run around is emptied as far as it can
        be, and drains; and when enough is draining already, it is passed over.
        """
        oldest = own = None
        for listed, head in self._heads.items():
            row = self._victim(head)
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
        if window := self._window(self.offset[oldest] // self.arena.page, span):
            for run in window:
                self._empty(run)
        elif own is not None:
            self._evict(own)
        elif self.arena.draining_pages < max(span, pages // _DRAIN_SHARE):
            self._empty(run)
        else:
            self._pass_over(oldest, self._heads[run.size])
        return True

    def _window(self, page: int, span: int) -> list[Run]:
        """The runs to empty for ``span`` free pages around ``page``, fewest objects first; [] if all hold something."""
        best: list[Run] = []
        fewest = -1
        for start in range(max(0, page - span + 1), min(page, len(self.arena.runs) - span) + 1):
            runs = list({run.base: run for run in self.arena.runs[start : start + span] if run is not None}.values())
            count = sum(run.used for run in runs)
            if (fewest < 0 or count < fewest) and not any(map(self._holds, runs)):
                best, fewest = runs, count
        return best

    def _holds(self, run: Run) -> bool:
        """Whether anything in ``run`` cannot be evicted."""
        state = self.state
        return any(row >= 0 and state[row] != State.RESIDENT for row in run.rows)

    def _empty(self, run: Run) -> None:
        """Evict what can be evicted from ``run``; what is held there goes with its last owner, nothing new comes."""
        self.arena.drain(run)
        self.vacate(run.used_rows())

    def _victim(self, head: int) -> int | None:
        """The object of a list to evict next; held ones on the way to it are passed over."""
        for _ in range(_LOOK):
            row = self.newer[head]
            if row == head:
                return None
            if self.state[row] == State.RESIDENT:
                return row
            self._pass_over(row, head)
        return None

    def _pass_over(self, row: int, head: int) -> None:
        self.cost += 1
        self._unlink(row)
        self._renew(row, head)

    def _evict(self, row: int) -> None:
        self.cost += 1
        self.evicted += 1
        self.remove(row)

    # --- rows and lists -----------------------------------------------------------------------------------------

    def _new_row(self) -> int:
        row = len(self.state)
        self.state.append(State.FREE)
        for column in (self.leases, self.epoch, self.offset, self.owner, self.size, self.stamp):
            column.append(0)
        self.older.append(-1)
        self.newer.append(-1)
        self.key.append(b"")
        return row

    def _head(self, size: int) -> int:
        head = self._heads.get(size)
        if head is None:
            head = self._heads[size] = self._new_row()
            self.state[head] = State.HEAD
            self.older[head] = self.newer[head] = head
        return head

    def _renew(self, row: int, head: int) -> None:
        """Put a row that is in no list where those used just now are."""
        self._clock += 1
        self.stamp[row] = self._clock
        self._link(row, head)

    def _link(self, row: int, after: int) -> None:
        """Put ``row`` on the older side of ``after``."""
        following = self.older[after]
        self.older[after], self.newer[row] = row, after
        self.older[row], self.newer[following] = following, row

    def _unlink(self, row: int) -> None:
        before, after = self.newer[row], self.older[row]
        self.older[before], self.newer[after] = after, before
