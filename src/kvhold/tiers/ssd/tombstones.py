"""What was forgotten, durably: purged and quarantined records that are still in their segments.

A file of 4 KiB blocks, each written twice and synced before anybody is told. A tombstone hides what was appended to
the log before its position (seq, at); what is stored under the same name later is not hidden.
"""

import logging
from collections.abc import Iterable
from errno import EIO
from pathlib import Path
from struct import Struct
from typing import Final

from xxhash import xxh3_128_digest

from kvhold.core.log.segments import BLOCK
from kvhold.tiers.ssd.files import FileLayer, blocks, read_all, write_all
from kvhold.tiers.ssd.footer import Record
from kvhold.tiers.ssd.format import MAX_KEY, NAMESPACE, SUM, VERSION

log = logging.getLogger(__name__)

Position = tuple[int, int]
"""(seq, at): everything appended before it is hidden."""
Name = tuple[bytes, int, bytes]
"""(namespace, group, key); group -1 is every object of the namespace, which is then empty for all namespaces."""

_MAGIC: Final = b"kvholdTS"
_HEAD: Final = Struct("<8sII16sI28x")
_ENTRY: Final = Struct("<BBxxI32s64sQQ")
_ONE, _NAMESPACE, _ALL = 1, 2, 3
_CHUNK: Final = 256 * BLOCK
PER_BLOCK: Final = (BLOCK - SUM - _HEAD.size) // _ENTRY.size


