"""Two toy engines on kvhold: a paged cache in numpy, a model that anybody can check, threads or steps.

``docs/new-engine.md`` walks through them.
"""

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from kvhold.client.attacher import Attacher, Half
from kvhold.client.control import Geometry, QuestionId
from kvhold.copy.engine import make_copier
from kvhold.copy.layout import fold
from kvhold.engines.common.accounts import Accounts
from kvhold.engines.common.adapters import Adapters
from kvhold.engines.common.batches import Batches
from kvhold.engines.common.blocking import Blocking
from kvhold.engines.common.copies import Copies
from kvhold.engines.common.groups import Group
from kvhold.engines.common.identity import Hashing, digest, namespace
from kvhold.engines.common.patience import Patience
from kvhold.engines.common.plans import CopyReport, Load, Publish, StepPlan
from kvhold.engines.common.question import ChainQuestion
from kvhold.engines.common.questions import Questions
from kvhold.engines.common.ranks import WorkerReport
from kvhold.engines.common.session import SchedulerSession
from kvhold.engines.common.settings import Settings
from kvhold.engines.common.spaces import Spaces
from kvhold.protocol import Hello

BLOCK, LAYERS, WIDTH = 4, 3, 64
HASHING = Hashing("sha256 of all tokens", "", 32, False)
KEPT = Group(0, "full attention", BLOCK, handed=False, whole=True, window=0)
Array = np.ndarray[Any, Any]


def attach(socket: Path, reads: bool = True) -> Callable[[Half], Attacher]:
    """How a half finds its manager: here only one that others run. ``reads``: it is read by a thread of its own."""
    return lambda half: Attacher(half, [socket], None, reads)


class Model:
    """Its KV of a token depends on all tokens before it, and its answer on all KV: a wrong byte is a wrong answer."""

    def __init__(self, seed: str = "toy") -> None:
        self.identity = digest({"model": seed, "layers": LAYERS, "width": WIDTH, "block": BLOCK})
        self._seed = seed

    def prefix(self, tokens: Sequence[int]) -> bytes:
        return hashlib.sha256(repr((self._seed, list(tokens))).encode()).digest()

    def kv(self, tokens: Sequence[int]) -> Array:
        """That of the last of ``tokens``: a row of bytes for each layer."""
        row = hashlib.shake_128(self.prefix(tokens)).digest(LAYERS * WIDTH)
        return np.ndarray((LAYERS, WIDTH), np.uint8, row)

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        """Of each full block a key, which stands for all tokens up to its end."""
        return [self.prefix(tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)]

    def expected(self, tokens: Sequence[int]) -> bytes:
        """The answer without any cache."""
        return answer([self.kv(tokens[: at + 1]) for at in range(len(tokens))])


def answer(rows: Sequence[Array]) -> bytes:
    return hashlib.sha256(b"".join(row.tobytes() for row in rows)).digest()


