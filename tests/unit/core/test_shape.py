"""Functions of the core that were taken apart stay short: each can be read without scrolling."""

import ast
from pathlib import Path

import pytest

from kvhold import core

FILES = ("budgets.py", "eviction.py", "forgetting.py", "lru.py", "matching.py", "operations.py", "twoq.py")
LINES, BRANCHES = 30, 10
BRANCH = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.match_case)


def too_long(source: str) -> list[str]:
    """Names of functions with too many lines, docstrings included, or branches."""
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
        and (
            (node.end_lineno or 0) - node.lineno + 1 > LINES
            or sum(isinstance(part, BRANCH) for part in ast.walk(node)) > BRANCHES
        )
    ]


@pytest.mark.parametrize("file", FILES)
def test_no_function_is_long_or_branches_much(file: str) -> None:
    assert too_long((Path(core.__file__).parent / file).read_text()) == []


def test_what_is_too_long_is_noticed() -> None:
    assert too_long("def f():\n" + "    pass\n" * LINES) == ["f"]
    assert too_long("def f():\n" + "    if g(): pass\n" * (BRANCHES + 1)) == ["f"]
    assert too_long("def f():\n" + "    if g(): pass\n" * BRANCHES) == []
