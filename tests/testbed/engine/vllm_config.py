"""A configuration of vLLM's for a model of which only its shape is there."""

import json
from pathlib import Path
from unittest.mock import patch

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    LoadConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.model_executor.models import registry


def tiny_config(folder: Path, max_len: int, connector: KVTransferConfig | None = None) -> VllmConfig:
    """One for all engines of a test, of which each takes a changed copy; ``folder`` gets what describes the model."""
    shape = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": max_len}
    (folder / "config.json").write_text(json.dumps(shape | names | {"intermediate_size": 64, "torch_dtype": "float32"}))
    with patch.object(registry, "_run_in_subprocess", lambda inspect: inspect()):  # which would import vLLM again
        return VllmConfig(
            model_config=ModelConfig(
                model=str(folder), skip_tokenizer_init=True, max_model_len=max_len, dtype="float32"
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=max_len, max_model_len=max_len, is_encoder_decoder=False
            ),
            cache_config=CacheConfig(block_size=16, enable_prefix_caching=True),
            device_config=DeviceConfig("cpu"),
            load_config=LoadConfig(load_format="dummy"),
            kv_transfer_config=connector,
        )
