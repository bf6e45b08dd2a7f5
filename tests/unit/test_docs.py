"""What docs name is what there is: words that are shown, tables of states and threads, files and what is in them."""

import ast
import re
from pathlib import Path

from kvhold.core import Core
from kvhold.core.rows import STATES
from kvhold.tiers.ssd import check, reading, recover
from kvhold.tiers.ssd.counters import REJECTED
from kvhold.tiers.ssd.format import Flaw

DOCS = Path(__file__).resolve().parents[2] / "docs"
OPERATIONS = DOCS / "operations.md"
SAYS = re.compile(
    r"""counts\[["'](\w+)["']\]|: "(\w+)",$|(?:reason.*= |return )"(\w+)"$|Counter\((\w+)=.*, (\w+)=""", re.MULTILINE
)


def table(title: str) -> set[str]:
    """The words in the first column of the table after a comment that begins so."""
    text = OPERATIONS.read_text().partition(f"<!-- checked against {title} -->")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    words = [word for row in rows for word in re.findall(r"`(\w+)`", row)]
    assert len(words) == len(set(words))
    return set(words)


def said(module: object) -> set[str]:
    """The words that a module's source counts or returns."""
    text = Path(str(module.__file__)).read_text()  # type: ignore[attr-defined]
    return {word for found in SAYS.findall(text) for word in found if word}


def test_the_states_of_the_arena() -> None:
    assert table("kvhold.core.Core.accounts") == set(Core(4096, 4096).accounts())


def test_why_a_record_is_rejected() -> None:
    words = said(check) | {word for word in said(reading) if word == "truncated"}
    assert {"checksum", "length", "identity", "truncated"} <= words
    assert table("kvhold.tiers.ssd") == words | {f"header_{flaw.value}" for flaw in Flaw} == set(REJECTED)


def test_what_inspect_met() -> None:
    heads = {"unused", "bad_header"} | {flaw.value for flaw in (Flaw.VERSION, Flaw.FOREIGN, Flaw.STALE)}
    counted = said(recover) | heads
    assert table("kvhold.tiers.ssd.recover") == counted - {"segments", "records", "sealed"}


def test_the_states_of_a_row() -> None:
    """Which there are, what holds in each, and which may follow it."""
    text = (DOCS / "design.md").read_text().partition("<!-- checked against kvhold.core.rows.STATES -->")[2]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.strip().split("\n\n")[0].splitlines()
    ]
    assert rows[0] == ["state", "slot", "can be found", "may be evicted", "becomes"]
    assert rows[2:] == [
        [
            facts.name.upper(),
            *("yes" if holds else "no" for holds in (facts.slot, facts.found, facts.evicted)),
            ", ".join(f"{STATES[state].name.upper()} ({why})" for state, why in facts.becomes.items()),
        ]
        for facts in STATES.values()
    ]


def test_the_walk_through_a_new_engine_names_what_there_is() -> None:
    root = OPERATIONS.parents[1]
    source = root / "src" / "kvhold"
    text = (root / "docs" / "new-engine.md").read_text()
    files = set(re.findall(r"`([\w/]+\.py)`", text))
    assert len(files) >= 6
    for name in files:
        assert any((folder / name).exists() for folder in (root, source, source / "engines")), name
    calls = set(re.findall(r"`(session|questions|batches|copies|control)\.(\w+)", text))
    assert len(calls) >= 10
    for module, name in calls:
        folder = source / ("client" if module == "control" else "engines/common")
        assert f"def {name}(" in (folder / f"{module}.py").read_text(), f"{module}.{name}"
    known = "".join(
        path.read_text() for path in [*source.rglob("*.py"), root / "tests" / "testbed" / "toy" / "toy_engine.py"]
    )
    for kind, name in set(re.findall(r"`([A-Z]\w+)\.(\w+)`", text)):
        assert f"class {kind}" in known, kind
        assert re.search(rf"(def |self\.){name}\b", known), name
    toys = ast.parse((root / "tests" / "testbed" / "toy" / "toy_engine.py").read_text())
    made_of = [node for node in toys.body if isinstance(node, ast.ImportFrom) and str(node.module).startswith("kvhold")]
    assert len(made_of) > 10
    for name in [alias.name for node in made_of for alias in node.names]:
        assert re.search(rf"\b{name}\b", text), f"{name} is used by the toy engines and is not explained"
    step = next(ast.unparse(node) for node in toys.body if isinstance(node, ast.ClassDef) and node.name == "StepEngine")
    made = set(re.findall(r"\b(session|questions|batches|copies|control)\.(\w+)\(", step))
    assert len(made) >= 15
    assert not [call for call in made if ".".join(call) + "(" not in text], (
        "calls of the toy engine that are not explained"
    )


