"""Imports point one way, and nobody needs an engine to run a manager."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvhold

ROOT = Path(kvhold.__file__).parent
MAY_IMPORT = {
    "core": {"core"},
    "protocol": {"protocol"},
    "client": {"client", "protocol", "units", "host", "folders", "threads"},
    "manager": {"manager", "core", "tiers", "protocol", "units", "host", "folders"},
    "tiers": {"tiers", "core", "units"},
    "copy": {"copy", "client.arena"},
    "engines.common": {"engines.common", "client", "protocol", "copy", "units", "host", "folders", "threads"},
    "engines.vllm": {"engines.vllm", "engines.common", "client", "protocol", "copy", "threads"},
    "engines.sglang": {"engines.sglang", "engines.common", "client", "protocol", "copy", "threads"},
    "units": set(),
    "host": {"units", "cgroups"},
    "cgroups": set(),
    "folders": set(),
    "threads": set(),
}
"""By the folder that a module is in; one that is not here may import nothing."""
ANYTHING = {"", "__main__", "cli"}
"""The commands and kvhold itself may import whatever they like."""

HEAVY = ("torch", "vllm", "sglang", "numpy", "transformers")


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def imports(name: str, path: Path) -> Iterator[str]:
    """Modules below kvhold that ``path`` imports anywhere, also inside of functions and for types alone."""
    package = ("kvhold." + name).split(".") if path.name == "__init__.py" else ("kvhold." + name).split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            named = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for full in named:
            if full.startswith("kvhold.") and full != "kvhold.__version__":
                yield full.removeprefix("kvhold.")


def folder(name: str) -> str:
    """What a module's rule goes by: an engine's own folder, or the first part of its name."""
    return ".".join(name.split(".")[: 2 if name.startswith("engines.") else 1])


def allowed(name: str, imported: str) -> bool:
    may = MAY_IMPORT.get(folder(name), set())
    return folder(name) in ANYTHING or any(imported == each or imported.startswith(each + ".") for each in may)


def test_imports_point_one_way() -> None:
    found = [(name, imported) for name, path in modules() for imported in imports(name, path)]
    wrong = [f"{name} imports {imported}" for name, imported in found if not allowed(name, imported)]
    assert not wrong, "\n".join(wrong)


def test_what_engines_have_in_common_names_none_of_them() -> None:
    """Neither inside of functions nor for types alone."""
    named = {
        f"{name} imports {module}"
        for name, path in modules()
        if folder(name) == "engines.common"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        if module.partition(".")[0] in HEAVY
    }
    assert not named


def test_every_folder_has_its_rule() -> None:
    folders = {folder(name) for name, _ in modules()} - {*ANYTHING, "engines"}
    assert folders == MAY_IMPORT.keys()


def test_the_rule_is_not_blind(tmp_path: Path) -> None:
    """All spellings of an import are seen."""
    (tmp_path / "m.py").write_text(
        "import kvhold.manager.server\n"
        "from kvhold import core\n"
        "from kvhold.core.state import Core\n"
        "from ..engines import vllm\n"
        "from . import state\n"
        "def f():\n    from kvhold.copy import host as h\n"
        "from kvhold import __version__\n"
        "import msgspec\n"
    )
    assert set(imports("core.m", tmp_path / "m.py")) == {
        "manager.server",
        "core",
        "core.state.Core",
        "engines.vllm",
        "core.state",
        "copy.host",
    }
    assert not allowed("core.m", "copy.host")
    assert not allowed("copy.m", "client.channel")
    assert not allowed("a_new_folder.m", "core.rows")
    assert allowed("cli.m", "core.rows")
    assert allowed("copy.m", "client.arena.ArenaMapping")
    assert not allowed("engines.common.m", "engines.vllm.names")
    assert allowed("engines.vllm.m", "engines.common.ranks")


@pytest.mark.parametrize(
    "statement",
    [
        "import kvhold.cli",
        "import kvhold.manager.process, kvhold.manager.http",
        "import kvhold.client.attacher",
        "import kvhold.core",
        "import " + ", ".join(f"kvhold.{name}" for name, _ in modules() if folder(name) == "engines.common"),
    ],
)
def test_no_engine_is_needed(statement: str) -> None:
    check = f"{statement}; import sys; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
