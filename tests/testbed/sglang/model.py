"""Random-weight Llamas that SGLang loads from a folder."""

import json
from pathlib import Path

VOCABULARY, HIDDEN = 512, 256
LAYERS, KV_HEADS, HEAD = 4, 4, 32


def make_llama(folder: Path, seed: int = 1) -> Path:
    """One with four layers in float32; another ``seed`` makes other weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=2048,
        initializer_range=0.2,  # so that what comes next depends on all that came before
        bos_token_id=0,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


def make_adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter of such a model, in place of what was in ``folder``."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for name, size in (("q_proj", HIDDEN), ("v_proj", KV_HEADS * HEAD)):
            where = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{where}.lora_A.weight"] = torch.randn(4, HIDDEN, generator=random) * 0.2
            weights[f"{where}.lora_B.weight"] = torch.randn(size, 4, generator=random) * 0.2
    save_file(weights, folder / "adapter_model.safetensors")
    return folder
