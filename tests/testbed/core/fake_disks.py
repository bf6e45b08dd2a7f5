"""A disk of names: takes the I/O effects of a core and carries them out late, in any order, in part, or not at all.

It is stricter than a real one. A slot that is to be read into is spoiled at once, as the device may begin at any time;
what is written must be in its slot from the effect to the answer. Every effect is checked against what the disk holds,
never against what the core remembers.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvhold.core import events as ev
from kvhold.core.arena import align
from kvhold.core.log import events as lev
from kvhold.core.log.events import Stored
from kvhold.core.log.segments import HEADER

Name = tuple[bytes, int, bytes]
Flying = lev.Write | lev.Read | lev.Reuse | lev.Seal | lev.Sync | lev.Forget | ev.Write | ev.Read | ev.Forget | ev.Ask


def name_of(stored: Stored) -> Name:
    return stored.namespace, stored.group, stored.key


def size_of(stored: Stored) -> int:
    return align(sum(map(align, stored.shards)))


@dataclass
class Life:
    """One life of a segment: names by byte offset, without gaps up to ``end``."""

    seq: int
    end: int = HEADER
    records: dict[int, Name] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    sealed: bool = False


class FakeDisk:
    """``arena`` is what lies in each slot, by offset: shared with whoever else writes there."""

    def __init__(self, arena: dict[int, Name]) -> None:
        self.arena = arena
        self.lives: dict[tuple[int, int], Life] = {}
        self.flying: dict[int, Flying] = {}
        self.cancelled: set[int] = set()
        self.answered: list[int] = []
        self.ended: Flying | None = None  # what was answered last
        self.stores: dict[int, set[Name]] = {}  # what is in each store that finds objects by their name
        self._kept: dict[int, set[Name]] = {}  # of what is being written there, by I/O, what is not to be forgotten
        self.partial = False  # only old records are being forgotten
        self._used: set[int] = set()
        self._seqs: dict[int, int] = {}
        self._forgotten: dict[int, tuple[int, int]] = {}

    def adopt(self, log: int, segment: int, seq: int, records: Iterable[tuple[Name, int]], room: int) -> Life:
        """A life with those of the records (name, size) that have room, from before the core began."""
        life = self.lives[log, segment] = Life(seq, sealed=True)
        for name, size in records:
            if life.end + HEADER + size <= room:
                life.records[life.end], life.sizes[life.end] = name, size
                life.end += HEADER + size
        self._seqs[log] = max(seq, self._seqs.get(log, 0))
        return life

    @property
    def extents(self) -> Iterator[tuple[int, int]]:
        """(offset, size) of all slots that an I/O may touch."""
        for io in self.flying.values():
            if isinstance(io, ev.Read | ev.Write):
                yield from ((stored.offset, size_of(stored)) for stored in io.objects)

    def reads(self, name: Name) -> bool:
        """Whether this object is on its way."""
        reads = [io for io in self.flying.values() if isinstance(io, ev.Read)]
        return any(name_of(stored) == name for io in reads for stored in io.objects)

    # --- effects ------------------------------------------------------------------------------------------------

    def take(self, effect: ev.ToBacking) -> None:
        if isinstance(effect, ev.Cancel):
            read = self.flying[effect.io]
            assert isinstance(read, ev.Read), "only reads are cancelled"
            assert read.backing == effect.backing
            assert effect.io not in self.cancelled
            self.cancelled.add(effect.io)
            return
        assert effect.io not in self._used, "a number is used once"
        self._used.add(effect.io)
        match effect:
            case lev.Write():
                self._take_write(effect)
            case lev.Read():
                self._take_read(effect)
            case lev.Reuse():
                self._take_reuse(effect)
            case lev.Seal():
                life = self.lives[effect.backing, effect.segment]
                assert (effect.seq, effect.end) == (life.seq, life.end)
                assert not life.sealed
                assert not self._busy(effect, lev.Write, lev.Seal, lev.Reuse)
                life.sealed = True
            case lev.Forget():
                self._take_forget(effect)
            case ev.Write() | ev.Read() | ev.Forget():
                self._store_takes(effect)
            case ev.Ask():
                assert len(set(effect.names)) == len(effect.names) > 0
        self.flying[effect.io] = effect

    def _store_takes(self, effect: ev.Write | ev.Read | ev.Forget) -> None:
        """What is to be forgotten is, at once: of what it was handed before, too."""
        there = self.stores.setdefault(effect.backing, set())
        if isinstance(effect, ev.Read):
            assert len({name_of(stored) for stored in effect.objects}) == len(effect.objects) > 0
            for stored in effect.objects:
                self.arena.pop(stored.offset, None)
        elif isinstance(effect, ev.Write):
            assert effect.objects
            assert all(self.arena[stored.offset] == name_of(stored) for stored in effect.objects)
            self._kept[effect.io] = {name_of(stored) for stored in effect.objects}
        else:
            for names in (
                there,
                *(kept for io, kept in self._kept.items() if self.flying[io].backing == effect.backing),
            ):
                whole = {name for name in names if effect.namespace in (b"", name[0])}
                names -= whole | set(effect.names)

    def _store_ends(self, io: ev.Write | ev.Read | ev.Forget, failing: Iterable[int]) -> ev.Done:
        there = self.stores.setdefault(io.backing, set())
        if isinstance(io, ev.Forget):
            return ev.Done(io.io, (0,) if set(failing) else ())
        failed = {position % len(io.objects) for position in failing}
        kept = self._kept.pop(io.io, set())
        for position, stored in enumerate(io.objects):
            name = name_of(stored)
            if isinstance(io, ev.Write):
                assert self.arena[stored.offset] == name, "a slot is not written while it is read"
                there |= {name} & kept if position not in failed else set()
            elif position in failed or name not in there:
                failed.add(position)
                there.discard(name)
            else:
                self.arena[stored.offset] = name
        return ev.Done(io.io, tuple(sorted(failed)))

    def _take_write(self, effect: lev.Write) -> None:
        writes = [io for io in self.flying.values() if isinstance(io, lev.Write) and io.backing == effect.backing]
        assert not writes, "one write at a time"
        assert not self._busy(effect, lev.Reuse, lev.Seal)
        life = self.lives[effect.backing, effect.segment]
        assert life.seq == effect.seq
        assert not life.sealed
        assert effect.objects
        at = life.end
        for stored in effect.objects:
            assert stored.at == at, "records are without gaps"
            assert (life.seq, at) >= self._forgotten.get(effect.backing, (0, 0)), "it would be gone after a restart"
            assert self.arena[stored.offset] == name_of(stored)
            at += HEADER + size_of(stored)
        assert len({stored.offset for stored in effect.objects}) == len(effect.objects), "an object is written twice"

    def _take_read(self, effect: lev.Read) -> None:
        assert not self._busy(effect, lev.Reuse)
        life = self.lives[effect.backing, effect.segment]
        assert life.seq == effect.seq, "a segment is not read in another life"
        places = {(effect.backing, effect.segment, stored.at) for stored in effect.objects}
        assert len(places) == len(effect.objects) > 0
        for other in self.flying.values():
            if isinstance(other, lev.Read):
                assert places.isdisjoint((other.backing, other.segment, stored.at) for stored in other.objects), (
                    "read once"
                )
        for stored in effect.objects:
            assert life.records[stored.at] == name_of(stored)
            self.arena.pop(stored.offset, None)

    def _take_reuse(self, effect: lev.Reuse) -> None:
        assert not self._busy(effect, lev.Write, lev.Read, lev.Seal, lev.Reuse), "nobody uses it"
        assert effect.seq > self._seqs.get(effect.backing, 0)
        self._seqs[effect.backing] = effect.seq
        self.lives.pop((effect.backing, effect.segment), None)

    def _take_forget(self, effect: lev.Forget) -> None:
        covered = effect.seq, effect.at
        ends = [(life.seq, life.end) for (log, _), life in self.lives.items() if log == effect.backing and life.records]
        writes = [io for io in self.flying.values() if isinstance(io, lev.Write) and io.backing == effect.backing]
        ends += [(io.seq, io.objects[-1].at + HEADER + size_of(io.objects[-1])) for io in writes]
        assert self.partial or all(end <= covered for end in ends), (
            f"all that was appended so far is forgotten: {ends}, not {covered}"
        )
        self._forgotten[effect.backing] = max(covered, self._forgotten.get(effect.backing, (0, 0)))

    def _busy(self, effect: lev.Write | lev.Read | lev.Reuse | lev.Seal, *kinds: type) -> bool:
        place = effect.backing, effect.segment
        return any(isinstance(io, kinds) and (io.backing, io.segment) == place for io in self.flying.values())  # type: ignore[union-attr]

    # --- answers ------------------------------------------------------------------------------------------------

    def finish(self, number: int, failing: Iterable[int] = ()) -> ev.Done | ev.Found:
        """Carry out a flying I/O, all but the ``failing`` positions, and answer it. An ask lies about those."""
        io = self.ended = self.flying.pop(number)
        self.answered.append(number)
        self.cancelled.discard(number)
        if isinstance(io, ev.Ask):
            there, lies = self.stores.get(io.backing, set()), {position % len(io.names) for position in failing}
            return ev.Found(number, tuple(at for at, name in enumerate(io.names) if (name in there) != (at in lies)))
        if type(io) in (ev.Write, ev.Read, ev.Forget):
            return self._store_ends(io, failing)
        if not isinstance(io, lev.Write | lev.Read):
            failed = (0,) if set(failing) else ()
            if isinstance(io, lev.Reuse) and not failed:
                self.lives[io.backing, io.segment] = Life(io.seq)
            return ev.Done(number, failed)
        failed = tuple(sorted({position % len(io.objects) for position in failing}))
        life = self.lives[io.backing, io.segment]
        assert life.seq == io.seq, "a segment is not given up under its I/O"
        for position, stored in enumerate(io.objects):
            if isinstance(io, lev.Write):
                assert self.arena[stored.offset] == name_of(stored), "a slot is not written while it is read"
                if position < min(failed, default=len(io.objects)):
                    life.records[stored.at] = name_of(stored)
                    life.end = stored.at + HEADER + size_of(stored)
            elif position in failed:
                self.arena.pop(stored.offset, None)
            else:
                self.arena[stored.offset] = life.records[stored.at]
        if isinstance(io, lev.Write) and failed:
            # What is written again goes to the same place, also if a purge came between: it would be gone after a
            # restart, which is no more than a miss.
            self._forgotten[io.backing] = min(self._forgotten.get(io.backing, (0, 0)), (life.seq, life.end))
        return ev.Done(number, failed)
