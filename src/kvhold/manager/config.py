"""The settings of a manager, checked."""

from dataclasses import dataclass, field
from pathlib import Path

from kvhold.core.limits import Limits
from kvhold.units import parse_directory

MIN_FREE = 1 << 30
"""What stays free on an SSD's filesystem, unless told otherwise."""


class ConfigError(Exception):
    """A setting that cannot be used; the message names it, its value and the remedy."""


class SocketTaken(ConfigError):
    """Another manager has the socket."""


@dataclass(frozen=True)
class SsdConfig:
    """A directory that may hold ``size`` bytes of records, while ``min_free`` bytes of its filesystem stay free."""

    path: Path
    size: int
    min_free: int


@dataclass(frozen=True)
class ManagerConfig:
    """``dram`` bytes of arena; ``http`` is host and port of metrics and health; ``starter_fd`` makes it embedded.

    ``eviction`` is one of :data:`kvhold.core.eviction.POLICIES`. With ``audit`` it
    checks its own books while it serves.
    """

    socket: Path
    dram: int
    huge_pages: bool = False
    eviction: str = "lru"
    http: tuple[str, int] | None = None
    starter_fd: int | None = None
    ssd: tuple[SsdConfig, ...] = ()
    limits: Limits = field(default_factory=Limits)
    audit: bool = False


def parse_ssd(text: str, min_free: int) -> SsdConfig:
    """``PATH:SIZE`` as the directory that it names. Raises ValueError."""
    return SsdConfig(*parse_directory(text), min_free)
