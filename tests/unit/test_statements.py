"""The tables of statements name tests that exist, and all of the statements."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLES = {"statements": 40, "connector-statements": 124}
"""How many statements each page has."""
TEST = re.compile(r"`(tests/[\w/.-]+\.py)::([\w:]+)`")
ROW = re.compile(r"\| (\d+) \| (.*?) \| (.*?) ?\| (.*?) ?\|")


def rows(text: str) -> list[tuple[int, str, str, str]]:
    found = [ROW.fullmatch(line) for line in text.splitlines() if re.match(r"\| \d", line)]
    return [(int(row[1]), row[2], row[3], row[4]) for row in found if row is not None]


def names_in(file: Path) -> set[str]:
    """The names of a file's tests, as pytest writes them."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return {name for name in names if name.rpartition("::")[2].startswith("test_")}


def missing(text: str) -> list[str]:
    """What the text names that does not exist."""
    known: dict[str, set[str]] = {}
    wrong = []
    for file, name in TEST.findall(text):
        if file not in known:
            known[file] = names_in(ROOT / file) if (ROOT / file).is_file() else set()
        if name not in known[file]:
            wrong.append(f"{file}::{name}")
    return wrong


def read(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text()


@pytest.mark.parametrize("page", TABLES)
def test_every_statement_has_a_row(page: str) -> None:
    text = read(page)
    assert [number for number, *_ in rows(text)] == list(range(1, TABLES[page] + 1))
    assert text.count("::test_") == len(TEST.findall(text)), "a test is named that is not looked for"


@pytest.mark.parametrize("page", TABLES)
def test_every_row_names_a_test_or_says_why_there_is_none(page: str) -> None:
    for number, statement, answer, tests in rows(read(page)):
        assert statement, number
        excused = answer.startswith(("Does not apply:", "Not built yet")) or (answer and tests == "NOT TESTED")
        assert TEST.search(tests) or excused, number


@pytest.mark.parametrize("page", TABLES)
def test_the_named_tests_exist(page: str) -> None:
    assert missing(read(page)) == []


def test_a_name_that_does_not_exist_is_noticed() -> None:
    here = "tests/unit/test_statements.py"
    assert missing(f"`{here}::test_the_named_tests_exist`") == []
    assert missing(f"`{here}::test_of_nothing`, `tests/none.py::test_a`") == [
        f"{here}::test_of_nothing",
        "tests/none.py::test_a",
    ]
