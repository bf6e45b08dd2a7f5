"""When a worker's copies have ended, as its attacher's thread sees that while the engine's thread begins others."""

from array import array
from collections.abc import ValuesView
from typing import Any

import pytest

from kvhold import protocol as wire
from kvhold.copy.job import Job
from kvhold.engines.common.accounts import Accounts
from kvhold.engines.common.copies import Copies
from kvhold.engines.common.plans import Publish, StepPlan
from kvhold.engines.common.ranks import WorkerReport


class Copier:
    """Begins copies that end when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def begin_publish(self, *_: Any) -> Job:
        self.jobs.append(Job(64))
        return self.jobs[-1]


class Meanwhile(dict[int, Any]):
    """Its values were looked at just before the engine's thread did ``work``."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self._work = work

    def values(self) -> ValuesView[Any]:
        seen = dict(self).values()
        work, self._work = self._work, lambda: None
        work()
        return seen


def test_a_copy_that_is_begun_while_its_end_is_looked_for_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or its arena is unmapped, and its slots are another engine's, while it writes to them."""
    copier = Copier()
    report = WorkerReport(0, 1, 0, 0, b"", b"", (64,), False, "")
    hello = wire.Hello("worker", "one", 0, 1, "one")
    attacher: Any = object()
    copies = Copies(report, copier, hello, lambda half: attacher, Accounts(), bytes, False)  # type: ignore[arg-type]
    monkeypatch.setattr(copies.mappings, "arena", lambda incarnation: object())
    plan = StepPlan(1, 7, publishes=[Publish(1, 0, [0], array("Q", [0]))], starts=((0,),))
    copies.publishes = Meanwhile(lambda: copies.start_publishes(plan))
    assert not copies.ended(1)
    copies.start_publishes(plan)
    assert len(copier.jobs) == 1
    assert not copies.ended(1), "it runs"
    copier.jobs[0].end()
    assert copies.ended(1)
