"""Tiny models on disk: no network, no tokenizer, weights from a seed."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}

# Shapes that kvhold has to refuse or treat specially; the engine starts them, nobody reads their output.
_KINDS: dict[str, dict[str, Any]] = {
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 64,
        "query_pre_attn_scalar": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": 10000.0,
        "tie_word_embeddings": True,
    },
    "deepseek_v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "head_dim": 64,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 99,
        "moe_layer_freq": 1,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
    },
    "mamba2": {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "state_size": 64,
        "num_heads": 8,
        "n_groups": 1,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "expand": 2,
        "time_step_rank": 8,
        "use_bias": False,
        "use_conv_bias": True,
        "chunk_size": 64,
        "residual_in_fp32": True,
        "rms_norm": True,
    },
}


def write_llama(
    path: Path, *, seed: int = 0, layers: int = 2, kv_heads: int = 2, dtype: str = "float32", **config_overrides: Any
) -> Path:
    """Write a Llama whose greedy output depends on every KV byte of the context, and return its folder.

    Measured with 500 tokens of context: values of three times the usual size let attention decide the output, and
    queries and keys of one and a half leave no position without weight. Then a flipped sign anywhere in the cache
    changes logprobs, and even nine in ten flips of the lowest byte do (with queries and keys of three: four in five,
    and one in six). With vLLM's own dummy weights (±1e-3) a destroyed cache would go unnoticed.
    """
    shape = {"num_hidden_layers": layers, "num_key_value_heads": kv_heads, "torch_dtype": dtype}
    config = {**_BASE, **_LLAMA, **shape, **config_overrides}
    _write_json(path, config)
    save_file(_llama_weights(config, seed), path / "model.safetensors", metadata={"format": "pt"})
    return path


def write_config(path: Path, kind: str) -> Path:
    """Write the config of another kind of model (``mistral``, ``gemma3``, ``deepseek_v2``, ``mamba2``), no weights."""
    _write_json(path, {**_BASE, **_KINDS[kind]})
    return path


def _write_json(path: Path, config: dict[str, Any]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))


def _llama_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["torch_dtype"])
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]

    def normal(rows: int, columns: int, std: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * std).to(dtype)

    def linear(outputs: int, inputs: int, gain: float = 1.0) -> torch.Tensor:
        return normal(outputs, inputs, gain * inputs**-0.5)

    weights = {"model.embed_tokens.weight": normal(vocab, hidden, 0.05)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": torch.ones(hidden, dtype=dtype),
            f"{prefix}.self_attn.q_proj.weight": linear(queries, hidden, 1.5),
            f"{prefix}.self_attn.k_proj.weight": linear(keys, hidden, 1.5),
            f"{prefix}.self_attn.v_proj.weight": linear(keys, hidden, 3.0),
            f"{prefix}.self_attn.o_proj.weight": linear(hidden, queries),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden, dtype=dtype),
            f"{prefix}.mlp.gate_proj.weight": linear(inner, hidden),
            f"{prefix}.mlp.up_proj.weight": linear(inner, hidden),
            f"{prefix}.mlp.down_proj.weight": linear(hidden, inner),
        }
    weights["model.norm.weight"] = torch.ones(hidden, dtype=dtype)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = linear(vocab, hidden)
    return weights
