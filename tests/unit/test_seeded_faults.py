"""Each fault that is put into the core still has its place there, and a changed function is found where it has gone."""

from pathlib import Path

import pytest
from testbed.mutations import run
from testbed.mutations.change import NotThere, Sources
from testbed.mutations.faults import FAULTS, Fault


def test_every_fault_still_applies():
    assert run.check() == []
    assert len(FAULTS) >= 60
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


LEDGER = """
class Book:
    def enter(self, row):
        if row in self.rows:  # a comment
            self.rows[
                row
            ] += 1
            self.tell(row, "more")
            return
        self.rows[row] = 1
        self.tell(row, "new")

def enter(rows, row):
    def again():
        return rows[row] > 1
    rows.append(row)
    return again()
"""


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    file = tmp_path / "src" / "kvhold" / "core" / "deep" / "ledger.py"
    file.parent.mkdir(parents=True)
    file.write_text(LEDGER)
    return tmp_path


@pytest.mark.parametrize(
    ("function", "old", "new", "gone", "there"),
    [
        ("Book.enter", "self.rows[row] += 1", "self.rows[row] += 2", "self.rows[row] += 1", "self.rows[row] += 2"),
        ("enter", "row in self.rows", "False", "if row in self.rows:", "if False:"),
        ("enter", "self.tell(_, 'new')", "", "'new'", "self.rows[row] = 1\n        pass"),
        (
            "enter",
            "self.tell(row, 'more')\nreturn",
            "",
            "'more'",
            "self.rows[row] += 1\n            pass\n        self.rows[row] = 1",
        ),
        ("again", "rows[row] > 1", "True", "> 1", "return True"),
        ("enter.again", "return _", "", "return rows[row]", "def again():\n        pass"),
        (
            "enter",
            "rows.append(row)",
            "rows.append(row)\nrows.append(row)",
            "",
            "rows.append(row)\n    rows.append(row)",
        ),
    ],
)
def test_a_passage_is_changed_wherever_its_function_is(
    ledger: Path, function: str, old: str, new: str, gone: str, there: str
):
    changed = Sources(ledger).changed(function, old, new)
    assert changed.file.name == "ledger.py"
    assert there in changed.text
    assert not gone or gone not in changed.text
    compile(changed.text, function, "exec")
    assert changed.text.count("def ") == LEDGER.count("def ")


@pytest.mark.parametrize(
    ("function", "old", "why"),
    [
        ("leave", "row in self.rows", "there is no function leave; it is in Book.enter (ledger.py)"),
        ("leave", "rows.pop()", "there is no function leave"),
        (
            "Book.enter",
            "rows.append(row)",
            "Book.enter (ledger.py) has no `rows.append(row)`; it is in enter (ledger.py)",
        ),
        ("Book.enter", "self.tell(_, _)", "`self.tell(_, _)` is 2 times in Book.enter (ledger.py)"),
        ("ter", "rows.append(row)", "there is no function ter; it is in enter (ledger.py)"),
    ],
)
def test_one_that_does_not_apply_says_where_its_passage_is(ledger: Path, function: str, old: str, why: str):
    assert run.check((Fault("this", function, old, "", ""),), ledger) == [f"this: {why}"]
    with pytest.raises(NotThere):
        Sources(ledger).changed(function, old, "")
