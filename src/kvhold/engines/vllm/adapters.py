"""vLLM's LoRA adapters: which one a request is with, and what of the engine's options decides what they do."""

from typing import TYPE_CHECKING

from kvhold.engines.common.adapters import Adapter

if TYPE_CHECKING:
    from vllm.config import LoRAConfig
    from vllm.lora.request import LoRARequest

RESET = "call reset_prefix_cache(reset_connector=True)"
_OPTIONS = (
    "lora_dtype",
    "target_modules",
    "max_lora_rank",
    "fully_sharded_loras",
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
    "enable_tower_connector_lora",
)


def adapter_of(request: "LoRARequest | None") -> Adapter | None:
    """The adapter of a request; None if it is with none."""
    if request is None:
        return None
    form = b"3d" if request.is_3d_lora_weight else b""
    return Adapter(request.lora_name, request.lora_int_id, request.lora_path, form)


def options_of(config: "LoRAConfig | None") -> bytes:
    """What of the engine's own options decides what an adapter does."""
    return repr([(name, str(getattr(config, name, None))) for name in _OPTIONS]).encode()
