"""Whether the files that an engine is told by are still those that it has loaded.

A storage may be attached when the engine has run for long. Files that were exchanged meanwhile say nothing of it.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

Stamps = dict[str, tuple[int, int, int]]
"""By path, a file's number, its size and the time of its last change."""


class Loaded:
    """The files of one engine's start, by what they are of. Where nobody has told of it, nothing is known of them."""

    def __init__(self) -> None:
        self._begun: dict[str, Stamps] = {}

    def begins(self, files: Mapping[str, Iterable[Path]]) -> None:
        """SGLang is about to load ``files``."""
        self._begun = {what: _stamps(some) for what, some in files.items()}

    def changed(self, files: Mapping[str, Iterable[Path]]) -> str:
        """One of ``files`` that is not what it was then; empty if there is none.

        Where there were none of a kind, SGLang has downloaded them.
        """
        for what, some in files.items():
            before, now = self._begun.get(what), _stamps(some)
            if before and before != now:
                return min(path for path in {**before, **now} if before.get(path) != now.get(path))
        return ""


def _stamps(files: Iterable[Path]) -> Stamps:
    found = {}
    for path in files:
        try:
            status = path.stat()
        except OSError:
            continue
        found[str(path)] = status.st_ino, status.st_size, status.st_mtime_ns
    return found


loaded = Loaded()
"""Those of this process's engine."""
