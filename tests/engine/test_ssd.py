"""The SSD tier under the real engine: warm after everything was killed, and never in the way when the disk fails."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from testbed.engine.bed import generate, prompt, reference, settle
from testbed.engine.engine_process import EngineProcess, packed
from testbed.engine.families import FAMILIES, weights
from testbed.engine.kvhold_bed import connect, counting, serving, status, until, warm_up
from testbed.process.manager_process import Manager, all_written

PROMPTS = [prompt(400, seed) for seed in range(40, 44)]
BLOCK = 32
FAMILY = {family.name: family for family in FAMILIES}
FAULTY = Path(__file__).parents[1] / "testbed" / "process" / "ssd_faulty.py"
WHOLE = [(len(tokens) - 1) // BLOCK * BLOCK for tokens in PROMPTS]


def written(manager: Manager) -> bool:
    """Whether all that was stored is in the log."""
    said = status(manager.socket)
    return all_written(said) and said["counters"].get("write_objects", 0) >= said["objects"] > 0


def recovered(manager: Manager) -> bool:
    return all(log["ready"] for log in status(manager.socket)["logs"])


@pytest.fixture
def ssd(tmp_path: Path) -> Path:
    return tmp_path / "ssd"


@pytest.fixture
def manager(short_folder: Path, ssd: Path) -> Iterator[Manager]:
    running = Manager(short_folder, "--ssd", f"{ssd}:256MiB", "--ssd-min-free", "64MiB", dram="64MiB")
    yield running
    print(running.log_tail())
    running.kill()


def test_the_first_request_after_everything_was_killed_comes_from_ssd(llama_dir: Path, manager: Manager) -> None:
    first = EngineProcess(llama_dir, connector=connect(manager))
    first.ready()
    computed = first.generate(PROMPTS)
    assert [output["cached"] for output in computed] == [0] * len(PROMPTS)
    until(lambda: written(manager), "all is in the log")
    first.kill()
    manager.kill()
    manager.start()
    until(lambda: recovered(manager), "the index is rebuilt")
    with serving(llama_dir, manager) as llm:
        restored = [packed(output) for output in generate(llm, PROMPTS)]
    assert [output.pop("cached") for output in restored] == WHOLE
    for output in computed:
        output.pop("cached")
    assert restored == computed
    counters = status(manager.socket)["counters"]
    assert counters["keys_read"] * BLOCK == sum(WHOLE)
    assert "read_failed" not in counters


def cached_by_source() -> dict[str, float]:
    """Tokens that this process's engine has counted as cached, by where they were."""
    return {
        sample.labels["source"]: sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "vllm:prompt_tokens_cached_by_source_total" and sample.value
    }


def test_hits_are_labelled_by_where_they_were(llama_dir: Path, manager: Manager) -> None:
    """A prompt of which the first blocks are in DRAM and the others on SSD is a hit in both."""
    with serving(llama_dir, manager, disable_log_stats=False) as llm:
        generate(llm, PROMPTS)
        until(lambda: written(manager), "all is in the log")
        manager.restart()
        until(lambda: recovered(manager), "the index is rebuilt")
        warm_up(llm)
        before = cached_by_source()
        for tokens in (PROMPTS[0][:200], PROMPTS[0], PROMPTS[0]):
            assert llm.reset_prefix_cache()
            generate(llm, [tokens])
        settle(llm)
        added = {source: count - before.get(source, 0) for source, count in cached_by_source().items()}
        assert added == {"disk": 192 + (384 - 192), "host": 192 + 384}