GLOSSARY = DOCS / "glossary.md"
SOURCE = DOCS.parent / "src" / "kvhold"


def test_every_word_of_the_glossary_lives_where_it_says() -> None:
    """The named module has the named class, function or constant."""
    tables = GLOSSARY.read_text().split("<!-- checked against src/kvhold -->")[1:]
    rows = [row for text in tables for row in re.findall(r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE)]
    words = [word for words, where in rows if "`" in where for word in words.split(", ")]
    assert len(words) > 40
    assert len(words) == len(set(words)), "one noun for one thing"
    for _, where in rows:
        for name in re.findall(r"`([\w.]+)`", where):
            *folders, last = name.split(".")
            if SOURCE.joinpath(*folders, f"{last}.py").exists():
                continue
            module = SOURCE.joinpath(*folders)
            files = [module.with_suffix(".py"), *module.glob("*.py")]
            text = "".join(file.read_text() for file in files if file.exists())
            assert re.search(rf"^(class {last}\b|def {last}\b|{last}\b.* = )", text, re.MULTILINE), name


def test_what_the_glossary_retires_is_not_used() -> None:
    """Neither as a word nor within a name; the long text of the demo is English, and no name of anything."""
    table = GLOSSARY.read_text().partition("## Words that are not used any more")[2]
    left = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    retired = {word for cell in left for word in re.findall(r"`(\w+)`", cell)}
    assert len(retired) >= 7
    for path in [*SOURCE.rglob("*.py"), *DOCS.glob("*.md")]:
        if path not in (SOURCE / "cli" / "demo_text.py", GLOSSARY):
            words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", path.read_text())}
            assert not retired & words, path


def test_the_files_that_design_sends_a_reader_to_are_there() -> None:
    """With the functions and classes that it says are in them."""
    text = (DOCS / "design.md").read_text()
    files = set(re.findall(r"`([\w/]+\.py)`", text))
    assert len(files) > 10
    for name in files:
        assert (SOURCE / name).exists() or (DOCS.parent / name).exists(), name
    table = text.partition("| question | file |")[2].partition("\n\n")[0]
    for row in table.splitlines():
        for file, names in re.findall(r"`([\w/]+\.py)`: ([^|]+)", row):
            for name in re.findall(r"`(\w+)`", names):
                assert re.search(rf"\b{name}\b", (SOURCE / file).read_text()), (file, name)


def test_the_threads_that_design_lists_are_those_that_there_are() -> None:
    text = (DOCS / "design.md").read_text().partition("\n## Threads\n")[2].partition("\n## ")[0]
    named = {
        ast.literal_eval(given["name"])
        for path in SOURCE.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and "daemon" in (given := {each.arg: each.value for each in call.keywords})
    }
    assert len(named) >= 12
    assert all(re.fullmatch(r"kvhold(-[a-z]+)+", name) for name in named), named
    assert set(re.findall(r"`(kvhold-[\w-]+)`", text)) == named


def defined(path: Path) -> set[str]:
    """What a module defines: its classes, functions and constants, and those of its classes by ``Class.name``."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        found |= _names(node)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for each in node.body for name in _names(each)}
    return found


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets if isinstance(node, ast.Assign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def test_what_answers_to_questions_send_a_reader_to_is_there() -> None:
    """Each file, and in it what the answer names: a definition, or words of a document."""
    text = (DOCS / "questions.md").read_text().partition("\n## How long")[0]
    answers = text.split("\n**")[1:]
    assert len(answers) >= 10
    for answer in answers:
        question, where = answer.partition("**")[0], answer.partition("\nWhere: ")[2]
        places = re.findall(r"`([\w/.-]+\.(?:py|md))`\s\(([^)]+)\)", where)
        assert len(places) == len(re.findall(r"`[\w/.-]+\.(?:py|md)`", where)) >= 2, question
        for name, wanted in places:
            found = [one for one in (SOURCE / name, DOCS.parent / name) if one.exists()]
            assert found, (question, name)
            path = found[0]
            there = defined(path) if path.suffix == ".py" else path.read_text()
            for each in re.findall(r"`([^`]+)`", wanted):
                assert each in there, (question, name, each)
    assert "(docs/questions.md)" in (DOCS.parent / "CONTRIBUTING.md").read_text()
    assert "(questions.md)" in (DOCS / "design.md").read_text()
