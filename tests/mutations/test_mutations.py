"""The tests of the core notice when it is broken: see ``run.py``."""

import os
from pathlib import Path

import pytest
import run
from run import MUTATIONS, STAGES, Mutation


def test_every_mutation_still_applies():
    assert run.check() == []
    assert len(MUTATIONS) >= 20
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    for mutation in MUTATIONS:
        source = (run.core(run.ROOT) / mutation.file).read_text()
        compile(source.replace(mutation.old, mutation.new), mutation.file, "exec")


def test_one_that_does_not_apply_is_named(tmp_path: Path):
    file = run.core(tmp_path) / "rows.py"
    file.parent.mkdir(parents=True)
    file.write_text("one\ntwo\ntwo\n")
    found = [Mutation(name, "rows.py", name, "", "") for name in ("one", "two", "three")]
    assert run.check(tuple(found), tmp_path) == [
        "two: its passage is 2 times in rows.py",
        "three: its passage is 0 times in rows.py",
    ]


def test_a_mutation_is_caught_and_a_harmless_one_is_not():
    broken = next(mutation for mutation in MUTATIONS if mutation.name == "a commit with an old epoch counts")
    harmless = Mutation("harmless", broken.file, broken.old, broken.old, "")
    told: list[str] = []
    survivors = run.run((broken, harmless), ("tests/unit/core/test_commits.py",), told=told.append)
    assert survivors == [harmless]
    assert "test_commits.py::" in told[1]


@pytest.mark.long
def test_every_mutation_is_caught(capsys: pytest.CaptureFixture[str]):
    with capsys.disabled():
        assert run.run(MUTATIONS, STAGES, jobs=os.cpu_count() or 1) == []
