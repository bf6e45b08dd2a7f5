"""Who conducts others keeps little itself."""

import ast
from pathlib import Path

import pytest

import kvhold

ROOT = Path(kvhold.__file__).parent


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
