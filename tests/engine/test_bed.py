"""The bed tests itself: it must be deterministic, and it must notice a single wrong byte."""

import os
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from testbed.engine import bed
from testbed.engine.models import write_llama
from testbed.process.manager_process import Manager

PROMPTS = [bed.prompt(n, seed) for seed, n in enumerate((33, 100, 320, 500))]


@pytest.fixture(scope="module")
def truth(llama_dir: Path) -> list[bed.Output]:
    return bed.reference(llama_dir, PROMPTS)


def test_two_starts_agree(llama_dir: Path, truth: list[bed.Output]) -> None:
    with bed.running(llama_dir, connector=None, enable_prefix_caching=False) as llm:
        assert [bed.generate(llm, [p])[0] for p in PROMPTS] == truth


def test_batching_and_local_hits_change_nothing(llama_dir: Path, truth: list[bed.Output]) -> None:
    with bed.running(llama_dir, connector=None) as llm:
        cold, warm = bed.generate(llm, PROMPTS), bed.generate(llm, PROMPTS)
    assert [output.cached for output in cold] == [0] * len(PROMPTS)
    assert [output.cached for output in warm] == [(len(p) - 1) // 32 * 32 for p in PROMPTS]
    assert cold == truth
    assert warm == truth


def test_chunked_prefill_changes_nothing(llama_dir: Path, truth: list[bed.Output]) -> None:
    with bed.running(llama_dir, connector=None, max_num_batched_tokens=96) as llm:
        assert bed.generate(llm, PROMPTS) == truth


def test_preemption_changes_nothing(llama_dir: Path) -> None:
    prompts = [bed.prompt(180, seed) for seed in range(3)]
    expected = bed.reference(llama_dir, prompts, 120)
    with bed.running(llama_dir, connector=None, num_gpu_blocks_override=24, max_model_len=512) as llm:
        assert bed.generate(llm, prompts, 120) == expected


def test_weights_come_from_the_seed(llama_dir: Path, tmp_path: Path, truth: list[bed.Output]) -> None:
    same, other = write_llama(tmp_path / "same"), write_llama(tmp_path / "other", seed=1)
    assert (same / "model.safetensors").read_bytes() == (llama_dir / "model.safetensors").read_bytes()
    assert all(a.tokens != b.tokens for a, b in zip(bed.reference(other, PROMPTS), truth, strict=True))


def test_steps(llama_dir: Path, truth: list[bed.Output]) -> None:
    with bed.running(llama_dir, connector=None) as llm:
        free = bed.free_blocks(llm)
        internal = bed.add(llm, "kept", PROMPTS[2])
        bed.add(llm, "dropped", PROMPTS[3])
        assert bed.step(llm) == []
        assert len(bed.block_ids(llm, internal)[0]) == 10
        bed.abort(llm, "dropped")
        assert bed.drain(llm) == {"kept": truth[2]}
        assert bed.settle(llm) == {}
        assert bed.free_blocks(llm) == free
        bed.add(llm, "late", PROMPTS[0], 100)
        with pytest.raises(TimeoutError, match="late"):
            bed.drain(llm, seconds=0)


def test_a_salt_separates(llama_dir: Path, truth: list[bed.Output]) -> None:
    with bed.running(llama_dir, connector=None) as llm:
        bed.generate(llm, PROMPTS)
        salted = bed.generate(llm, PROMPTS, salt="another tenant")
    assert [output.cached for output in salted] == [0] * len(PROMPTS)
    assert salted == truth


def test_one_engine_at_a_time(llama_dir: Path) -> None:
    with bed.running(llama_dir, connector=None), pytest.raises(RuntimeError, match="another engine"):
        bed.engine(llama_dir, connector=None)


def test_one_wrong_byte_shows(llama_dir: Path, truth: list[bed.Output]) -> None:
    """The negative control: with one sign flipped in one block of one layer, a hit no longer equals the reference."""
    with bed.running(llama_dir, connector=None) as llm:
        internal = bed.add(llm, "cold", PROMPTS[2])
        bed.step(llm)
        [blocks] = bed.block_ids(llm, internal)
        assert bed.drain(llm) == {"cold": truth[2]}
        for cache, block, lane in product(bed.runner(llm).kv_caches, (blocks[0], blocks[5], blocks[8]), (9, 41)):
            row = cache[block, 1, 17].view(torch.uint8)  # one token of one head: 32 floats of key, 32 of value
            row[4 * lane + 3] ^= 0x80
            [damaged] = bed.generate(llm, [PROMPTS[2]])
            row[4 * lane + 3] ^= 0x80
            assert damaged.cached == 288
            assert damaged.logprobs != truth[2].logprobs, (block, lane)
        assert bed.generate(llm, [PROMPTS[2]]) == [truth[2]]


STUB = """
import signal, socket, sys, os
path = sys.argv[sys.argv.index("--socket") + 1]
assert sys.argv[1:4] == ["serve", "--dram", "256MiB"], sys.argv
if "--broken" in sys.argv: sys.exit("broken on purpose")
if os.path.exists(path): os.unlink(path)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
server = socket.socket(socket.AF_UNIX)
server.bind(path)
server.listen()
while True: server.accept()[0].close()
"""


def test_manager_process(tmp_path: Path) -> None:
    stub = tmp_path / "stub.py"
    stub.write_text(STUB)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        Manager(tmp_path, "--broken", program=[str(stub)])
    manager = Manager(tmp_path, program=[str(stub)])
    try:
        first = manager.pid
        manager.stop()
        assert _state(first) == "T"
        manager.cont()
        assert _soon(lambda: _state(first) in "RS")
        manager.stop()
        manager.restart()
        assert manager.pid != first
        assert manager.alive
        assert manager.terminate() == 7
        assert not manager.alive
        with pytest.raises(ProcessLookupError):
            os.kill(manager.pid, 0)
    finally:
        manager.kill()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _soon(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
