"""How one half of an engine finds its manager."""

import hashlib
import logging
import os
from functools import partial
from pathlib import Path

from kvhold.client.attacher import Attacher, Half
from kvhold.client.embedded import Embedded
from kvhold.engines.common.mappings import Mappings
from kvhold.engines.common.settings import ManagerSettings, own_settings
from kvhold.folders import runtime_folders, sockets
from kvhold.host import default_dram
from kvhold.units import parse_size

log = logging.getLogger(__name__)


def own_sockets(engine: str) -> list[Path]:
    """Where the own manager of ``engine`` may listen: all its processes have this name in common."""
    name = hashlib.sha256(f"{os.uname().nodename}\0{engine}".encode()).hexdigest()[:16]
    return [folder / f"e-{name}.sock" for folder in runtime_folders()]


def make_attacher(half: Half, engine: str, settings: ManagerSettings, reads: bool) -> Attacher:
    """An attacher for the manager that ``settings`` name; by default that of ``engine``, or else the host's."""
    if settings.socket is not None:
        return Attacher(half, [Path(settings.socket)], None, reads)
    dram = parse_size(settings.dram) if settings.dram is not None else default_dram()
    embedded = Embedded(own_sockets(engine), dram, settings.huge_pages, settings.ssd, settings.eviction)
    # The scheduler's half speaks for all of an engine's: what each of them finds is the same.
    preferred = None if isinstance(half, Mappings) else partial(_say_what_is_ignored, own_settings(settings))
    return Attacher(half, sockets(), embedded, reads, preferred)


def _say_what_is_ignored(names: list[str], path: Path) -> None:
    if names:
        log.warning(
            "kvhold: using the manager on %s, which has its own settings; those of this engine for %s are ignored; "
            "give them to `kvhold serve` instead",
            path,
            ", ".join(names),
        )
