"""How the tier touches files: past the page cache, in whole blocks, and through one narrow interface.

O_DIRECT wants offsets, lengths and memory addresses aligned. Some filesystems forgive what others refuse, so all of it
is checked here, always. Whoever writes another :class:`FileLayer` (the tests do) checks the same with
:func:`check_aligned`.
"""

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from stat import S_IFREG, S_ISBLK, S_ISCHR, S_ISDIR, S_ISFIFO, S_ISLNK, S_ISREG, S_ISSOCK, S_IWGRP, S_IWOTH
from typing import Final, Protocol

from kvhold.core.log.segments import BLOCK

log = logging.getLogger(__name__)

IOV_MAX: Final = 1024
MEDIA_ERRORS: Final = {errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EBADMSG, errno.EREMOTEIO, errno.EUCLEAN}
"""What says that bytes on the disk are lost. Any other error only says that they could not be looked at."""
_LOCK_TRIES: Final = 10
_KINDS: Final = (
    (S_ISDIR, "a directory"),
    (S_ISFIFO, "a named pipe"),
    (S_ISLNK, "a symbolic link"),
    (S_ISSOCK, "a socket"),
    (S_ISCHR, "a device"),
    (S_ISBLK, "a device"),
)
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate  # glibc's posix_fallocate would write every block instead
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Misaligned(ValueError):
    """An offset, a length or an address is no multiple of 4096: a mistake of ours, never the disk's."""


class NotAFile(OSError):
    """Something that is no file has a file's name: a directory, a named pipe, a link. ``filename`` is where."""

    def __init__(self, path: Path, mode: int) -> None:
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        super().__init__(errno.EISDIR if S_ISDIR(mode) else errno.ENXIO, f"it is {kind}, not a file", str(path))


class Shared(OSError):
    """Others may write to a directory or a file: what it holds may be theirs. ``strerror`` has the remedy."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EPERM, why, str(path))


class FileLayer(Protocol):
    """Files by handle. Everything raises OSError; ``preadv`` and ``pwritev`` may do less than they were asked to."""

    def lock(self, path: Path) -> int:
        """Lock a file, made if it is not there, until its handle is closed or the process ends. BlockingIOError."""

    def make_directory(self, directory: Path) -> None:
        """Make it, if it is not there yet, for this user alone."""

    def check_private(self, directory: Path, names: Iterable[str]) -> None:
        """Raise Shared where others may write to it or to one of the files ``names``, NotAFile where one is none."""

    def names(self, directory: Path) -> dict[str, int]:
        """What is in a directory: bytes on the disk of each regular file, -1 for anything else."""

    def open_segment(self, path: Path, *, create: bool = False, write: bool = True) -> int: ...
    def size(self, handle: int) -> int: ...
    def preadv(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int: ...
    def pwritev(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int: ...
    def fdatasync(self, handle: int) -> None: ...
    def allocate(self, handle: int, size: int) -> None:
        """Make the file exactly so long, with room on the disk for all of it where the filesystem can promise that."""

    def close(self, handle: int) -> None: ...
    def remove(self, path: Path) -> None: ...
    def replace(self, source: Path, target: Path) -> None: ...
    def sync_names(self, directory: Path) -> None:
        """Make creations, renames and removals in a directory durable."""

    def free_bytes(self, directory: Path) -> int: ...


class RealFiles:
    """The operating system's files, with O_DIRECT where the filesystem has it."""

    def __init__(self) -> None:
        self._buffered: set[int] = set()  # handles without O_DIRECT
        self._warned = False
        self._locks: dict[Path, tuple[Path, int]] = {}  # by directory: the lock file and its handle

    def lock(self, path: Path) -> int:
        handle = _open(path, os.O_RDWR | os.O_CREAT)
        for left in reversed(range(_LOCK_TRIES)):  # a manager that is just being killed holds it for a moment
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._locks[path.parent] = path, handle
                return handle
            except OSError as error:
                if left and isinstance(error, BlockingIOError):
                    time.sleep(0.05)
                    continue
                os.close(handle)
                raise
        raise AssertionError

    def make_directory(self, directory: Path) -> None:
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None

    def check_private(self, directory: Path, names: Iterable[str]) -> None:
        _check_owner(directory, directory.stat(), "-R ")
        for name in names:
            path = directory / name
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue
            if not S_ISREG(status.st_mode):
                raise NotAFile(path, status.st_mode)
            _check_owner(path, status)

    def names(self, directory: Path) -> dict[str, int]:
        found = {}
        with os.scandir(directory) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                found[entry.name] = status.st_blocks * 512 if S_ISREG(status.st_mode) else -1
        return found

    def open_segment(self, path: Path, *, create: bool = False, write: bool = True) -> int:
        flags = (os.O_RDWR if write else os.O_RDONLY) | (os.O_CREAT if create else 0)
        if write:
            self._still_ours(path.parent)
        try:
            return _open(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        handle = _open(path, flags)
        self._go_buffered(handle)
        return handle

    def size(self, handle: int) -> int:
        return os.fstat(handle).st_size

    def preadv(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        check_aligned(buffers, offset)
        try:
            done = os.preadv(handle, buffers, offset)
        except OSError as error:
            if not self._refused(handle, error):
                raise
            done = os.preadv(handle, buffers, offset)
        if handle in self._buffered:
            os.posix_fadvise(handle, offset, done, os.POSIX_FADV_DONTNEED)
        return done

    def pwritev(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        check_aligned(buffers, offset)
        try:
            return os.pwritev(handle, buffers, offset)
        except OSError as error:
            if not self._refused(handle, error):
                raise
            return os.pwritev(handle, buffers, offset)

    def fdatasync(self, handle: int) -> None:
        os.fdatasync(handle)
        if handle in self._buffered:  # only clean pages can be dropped
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        if os.fstat(handle).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "the file was removed while in use")

    def allocate(self, handle: int, size: int) -> None:
        while _fallocate(handle, 0, 0, size):
            code = ctypes.get_errno()
            if code == errno.EINTR:
                continue
            if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise OSError(code, os.strerror(code))
            break
        os.ftruncate(handle, size)

    def close(self, handle: int) -> None:
        self._buffered.discard(handle)
        for directory, (_, lock) in list(self._locks.items()):
            if lock == handle:
                del self._locks[directory]
        os.close(handle)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def replace(self, source: Path, target: Path) -> None:
        source.replace(target)

    def sync_names(self, directory: Path) -> None:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def free_bytes(self, directory: Path) -> int:
        status = os.statvfs(directory)
        return status.f_bavail * status.f_frsize

    def _still_ours(self, directory: Path) -> None:
        """Raise FileNotFoundError where another directory took the place of the one that was locked.

        What lies below an unmounted filesystem, or was made anew after a removal, may be another manager's.
        """
        path, handle = self._locks.get(directory, (None, -1))
        if path is None:
            return
        try:
            here = os.stat(path, follow_symlinks=False)
        except NotADirectoryError as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from error
        if not os.path.samestat(here, os.fstat(handle)):
            raise FileNotFoundError(errno.ENOENT, "its lock file was replaced")

    def _refused(self, handle: int, error: OSError) -> bool:
        """Whether this is a filesystem that opens with O_DIRECT and then does not mean it. If so, do without."""
        if error.errno != errno.EINVAL or handle in self._buffered:
            return False
        fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) & ~os.O_DIRECT)
        self._go_buffered(handle)
        return True

    def _go_buffered(self, handle: int) -> None:
        self._buffered.add(handle)
        if not self._warned:
            self._warned = True
            log.warning(
                "ssd: %s is on a filesystem without O_DIRECT: every byte is copied once more, through the page cache, "
                "and takes memory there until it is dropped; use ext4 or xfs for full speed",
                os.path.realpath(f"/proc/self/fd/{handle}"),
            )


