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

# Every expert takes every token: which of them are chosen would otherwise turn a last bit into another answer.
_MOE = {"num_experts_per_tok": 4, "moe_intermediate_size": 64, "norm_topk_prob": True}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_head": 32,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "attention_bias": False,
}

# What differs from ``_BASE`` in the smallest model of each kind that the CPU engine starts; see ``families.py``.
_KINDS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
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
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "num_hidden_layers": 4,
        "sliding_window": 64,
        "query_pre_attn_scalar": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "head_dim": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 4,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "swiglu_limit": 7.0,
        "attention_bias": True,
    },
    "llama4": {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "num_hidden_layers": 4,
        "num_local_experts": 1,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 256,
        "attention_chunk_size": 64,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 1, 1, 0],
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
        "use_qk_norm": True,
        "attn_temperature_tuning": False,
        "moe_layers": [],
    },
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "num_experts": 4,
        **_MOE,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.25,
    },
    "granite": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "mamba", "mamba", "attention"],
        **_MAMBA2,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 256,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 0.17,
        "position_embedding_type": "rope",
    },
    "falcon_h1": {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        **_MAMBA2,
        "mamba_d_ssm": 256,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": True,
        "mamba_use_mlp": True,
        "projectors_bias": False,
        "mlp_bias": False,
        "key_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 1.0,
        "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0,
        "ssm_multipliers": [1.0] * 5,
        "mlp_multipliers": [1.0, 1.0],
    },
    "nemotron_h": {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M-M*",
        "layers_block_type": ["mamba", "mlp", "mamba", "attention"],
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "n_groups": 1,
        "conv_kernel": 4,
        "expand": 2,
        "chunk_size": 32,
        "use_conv_bias": True,
        "use_bias": False,
        "mlp_bias": False,
        "attention_bias": False,
        "mamba_hidden_act": "silu",
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": 1e-5,
        "mamba_proj_bias": False,
        "residual_in_fp32": False,
        "norm_eps": 1e-5,
    },
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "conv_L_cache": 3,
        "conv_bias": False,
        "block_dim": 128,
        "block_ff_dim": 256,
        "block_auto_adjust_ff_dim": False,
        "block_multiple_of": 32,
        "norm_eps": 1e-5,
        "conv_dim": 128,
        "conv_use_xavier_init": True,
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
        **_MOE,
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
        "chunk_size": 32,
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


def write_gemma3(path: Path, *, seed: int = 0, **config_overrides: Any) -> Path:
    """The same for a Gemma 3, with three groups of sliding windows beside one of full attention."""
    config = {**_BASE, **_KINDS["gemma3"], **config_overrides}
    _write_json(path, config)
    weights = {
        name: tensor * 0 if "norm" in name else tensor  # its norms add one
        for name, tensor in _llama_weights(config, seed).items()
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, size in (
            ("pre_feedforward_layernorm", config["hidden_size"]),
            ("post_feedforward_layernorm", config["hidden_size"]),
            ("self_attn.q_norm", config["head_dim"]),
            ("self_attn.k_norm", config["head_dim"]),
        ):
            weights[f"{prefix}.{name}.weight"] = torch.zeros(size, dtype=weights["model.norm.weight"].dtype)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def write_config(path: Path, kind: str, **overrides: Any) -> Path:
    """Write the config of another kind of model, a key of ``_KINDS``, without weights."""
    _write_json(path, {**_BASE, **_KINDS[kind], **overrides})
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