@pytest.mark.parametrize("name", ["gemma3", "falcon_h1"])
def test_a_hit_over_several_groups_is_what_has_arrived_when_time_is_up(
    short_folder: Path, tmp_path: Path, name: str
) -> None:
    """The beginning is in DRAM, the disk does not give the rest: it used to be all or nothing."""
    family, faults = FAMILY[name], tmp_path / "faults"
    faults.mkdir()
    short, long = prompt(200, 1), prompt(333, 1)
    manager = Manager(short_folder, "--ssd", f"{tmp_path}/ssd:256MiB", dram="64MiB", program=(str(FAULTY), str(faults)))
    try:
        with weights():
            folder = family.write(tmp_path)
            expected = reference(folder, [short, long], **family.options)
            settings = {"read_deadline_ms": 300}
            with serving(folder, manager, settings=settings, **family.options) as llm, counting() as counts:
                for tokens in (short, long):
                    generate(llm, [tokens])
                    settle(llm)
                until(lambda: written(manager), "all is in the log")
                manager.restart()
                until(lambda: recovered(manager), "the index is rebuilt")
                warm_up(llm)
                assert llm.reset_prefix_cache()
                [beginning] = generate(llm, [short])
                assert beginning == expected[0]
                assert beginning.cached > 0
                (faults / "block-read").touch()
                for reason in ("deadline", "out_of_service"):
                    while not counts[f"tokens_missed_{reason}"]:
                        settle(llm)
                        assert llm.reset_prefix_cache()
                        [output] = generate(llm, [long])
                        assert output == expected[1]
                        assert output.cached == beginning.cached
                (faults / "block-read").unlink()
                assert counts["load_failures"] == 0
    finally:
        print(manager.log_tail())
        manager.kill()


def test_a_damaged_disk_is_a_miss(llama_dir: Path, manager: Manager, ssd: Path) -> None:
    with serving(llama_dir, manager) as llm:
        computed = generate(llm, PROMPTS)
        until(lambda: written(manager), "all is in the log")
    manager.kill()
    for segment in ssd.glob("*.segment"):
        data = bytearray(segment.read_bytes())
        for at in range(8192 + 100, len(data), 16384):
            data[at] ^= 1
        segment.write_bytes(data)
    manager.start()
    until(lambda: recovered(manager), "the index is rebuilt")
    with serving(llama_dir, manager) as llm:
        outputs = generate(llm, PROMPTS)
        assert [(o.tokens, o.logprobs) for o in outputs] == [(o.tokens, o.logprobs) for o in computed]
        assert sum(output.cached for output in outputs) < sum(WHOLE)
        assert status(manager.socket)["counters"]["read_failed"] > 0
        llm.reset_prefix_cache()
        assert [output.cached for output in generate(llm, PROMPTS)] == WHOLE, "what was damaged is stored anew"


@pytest.mark.parametrize("how", ["removed", "unmounted", "full"])
def test_a_disk_that_goes_away_disturbs_nobody(how: str, llama_dir: Path, short_folder: Path, small_disk: Path) -> None:
    manager = Manager(short_folder, "--ssd", f"{small_disk}/log:40MiB", "--ssd-min-free", "0", dram="64MiB")
    try:
        with serving(llama_dir, manager) as llm:
            computed = generate(llm, PROMPTS[:2])
            if how == "removed":
                subprocess.run(["rm", "-rf", f"{small_disk}/log"], check=True)
            elif how == "unmounted":
                subprocess.run(["umount", "-l", str(small_disk)], check=True)
            else:
                (small_disk / "ballast").write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096 - 8192))
            more = generate(llm, PROMPTS)
            assert [(o.tokens, o.logprobs) for o in more[:2]] == [(o.tokens, o.logprobs) for o in computed]
            assert llm.reset_prefix_cache()
            again = generate(llm, PROMPTS)
            assert [(o.tokens, o.logprobs) for o in again] == [(o.tokens, o.logprobs) for o in more]
            assert [output.cached for output in again] == WHOLE, "DRAM does not mind"
        assert manager.alive
        assert manager.terminate() == 0
    finally:
        if manager.alive:
            manager.kill()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 48 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "kvhold-test", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a filesystem")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], capture_output=True)  # unless the test has
