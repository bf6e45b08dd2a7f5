"""Which weights a LoRA adapter has: block hashes have its name and path alone, and cannot tell a retrained one.

Workers read an adapter's files when a request with it is first scheduled, or when they are told to load it, and again
whenever they had dropped it or are told to load it anew. None of that is said to the connector. But files that were
last changed before the engine could have loaded anything are what was loaded, whenever that was; so an adapter is known
as long as its files are older than the engine, and unknown, for the engine's life or until its connector is reset, once
they are not. After a reset a newer adapter counts as what is loaded, but for this engine alone: it has the operator's
word for that, and shares with nobody what it computes. Age is the time of the last change of the inode, which neither
copying nor renaming can set back. A folder further up that is put in place of another one is noticed only if it happens
after the first look.

Files are looked at by a thread of its own, because a file server may take seconds to answer: the scheduler asks for a
look that begins after a request was seen, and what was computed counts only after a look that began later still.
"""

import contextlib
import hashlib
import logging
import os
import queue
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from kvhold.engines.common.weights import weights_digest
from kvhold.threads import ENGINE, belongs_to

log = logging.getLogger(__name__)

CLOCK_SECONDS = 1.0
"""Files that are not older than the engine by this much are not older: a file server's clock may differ."""
_FRESH_SECONDS = 1.0
"""A request that still waits has its adapter's files looked at again."""
_PATIENCE = 1.0
"""Seconds after which a look at files is not waited for any longer."""
_LAST = 5.0
"""Seconds that the thread has to end."""
_MOST = 256
"""Adapters that are remembered, and looks that may be waiting."""
_CONFIG = "adapter_config.json"
Stamp = tuple[tuple[str, int, int, int], ...]
"""(name, inode, size, change time in ns) of each file and link that an adapter is made of."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter as requests name it. Workers know it by its ``number``; ``form`` says how its files are read."""

    name: str
    number: int
    path: str
    form: bytes = b""


@dataclass(slots=True)
class Known:
    """What is known of the folder ``path``, from a look that began at ``begun``."""

    path: str
    begun: float = 0.0
    waiting: bool = False  # a look will begin
    stamp: Stamp = ()
    digest: bytes | None = None
    changed: bool = False  # from one look to another
    tainted: bool = False  # what this engine has computed with it may be of other weights than its files
    private: bool = False  # it was tainted, or its files were newer than the engine, before the last reset
    trouble: str = ""  # of the last look that failed


