"""A random life of engines of one kind, with one manager: requests, aborts, failures, resets, crashes, restarts.

    PYTHONPATH=tests python -m testbed.oracle.oracle_world KIND SEED [SEED...]

tells what happened in them; with ORACLE_ALONE set, in a vLLM without a connector. ORACLE_EVENTS says how long they are.
A seed fixes all choices, but not the moments at which a manager answers.
"""

import json
import logging
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from testbed.engine.vllm_config import tiny_config
from testbed.oracle.oracle_kinds import KINDS, Kind
from testbed.oracle.oracle_runner import MAX_LEN, OracleEngine, Shape, Weather
from testbed.process.manager_process import Manager
from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec

LONGEST = 230  # tokens of a prompt
MOST_NEW = 24  # tokens generated
PATIENCE = 30.0
"""Seconds until what still waits is taken to hang."""


class _Errors(logging.Handler):
    """What the connector caught and logged: in an engine it would be a miss, here it is a failure."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(logging.Formatter().format(record))


@contextmanager
def surroundings() -> Iterator[tuple[VllmConfig, Manager]]:
    """A configuration and a manager for as many worlds as one likes; leaves nothing behind."""
    hashes = {name: getattr(kv_cache_utils, name, None) for name in ("NONE_HASH", "_NONE_HASH_SEED")}
    with tempfile.TemporaryDirectory(prefix="kvhold-") as folder:
        base = tiny_config(Path(folder), MAX_LEN)
        manager = Manager(Path(folder), dram="64MiB")
        try:
            yield base, manager
        finally:
            manager.kill()
            for name, value in hashes.items():
                setattr(kv_cache_utils, name, value)


def need(kind: Kind, budget: int) -> int:
    """Blocks that the longest request may hold at once."""
    tokens = LONGEST + MOST_NEW + kind.drafts + 1
    blocks = 0
    for spec in kind.groups:
        if isinstance(spec, MambaSpec):
            blocks += 5
        elif isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
            blocks += min(spec.max_admission_blocks_per_request(budget, MAX_LEN), cdiv(tokens, spec.block_size))
        else:
            blocks += cdiv(tokens, kind.block_tokens(spec))
    return blocks + len(kind.groups)


def rest(engine: OracleEngine, done: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Step until ``done``, for so long at most; whether it is."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        if not engine.step():
            time.sleep(0.0003)  # the manager needs a processor to answer
    return True


def hits(engine: OracleEngine, prompts: list[list[int]], want: int = 4) -> list[int]:
    """How many tokens of each of ``prompts`` ``engine`` need not compute, one after the other."""
    found = []
    for at, prompt in enumerate(prompts):
        name = f"p{at} {engine.steps}"
        engine.add(name, prompt, want)
        assert rest(engine, lambda: not engine.scheduler.has_requests()), engine.story()
        found.append(engine.finished[name].hit or 0)
    engine.check_cached()
    engine.check_idle()
    return found


class World:
    """Requests over a small tree of shared text, and everything that may befall them."""

    def __init__(self, base: VllmConfig, kind: Kind, seed: int, manager: Manager | None) -> None:
        self.base, self.kind, self.manager = base, kind, manager
        self.random = random.Random(f"{kind.name} {seed}")
        self.counts: Counter[str] = Counter()
        self.weather = Weather(random.Random(self.random.random()))
        self.names = 0
        self.stopped = 0  # steps until a stopped manager goes on
        self.texts: list[list[int]] = []  # whole texts of finished requests
        self.engine = self._start()

    # --- engines ------------------------------------------------------------------------------------------------

    def _start(self) -> OracleEngine:
        draw = self.random
        budget = draw.choice([2 * self.kind.block_size, 3 * self.kind.block_size + 8, 128, 512])
        blocks = int(need(self.kind, budget) * draw.choice([1, 1, 1.3, 1.7, 3])) + 2
        self.weather.late = draw.choice([0.0, 0.3, 0.7, 0.9])
        self.engine = OracleEngine(
            self.base,
            self.kind,
            Shape(blocks, budget, draw.choice([2, 8]), draw.choice([20.0, 20.0, 1.0])),
            str(self.manager.socket) if self.manager is not None else None,
            self.weather,
            self.counts,
        )
        self.counts["engines"] += 1
        return self.engine

    def run(self, events: int) -> Counter[str]:
        """All of it; raises what goes wrong."""
        errors = _Errors()
        logger = logging.getLogger("kvhold")
        logger.addHandler(errors)
        said = self.manager.log.stat().st_size if self.manager is not None else 0
        try:
            for _ in range(events):
                self._event()
                if self.stopped == 1:
                    self._resume()
                self.stopped = max(0, self.stopped - 1)
            self._drain()
            assert not errors.records, "the connector caught exceptions"
            if self.manager is not None:
                with self.manager.log.open() as log:
                    log.seek(said)
                    bad = [line for line in log if any(word in line for word in ("refused:", "ERROR", "Traceback"))]
                assert not bad, "the manager says:\n" + "".join(bad[:10])
        except Exception as error:
            for record in errors.records[:3]:
                error.add_note(record)
            raise
        finally:
            logger.removeHandler(errors)
            self._resume()
            self.engine.close()
        return self.counts

    # --- events -------------------------------------------------------------------------------------------------

    def _event(self) -> None:
        draw, engine = self.random, self.engine
        if len(engine.live) < 6 and draw.random() < (0.5 if len(engine.live) < 2 else 0.15):
            self._add()
        chance = draw.random()
        if chance < 0.012 and engine.live:
            waiting = [name for name, live in engine.live.items() if not live.request.is_finished()]
            if waiting:
                engine.abort(draw.choice(waiting))
        elif chance < 0.05:
            self._reset()
        elif chance < 0.06:
            weather = self.weather
            weather.refuse, weather.fail, weather.spoil = draw.choice([(0, 0, 0), (0, 0, 0), (0.3, 0.2, 0.3)])
        elif chance < 0.062 and not self.stopped and self.manager is not None:
            self.counts["manager killed"] += 1
            self.manager.restart()
        elif chance < 0.066 and not self.stopped and self.manager is not None:
            self.counts["manager stopped"] += 1
            self.manager.stop()
            self.stopped = draw.choice([5, 40])
        elif chance < 0.072:
            self._drain()
            self._resume()  # an engine's start and end wait for a manager that may answer
            engine.close()
            self._start()
        elif chance < 0.082:
            for name in engine.loading[:1]:
                engine.abort(name)
        self._step()

    def _step(self) -> None:
        computed = self.engine.step()
        for name in list(self.engine.finished):
            live = self.engine.finished.pop(name)
            self.texts.append(live.tape.tokens)
        if self.engine.steps % 64 == 0:
            self.counts["cached blocks checked"] += self.engine.check_cached()
        if not computed and self.engine.live:
            time.sleep(0.0003)  # the manager needs a processor to answer

    def _add(self) -> None:
        draw = self.random
        size = self.kind.block_size
        length = draw.choice(
            [
                draw.randint(1, LONGEST),
                draw.randint(LONGEST // 2, LONGEST),
                max(1, draw.randint(1, LONGEST // size) * size + draw.choice([-1, 0, 1])),
            ]
        )
        tokens = self._text(min(length, LONGEST))
        self.engine.add(f"r{self.names}", tokens, draw.randint(1, MOST_NEW), draw.randint(0, 2))
        self.names += 1

    def _text(self, length: int) -> list[int]:
        """A walk through the tree, or what a finished request left, cut or continued to ``length``."""
        draw = self.random
        tokens: list[int] = []
        if self.texts and draw.random() < 0.3:
            tokens = list(draw.choice(self.texts[-8:]))
        branch = draw.choice(["a", "a", "b"])
        while len(tokens) < length:
            segment = random.Random(f"{branch} {len(tokens)}")
            tokens += [segment.randint(1, 90) for _ in range(segment.choice([16, 24, 40, 64]))]
            branch += draw.choice("xxy")
        return tokens[:length]

    def _reset(self) -> None:
        draw, engine = self.random, self.engine
        running = draw.random() < 0.3 and not engine.holds_blocks_beside_running_requests
        connector = draw.random() < 0.15
        self.counts["resets of the connector" if connector else "resets"] += 1
        engine.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=connector)

    def _resume(self) -> None:
        if self.stopped and self.manager is not None:
            self.stopped = 0
            self.manager.cont()

    def _drain(self) -> None:
        """All requests end, also without a manager that answers."""
        if self.random.random() < 0.5:
            self._resume()
        end = time.monotonic() + PATIENCE
        while self.engine.scheduler.has_requests():
            self._step()
            if time.monotonic() > end:
                raise AssertionError(f"the engine does not come to rest: {self.engine.story()}")
        self.counts["cached blocks checked"] += self.engine.check_cached()
        self.engine.check_idle()


def live(base: VllmConfig, kind: Kind, seed: int, manager: Manager | None, events: int, **bugs: Any) -> Counter[str]:
    """One world; what is raised says how to see it again. ``bugs`` are fields of :class:`Weather`."""
    try:
        world = World(base, kind, seed, manager)
        for name, value in bugs.items():
            setattr(world.weather, name, value)
        return world.run(events)
    except Exception as error:
        error.add_note(f"seen with PYTHONPATH=tests ./dev run python -m testbed.oracle.oracle_world {kind.name} {seed}")
        raise


def main(name: str, *seeds: str) -> None:
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
    alone, events = "ORACLE_ALONE" in os.environ, int(os.environ.get("ORACLE_EVENTS", "250"))
    with surroundings() as (base, manager):
        for seed in seeds:
            begun = time.perf_counter()
            counts = live(base, KINDS[name], int(seed), None if alone else manager, events)
            print(f"{name} {seed}: {time.perf_counter() - begun:.1f} s, {json.dumps(counts)}", flush=True)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main(*sys.argv[1:])
