"""``kvhold demo`` as a user runs it: as a command, with the real model and real engine processes."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvhold.cli import demo_worker
from kvhold.cli.demo_engine import BLOCK, CONTEXT

SECONDS = 300.0
RUNS = ("computed", "engine's own cache", "kvhold, after reset", "kvhold, new engine", "SSD, all restarted")
PARAGRAPH = """\
On Monday the baker of Ostby bought a red bicycle from his neighbour. He painted the basket white, because bread should
travel in something clean. On Tuesday he rode it to the mill and back with two sacks of rye, and on Wednesday the front
tyre was flat. The smith mended it in return for a loaf, and everyone in the street was given a slice before noon.
"""


class Demo:
    """A demo that runs, with ``folder`` as its place for temporary files."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvhold.cli", "demo", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": str(folder)},
        )

    def finish(self) -> tuple[int, str, str]:
        """(status, standard output, standard error), after a check that nothing was left behind."""
        out, err = self.process.communicate(timeout=SECONDS)
        left = [path for path in self.folder.rglob("*") if "kvhold" in path.name]
        assert (left, self._processes()) == ([], []), err
        return self.process.returncode, out, err

    def _processes(self) -> list[str]:
        mark = f"TMPDIR={self.folder}".encode()
        return [str(path.parent) for path in Path("/proc").glob("[0-9]*/environ") if mark in _read(path).split(b"\0")]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # gone, or another user's
        return b""


@pytest.fixture(scope="module")
def folder() -> Iterator[Callable[[], Path]]:
    """Makes folders with short names: a Unix socket's path ends at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        yield lambda: Path(tempfile.mkdtemp(prefix="", dir=name))


@pytest.fixture(scope="module")
def outcomes(folder: Callable[[], Path]) -> dict[str, tuple[int, str, str]]:
    """Three demos at once: most of the time each of them imports vLLM on one core."""
    short = folder() / "short.txt"
    short.write_text(PARAGRAPH)
    # The host's manager could listen in the demo's folder there, the engine's own has too long a name.
    parent, name = folder(), "/kvhold-demo-12345678/kvhold/kvhold.sock"
    too_deep = parent / ("x" * (107 - len(f"{parent}/{name}")))
    too_deep.mkdir()
    demos = {
        "default": Demo(folder()),
        "short": Demo(folder(), "--prompt-file", str(short), "--question", "What colour was the bicycle?"),
        "no manager": Demo(too_deep, "--prompt-file", str(short)),
    }
    return {name: demo.finish() for name, demo in demos.items()}


def rows(output: str) -> list[list[int]]:
    """Prompt tokens of each run: all, computed, from the engine's cache, from kvhold."""
    found = [re.search(rf"^{run} +(\d+) +(\d+) +(\d+) +(\d+) +\d+ ms", output, re.MULTILINE) for run in RUNS]
    return [[int(count) for count in match.groups()] for match in found if match]


@pytest.mark.parametrize("name", ["default", "short"])
def test_restores_and_changes_nothing(outcomes: dict[str, tuple[int, str, str]], name: str) -> None:
    status, out, err = outcomes[name]
    assert status == 0, err
    tokens = rows(out)[0][0]
    cached = (tokens - 1) // 32 * 32
    rest = tokens - cached
    assert rows(out) == [
        [tokens, tokens, 0, 0],
        [tokens, rest, cached, 0],
        [tokens, rest, 0, cached],
        [tokens, rest, 0, cached],
        [tokens, rest, 0, cached],
    ]
    assert "Identical in all five runs" in out
    assert len(re.findall(r"ms +[\d.]+MiB +[\d.]+$", out, re.MULTILINE)) == 3
    assert "5 of 5" in err


def test_the_prompts(outcomes: dict[str, tuple[int, str, str]]) -> None:
    assert 1000 < rows(outcomes["default"][1])[0][0] < 1500
    assert "is Justice." in outcomes["default"][1]
    assert 97 <= rows(outcomes["short"][1])[0][0] <= 105


def test_says_why_nothing_was_restored(outcomes: dict[str, tuple[int, str, str]]) -> None:
    """Here no manager could start, because the socket's path is too long."""
    status, out, err = outcomes["no manager"]
    assert status == 1
    assert out == ""
    assert "no hit in run 3, kvhold, after reset: 0 of 96 tokens came from kvhold" in err
    assert "asked for 96 tokens: 0 found, 96 missed (detached)" in err
    assert "manager  none answers" in err
    assert "is longer than 107 bytes" in err


@pytest.mark.parametrize(("hardware", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_computes_in_numbers_that_the_processor_has(
    monkeypatch: pytest.MonkeyPatch, hardware: bool, dtype: torch.dtype
) -> None:
    """With room for the longest prompt in either: of 30 layers with keys and values of 3 heads of 64 lanes."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: hardware)
    numbers = demo_worker._numbers()
    assert f"torch.{numbers['dtype']}" == str(dtype)
    assert numbers["kv_cache_memory_bytes"] >= (CONTEXT + BLOCK) * 30 * 2 * 3 * 64 * dtype.itemsize


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("Hi.", "is too short: .* make 24 tokens.* takes 33"), ("word " * 9000, "is too long: .* the model takes 8160")],
)
def test_refuses_prompts_of_the_wrong_size(folder: Callable[[], Path], text: str, complaint: str) -> None:
    path = folder() / "prompt.txt"
    path.write_text(text)
    status, out, err = Demo(folder(), "--prompt-file", str(path)).finish()
    assert (status, out) == (1, "")
    assert re.search(complaint, err)


def test_an_interrupted_demo_leaves_nothing(folder: Callable[[], Path]) -> None:
    demo = Demo(folder())
    end = time.monotonic() + SECONDS
    while not list(demo.folder.glob("kvhold-demo-*/kvhold/e-*.sock")):
        assert demo.process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    demo.process.send_signal(signal.SIGINT)
    status, out, err = demo.finish()
    assert (status, out) == (130, "")
    assert "interrupted" in err
