"""The listening socket: one manager per path, kept apart by a lock that a crash cannot leave behind."""

import fcntl
import os
import socket
import stat
from pathlib import Path

from kvhold.manager.config import ConfigError, SocketTaken

_MAX_PATH = 107


class Listener:
    """Binds ``path`` with mode 0600. Raises ConfigError when another manager or program has it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_absolute():
            raise ConfigError(f"socket: {path} is not an absolute path")
        if len(os.fsencode(path)) > _MAX_PATH:
            raise ConfigError(f"socket: {path} is longer than {_MAX_PATH} bytes; choose a shorter path")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.parent.stat().st_uid not in (os.getuid(), 0):
                raise ConfigError(f"socket: {path.parent} belongs to another user; choose another path")
            lock = _lock(path)
        except OSError as error:
            raise ConfigError(f"socket: {path} cannot be made: {error.strerror}") from None
        if lock is None:
            raise SocketTaken(f"socket: {path} belongs to a running manager; stop it or choose another path")
        self._lock = lock
        self._replace_stale()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        mask = os.umask(0o177)
        try:
            self.socket.bind(str(path))
        except OSError as error:
            raise ConfigError(f"socket: {path} cannot be bound: {error.strerror}") from None
        finally:
            os.umask(mask)
        self.socket.listen(128)

    def _replace_stale(self) -> None:
        try:
            found = self.path.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(found.st_mode):
            raise ConfigError(f"socket: {self.path} exists and is not a socket; choose another path")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1)
            try:
                probe.connect(str(self.path))
            except ConnectionRefusedError:
                self.path.unlink()
            except OSError as error:
                raise ConfigError(f"socket: {self.path} cannot be examined: {error.strerror}") from None
            else:
                raise ConfigError(f"socket: something listens on {self.path} already; choose another path")

    def close(self) -> None:
        """Stop listening and take the paths away; the lock goes last."""
        self.socket.close()
        _remove(self.path, self._lock)


def sweep(folder: Path) -> None:
    """Take away what killed managers of engines left in ``folder``."""
    for path in folder.glob("e-*.sock"):
        lock = _lock(path)
        if lock is not None:
            _remove(path, lock)


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


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


def _remove(path: Path, lock: int) -> None:
    path.unlink(missing_ok=True)
    _lock_path(path).unlink(missing_ok=True)
    os.close(lock)
