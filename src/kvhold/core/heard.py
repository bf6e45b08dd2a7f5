"""What backings said that are asked what they have: a fixed number of answers, each for a bounded time."""

from array import array
from typing import Final

UNKNOWN: Final = 0
THERE: Final = 1
ABSENT: Final = 2
NOT_GOT: Final = 3
"""It was to be had and did not come, or something else came: whatever is said, it is not tried again for a while."""

_MIX: Final = 0x9E3779B97F4A7C15
"""Marks of keys that differ little are not together."""
_WAYS: Final = 8
"""Entries among which one has to be found or replaced."""


class Heard:
    """A table of 64-bit marks, each with a word and the time until which it counts.

    What is not in it is :data:`UNKNOWN`. Of the entries that a mark may have, the one that ends first makes room.
    """

    def __init__(self) -> None:
        self.cleared = 0  # how often all was forgotten
        self._marks, self._until, self._words = array("Q"), array("Q"), bytearray()

    def __len__(self) -> int:
        """Entries that it has room for; it takes memory only once something was heard."""
        return len(self._marks)

    def of(self, mark: int, now: int) -> int:
        """What was heard of ``mark``."""
        at = self._find(mark)
        return self._words[at] if at >= 0 and now < self._until[at] else UNKNOWN

    def note(self, mark: int, word: int, now: int, lasts: int, room: int) -> None:
        """Remember a word for so many nanoseconds; the table has ``room`` for so many, about."""
        if len(self) != max(1, room // _WAYS) * _WAYS:
            self._resize(max(1, room // _WAYS) * _WAYS)
        at = self._find(mark)
        if at < 0:
            at = min(self._ways(mark), key=self._until.__getitem__)
        elif self._words[at] == NOT_GOT != word and now < self._until[at]:
            return
        self._marks[at], self._until[at], self._words[at] = mark, now + lasts, word

    def clear(self) -> None:
        """Forget all, and what is being asked now."""
        self.cleared += 1
        self._resize(len(self))

    def _resize(self, size: int) -> None:
        self._marks, self._until, self._words = (
            array("Q", bytes(8 * size)),
            array("Q", bytes(8 * size)),
            bytearray(size),
        )

    def _ways(self, mark: int) -> range:
        start = (mark * _MIX >> 32) % (len(self) // _WAYS) * _WAYS
        return range(start, start + _WAYS)

    def _find(self, mark: int) -> int:
        if not self._marks:
            return -1
        ways = self._ways(mark)
        try:
            return self._marks.index(mark, ways.start, ways.stop)
        except ValueError:
            return -1
