"""The driver of the fuzz: requests, aborts, resets, and faults in the copies and of the manager, at random."""

import random
import time
from typing import Any

import pytest
from testbed.engine.bed import LLM, PATIENCE, Output, Tokens, abort, add, prompt, scheduler, settle, step
from testbed.engine.families import Bench, differing, weights
from testbed.engine.kvhold_bed import attached, check_identity, counting, status, until
from testbed.process.manager_process import Manager

import kvhold.copy.host as host
from kvhold.copy.host import HostCopier


class Chaos:
    """Random faults in the copies of this process: held back, failing, or neither."""

    def __init__(self, rng: random.Random, patch: pytest.MonkeyPatch | None = None) -> None:
        patch = patch or pytest.MonkeyPatch()
        self._rng = rng
        self._open = True
        self.fail_restores = self.fail_publishes = 0.0
        advance, restore, publish = HostCopier.advance, HostCopier.restore, HostCopier.begin_publish

        def held_advance(copier: HostCopier) -> None:
            if self._open:
                advance(copier)

        def chaotic_restore(copier: HostCopier, *args: Any) -> None:
            if rng.random() < self.fail_restores:
                raise OSError("injected")
            restore(copier, *args)

        def chaotic_publish(copier: HostCopier, *args: Any) -> Any:
            if rng.random() < self.fail_publishes:
                job = host.Job(0)
                job.end("injected")
                return job
            return publish(copier, *args)

        patch.setattr(host, "STEP_BYTES", rng.choice([1, 4, 1000]) << 15)  # one block of this model has 32 KiB
        patch.setattr(HostCopier, "advance", held_advance)
        patch.setattr(HostCopier, "restore", chaotic_restore)
        patch.setattr(HostCopier, "begin_publish", chaotic_publish)

    def turn(self) -> None:
        self._open = self._rng.random() < 0.7
        self.fail_restores = self._rng.choice([0.0, 0.0, 0.05])  # of each object
        self.fail_publishes = self._rng.choice([0.0, 0.0, 0.2])

    def end(self) -> None:
        self._open = True
        self.fail_restores = self.fail_publishes = 0.0


class Health:
    """What is done to the manager: it is running, stopped, or dead."""

    def __init__(self, rng: random.Random, manager: Manager) -> None:
        self._rng = rng
        self._manager = manager
        self._stopped = False

    def turn(self) -> None:
        if not self._manager.alive:
            self._manager.start()
        elif self._stopped:
            self._manager.cont()
            self._stopped = False
        elif self._rng.random() < 0.5:
            self._manager.stop()
            self._stopped = True
        else:
            self._manager.kill()

    def end(self) -> None:
        if self._stopped:
            self._manager.cont()
        if not self._manager.alive:
            self._manager.start()


def requests(
    rng: random.Random, count: int, texts: int, longest: int, longest_tail: int, most: int
) -> tuple[list[Tokens], list[int]]:
    """Prompts that begin like one of a few texts and go on in their own way; how many tokens to generate for each."""
    shared = [prompt(longest, seed) for seed in range(texts)]
    prompts, limits = [], []
    for _ in range(count):
        tail = [rng.randrange(3, 500) for _ in range(rng.randrange(1, longest_tail))]
        prompts.append(rng.choice(shared)[: rng.randrange(30, longest)] + tail)
        limits.append(rng.randrange(1, most))
    return prompts, limits


def drive(
    llm: LLM,
    manager: Manager,
    patch: pytest.MonkeyPatch,
    rng: random.Random,
    prompts: list[Tokens],
    limits: list[int],
    faults: bool,
) -> dict[int, Output]:
    """What finished, by its place in ``prompts``."""
    chaos, health = Chaos(rng, patch), Health(rng, manager)
    done: dict[str, Output] = {}
    aborted: set[str] = set()
    sent = 0
    end = time.monotonic() + PATIENCE
    while sent < len(prompts) or scheduler(llm).has_requests():
        assert time.monotonic() < end, f"requests hang: {sorted(scheduler(llm).requests)}"
        if sent < len(prompts) and rng.random() < 0.4:
            add(llm, str(sent), prompts[sent], limits[sent])
            sent += 1
        if sent and len(aborted) < len(prompts) / 4 and rng.random() < 0.03:
            name = str(rng.randrange(sent))
            if name not in done:
                abort(llm, name)
                aborted.add(name)
        if rng.random() < 0.05:
            chaos.turn()
        if faults and sent < len(prompts) and rng.random() < 0.02:
            health.turn()
        if sent == len(prompts):
            chaos.end()
        if finished := step(llm):
            end = time.monotonic() + PATIENCE
        done |= {output.request_id: output for output in finished if output.request_id not in aborted}
        if rng.random() < 0.03:
            llm.reset_prefix_cache(reset_connector=rng.random() < 0.2)
    chaos.end()
    health.end()
    settle(llm)
    assert set(done) | aborted >= {str(i) for i in range(len(prompts))}
    return {int(name): output for name, output in done.items()}


def check_at_random(
    bench: Bench,
    patch: pytest.MonkeyPatch,
    rng: random.Random,
    prompts: list[Tokens],
    limits: list[int],
    faults: bool,
    **options: Any,
) -> None:
    """Whatever finishes is what the engine says without kvhold, and nothing leaks."""
    with weights(), counting() as counts:
        expected, noise = bench.truth(prompts, limits), bench.noise
        try:
            llm = bench.engine(2, max_num_batched_tokens=96, max_num_seqs=6, max_model_len=256, **options)
            done = drive(llm, bench.manager, patch, rng, prompts, limits, faults)
            assert len(done) > len(prompts) / 2
            assert not differing(list(done.values()), [expected[i] for i in done], noise)
            until(lambda: attached(llm), "attached at the end")
            bench.check_nothing_held()
            check_identity(counts)
        finally:
            bench.close()
    until(lambda: not status(bench.manager.socket)["instances"], "the manager holds nothing for a closed engine")
