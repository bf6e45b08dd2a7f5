"""What the log costs on a trace of questions and stores, by the real core with a disk that answers at once.

    ./dev run python benchmarks/ssd_trace.py [--size 512KiB] [--requests 60000]

Keys are asked for by a Zipf law; what is missing is stored. The arena holds a quarter of what the log does. Shown are
the bytes written to disk for each byte of payload stored, how many of those were written again when a segment was given
up, and how much was read back.
"""

import argparse
import random
from array import array
from itertools import accumulate

from figures import goal

from kvhold.core import Core
from kvhold.core import events as ev
from kvhold.core.limits import Limits
from kvhold.core.log import events as lev
from kvhold.core.log.segments import HEADER, footer_bytes, table_bytes
from kvhold.units import format_size, parse_size

SEGMENT = 256 << 20
SEGMENTS = 8
PAGE = 16 << 20


class Replay:
    def __init__(self, size: int) -> None:
        self.size = size
        log = SEGMENTS * SEGMENT
        pages = log // 4 // PAGE
        self.core = Core(PAGE, pages * PAGE, Limits(write_queue=1 << 20))
        self.now = 0
        self.op = 0
        self.free: list[tuple[int, int]] = []
        self.first = self.again = self.read = self.headers = self.footers = self.asked = self.found = 0
        self.stored: set[bytes] = set()
        for event in (
            ev.Populated(pages),
            lev.LogOpened(1, SEGMENTS, SEGMENT),
            lev.Segments(1, ()),
            lev.LogReady(1),
            ev.Joined(1, ev.Role.SCHEDULER, "trace", 0, 1),
            ev.Joined(2, ev.Role.WORKER, "trace", 0, 1),
            ev.Mapped(2),
            ev.Open(1, 0, b"n" * 32, 0, 32, (size,), 8),
        ):
            self.do(event)

    def do(self, event: ev.Event) -> list[ev.Effect]:
        self.now += 1_000_000
        told: list[ev.Effect] = []
        todo = list(self.core.handle(event, self.now))
        while todo or self.core.has_work:
            if not todo:
                todo = self.core.step()
                continue
            effect = todo.pop(0)
            told.append(effect)
            if isinstance(effect, ev.Grant):
                self.free += zip(array("I", effect.rows), array("Q", effect.epochs), strict=True)
            elif isinstance(effect, lev.Write | lev.Read | lev.Reuse | lev.Seal | lev.Forget):
                self._count(effect)
                todo += self.core.handle(ev.Done(effect.io), self.now)
        return told

    def _count(self, effect: ev.Effect) -> None:
        if isinstance(effect, lev.Write):
            for stored in effect.objects:
                if stored.key in self.stored:
                    self.again += self.size
                else:
                    self.first += self.size
                    self.stored.add(stored.key)
                self.headers += HEADER
        elif isinstance(effect, lev.Read):
            self.read += len(effect.objects) * self.size
        elif isinstance(effect, lev.Seal):
            records = (effect.end - HEADER) // (HEADER + self.size)
            self.footers += footer_bytes(records, table_bytes(1)) + HEADER

    def request(self, key: bytes) -> None:
        self.op += 1
        self.asked += 1
        answers = [e for e in self.do(ev.Query(1, self.op, 1, 0, 0, key)) if isinstance(e, ev.Answer)]
        if answers[0].resident:
            self.found += 1
            self.do(ev.Release(1, ((self.op, 1),)))
            return
        self.stored.discard(key)  # whatever was known of it is gone: storing it is no rewriting
        row, epoch = self.free.pop()
        commit = ev.Commit(1, 0, b"", 0, key, array("I", [row]).tobytes(), array("Q", [epoch]).tobytes(), (self.size,))
        self.do(commit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=parse_size, default=512 << 10)
    parser.add_argument("--requests", type=int, default=60_000)
    arguments = parser.parse_args()
    size: int = arguments.size
    per_log = SEGMENTS * ((SEGMENT - 2 * HEADER) // (size + HEADER))
    for share in (0.7, 1.5):
        keys = int(share * per_log)
        weights = list(accumulate(1 / (rank + 1) ** 0.9 for rank in range(keys)))
        rng = random.Random(7)
        replay = Replay(size)
        for number in rng.choices(range(keys), cum_weights=weights, k=arguments.requests):
            replay.request(number.to_bytes(32, "little"))
        written = replay.first + replay.again
        print(f"{keys} objects of {format_size(size)}, {share:g} of the log, {arguments.requests} requests:")
        overhead = (written + replay.headers + replay.footers) / written
        most = 1 + 8192 / size + 0.005
        print(f"  hits {replay.found / replay.asked:.1%}; written {format_size(written)}")
        print(f"  bytes on disk per byte of payload: {overhead:.5f} {goal(overhead, most)}")
        factor = written / replay.first
        print(f"  rewrite factor: {factor:.3f} {goal(factor, 1.1) if share <= 0.7 else ''}")
        print(f"  payload read back per payload written: {replay.read / written:.3f}")


if __name__ == "__main__":
    main()
