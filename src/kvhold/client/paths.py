"""Where managers listen."""

import hashlib
import os
import tempfile
from pathlib import Path


def runtime_dir() -> Path:
    """A directory of this user alone, the same for all of the user's processes on the host."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.path.isdir(base) and os.stat(base).st_uid == os.getuid():
        return Path(base) / "kvhold"
    return Path(tempfile.gettempdir()) / f"kvhold-{os.getuid()}"


def default_socket() -> Path:
    """Where ``kvhold serve`` listens and engines look first."""
    return runtime_dir() / "kvhold.sock"


def embedded_socket(engine_id: str) -> Path:
    """Where the manager of one engine listens: the same path in each of its processes and data-parallel ranks."""
    name = hashlib.sha256(f"{os.uname().nodename}\0{engine_id}".encode()).hexdigest()[:16]
    return runtime_dir() / f"e-{name}.sock"
