"""SGLang's arguments of an engine that is not started, over a model that nobody computes with."""

import json
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.server_args import ServerArgs

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}


def write_model(folder: Path, weights: bytes = b"x" * 999) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "pytorch_model.bin").write_bytes(weights)
    return folder


def resolved(folder: Path, **given: Any) -> Any:
    known = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "skip_tokenizer_init": True,
        "enable_hierarchical_cache": True,
        "hicache_mem_layout": "page_first_direct",
    }
    args = ServerArgs(model_path=str(folder), **known | given)
    args.resolve_once()
    return args


def storage(**given: Any) -> HiCacheStorageConfig:
    known = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "llama",
        "extra_config": {"interface_v1": 1},
    }
    return HiCacheStorageConfig(**known | given)
