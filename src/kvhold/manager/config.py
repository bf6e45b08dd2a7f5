"""What a manager may be told."""

from dataclasses import dataclass, field
from pathlib import Path

from kvhold.core.limits import Limits
from kvhold.units import LEAST_SSD, format_size, parse_size

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
    """``dram`` bytes of arena; ``http`` is host and port of metrics and health; ``starter_fd`` makes it embedded."""

    socket: Path
    dram: int
    huge_pages: bool = False
    http: tuple[str, int] | None = None
    starter_fd: int | None = None
    ssd: tuple[SsdConfig, ...] = ()
    limits: Limits = field(default_factory=Limits)


def parse_ssd(text: str, min_free: int) -> SsdConfig:
    """``PATH:SIZE`` as the directory that it names. Raises ValueError."""
    path, colon, size = text.rpartition(":")
    if not colon or not path:
        raise ValueError(f"{text!r} is not PATH:SIZE, e.g. /var/cache/kvhold:500GiB")
    if not Path(path).is_absolute():
        raise ValueError(f"ssd: {path!r} is not an absolute path; write it like /var/cache/kvhold:500GiB")
    try:
        budget = parse_size(size)
    except ValueError as error:
        raise ValueError(f"ssd: {text!r}: {error}") from None
    if budget < LEAST_SSD:
        raise ValueError(f"ssd: {format_size(budget)} for {path} is too small; give at least {format_size(LEAST_SSD)}")
    return SsdConfig(Path(path), budget, min_free)
