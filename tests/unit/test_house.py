"""Who conducts others keeps little itself, and what the design says of the way of a block is so."""

import ast
import re
from pathlib import Path

import pytest

import kvhold

ROOT = Path(kvhold.__file__).parent
DESIGN = Path(__file__).resolve().parents[2] / "docs" / "design.md"
FOLDERS = ("client", "copy", "engines/common", "engines/vllm")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("engines/vllm/scheduler.py", "SchedulerHalf"),
        ("engines/vllm/worker.py", "WorkerHalf"),
        ("engines/vllm/restores.py", "Restores"),
        ("engines/vllm/publishing.py", "Publishing"),
        ("engines/vllm/resets.py", "Resets"),
        ("engines/common/copies.py", "Copies"),
    ],
)
def test_a_half_and_its_parts_have_few_attributes(path: str, name: str) -> None:
    [kind] = [
        node for node in ast.walk(ast.parse((ROOT / path).read_text())) if getattr(node, "name", None) == name
    ]  # a class
    kept = {
        node.attr
        for node in ast.walk(kind)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    assert 0 < len(kept) <= 15, sorted(kept)


@pytest.mark.parametrize(("way", "hops"), [("restore", 28), ("publish", 21)])
def test_the_way_of_a_block_is_the_one_that_the_design_tells(way: str, hops: int) -> None:
    """Each step is a function of a file, and the numbers in front of the rows count them."""
    told = DESIGN.read_text().partition(f"**The way of one {way}")[2]
    rows = told.partition("|---|---|---|---|\n")[2].partition("\n\n")[0]
    counted = 0
    for row in rows.splitlines():
        _, numbers, _, through, *_ = (cell.strip() for cell in row.split("|"))
        steps = re.findall(r"`(?:copy\.)?(\w+)\.(\w+)`", through)
        first, _, last = numbers.partition("-")
        assert (int(first), int(last or first)) == (counted + 1, counted + len(steps)), row
        counted += len(steps)
        for file, function in steps:
            texts = [path.read_text() for folder in FOLDERS if (path := ROOT / folder / f"{file}.py").is_file()]
            assert any(re.search(rf"def {function}\(", text) for text in texts), f"{file}.{function}"
    assert counted <= hops
