"""Whether the rules of the core's books hold, looked at while it serves: bit by bit, between the loop's turns."""

import logging
import time
from collections.abc import Iterator

from kvhold.core import Core
from kvhold.core.audit import RULES, Finding

log = logging.getLogger(__name__)

REST = 19
"""After a slice the audit rests for so many times what that took: it has a twentieth of the loop's time at most."""
PASS_SECONDS = 60.0
"""After all rules were looked at, the audit rests for so long."""


class Auditor:
    """Goes through all rules again and again. What does not hold is counted each time, and logged the first time."""

    def __init__(self, core: Core) -> None:
        self.due = 0.0
        """When the next slice is to be looked at, on the monotonic clock, in seconds."""
        self._core = core
        self._slices: Iterator[list[Finding]] = RULES.slices(core)
        self._told: set[str] = set()

    def turn(self) -> None:
        """Look at one slice if it is time for that."""
        begun = time.monotonic()
        if begun < self.due:
            return
        findings = next(self._slices, None)
        if findings is None:
            self._core.counters["audits"] += 1
            self._slices = RULES.slices(self._core)
            self.due = begun + PASS_SECONDS
            return
        for finding in findings:
            self._core.counters["audit_violations"] += 1
            if finding.rule not in self._told:
                self._told.add(finding.rule)
                log.error("audit: this must always hold, and does not: %s", finding)
        ended = time.monotonic()
        self.due = ended + (ended - begun) * REST