class Tombstones:
    """The tombstones of one log. Not thread-safe: one thread appends.

    ``limit`` bounds the file's bytes. Where that many cannot be told apart any more, all that was stored before the
    latest of them is hidden: a restart is colder then, but nothing comes back.
    """

    def __init__(self, files: FileLayer, path: Path, log_id: bytes, limit: int) -> None:
        self._files = files
        self._path = path
        self._log = log_id
        self.limit = limit
        self._end = 0
        self._named = False  # durably: a former process may have ended before it was
        self._hidden: dict[Name, Position] = {}
        self._owed: dict[Name, Position] = {}  # hidden, and not durably: a write of them failed
        self.damaged = 0
        self.lost = False
        """Whether some that were there are not, so that more is hidden."""
        self.newest_seq = 0

    def __len__(self) -> int:
        return len(self._hidden)

    def load(self) -> None:
        """Read what is there; damage is skipped and counted, in blocks. Raises OSError, but not for a missing file."""
        try:
            handle = self._files.open_segment(self._path, write=False)
        except FileNotFoundError:
            return
        buffer = blocks(_CHUNK)
        try:
            while got := read_all(self._files, handle, [buffer], self._end):
                for at in range(0, got, BLOCK):
                    self._take(buffer[at : at + BLOCK])
                self._end += got
        finally:
            self._files.close(handle)

    def hides(self, record: Record) -> bool:
        """Whether a recovered record was forgotten."""
        hidden = self._hidden
        if not hidden:
            return False
        namespace, group, key = record[:3]
        place = record[6:8]
        for name in ((b"", -1, b""), (namespace, -1, b""), (namespace, group, key)):
            position = hidden.get(name)
            if position is not None and place < position:
                return True
        return False

    def hide_all(self, seq: int) -> None:
        """Hide all that was appended to lives up to ``seq``; durably once this is compacted or appended to."""
        everything = b"", -1, b""
        self._hide(everything, (seq + 1, 0))
        self._owed[everything] = self._hidden[everything]
        self.lost = True

    def append(self, names: Iterable[Name], namespace: bytes | None, position: Position) -> None:
        """Hide these, or (``namespace`` given) all of a namespace, or (empty) all; durable on return. OSError.

        What could not be written is written with the next ones. ValueError, and nothing has changed, where one of
        ``names`` is none.
        """
        if namespace and len(namespace) != NAMESPACE:
            return  # no record can be of it
        new = [(namespace, -1, b"")] if namespace is not None else list(names)
        for name in new:
            _check(name)
        for name in new:
            self._hide(name, position)
            self._owed[name] = self._hidden[name]
        buffer = self._pack(self._owed.items())
        if self._end + len(buffer) > self.limit or self._shortened():
            self.rewrite()
        else:
            self._write(self._path, buffer, self._end)
            self._name()
            self._owed.clear()

    def compact(self, oldest_seq: int) -> None:
        """Let go of what can hide nothing, because every record is of ``oldest_seq`` or later; keep the limit. OSError.

        ``oldest_seq`` is 0 where that is not known.
        """
        for name in [name for name, (seq, _) in self._hidden.items() if seq < oldest_seq]:
            del self._hidden[name]
        wasteful = self._end > 2 * len(self._pack(self._hidden.items())) + 16 * BLOCK
        if self._owed or wasteful or self._end > self.limit or (self._end and not self._hidden):
            self.rewrite()

    def rewrite(self) -> None:
        """Replace the file, atomically, by one that says the same once."""
        buffer = self._pack(self._hidden.items())
        if len(buffer) > self.limit // 2:
            log.warning("ssd: %s: %d tombstones are too many; a restart will be cold", self._path, len(self._hidden))
            self._hidden = {(b"", -1, b""): max(self._hidden.values())}
            buffer = self._pack(self._hidden.items())
        fresh = self._path.with_name(self._path.name + ".new")
        self._files.remove(fresh)
        self._write(fresh, buffer, 0)
        self._named = False
        self._files.replace(fresh, self._path)
        self._name()
        self._owed.clear()

    def _shortened(self) -> bool:
        """Whether somebody has removed or cut what was written: what is in memory is all that says it."""
        if not self._end:
            return False
        try:
            handle = self._files.open_segment(self._path, write=False)
        except FileNotFoundError:
            return True
        try:
            return self._files.size(handle) < self._end
        finally:
            self._files.close(handle)

    def _name(self) -> None:
        """Make the file be found after a loss of power."""
        if not self._named:
            self._files.sync_names(self._path.parent)
            self._named = True

    def _write(self, path: Path, buffer: memoryview, at: int) -> None:
        handle = self._files.open_segment(path, create=True)
        try:
            if buffer and write_all(self._files, handle, [buffer], at) != len(buffer):
                raise OSError(EIO, "the disk took a part of the tombstones only")
            self._files.fdatasync(handle)
        finally:
            self._files.close(handle)
        self._end = at + len(buffer)

    def _hide(self, name: Name, position: Position) -> None:
        self._hidden[name] = max(position, self._hidden.get(name, (0, 0)))
        self.newest_seq = max(self.newest_seq, position[0])

    def _pack(self, entries: Iterable[tuple[Name, Position]]) -> memoryview:
        """Blocks of all ``entries``, each block twice: one flipped bit must not bring anything back."""
        rest = list(entries)
        count = -(-len(rest) // PER_BLOCK)
        buffer = blocks(2 * count * BLOCK)
        for index in range(count):
            chunk = rest[index * PER_BLOCK : (index + 1) * PER_BLOCK]
            block = buffer[2 * index * BLOCK : (2 * index + 1) * BLOCK]
            _HEAD.pack_into(block, 0, _MAGIC, VERSION, 0, self._log, len(chunk))
            for slot, ((namespace, group, key), (seq, at)) in enumerate(chunk):
                kind = _ONE if group >= 0 else _NAMESPACE if namespace else _ALL
                offset = _HEAD.size + slot * _ENTRY.size
                _ENTRY.pack_into(block, offset, kind, len(key), max(group, 0), namespace, key, seq, at)
            block[-SUM:] = xxh3_128_digest(block[:-SUM])
            buffer[(2 * index + 1) * BLOCK : (2 * index + 2) * BLOCK] = block
        return buffer

    def _take(self, block: memoryview) -> None:
        magic, version, _, its_log, count = _HEAD.unpack_from(block)
        good = magic == _MAGIC and block[-SUM:] == xxh3_128_digest(block[:-SUM])
        if not good or version != VERSION or its_log != self._log or count > PER_BLOCK:
            self.damaged += 1
            return
        for slot in range(count):
            kind, width, group, namespace, key, seq, at = _ENTRY.unpack_from(block, _HEAD.size + slot * _ENTRY.size)
            if kind == _ONE:
                self._hide((namespace, group, key[:width]), (seq, at))
            elif kind in (_NAMESPACE, _ALL):
                self._hide((namespace if kind == _NAMESPACE else b"", -1, b""), (seq, at))


def _check(name: Name) -> None:
    """Raise ValueError where a name has no place in an entry: what would be written were another name, or nothing."""
    namespace, group, key = name
    if group == -1 and not key:
        return
    if not 0 <= group < 1 << 32 or len(namespace) != NAMESPACE or not 0 < len(key) <= MAX_KEY:
        raise ValueError(f"no name of an object: {name}")
