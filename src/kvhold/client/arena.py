"""A worker's mapping of a manager's arena."""

import ctypes
import mmap


class ArenaMapping:
    """``size`` bytes of the arena's file, mapped shared. Outlives the manager: a copy that began can always end."""

    def __init__(self, descriptor: int, size: int, incarnation: int) -> None:
        self.size = size
        self.incarnation = incarnation
        self._map = mmap.mmap(descriptor, size)
        self._map.madvise(mmap.MADV_DONTFORK)
        anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(anchor)
        del anchor

    def close(self) -> None:
        """Unmap. Nobody may hold the address any more."""
        self._map.close()