class Pool:
    """The block numbers of an engine, each held by whoever needs its content."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.holds = [0] * blocks
        self._freed = threading.Condition()

    def take(self, wanted: int, wait: float) -> list[int] | None:
        """Free blocks, held once from now on; None if there are not so many within ``wait`` seconds."""
        with self._freed:
            if not self._freed.wait_for(lambda: self.holds.count(0) >= wanted, wait):
                return None
            taken = [block for block, holds in enumerate(self.holds) if not holds][:wanted]
            self.hold(taken)
            return taken

    def hold(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.holds[block] += 1

    def let_go(self, blocks: Sequence[int]) -> None:
        with self._freed:
            for block in blocks:
                self.holds[block] -= 1
            self._freed.notify_all()


class PagedCache:
    """One rank's pages, ``pages[block, layer, token]``, which have those ``columns`` of the KV that are its own."""

    def __init__(self, blocks: int, columns: slice = slice(0, WIDTH)) -> None:
        self.columns = columns
        self.pages = np.zeros((blocks, LAYERS, BLOCK, columns.stop - columns.start), np.uint8)

        self.object_bytes: int = self.pages[0].nbytes

    def compute(self, model: Model, tokens: Sequence[int], start: int, blocks: Sequence[int]) -> None:
        """Fill the KV of ``tokens`` from ``start`` on."""
        for at in range(start, len(tokens)):
            self.pages[blocks[at // BLOCK], :, at % BLOCK] = model.kv(tokens[: at + 1])[:, self.columns]

    def rows(self, tokens: int, blocks: Sequence[int]) -> list[Array]:
        """The KV of so many tokens."""
        return [self.pages[blocks[at // BLOCK], :, at % BLOCK] for at in range(tokens)]


class PoolEngine:
    """An engine without steps: each request is served by a thread, which may wait for kvhold."""

    def __init__(self, name: str, socket: Path, model: Model, blocks: int = 256, threads: int = 4) -> None:
        self.model, self.pool, self.cache, self.restored = model, Pool(blocks), PagedCache(blocks), 0
        self.kvhold = Blocking(name, f"toy {name}", attach(socket))
        name_of_all = namespace((model.identity, model.identity), HASHING, b"")
        geometry = Geometry(name_of_all, KEPT.index, HASHING.key_bytes, (self.cache.object_bytes,), "toy", KEPT.whole)
        self.space = self.kvhold.open(geometry, slots=blocks)
        self.threads = ThreadPoolExecutor(threads)

    def serve(self, tokens: Sequence[int]) -> bytes:
        """The answer to a prompt."""
        keys, blocks = self.model.keys(tokens), self.pool.take(-(-len(tokens) // BLOCK), wait=60.0)
        assert blocks is not None, "the prompts of all threads fit into the cache"
        try:
            pages, size = self.cache.pages, self.cache.object_bytes
            buffers = [[(pages[block].ctypes.data, size)] for block in blocks[: len(keys)]]  # in one piece each
            hit = self.kvhold.find(self.space, keys, seconds=0.2)
            restored = self.kvhold.restore(hit, buffers)
            self.cache.compute(self.model, tokens, restored * BLOCK, blocks)
            self.kvhold.publish(self.space, keys, buffers[restored:], seconds=0.5, skip=restored)
            self.restored += restored * BLOCK
            return answer(self.cache.rows(len(tokens), blocks))
        finally:
            self.pool.let_go(blocks)

    def close(self) -> None:
        self.threads.shutdown()
        self.kvhold.close()


@dataclass
class Request:
    name: str
    tokens: Sequence[int]
    keys: list[bytes]
    blocks: list[int] = field(default_factory=list)
    restored: int = 0  # blocks
    lease: QuestionId | None = None  # what its restore is leased as
    awaited: int = 0  # ranks that have not ended its restore
    failed: bool = False


class Worker:
    """One rank of an engine with steps."""

    def __init__(self, name: str, socket: Path, model: Model, blocks: int, rank: int, world: int, split: bool) -> None:
        part = WIDTH // world
        self.cache = PagedCache(blocks, slice(rank * part, (rank + 1) * part) if split else slice(0, WIDTH))
        size, address, page = self.cache.object_bytes, self.cache.pages.ctypes.data, self.cache.object_bytes // LAYERS
        layout = fold([(address + layer * page, size, page) for layer in range(LAYERS)], blocks, "cpu")
        owner = rank if split else 0  # ranks that hold the same KV share what the first of them writes
        report = WorkerReport(rank, world, 0, owner, model.identity, model.identity, (size,), False, f"rank {rank}")
        hello = Hello("worker", name, rank, world, f"toy {name}", report=report.packed())
        self.copies = Copies(report, make_copier([layout]), hello, attach(socket), Accounts(), bytes, False)
        self.copies.attacher.start(10.0)


class StepEngine:
    """An engine with steps and two ranks, which are here in one process; no step waits beyond its budget.

    ``split`` ranks have half of the KV each; others hold the same.
    """

    def __init__(self, name: str, socket: Path, model: Model, split: bool, blocks: int = 256) -> None:
        self.model, self.pool, self.split, self.restored = model, Pool(blocks), split, 0
        self.workers = [Worker(name, socket, model, blocks, rank, 2, split) for rank in range(2)]
        self.session = SchedulerSession(name, 2, f"toy {name}", attach(socket, False), Settings(step_budget_ms=5.0))
        control, self.accounts = self.session.control, Accounts()
        self.spaces = Spaces(control, [KEPT], Adapters(b"", ""), lambda: HASHING, "toy", "", blocks * BLOCK // 2, None)
        self.questions = Questions(control, self.session.budget, self.accounts, self, Patience(0.2).of)
        self.batches = Batches(control, self.accounts, self.spaces)
        self.batches.source = self.pool
        self.waiting: list[Request] = []
        self.restoring: dict[str, Request] = {}
        self._numbers = count(1)
        self.session.start()

    def submit(self, tokens: Sequence[int]) -> str:
        self.waiting.append(Request(f"request {next(self._numbers)}", tokens, self.model.keys(tokens)))
        return self.waiting[-1].name

    def step(self) -> dict[str, bytes]:
        """Serve who can be served; their answers by name."""
        self.session.begin_step()
        loads: list[Load] = []
        publishes: list[Publish] = []
        self.batches.conclude()
        ready = [request for request in self.restoring.values() if not request.awaited]
        ready += [request for request in list(self.waiting) if self._admit(request, loads)]
        for request in ready:
            self._publish(request, publishes)
        number, ranks = self.session.number_step(), self.spaces.ranks
        plan = StepPlan(number, self.session.control.incarnation, loads, publishes, ranks.starts if ranks else ())
        self.session.end_step()
        report = CopyReport()
        for worker in self.workers:  # each in a process of its own, were this an engine
            worker.copies.start_loads(plan)
            for request in ready:
                worker.cache.compute(self.model, request.tokens, request.restored * BLOCK, request.blocks)
            worker.copies.start_publishes(plan)
            report = report.aggregate(worker.copies.take_report() or CopyReport())
            self._take_loads(worker)
        if ranks:
            self.batches.ended(report, ranks.writes)
        return {request.name: self._finish(request) for request in ready}

    def ask(
        self, spaces: Sequence[int], local: int, limit: int, hashes: Sequence[bytes], former: QuestionId | None
    ) -> ChainQuestion:
        """A request's question: here a hit is the longest prefix of a chain."""
        return ChainQuestion(self.session.control, spaces[0], BLOCK, local, limit, hashes, former)

    def _admit(self, request: Request, loads: list[Load]) -> bool:
        """Whether the request can be computed in this step; a restore is computed on when it has ended."""
        limit = (len(request.tokens) - 1) // BLOCK * BLOCK  # the last token is computed in any case
        spaces = self.spaces.plain  # a session may end at any time, also in the middle of a step
        if spaces is None:
            self.questions.miss(request.name, 0, limit, "detached")
        found = 0 if spaces is None else self.questions.find(request.name, 0, limit, spaces, request.keys)
        blocks = self.pool.take(-(-len(request.tokens) // BLOCK), wait=0.0) if found is not None else None
        if blocks is None:
            return False  # the word on it is awaited, or blocks are
        self.waiting.remove(request)
        request.blocks = blocks
        taken = self.questions.take(request.name, found) if found else None
        if taken is None:
            self.questions.settle(request.name)
            return True
        question, _, [leased] = taken
        mine = [blocks[at] for at in leased.blocks]
        loads.append(Load(request.name, [(0, mine, leased.offsets)], mine))
        request.lease, request.restored, request.awaited = question.id, len(mine), len(self.workers)
        self.restoring[request.name] = request
        return False

    def _publish(self, request: Request, publishes: list[Publish]) -> None:
        """Publish what this step completes and the manager does not have."""
        if self.spaces.plain is None:
            return
        [space], [stored] = self.spaces.plain, self.questions.stored(request.name) or [()]
        keys = request.keys
        for start in range(request.restored, len(keys)):
            if (start + 1) * BLOCK not in stored and not self.batches.under_way(space, keys[start]):
                parent, blocks = keys[start - 1] if start else b"", request.blocks[start : len(keys)]
                self.batches.begin(space, 0, parent, start, keys[start:], blocks, publishes)
                return

    def _take_loads(self, worker: Worker) -> None:
        """One rank has ended restores: the lease of one ends when the last rank has."""
        loads, control = worker.copies.take_loads(), self.session.control
        for name in loads.ended:
            request = self.restoring[name]
            request.awaited -= 1
            request.failed = request.failed or name in loads.failed
            if not request.awaited:
                assert request.lease is not None
                if request.failed:
                    control.restore_failed(request.lease)
                    request.restored = 0
                control.release((request.lease,))

    def _finish(self, request: Request) -> bytes:
        self.restoring.pop(request.name, None)
        self.questions.drop(request.name)
        self.restored += request.restored * BLOCK
        parts = [worker.cache.rows(len(request.tokens), request.blocks) for worker in self.workers]
        whole = [np.concatenate(rows, axis=1) for rows in zip(*parts, strict=True)] if self.split else parts[0]
        self.pool.let_go(request.blocks)
        assert self.split or answer(parts[0]) == answer(parts[1])
        return answer(whole)

    def close(self) -> None:
        self.session.stop()
        for worker in self.workers:
            worker.copies.shutdown()
