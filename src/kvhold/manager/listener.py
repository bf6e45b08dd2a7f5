"""The listening socket: one manager per path, kept apart by a lock that a crash cannot leave behind."""

import fcntl
import os
import socket
import stat
import time
from pathlib import Path

from kvhold.host import check_socket
from kvhold.manager.config import ConfigError, SocketTaken

_LOCK_SECONDS = 0.2
"""A sweep, or a manager that is just ending, holds a lock for an instant; one that is held longer is in use."""


class Listener:
    """Takes ``path``, with mode 0600. Raises ConfigError when another manager or program has it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            check_socket(path)
        except ValueError as error:
            raise ConfigError(f"socket: {path} is {error}") from None
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.parent.stat().st_uid not in (os.getuid(), 0):
                raise ConfigError(f"socket: {path.parent} belongs to another user; choose another path")
            self._lock = _patient_lock(path)
            try:
                _remove_stale(path)
                self.socket = _bind(path)
            except (ConfigError, OSError):
                _unlock(path, self._lock)
                raise
        except OSError as error:
            raise ConfigError(f"socket: {path} cannot be had: {error.strerror}") from None

    def listen(self) -> None:
        """Let clients connect; until now they were told that nobody is here."""
        self.socket.listen(128)

    def close(self) -> None:
        """Stop listening and take the paths away; the lock goes last. Closing again does nothing."""
        if self.socket.fileno() >= 0:
            self.socket.close()
            self.path.unlink(missing_ok=True)
            _unlock(self.path, self._lock)


def sweep(folder: Path) -> None:
    """Take away what killed managers of engines left in ``folder``."""
    for left in folder.glob("e-*.sock.lock"):
        path = left.with_suffix("")
        lock = _lock(path)
        if lock is not None:
            path.unlink(missing_ok=True)
            _unlock(path, lock)


def _bind(path: Path) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    mask = os.umask(0o177)
    try:
        bound.bind(str(path))
    finally:
        os.umask(mask)
    return bound


def _remove_stale(path: Path) -> None:
    """Take away a socket on which nobody listens any more. Raises ConfigError for anything else that is there."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"socket: {path} exists and is not a socket; choose another path")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass  # so many wait for it that there is no room for one more
    raise ConfigError(f"socket: something listens on {path} already; choose another path")


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _patient_lock(path: Path) -> int:
    """The lock of ``path``. Raises SocketTaken when another process keeps it, and OSError."""
    end = time.monotonic() + _LOCK_SECONDS
    while (lock := _lock(path)) is None:
        if time.monotonic() > end:
            raise SocketTaken(f"socket: {path} belongs to a running manager; stop it or choose another path")
        time.sleep(0.01)
    return lock


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock of ``path``, or None when another process has it. Raises OSError."""
    while True:
        descriptor = os.open(_lock_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        try:
            if _lock_path(path).stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)  # its last holder took the file away in between


def _unlock(path: Path, lock: int) -> None:
    _lock_path(path).unlink(missing_ok=True)
    os.close(lock)
