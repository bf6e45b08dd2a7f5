"""The open segments of a log: as few descriptors as are useful, never closed under an I/O."""

import logging
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from errno import ENOSPC
from threading import Lock
from typing import Final

from kvhold.tiers.ssd.survey import Log
from kvhold.units import format_size

log = logging.getLogger(__name__)

_KEPT: Final = 256
_Key = tuple[int, bool]
"""Segment, and whether it may be written."""


@dataclass(slots=True)
class _Open:
    handle: int
    users: int = 0


class Handles:
    """Segments' files, opened when they are wanted and kept for a while. Thread-safe; raises OSError.

    Those to be read and those to be written are kept apart: a directory that may not be written can still be read.
    """

    def __init__(self, opened: Log, keep: int = _KEPT) -> None:
        self._log = opened
        self._keep = keep
        self._lock = Lock()
        self._open: OrderedDict[_Key, _Open] = OrderedDict()  # the most recently used last
        self._named: set[int] = set()  # segments whose names are durable; a former process may have ended too early

    @contextmanager
    def use(self, segment: int, *, write: bool) -> Iterator[int]:
        """The handle of an existing segment's file, which stays open inside of the context."""
        key = segment, write
        with self._lock:
            entry = self._open.get(key)
            if entry is not None:
                entry.users += 1
                self._open.move_to_end(key)
        if entry is None:
            # Outside of the lock: on a sick disk this may take for ever, and only this thread shall wait for it.
            entry = self._add(key, self._log.files.open_segment(self._log.segment_path(segment), write=write))
        try:
            yield entry.handle
        finally:
            with self._lock:
                entry.users -= 1
                surplus = self._surplus()
                if not entry.users and self._open.get(key) is not entry and entry.handle not in surplus:
                    surplus.append(entry.handle)
            for handle in surplus:
                self._log.files.close(handle)

    def create(self, segment: int) -> None:
        """Make the segment's file, of full size, if it is not there yet. ENOSPC where ``min_free`` would be hurt."""
        files, path, size = self._log.files, self._log.segment_path(segment), self._log.segment_bytes
        try:
            handle, new = files.open_segment(path), False
        except FileNotFoundError:
            self._check_room(size)
            handle, new = files.open_segment(path, create=True), True
        try:
            if new or files.size(handle) != size:
                files.allocate(handle, size)
        except OSError:
            if new:  # what was allocated of it is not to be kept from others
                files.remove(path)
            raise
        finally:
            files.close(handle)
        if new:
            self._drop(segment)  # of a file of this name that somebody removed
            self._named.discard(segment)
        if segment not in self._named:
            files.sync_names(self._log.path)
            self._named.add(segment)

    def close(self) -> None:
        """Close all. Only when no thread uses any."""
        with self._lock:
            handles = [entry.handle for entry in self._open.values()]
            self._open.clear()
        for handle in handles:
            self._log.files.close(handle)

    def _add(self, key: _Key, handle: int) -> _Open:
        with self._lock:
            entry = self._open.get(key)
            if entry is None:
                entry = self._open[key] = _Open(handle)
                handle = -1
            entry.users += 1
        if handle >= 0:  # another thread was faster
            self._log.files.close(handle)
        return entry

    def _drop(self, segment: int) -> None:
        with self._lock:
            entries = [self._open.pop((segment, write), None) for write in (False, True)]
            idle = [entry.handle for entry in entries if entry is not None and not entry.users]
        for handle in idle:
            self._log.files.close(handle)

    def _surplus(self) -> list[int]:
        if len(self._open) <= self._keep:
            return []
        idle = [key for key, entry in self._open.items() if not entry.users]
        return [self._open.pop(key).handle for key in idle[: len(self._open) - self._keep]]

    def _check_room(self, size: int) -> None:
        free = self._log.files.free_bytes(self._log.path)
        if free - size < self._log.min_free:
            raise OSError(
                ENOSPC,
                f"{format_size(free)} are free and min_free is {format_size(self._log.min_free)}: no room for another "
                f"segment of {format_size(size)}; free some, lower min_free, or give --ssd a smaller size",
            )
