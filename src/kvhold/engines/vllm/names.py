"""By which names a vLLM engine is known: to its own halves, to its manager, to people."""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def instance_of(config: "VllmConfig") -> str:
    """The engine's id: the same in its scheduler and its workers, another one for each data-parallel rank."""
    assert config.kv_transfer_config is not None
    return str(config.kv_transfer_config.engine_id)


def engine_of(instance: str) -> str:
    """What all data-parallel ranks, which vLLM numbers in the id, are of together."""
    return re.sub(r"_dp\d+$", "", instance)


def engine_label(config: "VllmConfig") -> str:
    """What a person recognises the engine by."""
    return f"vLLM {config.model_config.model}"


def served_name(config: "VllmConfig") -> str:
    """Under which name requests ask for the model."""
    model = config.model_config
    return str(getattr(model, "served_model_name", None) or model.model)
