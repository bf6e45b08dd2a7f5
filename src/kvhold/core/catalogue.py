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

    __slots__ = ("group", "id", "key_bytes", "maps", "namespace", "shards", "size", "users")

    def __init__(self, id: int, namespace: bytes, group: int, key_bytes: int, shards: tuple[int, ...], size: int):
        self.id = id
        self.namespace = namespace
        self.group = group
        self.key_bytes = key_bytes
        self.shards = shards
        self.size = size
        self.users = 0
        self.maps: list[dict[bytes, int]] = [{} for _ in range(_SPREAD)]

    def get(self, key: bytes) -> int | None:
        return self.maps[key[-1]].get(key)

    def __len__(self) -> int:
        return sum(map(len, self.maps))


class Catalogue:
    """Rows over an :class:`Arena`. Callers keep the states' order; nothing here asks who may do what."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.indexes: dict[int, Index] = {}
        self.bytes = [0] * (State.HEAD + 1)  # slot bytes by state
        self.evicted = 0
        self._by_name: dict[tuple[bytes, int], Index] = {}
        self._next_index = 1
        self.next_epoch = 1
        self._clock = 0
        self._heads: dict[int, int] = {}
        self._spare: list[int] = []
        self.state = bytearray()
        self.leases = array("I")
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
        if index.users == 0 and len(index) == 0 and self.indexes.pop(index.id, None) is not None:
            del self._by_name[index.namespace, index.group]

    # --- slots --------------------------------------------------------------------------------------------------

    def take(self, size: int, owner: int) -> int | None:
        """A row in state CREDIT with a slot of ``size`` bytes, evicting what was used longest ago; None if all is held."""
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
        """A credit becomes a resident object, just older than its parent, so that chains are evicted from their ends."""
        self.move(row, State.RESIDENT)
        self.owner[row] = index.id
        self.key[row] = key
        index.maps[key[-1]][key] = row
        if parent is None:
            self._clock += 1
            self.stamp[row] = self._clock
            self._link(row, self._head(index.size))
        else:
            self.stamp[row] = self.stamp[parent]
            self._link(row, parent)

    def remove(self, row: int) -> None:
        """Take an object out of its index and list; a leased one becomes DOOMED, any other is freed."""
        index = self.indexes[self.owner[row]]
        del index.maps[self.key[row][-1]][self.key[row]]
        self.key[row] = b""
        self._unlink(row)
        if self.state[row] == State.LEASED:
            self.move(row, State.DOOMED)
        else:
            self.free(row)
        self.drop_index_if_idle(index)

    def lease(self, rows: Iterable[int]) -> None:
        """Keep these resident rows, all of one size, where they are until :meth:`release`."""
        leases, state = self.leases, self.state
        first = row = 0
        for row in rows:
            count = leases[row]
            leases[row] = count + 1
            if not count:
                state[row] = State.LEASED
                first += 1
        size = self.size[row]
        self.bytes[State.RESIDENT] -= first * size
        self.bytes[State.LEASED] += first * size

    def release(self, rows: Iterable[int]) -> None:
        leases, state = self.leases, self.state
        last = row = 0
        for row in rows:
            count = leases[row] - 1
            leases[row] = count
            if not count:
                if state[row] == State.DOOMED:
                    self.free(row)
                else:
                    state[row] = State.RESIDENT
                    last += 1
        size = self.size[row]
        self.bytes[State.LEASED] -= last * size
        self.bytes[State.RESIDENT] += last * size

    def touch(self, rows: Sequence[int]) -> None:
        """Make a chain's rows the most recent of their list, its first row before its last.

        Rows that already follow each other are moved as one piece. A row that was evicted meanwhile is left out.
        """
        if not rows:
            return
        head = self._heads.get(self.size[rows[0]])
        if head is None:
            return
        self._clock += 1
        older, newer, stamp, clock = self.older, self.newer, self.stamp, self._clock
        state, sizes, size = self.state, self.size, self.size[rows[0]]
        pieces: list[tuple[int, int]] = []
        last = -1
        for row in rows:
            if not State.RESIDENT <= state[row] <= State.LEASED or sizes[row] != size:
                last = -1
                continue
            stamp[row] = clock
            if last >= 0 and older[last] == row:
                pieces[-1] = (pieces[-1][0], row)
            else:
                pieces.append((row, row))
            last = row
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
        it and a run of the new size, because only empty pages can change their size.
        """
        oldest = min(filter(None, map(self._victim, self._heads)), key=self.stamp.__getitem__, default=None)
        if oldest is None:
            return False
        if self.size[oldest] == size:
            self._evict(oldest)
            return True
        window = self._window(self.offset[oldest] // self.arena.page, self.arena.span_of(size))
        if window:
            for run in window:
                self._empty(run)
        elif (own := self._victim(size)) is not None:
            self._evict(own)
        else:
            self._empty(self.arena.run_at(self.offset[oldest]))
        return True

    def _window(self, page: int, span: int) -> list[Run]:
        """The runs to empty for ``span`` free pages around ``page``, fewest objects first; [] where something is held."""
        best: list[Run] = []
        fewest = None
        for start in range(max(0, page - span + 1), min(page, len(self.arena.runs) - span) + 1):
            runs = {run.base: run for run in self.arena.runs[start : start + span] if run is not None}.values()
            rows = [row for run in runs for row in run.used_rows()]
            if all(self.state[row] == State.RESIDENT for row in rows) and (fewest is None or len(rows) < fewest):
                best, fewest = list(runs), len(rows)
        return best

    def _empty(self, run: Run) -> None:
        """Evict what can be evicted from ``run``; what is held there goes with its last owner, nothing new comes."""
        self.arena.drain(run)
        for row in run.used_rows():
            if self.state[row] == State.RESIDENT:
                self._evict(row)

    def _victim(self, size: int) -> int | None:
        head = self._heads.get(size)
        if head is None:
            return None
        for _ in range(_LOOK):
            row = self.newer[head]
            if row == head:
                return None
            if self.state[row] == State.RESIDENT:
                return row
            self._clock += 1
            self.stamp[row] = self._clock
            self._unlink(row)
            self._link(row, head)
        return None

    def _evict(self, row: int) -> None:
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

    def _link(self, row: int, after: int) -> None:
        """Put ``row`` on the older side of ``after``."""
        following = self.older[after]
        self.older[after], self.newer[row] = row, after
        self.older[row], self.newer[following] = following, row

    def _unlink(self, row: int) -> None:
        before, after = self.newer[row], self.older[row]
        self.older[before], self.newer[after] = after, before
