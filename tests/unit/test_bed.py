"""What tests share is the package ``testbed``, and every module of the tests is imported by its path from ``tests``."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
APART = "vllm_suite"
"""A plugin and a script for vLLM's own tests, which run where those lie."""

NAMESAKE = "sglang"
"""A folder named like a package that its tests import: as a package of its own it would be found in place of that."""


def modules(tests: Path) -> list[Path]:
    return [path for path in sorted(tests.rglob("*.py")) if path.relative_to(tests).parts[0] != APART]


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def wrong(tests: Path) -> list[str]:
    """What breaks a rule, and what to do about it."""
    found = []
    names: dict[str, list[str]] = {}
    for path in modules(tests):
        names.setdefault(path.stem, []).append(".".join(path.relative_to(tests).with_suffix("").parts))
    for path in modules(tests):
        where = path.relative_to(tests)
        test = path.name.startswith("test_")
        if not test and path.stem not in ("conftest", "__init__") and where.parts[0] != "testbed":
            found.append(f"{where} is no test: it belongs into testbed/{where.parts[0]}")
        package = (path.parent / "__init__.py").exists()
        if where.parts[0] == NAMESAKE:
            if package:
                found.append(f"{where.parent} has an __init__.py: nobody could import the real {NAMESAKE}")
        elif test and not package:
            found.append(f"{where.parent} has no __init__.py: another file could not be called {path.name}")
        for name in imported(path):
            if name.startswith("."):
                found.append(f"{where} imports {name}: write its path from tests")
            elif "." not in name and name in names and name not in names[name]:
                found.append(f"{where} imports {name}: write {' or '.join(names[name])}")
    return found


def test_every_module_of_the_tests_is_imported_by_its_path() -> None:
    assert wrong(TESTS) == []


def test_nothing_of_the_tests_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["src/kvhold"]}


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("engine/test_a.py", "from testbed.part.one import x\nimport os, unit.test_b\n", []),
        ("engine/test_a.py", "from one import x\n", ["engine/test_a.py imports one: write testbed.part.one"]),
        ("engine/test_a.py", "def f():\n    import test_b\n", ["engine/test_a.py imports test_b: write unit.test_b"]),
        (
            "engine/test_a.py",
            "from .test_c import x\n",
            ["engine/test_a.py imports .test_c: write its path from tests"],
        ),
        ("engine/two.py", "", ["engine/two.py is no test: it belongs into testbed/engine"]),
        ("bare/test_b.py", "", ["bare has no __init__.py: another file could not be called test_b.py"]),
        ("sglang/test_b.py", "import sglang\n", []),
    ],
)
def test_what_breaks_the_rule_is_told(tmp_path: Path, file: str, text: str, why: list[str]) -> None:
    for name in (
        "engine/__init__.py",
        "unit/__init__.py",
        "unit/test_b.py",
        "testbed/part/one.py",
        "testbed/__init__.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    assert wrong(tmp_path) == why
