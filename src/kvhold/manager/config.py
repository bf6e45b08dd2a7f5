"""What a manager may be told."""

from dataclasses import dataclass
from pathlib import Path


class ConfigError(Exception):
    """A setting that cannot be used; the message names it, its value and the remedy."""


class SocketTaken(ConfigError):
    """Another manager has the socket."""


@dataclass(frozen=True)
class ManagerConfig:
    """``dram`` bytes of arena; ``http`` is host and port of metrics and health; ``starter_fd`` makes it embedded."""

    socket: Path
    dram: int
    huge_pages: bool = False
    http: tuple[str, int] | None = None
    starter_fd: int | None = None
