"""The listening socket: one manager per path, kept apart by a lock that a crash cannot leave behind."""

import fcntl
import logging
import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

from kvhold.folders import DEFAULT, NoFolder, is_default, make, new_socket, sockets
from kvhold.host import check_socket, listens
from kvhold.manager.config import ConfigError, SocketTaken

log = logging.getLogger(__name__)

_LOCK_SECONDS = 0.2
"""A sweep, or a manager that is just ending, holds a lock for an instant; one that is held longer is in use."""
_RETURN_SECONDS = 3.0
"""A manager whose socket was taken away puts it back within this time; see ``Server``."""


class Listener:
    """Takes ``path``, with mode 0600. Raises ConfigError when another manager or program has it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            check_socket(path)
        except ValueError as error:
            raise ConfigError(f"socket: {path} is {error}") from None
        if is_default(path) and path.name == DEFAULT:
            _refuse_a_second(path)
        _await_return(path)
        self._inode: tuple[int, int] | None = (0, 0)  # no file has it
        self._trouble = ""
        self._take(path, _patient_lock)

    def _take(self, path: Path, lock: Callable[[Path], int]) -> None:
        """Make what is missing of the folder, the lock, for which ``lock`` is called, and the socket."""
        try:
            if is_default(path):
                if flaw := make(path.parent):
                    raise ConfigError(f"socket: {path.parent} cannot be used: {flaw}; choose another path")
            else:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                if path.parent.stat().st_uid not in (os.getuid(), 0):
                    raise ConfigError(f"socket: {path.parent} belongs to another user; choose another path")
            held = lock(path)
            try:
                if _inode(path) != self._inode:
                    _remove_stale(path)
                    self.socket = _bind(path)
                    self._inode = _inode(path)
            except (ConfigError, OSError):
                _unlock(path, held)
                raise
        except OSError as error:
            raise ConfigError(f"socket: {path} cannot be made: {error.strerror}") from None
        self.path = path
        self._lock = held

    def listen(self) -> None:
        """Let clients connect; until now they were told that nobody is here."""
        self.socket.listen(128)

    def is_there(self) -> bool:
        """Whether clients still find the socket, and whoever starts a manager its lock."""
        return _inode(self.path) == self._inode and _inode(_lock_path(self.path)) == _inode_of(self._lock)

    def put_back(self) -> socket.socket | None:
        """Have again what somebody has removed of socket, lock and folder; the former socket, if there is a new one.

        It is elsewhere only where its folder cannot be made again, like a user's after logout, and clients look there.
        """
        former, lock = self.socket, self._lock
        try:
            try:
                self._take(self.path, self._lock_again)
            except SocketTaken:
                raise
            except ConfigError:
                if not is_default(self.path):
                    raise
                self._take(new_socket(self.path.name), self._lock_again)
        except (ConfigError, NoFolder) as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                log.error("%s was removed by somebody, and no client finds this manager any more: %s", self.path, error)
            return None
        self._trouble = ""
        os.close(lock)
        if self.socket is former:
            return None
        self.listen()
        log.warning("the socket was removed by somebody; this manager listens on %s again", self.path)
        return former

    def _lock_again(self, path: Path) -> int:
        """The lock that is held already, where its file is still there, or that of a new one."""
        if _inode(_lock_path(path)) == _inode_of(self._lock):
            return os.dup(self._lock)
        if (lock := _lock(path)) is None:
            raise SocketTaken(f"{path} belongs to another running manager now; stop one of them")
        return lock

    def close(self) -> None:
        """Stop listening and take the paths away; the lock goes last. Closing again does nothing."""
        if self.socket.fileno() >= 0:
            self.socket.close()
            if _inode(self.path) == self._inode:  # or else it is another manager's
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


def _refuse_a_second(path: Path) -> None:
    """Raise SocketTaken where a manager for all engines listens in another of the folders already."""
    for other in sockets():
        if other != path and listens(other):
            raise SocketTaken(
                f"socket: {other} belongs to a running manager, which engines find; stop it, or name another --socket"
            )


def _await_return(path: Path) -> None:
    """Where somebody has removed a living manager's socket, wait until it has put that back."""
    end = time.monotonic() + _RETURN_SECONDS
    while not path.exists() and _is_bound(path):
        if time.monotonic() > end:
            log.warning("another process listens on a socket that was removed from %s, or in another container", path)
            return
        time.sleep(0.05)


def _is_bound(path: Path) -> bool:
    """Whether a process listens on a socket that was made there, even if it has been removed since."""
    try:
        lines = Path("/proc/net/unix").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    fields = (line.split(None, 7) for line in lines[1:])
    return any(len(each) == 8 and each[3] == "00010000" and each[7] == str(path) for each in fields)


def _bind(path: Path) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    mask = os.umask(0o177)
    try:
        bound.bind(str(path))
    finally:
        os.umask(mask)
    return bound


def _inode(path: Path) -> tuple[int, int] | None:
    """Which file is there, if any."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _inode_of(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _remove_stale(path: Path) -> None:
    """Take away a socket on which nobody listens any more. Raises ConfigError for anything else that is there."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"socket: {path} exists and is not a socket; choose another path")
    if listens(path):
        raise ConfigError(f"socket: something listens on {path} already; choose another path")
    path.unlink()


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
    if _inode(_lock_path(path)) == _inode_of(lock):  # or else it was removed, and another process's is there
        _lock_path(path).unlink(missing_ok=True)
    os.close(lock)
