"""Where managers listen and everybody looks: folders that do not follow the environment of whoever asks."""

import os
import stat
from pathlib import Path

VARIABLE = "KVHOLD_RUNTIME_DIR"
"""Names the only folder, for containers that share one, and for tests."""
DEFAULT = "kvhold.sock"
"""What ``kvhold serve`` listens on, in one of the folders."""
_GIVEN = Path("/run/kvhold")
"""A service manager makes it for its service's user; it is nobody else's to make."""


class NoFolder(ValueError):
    """No folder can have a socket; the message says why and what to do."""


def runtime_folders() -> list[Path]:
    """The folders in which this user's managers may be, the best first; they need not exist."""
    if chosen := os.environ.get(VARIABLE):
        return [Path(chosen)]
    user = os.getuid()
    return [_GIVEN, Path(f"/run/user/{user}/kvhold"), Path(f"/tmp/kvhold-{user}"), Path(f"/dev/shm/kvhold-{user}")]


def sockets(name: str = DEFAULT) -> list[Path]:
    """Where a manager that listens on ``name`` may be found. Folders of other users are left out."""
    return [folder / name for folder in runtime_folders() if _flaw(folder) is None or not folder.exists()]


def new_socket(name: str = DEFAULT) -> Path:
    """Where a manager is to listen on ``name``, in a folder that is made if it is missing. Raises NoFolder."""
    flaws = []
    for folder in runtime_folders():
        flaw = make(folder)
        if flaw is None:
            return folder / name
        flaws.append(f"{folder} ({flaw})")
    raise NoFolder(
        f"socket: no folder can have one: {', '.join(flaws)}; make one of them usable, set {VARIABLE} to another, or "
        "name a manager's socket"
    )


def make(folder: Path) -> str | None:
    """Make one of :func:`runtime_folders` if it is missing; why nobody can listen in it, or None."""
    try:
        if folder != _GIVEN:
            folder.mkdir(mode=0o700, exist_ok=True, parents=bool(os.environ.get(VARIABLE)))
    except OSError as error:
        return str(error.strerror)
    return _flaw(folder) or (None if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written to")


def _flaw(folder: Path) -> str | None:
    """Why a socket in ``folder`` may be anybody's; None if it is this user's alone to make."""
    try:
        found = folder.stat() if os.environ.get(VARIABLE) else folder.lstat()
    except OSError as error:
        return str(error.strerror)
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a folder"
    if os.environ.get(VARIABLE):  # whoever set it answers for it; peers are checked by their user all the same
        return None if found.st_uid in (os.getuid(), 0) else "it belongs to another user"
    if found.st_uid != os.getuid():
        return "it belongs to another user"
    if found.st_mode & 0o022:
        return "others may write to it"
    return None


def is_default(path: Path) -> bool:
    """Whether ``path`` is one of those where commands and engines look by themselves."""
    return path.parent in runtime_folders()
