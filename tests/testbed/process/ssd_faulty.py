"""``kvhold`` on disks that fail to order: ``python ssd_faulty.py FAULTS serve ...``.

What is done to a file first looks for its order in the directory FAULTS: while ``block-OPERATION`` exists it waits,
``delay-OPERATION`` holds seconds, ``fail-OPERATION`` the name of an errno. Operations are those that the two classes
here name. Times that tests would have to wait for are shorter than in earnest, and writes smaller.
"""

import errno
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import kvhold.manager.process as process
import kvhold.manager.server as server
import kvhold.manager.sessions as sessions
import kvhold.manager.ssd as ssd
from kvhold.cli import main
from kvhold.manager.config import ManagerConfig
from kvhold.tiers.ssd.files import RealFiles
from kvhold.tiers.ssd.footer import Record
from kvhold.tiers.ssd.recover import Found, Recovery

ANSWER_SECONDS, RETRY_SECONDS = 1.0, 0.3
STORE_SECONDS, DISK_SECONDS = 1.0, 2.0
WRITE_BATCH = 256 << 10
"""A write that hangs holds what it writes: not all of a little arena."""


class Orders:
    def __init__(self, faults: Path) -> None:
        self._faults = faults

    def heed(self, operation: str) -> None:
        while (self._faults / f"block-{operation}").exists():
            time.sleep(0.005)
        if (delay := self._order("delay", operation)) is not None:
            time.sleep(float(delay))
        if (name := self._order("fail", operation)) is not None:
            code = getattr(errno, name)
            raise OSError(code, os.strerror(code))

    def _order(self, what: str, operation: str) -> str | None:
        try:
            return (self._faults / f"{what}-{operation}").read_text()
        except FileNotFoundError:
            return None


class Faulty(RealFiles):
    def __init__(self, orders: Orders) -> None:
        super().__init__()
        self._may = orders.heed

    def open_segment(self, path: Path, *, create: bool = False, write: bool = True) -> int:
        self._may("create" if create else "open")
        return super().open_segment(path, create=create, write=write)

    def preadv(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._may("read")
        return super().preadv(handle, buffers, offset)

    def pwritev(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._may("write")
        return super().pwritev(handle, buffers, offset)

    def fdatasync(self, handle: int) -> None:
        self._may("sync")
        super().fdatasync(handle)

    def allocate(self, handle: int, size: int) -> None:
        self._may("allocate")
        super().allocate(handle, size)


def run(config: ManagerConfig, serve=process.run) -> int:  # type: ignore[no-untyped-def]
    limits = replace(
        config.limits,
        answer_ns=int(ANSWER_SECONDS * 1e9),
        hung_ns=int(ANSWER_SECONDS * 1e9),
        retry_ns=int(RETRY_SECONDS * 1e9),
        write_batch=WRITE_BATCH,
    )
    return serve(replace(config, limits=limits))


def recovery(orders: Orders) -> type[Recovery]:
    class Faulty(Recovery):
        """``rebuild`` is each segment's turn."""

        def segment(self, segment: int, seq: int) -> Iterator[list[Record] | Found]:
            orders.heed("rebuild")
            yield from super().segment(segment, seq)

    return Faulty


if __name__ == "__main__":
    orders = Orders(Path(sys.argv.pop(1)))
    ssd.claim_log = partial(ssd.claim_log, files=Faulty(orders))  # type: ignore[assignment]
    ssd.Recovery = recovery(orders)  # type: ignore[misc]
    server.STORE_SECONDS, sessions.DISK_SECONDS = STORE_SECONDS, DISK_SECONDS
    process.run = run
    main()
