"""The SSD tier under the real engine: warm after everything was killed, and never in the way when the disk fails."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from bed import generate, prompt
from engine_process import EngineProcess, packed
from kvhold_bed import connect, serving, status, until
from manager_process import Manager, all_written

PROMPTS = [prompt(400, seed) for seed in range(40, 44)]
BLOCK = 32
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
