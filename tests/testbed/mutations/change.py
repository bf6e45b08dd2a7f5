"""Find a function by its name, wherever it is written, and change one passage of it.

A function is named by as much of its qualified name as tells it apart: ``commit`` or ``Credits.commit``. The passage is
an expression or statements, compared as Python reads them, so that neither their place nor how they are laid out
matters. In a passage ``_`` stands for any expression.
"""

import ast
import copy
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ANYTHING: Final = "_"


class NotThere(Exception):
    """There is no such function or passage, or more than one."""


@dataclass(frozen=True)
class Function:
    file: Path
    name: str
    """Its qualified name in the file."""
    node: ast.FunctionDef

    def __str__(self) -> str:
        return f"{self.name} ({self.file.name})"


@dataclass(frozen=True)
class _Passage:
    """``count`` members of ``within``, or, of an expression, the one field or member that it is."""

    within: Any
    at: str | int
    count: int | None = None

    def put(self, new: list[ast.stmt]) -> None:
        if self.count is not None:
            self.within[self.at : self.at + self.count] = new or [ast.Pass()]
            return
        [statement] = new
        assert isinstance(statement, ast.Expr)
        if isinstance(self.at, int):
            self.within[self.at] = statement.value
        else:
            setattr(self.within, self.at, statement.value)


@dataclass(frozen=True)
class Changed:
    """``function`` is its new text, ``text`` that of the whole ``file``."""

    file: Path
    function: str
    text: str


class Sources:
    """All Python files under a folder, each read once."""

    def __init__(self, folder: Path) -> None:
        self._texts = {file: file.read_text() for file in sorted(folder.rglob("*.py"))}
        self._functions = [
            Function(file, name, node)
            for file, text in self._texts.items()
            for name, node in _named(ast.parse(text).body, "")
        ]

    def changed(self, function: str, old: str, new: str) -> Changed:
        """What becomes of the function when the passage ``new`` stands in the place of ``old``."""
        where = self.find(function, old)
        node = copy.deepcopy(where.node)
        [passage] = _passages(node, old)
        passage.put(ast.parse(new).body)
        written = ast.unparse(node)
        lines = self._texts[where.file].splitlines()
        first = min(one.lineno for one in (node, *node.decorator_list)) - 1
        lines[first : node.end_lineno] = textwrap.indent(written, " " * node.col_offset).splitlines()
        return Changed(where.file, written, "\n".join(lines) + "\n")

    def find(self, function: str, old: str) -> Function:
        """The only function of that name that has the passage, once."""
        named = [one for one in self._functions if f".{one.name}".endswith(f".{function}")]
        if not named:
            raise NotThere(f"there is no function {function}{self._elsewhere(old)}")
        having = [one for one in named for _ in _passages(one.node, old)]
        if not having:
            raise NotThere(f"{_list(named)} has no `{old}`{self._elsewhere(old)}")
        if len(having) > 1:
            raise NotThere(f"`{old}` is {len(having)} times in {_list(list(dict.fromkeys(having)))}")
        return having[0]

    def _elsewhere(self, old: str) -> str:
        """Where a passage has gone, for who has moved it."""
        found = [one for one in self._functions if _passages(one.node, old)]
        inner = [one for one in found if not any(two.name.startswith(f"{one.name}.") for two in found)]
        return f"; it is in {_list(inner)}" if inner else ""


def _list(functions: list[Function]) -> str:
    return ", ".join(map(str, functions))


def _named(statements: list[ast.stmt], before: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for statement in statements:
        if isinstance(statement, ast.FunctionDef):
            yield f"{before}{statement.name}", statement
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            yield from _named(statement.body, f"{before}{statement.name}.")


def _passages(function: ast.FunctionDef, old: str) -> list[_Passage]:
    wanted = ast.parse(old).body
    if len(wanted) == 1 and isinstance(wanted[0], ast.Expr):
        # A call that stands alone is a statement, which may be left out; any other expression has a value.
        expression = wanted[0].value
        return [
            _Passage(statements, at, 1) if statements is not None else _Passage(within, at)
            for within, at, statements, node in _expressions(function)
            if _same(node, expression)
        ]
    return [
        _Passage(statements, at, len(wanted))
        for statements in _blocks(function)
        for at in range(len(statements) - len(wanted) + 1)
        if all(_same(one, other) for one, other in zip(statements[at:], wanted, strict=False))
    ]


def _blocks(function: ast.FunctionDef) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(function):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield value


def _expressions(function: ast.FunctionDef) -> Iterator[tuple[Any, str | int, list[ast.stmt] | None, ast.expr]]:
    """Each expression with what it is in and where; for one that is a statement, the statements around it."""
    for statements in _blocks(function):
        for at, statement in enumerate(statements):
            if isinstance(statement, ast.Expr):
                yield None, at, statements, statement.value
    for node in ast.walk(function):
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.expr) and not isinstance(node, ast.Expr):
                yield node, name, None, value
            elif isinstance(value, list):
                for at, one in enumerate(value):
                    if isinstance(one, ast.expr):
                        yield value, at, None, one


def _same(node: Any, wanted: Any) -> bool:
    if isinstance(wanted, ast.Name) and wanted.id == ANYTHING:
        return isinstance(node, ast.expr)
    if isinstance(wanted, ast.AST):
        return type(node) is type(wanted) and all(
            _same(getattr(node, field, None), getattr(wanted, field, None)) for field in wanted._fields
        )
    if isinstance(wanted, list):
        return (
            isinstance(node, list)
            and len(node) == len(wanted)
            and all(_same(one, other) for one, other in zip(node, wanted, strict=True))
        )
    return type(node) is type(wanted) and node == wanted
