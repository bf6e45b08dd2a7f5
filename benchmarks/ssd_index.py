"""How long the index of a log takes to rebuild at start, from footers and from record headers alone, core included.

    ./dev run python benchmarks/ssd_index.py [--footers 500000 8000000] [--headers 100000]

Segments are made as sparse files that hold headers and footers and no payload: payloads are not read at start.
"""

import argparse
import os
import tempfile
import threading
import time
from pathlib import Path

from figures import goal

from kvhold.core import Core
from kvhold.core import events as ev
from kvhold.core.log import events as lev
from kvhold.core.log.segments import HEADER, footer_bytes, table_bytes
from kvhold.manager.config import SsdConfig
from kvhold.manager.ssd import SsdStore
from kvhold.tiers.ssd.directory import claim_log, reserve_bytes, trim_log
from kvhold.tiers.ssd.files import blocks
from kvhold.tiers.ssd.footer import Entry, encode_footer
from kvhold.tiers.ssd.format import FROM_MANAGER, RecordHead, SegmentHead, encode_record, encode_segment

SEGMENT = 256 << 20
SIZE = 32 << 10
NAMESPACE = b"n" * 32
PER_SEGMENT = 7_000
GOALS = {500_000: 3.0, 8_000_000: 60.0}


def make(folder: Path, records: int, footers: bool) -> int:
    """A log of so many records; the budget that it was made with."""
    segments = -(-records // PER_SEGMENT)
    budget = (segments + 4) * SEGMENT
    budget += reserve_bytes(budget) + (32 << 20)
    log = claim_log(folder, budget, min_free=0, segment_bytes=SEGMENT)
    trim_log(log)
    block, now = blocks(HEADER), time.time_ns()
    for number in range(segments):
        with log.segment_path(number).open("wb") as file:
            file.truncate(SEGMENT)
            encode_segment(block, SegmentHead(log.id, number + 1, number, SEGMENT, now))
            file.write(block)
            count = min(PER_SEGMENT, records - number * PER_SEGMENT)
            at = [HEADER + i * (HEADER + SIZE) for i in range(count)]
            keys = [os.urandom(32) for _ in range(count)]
            if footers:
                geometry = (NAMESPACE, 0, 32, (SIZE,))
                buffer = blocks(footer_bytes(count, table_bytes(1)))
                entries = [Entry(geometry, key, place, 0, now) for key, place in zip(keys, at, strict=True)]
                encode_footer(buffer, log.id, number, number + 1, at[-1] + HEADER + SIZE, entries)
                file.seek(SEGMENT - len(buffer))
                file.write(buffer)
                continue
            for key, place in zip(keys, at, strict=True):
                head = RecordHead(
                    log.id, number + 1, number, 0, place, HEADER + SIZE, now, NAMESPACE, 0, FROM_MANAGER, key, b"",
                    (SIZE,), (bytes(16),),
                )  # fmt: skip
                encode_record(block, head)
                file.seek(place)
                file.write(block)
    log.close()
    return budget


def rebuild(folder: Path, budget: int) -> tuple[float, int]:
    """Seconds from opening the directory to an index that is whole, and its objects."""
    begun = time.perf_counter()
    store = SsdStore(SsdConfig(folder, budget, 0), memoryview(bytearray(4096)))
    core, ready = Core(64 << 20, 64 << 20), threading.Event()

    def tell(event: ev.Event) -> None:
        core.handle(event, 0)
        if isinstance(event, lev.LogReady):
            ready.set()

    store.start(1, tell)
    ready.wait()
    seconds = time.perf_counter() - begun
    store.close(5)
    return seconds, core.objects


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--footers", type=int, nargs="*", default=[500_000])
    parser.add_argument("--headers", type=int, nargs="*", default=[100_000])
    parser.add_argument("--directory", type=Path, default=None)
    arguments = parser.parse_args()
    for what, counts in (("footers", arguments.footers), ("headers alone", arguments.headers)):
        for count in counts:
            with tempfile.TemporaryDirectory(prefix="kvb-", dir=arguments.directory) as name:
                budget = make(Path(name) / "log", count, what == "footers")
                seconds, objects = rebuild(Path(name) / "log", budget)
                assert objects == count, (objects, count)
                verdict = goal(seconds, GOALS[count]) if what == "footers" and count in GOALS else ""
                print(f"{count:,} records from {what}: {seconds:.2f} s, {seconds / count * 1e6:.1f} us each {verdict}")


if __name__ == "__main__":
    main()
