"""How one half of a vLLM engine finds its manager, and how it introduces itself."""

import hashlib
import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvhold.client.embedded import Embedded
from kvhold.client.keeper import Half, Keeper
from kvhold.engines.vllm.config import Settings, own_settings
from kvhold.host import default_dram
from kvhold.places import places, sockets
from kvhold.units import parse_size

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = init_logger(__name__)


def instance_of(config: "VllmConfig") -> str:
    """The engine's id: the same in its scheduler and its workers, another one for each data-parallel rank."""
    assert config.kv_transfer_config is not None
    return str(config.kv_transfer_config.engine_id)


def engine_label(config: "VllmConfig") -> str:
    """What a person recognises the engine by."""
    return f"vLLM {config.model_config.model}"


def served_name(config: "VllmConfig") -> str:
    """Under which name requests ask for the model."""
    model = config.model_config
    return str(getattr(model, "served_model_name", None) or model.model)


def own_sockets(instance: str) -> list[Path]:
    """Where the engine's own manager may listen: one for all data-parallel ranks, which vLLM numbers in the id."""
    engine = re.sub(r"_dp\d+$", "", instance)
    name = hashlib.sha256(f"{os.uname().nodename}\0{engine}".encode()).hexdigest()[:16]
    return [folder / f"e-{name}.sock" for folder in places()]


def make_keeper(half: Half, config: "VllmConfig", settings: Settings, reads: bool) -> Keeper:
    """A keeper for the manager that ``settings`` name; by default the engine's own, or else the host's."""
    if settings.socket is not None:
        return Keeper(half, [Path(settings.socket)], None, reads)
    dram = parse_size(settings.dram) if settings.dram is not None else default_dram()
    embedded = Embedded(own_sockets(instance_of(config)), dram, settings.huge_pages, settings.ssd)
    # The scheduler speaks for all of an engine's halves: what each of them finds is the same.
    preferred = None if reads else partial(_say_what_is_ignored, own_settings(settings))
    return Keeper(half, sockets(), embedded, reads, preferred)


def _say_what_is_ignored(names: list[str], path: Path) -> None:
    if names:
        log.warning(
            "kvhold: using the manager on %s, which has its own settings; those of this engine for %s are ignored; "
            "give them to `kvhold serve` instead",
            path,
            ", ".join(names),
        )