@belongs_to(ENGINE)
@dataclass(slots=True)
class Adapters:
    """The adapters of one engine, asked on the scheduler's thread. ``options`` are what else decides what they do.

    ``reset`` is how a person has the engine give up all that was computed before, for the log.
    """

    options: bytes
    reset: str
    _known: dict[str, Known] = field(default_factory=dict)  # by path; the last used last
    _path_of: dict[int, str] = field(default_factory=dict)  # by adapter id
    _asked: dict[str, float] = field(default_factory=dict)  # by request: since when a look is awaited
    _born: float = field(default_factory=lambda: time.time() - CLOCK_SECONDS)
    _reset: float = 0.0  # when that was last
    _salt: bytes = b""  # of this engine alone, since its last reset
    _looks: "queue.Queue[Known | None]" = field(default_factory=lambda: queue.Queue(_MOST))
    _looked: threading.Event = field(default_factory=threading.Event)  # since something was asked last
    _thread: threading.Thread | None = None
    _busy: float = 0.0  # since when the thread is looking; 0: it is not

    def look(self, request: str, adapter: Adapter) -> bool | None:
        """Whether the adapter's weights are known, by a look that began after ``request`` was first seen.

        None while that is awaited.
        """
        now = time.monotonic()
        known = self._of(adapter)
        since = self._asked.get(request)
        if since is None or since <= known.begun < now - _FRESH_SECONDS:
            since = self._asked[request] = now
        if known.begun < since:
            self._want(known)
            stuck = 0 < self._busy < now - _PATIENCE
            return None if now - since < _PATIENCE and not stuck else False
        return self._judge(known)

    def wait(self, seconds: float) -> None:
        """Let the thread look. A scheduler that only asks again and again leaves it no time to run Python."""
        self._looked.wait(seconds)

    def drop(self, request: str) -> None:
        """The request is over."""
        self._asked.pop(request, None)

    def digest(self, adapter: Adapter) -> bytes | None:
        """What stands for the adapter's weights, as far as the last look goes; None if they are unknown.

        A hub's id is no local path: what workers download is not looked for."""
        known = self._of(adapter)
        if not self._judge(known):
            return None
        assert known.digest is not None
        salt = self._salt if known.private else b""
        return hashlib.sha256(b"\0".join((known.digest, adapter.form, self.options)) + salt).digest()

    def private(self, adapter: Adapter) -> bool:
        """Whether its digest is of this engine alone."""
        return self._of(adapter).private

    def path(self, adapter: Adapter) -> str:
        """Where the adapter is."""
        return self._of(adapter).path

    def sure(self, path: str, since: float) -> bool | None:
        """Whether all that was computed with the adapter up to ``since`` was with the known weights; None: ask again.

        A look that begins later has to find the files unchanged."""
        known = self._known.get(path)
        if known is None:
            return False
        if known.begun > since:
            return self._judge(known)
        self._want(known)
        return None if time.monotonic() - since < _PATIENCE else False

    def rekeyed(self) -> None:
        """What was computed before is not used any more, so that of adapters in doubt only new changes matter."""
        self._path_of.clear()
        self._asked.clear()
        self._reset, self._salt = time.time(), os.urandom(16)
        for known in self._known.values():
            if known.tainted or known.changed:
                known.tainted, known.changed, known.private = False, False, True

    def stop(self) -> None:
        if self._thread is not None:
            with contextlib.suppress(queue.Full):  # a daemon that hangs in a file server ends with the process
                self._looks.put_nowait(None)
                self._thread.join(_LAST)

    def _of(self, adapter: Adapter) -> Known:
        """The adapter's entry."""
        path = os.path.abspath(os.path.expanduser(adapter.path))
        known = self._known.pop(path, None)
        if known is None:
            known = Known(path)
            while len(self._known) >= _MOST:
                del self._known[next(iter(self._known))]
        self._known[path] = known
        # Workers go by the id: what they have under it serves every path that comes with it.
        number = adapter.number
        other = self._path_of.setdefault(number, path)
        if other != path:
            self._path_of[number] = ""  # no path at all
            for each in (known, self._known.get(other)):
                if each is not None:
                    self._taint(each, f"its id {number} is another adapter's, too")
        while len(self._path_of) > _MOST:
            del self._path_of[next(iter(self._path_of))]
        return known

    def _judge(self, known: Known) -> bool:
        """Whether the last look found files that are certainly those that were loaded."""
        if known.digest is None:
            return False
        newest = max(entry[3] for entry in known.stamp) / 1e9
        known.private = known.private or self._born <= newest < self._reset
        if newest >= (self._reset if known.private else self._born) or known.changed:
            self._taint(known, "its files are not older than this engine, which may have loaded others before")
        return not known.tainted

    def _taint(self, known: Known, why: str) -> None:
        if not known.tainted:
            known.tainted = True
            log.warning(
                "kvhold: the KV cache of adapter %s is not kept: %s. Restart the engine, or, once the adapter is "
                "loaded, %s",
                known.path,
                why,
                self.reset,
            )

    # --- looking ------------------------------------------------------------------------------------------------

    def _want(self, known: Known) -> None:
        """Have a look begin, unless one is going to anyway."""
        if known.waiting:
            return
        known.waiting = True
        self._looked.clear()
        try:
            self._looks.put_nowait(known)
        except queue.Full:
            known.waiting = False
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="kvhold-adapters", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        """The thread: look at what is wanted, one after the other."""
        while (known := self._looks.get()) is not None:
            known.waiting = False
            begun = self._busy = time.monotonic()
            try:
                stamp = _stamp(Path(known.path))
                known.changed = known.changed or (bool(known.stamp) and stamp != known.stamp)
                if stamp != known.stamp or known.digest is None:
                    digest = adapter_digest(Path(known.path))
                    again = _stamp(Path(known.path))
                    known.stamp, known.digest = again, digest if again == stamp else None
            except Exception as error:  # noqa: BLE001 - whatever is the matter with the files, they are unknown
                known.digest = None
                if str(error) != known.trouble:
                    known.trouble = str(error)
                    log.warning("kvhold: the KV cache of adapter %s is not kept: %s", known.path, error)
            known.begun, self._busy = begun, 0.0  # the last: it says that the rest is there
            self._looked.set()


def adapter_digest(folder: Path) -> bytes | None:
    """A digest of the adapter in ``folder``, independent of where that lies; None if there is none."""
    weights = weights_digest(folder)
    return hashlib.sha256(weights + (folder / _CONFIG).read_bytes()).digest() if weights is not None else None


def _stamp(folder: Path) -> Stamp:
    """When the folder, what is in it and each link on the way was last changed. Raises OSError for what is missing.

    Folders above count by which they are: others come and go in them all the time.
    """
    found = [_entry(link) for link in (folder, *folder.parents) if link.is_symlink()]
    real = folder.resolve(strict=True)
    found.append(_entry(real))
    found += [(str(above), above.stat().st_ino, 0, 0) for above in real.parents]
    for path in sorted(folder.iterdir()):
        found.append(_entry(path))
        if path.is_symlink():
            found.append(_entry(path.resolve(strict=True)))
    return tuple(found)


def _entry(path: Path) -> tuple[str, int, int, int]:
    stat = path.lstat()
    return str(path), stat.st_ino, stat.st_size, stat.st_ctime_ns
