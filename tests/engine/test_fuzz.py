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
from testbed.engine.bed import LLM, Output, Tokens, free_blocks, generate, reference, running, settle
from testbed.engine.families import FAMILIES, LONG_FAMILIES, Bench, Family
from testbed.engine.fuzz import check_at_random, drive, requests
from testbed.engine.kvhold_bed import (
    attached,
    check_identity,
    check_nothing_held,
    connect,
    counting,
    status,
    until,
    warm_up,
)
from testbed.process.manager_process import Manager, all_written

REQUESTS = 40
OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 96, "max_num_seqs": 6, "max_model_len": 512}


@pytest.fixture
def keeper(request: pytest.FixtureRequest, short_folder: Path) -> Iterator[Manager]:
    """A manager with plenty of DRAM, or, if the parameter says how little it has, an SSD."""
    options = ["--ssd", f"{short_folder}/ssd:64MiB", "--ssd-min-free", "0"] if request.param else []
    process = Manager(short_folder, *options, dram=request.param or "256MiB")
    yield process
    print(process.log_tail())
    process.kill()


@pytest.mark.parametrize(
    ("seed", "blocks", "faults", "keeper"),
    [
        (0, 26, False, None),
        (1, 22, True, None),
        (2, 40, True, None),
        (50, 26, False, "2MiB"),
        (51, 30, True, "2MiB"),
        *(
            pytest.param(seed, 20 + seed % 20, seed % 3 > 0, "2MiB" if seed % 2 else None, marks=pytest.mark.long)
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
    prompts, limits = requests(rng, REQUESTS, 12 if status(manager.socket)["logs"] else 4, 400, 60, 30)
    expected = reference(llama_dir, prompts, limits, max_model_len=512)
    settings = connect(manager, answer_deadline_ms=rng.choice([20, 200]), save_decode_cache=rng.random() < 0.5)
    with running(llama_dir, connector=settings, num_gpu_blocks_override=blocks, **OPTIONS) as llm, counting() as counts:
        warm_up(llm)
        free = free_blocks(llm)
        done = drive(llm, manager, monkeypatch, rng, prompts, limits, faults)
        assert len(done) > REQUESTS / 2
        wrong = {i: output for i, output in done.items() if output != expected[i]}
        assert not wrong
        until(lambda: attached(llm), "attached at the end")
        if status(manager.socket)["logs"]:
            check_served_from_ssd(llm, manager, prompts, limits, expected)
        check_nothing_held(llm, free, manager.socket)
        check_identity(counts)
    until(lambda: not status(manager.socket)["instances"], "the manager holds nothing for a closed engine")


def check_served_from_ssd(
    llm: LLM, manager: Manager, prompts: list[Tokens], limits: list[int], expected: list[Output]
) -> None:
    """A prompt whose blocks are no longer in DRAM comes back equal; a busy disk may have kept none of them before."""
    for i in [*range(len(prompts))] * 2:
        if status(manager.socket)["counters"].get("keys_read"):
            return
        llm.reset_prefix_cache()
        assert generate(llm, [prompts[i]], limits[i]) == [expected[i]]
        settle(llm)
        until(lambda: all_written(status(manager.socket)), "what was stored is written")
    raise AssertionError(status(manager.socket)["counters"])


@pytest.mark.parametrize(
    ("family", "seed", "faults", "keeper"),
    [
        *(pytest.param(family, 0, at % 2 == 0, "8MiB" if at % 2 else None) for at, family in enumerate(FAMILIES)),
        *(
            pytest.param(family, seed, seed % 3 > 0, None if seed % 2 else "8MiB", marks=pytest.mark.long)
            for family in [*FAMILIES, *LONG_FAMILIES]
            for seed in range(1, 9)
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Family) else None,
    indirect=["keeper"],
)
def test_fuzz_of_every_kind_of_group(
    family: Family, keeper: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, faults: bool
) -> None:
    rng = random.Random(seed)
    prompts, limits = requests(rng, REQUESTS // 2, 4, 180, 50, 26)
    settings = {"answer_deadline_ms": rng.choice([20, 200]), "save_decode_cache": rng.random() < 0.5}
    blocks = family.pool + rng.randrange(8)
    bench = Bench(family, tmp_path, keeper)
    check_at_random(bench, monkeypatch, rng, prompts, limits, faults, settings=settings, num_gpu_blocks_override=blocks)
