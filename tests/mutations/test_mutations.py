"""The tests of the core notice when it is broken: see ``testbed.mutations.run``."""

import os

import pytest
from testbed.mutations import run
from testbed.mutations.faults import FAULTS, Fault
from testbed.mutations.run import STAGES


def test_a_mutation_is_caught_and_a_harmless_one_is_not():
    broken = next(fault for fault in FAULTS if fault.name == "a commit with an old epoch counts")
    harmless = Fault("harmless", broken.function, broken.old, broken.old, "")
    told: list[str] = []
    survivors = run.run((broken, harmless), ("tests/unit/core/test_commits.py",), told=told.append)
    assert survivors == [harmless]
    assert "test_commits.py::" in told[1]


@pytest.mark.long
def test_every_mutation_is_caught(capsys: pytest.CaptureFixture[str]):
    with capsys.disabled():
        assert run.run(FAULTS, STAGES, jobs=os.cpu_count() or 1) == []
