"""Everything at once, at random: every finished request equals the engine without kvhold, and nothing leaks.

Shared prefixes, a block pool so small that requests are preempted, chunked prefill, slow, failing and aborted restores,
failing publishes, resets of the engine's cache and of the connector, and a real manager that is stopped, continued,
killed and restarted meanwhile; in some with so little DRAM that most of what is restored comes from its SSD, also after
a restart. More seeds: ``pytest tests/engine/test_fuzz.py --long``.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bed import LLM, Output, abort, add, free_blocks, prompt, reference, running, scheduler, settle, step
from kvhold_bed import attached, check_identity, check_nothing_held, connect, counting, status, until, warm_up
from manager_process import Manager

import kvhold.copy.host as host
from kvhold.copy.host import HostCopier

REQUESTS = 40
OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 96, "max_num_seqs": 6, "max_model_len": 512}


class Chaos:
    """Random faults in the copies: held back, failing, or neither."""

    def __init__(self, rng: random.Random, patch: pytest.MonkeyPatch) -> None:
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
        self.fail_restores = self._rng.choice([0.0, 0.0, 0.3])
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


@pytest.fixture
def keeper(request: pytest.FixtureRequest, short_folder: Path) -> Iterator[Manager]:
    """A manager with plenty of DRAM, or with next to none and an SSD."""
    options = ["--ssd", f"{short_folder}/ssd:64MiB", "--ssd-min-free", "0"] if request.param else []
    process = Manager(short_folder, *options, dram="2MiB" if options else "256MiB")
    yield process
    print(process.log_tail())
    process.kill()


@pytest.mark.parametrize(
    ("seed", "blocks", "faults", "keeper"),
    [
        (0, 26, False, False),
        (1, 22, True, False),
        (2, 40, True, False),
        (50, 26, False, True),
        (51, 30, True, True),
        *(
            pytest.param(seed, 20 + seed % 20, seed % 3 > 0, seed % 2 > 0, marks=pytest.mark.long)
            for seed in range(3, 43)
        ),
    ],
    indirect=["keeper"],
)
def test_fuzz(
    llama_dir: Path, keeper: Manager, monkeypatch: pytest.MonkeyPatch, seed: int, blocks: int, faults: bool
) -> None:
    manager = keeper
    rng = random.Random(seed)
    shared = [prompt(400, s) for s in range(12 if status(manager.socket)["logs"] else 4)]
    prompts, limits = [], []
    for _ in range(REQUESTS):
        tail = [rng.randrange(3, 500) for _ in range(rng.randrange(1, 60))]
        prompts.append(rng.choice(shared)[: rng.randrange(30, 400)] + tail)
        limits.append(rng.randrange(1, 30))
    expected = reference(llama_dir, prompts, limits, max_model_len=512)
    settings = connect(manager, answer_deadline_ms=rng.choice([20, 200]), save_decode_cache=rng.random() < 0.5)
    with running(llama_dir, connector=settings, num_gpu_blocks_override=blocks, **OPTIONS) as llm, counting() as counts:
        warm_up(llm)
        free = free_blocks(llm)
        done = _drive(llm, manager, monkeypatch, rng, prompts, limits, faults)
        assert len(done) > REQUESTS / 2
        wrong = {name: output for name, output in done.items() if output != expected[int(name)]}
        assert not wrong
        until(lambda: attached(llm), "attached at the end")
        check_nothing_held(llm, free, manager.socket)
        check_identity(counts)
        said = status(manager.socket)
        if said["logs"] and not faults:
            assert said["counters"].get("keys_read", 0) > 0, said["counters"]
    until(lambda: not status(manager.socket)["instances"], "the manager holds nothing for a closed engine")


def _drive(
    llm: LLM,
    manager: Manager,
    patch: pytest.MonkeyPatch,
    rng: random.Random,
    prompts: list[list[int]],
    limits: list[int],
    faults: bool,
) -> dict[str, Output]:
    chaos, health = Chaos(rng, patch), Health(rng, manager)
    done: dict[str, Output] = {}
    aborted: set[str] = set()
    sent = 0
    for _ in range(20_000):
        if sent == len(prompts) and not scheduler(llm).has_requests():
            break
        if sent < len(prompts) and rng.random() < 0.4:
            add(llm, str(sent), prompts[sent], limits[sent])
            sent += 1
        if sent and rng.random() < 0.03:
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
        done |= {output.request_id: output for output in step(llm) if output.request_id not in aborted}
        if rng.random() < 0.03:
            llm.reset_prefix_cache(reset_connector=rng.random() < 0.2)
    else:
        raise AssertionError(f"requests hang: {sorted(scheduler(llm).requests)}")
    chaos.end()
    health.end()
    settle(llm)
    assert set(done) | aborted >= {str(i) for i in range(len(prompts))}
    return done
