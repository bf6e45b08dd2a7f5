"""Random-weight Llamas that SGLang loads from a folder."""

from pathlib import Path

VOCABULARY = 512
LAYERS, KV_HEADS, HEAD = 4, 4, 32


def make_llama(folder: Path, seed: int = 1) -> Path:
    """One with four layers in float32; another ``seed`` makes other weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
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