def _open(path: Path, flags: int) -> int:
    """A regular file's handle. Nothing else is waited for or followed: a named pipe would keep a start for ever."""
    try:
        handle = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError:
        try:
            mode = path.lstat().st_mode
        except OSError:
            mode = S_IFREG
        if not S_ISREG(mode):
            raise NotAFile(path, mode) from None
        raise
    mode = os.fstat(handle).st_mode
    if not S_ISREG(mode):
        os.close(handle)
        raise NotAFile(path, mode)
    return handle


def _check_owner(path: Path, status: os.stat_result, depth: str = "") -> None:
    """Raise Shared unless only this user, and root, may write to it."""
    if status.st_uid not in (os.geteuid(), 0):
        remedy = f"run `chown {depth}{os.geteuid()} {path}`, or run the manager as that user"
        raise Shared(path, f"it belongs to another user (uid {status.st_uid}): {remedy}")
    if status.st_mode & (S_IWGRP | S_IWOTH):
        who = "every user" if status.st_mode & S_IWOTH else "its group"
        instead = (
            ", or name a folder in it that is not there yet, which kvhold makes for this user alone" if depth else ""
        )
        raise Shared(path, f"{who} may write to it: run `chmod go-w {path}`{instead}")


def check_aligned(buffers: Sequence[memoryview], offset: int) -> None:
    """Raise :class:`Misaligned` unless O_DIRECT takes this anywhere."""
    if offset % BLOCK:
        raise Misaligned(f"file offset {offset} is no multiple of {BLOCK}")
    if not 0 < len(buffers) <= IOV_MAX:
        raise Misaligned(f"{len(buffers)} buffers in one call; 1 to {IOV_MAX} are possible")
    for buffer in buffers:
        size = buffer.nbytes
        if not size or size % BLOCK:
            raise Misaligned(f"a buffer of {size} bytes is no multiple of {BLOCK}")
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        if address % BLOCK:
            raise Misaligned(f"a buffer at address {address:#x} is not aligned to {BLOCK}")


def blocks(size: int) -> memoryview:
    """``size`` zero bytes of memory of our own, aligned."""
    return memoryview(mmap.mmap(-1, max(size, BLOCK)))[:size]


def read_all(files: FileLayer, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill ``buffers`` from ``offset`` on, in as many calls as it takes; the bytes read, fewer where the file ends."""
    return _all(files.preadv, handle, buffers, offset)


def write_all(files: FileLayer, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Write all of ``buffers``, in as many calls as it takes; the bytes written, fewer where the disk takes no more."""
    return _all(files.pwritev, handle, buffers, offset)


class _Call(Protocol):
    def __call__(self, handle: int, buffers: Sequence[memoryview], offset: int, /) -> int: ...


def _all(call: _Call, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
    done = 0
    rest = list(buffers)
    while rest:
        # What is short of a block is done again: the next call has to begin at a whole one.
        step = call(handle, rest[:IOV_MAX], offset + done) // BLOCK * BLOCK
        if step <= 0:
            break
        done += step
        while rest and step >= rest[0].nbytes:
            step -= rest.pop(0).nbytes
        if step:
            rest[0] = rest[0][step:]
    return done
