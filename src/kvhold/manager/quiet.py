"""A log handler that writes a line a few times and then how often: what a client can cause must not fill a disk."""

import logging
import time
from collections.abc import Hashable

WINDOW_SECONDS = 60.0
SAME = 10
"""Times that the same line is written within that time."""
ALIKE = 400
"""Lines that differ in names and numbers alone."""
_KEPT = 1024
"""Lines that are counted at once."""


class QuietHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to a stream, and says at a minute's end of each thing that was said too often how often it was."""

    def __init__(self, stream: object) -> None:
        super().__init__(stream)  # type: ignore[arg-type]
        self._counts: dict[Hashable, int] = {}
        self._left_out: dict[str, tuple[logging.LogRecord, int]] = {}  # by format: the last one, and how many
        self._until = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if now >= self._until:
            self._tell()
            self._until = now + WINDOW_SECONDS
        alike: Hashable = record.name, record.lineno
        same: Hashable = alike, record.getMessage()
        if len(self._counts) >= _KEPT and same not in self._counts:
            same = alike  # too many different lines to be counted each for itself
        count = self._counts[same] = self._counts.get(same, 0) + 1
        of_all = self._counts[alike] = self._counts.get(alike, 0) + 1
        if (count > SAME and same != alike) or of_all > ALIKE:
            self._left_out[record.msg] = record, self._left_out.get(record.msg, (record, 0))[1] + 1
        else:
            super().emit(record)

    def _tell(self) -> None:
        left_out, self._left_out = self._left_out, {}
        self._counts.clear()
        for record, count in left_out.values():
            last = record.getMessage()
            more = {"msg": "%s (and %d more like this)", "args": (last, count - 1)}
            super().emit(logging.makeLogRecord(record.__dict__ | more))

    def close(self) -> None:
        self._tell()
        super().close()
