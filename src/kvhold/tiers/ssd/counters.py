"""What one directory's I/O has done, for metrics."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from kvhold.tiers.ssd.format import Flaw

ERRORS: Final = ("EIO", "ENOSPC", "EROFS", "ENOENT")
"""Errors that are counted from the start, as 0. There may be others."""
REJECTED: Final = ("checksum", "length", "truncated", "identity", *(f"header_{flaw.value}" for flaw in Flaw))
"""Every reason for which a record is rejected."""


@dataclass(slots=True)
class Counters:
    """Plain sums. Each belongs to one thread, which alone adds to it; :meth:`plus` makes the sum of several.

    Bytes include headers. Seconds are those spent in system calls, and those in checksums. ``errors`` are by errno's
    name, ``rejected`` by why a record that was read was not what had been asked for.
    """

    read_bytes: int = 0
    read_seconds: float = 0.0
    written_bytes: int = 0
    write_seconds: float = 0.0
    sync_seconds: float = 0.0
    checksum_seconds: float = 0.0
    reads: int = 0
    writes: int = 0
    syncs: int = 0
    sync_failures: int = 0
    failed_objects: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)

    def plus(self, other: "Counters") -> "Counters":
        total = Counters()
        for name in self.__slots__:
            setattr(total, name, getattr(self, name) + getattr(other, name))
        return total
