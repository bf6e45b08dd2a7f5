"""Models of every kind of cache group: the smallest of each family that the CPU engine runs, and how to judge outputs.

Their weights are made in the engine's own process, by :func:`weights` around every engine, because each family has its
own names of tensors in a checkpoint.
"""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from bed import LLM, Output, Tokens, close, engine, free_blocks, generate, reference, settle
from kvhold_bed import check_nothing_held, connect, warm_up
from manager_process import Manager
from models import write_config
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader


@dataclass(frozen=True)
class Family:
    """One model and what it allows.

    ``unit`` is the distance in tokens at which hits can end, ``pool`` a number of blocks that is too small for several
    requests of 256 tokens.

    The engine itself computes the same logprobs to the last bit for most models in whatever way it gets there. For some
    that does not hold between requests ``batched`` and alone, between tokens ``decoded`` one by one and prefilled, or
    between a prompt ``resumed`` after a hit and one prefilled at once, because other kernels or other orders of
    summation are used there; then these bound the difference. The engine without kvhold is tested to stay within them,
    and to differ from itself where any is not zero.
    """

    name: str
    kind: str
    unit: int
    pool: int
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    batched: float = 0.0
    decoded: float = 0.0
    resumed: float = 0.0
    caches_itself: bool = True
    """Whether the CPU engine has prefix caching for it. Without, nothing of its own says how far a hit reaches."""
    keeps_decoded: bool = True
    """Whether the engine ever has something to keep of what follows a prompt: there it keeps no recurrent states."""

    @property
    def any_noise(self) -> float:
        return max(self.batched, self.decoded, self.resumed)

    def write(self, folder: Path) -> Path:
        return write_config(folder / self.name, self.kind, **self.config)


NOISE = 2e-5
"""In float32. Measured are 4e-6; a flipped sign somewhere in a cache makes 1e-3, a wrong block more."""
NOISE_BFLOAT16 = 0.5
"""Measured are 0.3, with other tokens wherever two are as probable; so such outputs are compared up to there."""

_MAMBA2: dict[str, Any] = {"batched": NOISE, "decoded": NOISE, "keeps_decoded": False}
_GDN: dict[str, Any] = {"decoded": NOISE_BFLOAT16, "keeps_decoded": False}

FAMILIES = [
    Family("mistral", "mistral", 32, 10),
    Family("gemma3", "gemma3", 32, 40),
    Family("gpt_oss", "gpt_oss", 32, 20),
    Family("llama4", "llama4", 32, 36, {}, {}, NOISE, NOISE, NOISE),
    Family("qwen3_next", "qwen3_next", 64, 20, {"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}, **_GDN),
    Family("granite_partial", "granite", 32, 14, {"mamba_d_state": 32}, {"prefix_match_unit": 32}, **_MAMBA2),
    Family("falcon_h1", "falcon_h1", 64, 12, **_MAMBA2),
    Family("mamba2", "mamba2", 32, 8, **_MAMBA2),
    Family("lfm2", "lfm2", 32, 24, decoded=NOISE, keeps_decoded=False),
    Family("deepseek_v2", "deepseek_v2", 16, 24, {}, {"block_size": 16}, NOISE, NOISE, NOISE, caches_itself=False),
]

LONG_FAMILIES = [  # which have the groups of one above in another order or number
    Family("gemma2", "gemma2", 32, 20),
    Family("granite", "granite", 64, 20, **_MAMBA2),
    Family("nemotron_h", "nemotron_h", 64, 16, **_MAMBA2),
]


def differing(outputs: Sequence[Output], expected: Sequence[Output], noise: float) -> list[int]:
    """Which outputs are not what was expected."""
    return [i for i, (a, b) in enumerate(zip(outputs, expected, strict=True)) if not same(a, b, noise)]


def same(output: Output, expected: Output, noise: float) -> bool:
    """Equal, or equal tokens with logprobs within ``noise``.

    With the noise of bfloat16 another token may be the most probable one; its logprob must then be within the noise of
    the expected token's, and what follows is another text.
    """
    if output == expected or not noise:
        return output == expected
    if (len(output.tokens), output.finish_reason) != (len(expected.tokens), expected.finish_reason):
        return False
    for i in range(len(expected.tokens)):
        if abs(output.logprobs[i] - expected.logprobs[i]) > noise:
            return False
        if output.tokens[i] != expected.tokens[i]:
            return noise >= NOISE_BFLOAT16
    return True


def distance(output: Output, expected: Output) -> float:
    """The greatest difference of logprobs."""
    return max(abs(a - b) for a, b in zip(output.logprobs, expected.logprobs, strict=True))


class Bench:
    """One family's engines, with kvhold and without, one at a time, and a manager that outlives them."""

    def __init__(self, family: Family, folder: Path, manager: Manager) -> None:
        self.family = family
        self.manager = manager
        self._folder = family.write(folder)
        self._truth: dict[tuple[tuple[int, ...], int], Output] = {}
        self._open: tuple[tuple[bool, dict[str, Any]], LLM, int] | None = None

    def truth(self, prompts: Sequence[Tokens], max_tokens: int | Sequence[int] = 8) -> list[Output]:
        """What the engine says without kvhold, each request alone and cold. Ends the open engine if it has to be asked.

        With its own prefix cache, emptied before each request: with one it prefills models with recurrent states in
        other pieces than without, and a piece of one token goes to the kernels for decoding.
        """
        limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        keys = [(tuple(tokens), limit) for tokens, limit in zip(prompts, limits, strict=True)]
        for tokens, limit in dict.fromkeys(key for key in keys if key not in self._truth):
            [self._truth[tokens, limit]] = generate(self.alone(), [list(tokens)], limit)
        return [self._truth[key] for key in keys]

    def uncached(self, prompts: Sequence[Tokens], max_tokens: int = 8) -> list[Output]:
        """The same without its own prefix cache."""
        self.close()
        return reference(self._folder, prompts, max_tokens, **self.family.options)

    def alone(self, **options: Any) -> LLM:
        """The engine without kvhold; the one that is open if it has these options. Its own cache is empty."""
        return self._start((False, options), None, options)

    def engine(self, credits: int = 64, settings: dict[str, Any] | None = None, **options: Any) -> LLM:
        """The engine with kvhold, attached; the one that is open if it has these options. Its own cache is empty."""
        wanted = settings or {}
        return self._start((True, options | wanted), connect(self.manager, **wanted), options, credits)

    def _start(
        self,
        key: tuple[bool, dict[str, Any]],
        connector: dict[str, Any] | None,
        options: dict[str, Any],
        credits: int = 0,
    ) -> LLM:
        if self._open is None or self._open[0] != key:
            self.close()
            llm = engine(self._folder, connector=connector, **self.family.options | options)
            try:
                if connector is not None:
                    warm_up(llm, credits)
                    assert llm.reset_prefix_cache()
            except BaseException:
                close(llm)
                raise
            self._open = key, llm, free_blocks(llm)
        self.forget()
        return self._open[1]

    def forget(self) -> None:
        """Empty the engine's own cache; kvhold keeps what it has."""
        assert self._open is not None
        settle(self._open[1])
        assert self._open[1].reset_prefix_cache()

    def check_nothing_held(self) -> None:
        assert self._open is not None
        _, llm, free = self._open
        self.forget()
        check_nothing_held(llm, free, self.manager.socket)

    def close(self) -> None:
        if self._open is not None:
            opened, self._open = self._open, None
            close(opened[1])


# Weights


@contextmanager
def weights(seed: int = 0) -> Iterator[None]:
    """While this is open, engines without a checkpoint get weights that make their output depend on their whole cache.

    The same in every engine of this process. See ``models.write_llama`` for the sizes; a recurrent state must in
    addition fade so slowly that what was put into it hundreds of tokens ago still matters.
    """
    load = DummyModelLoader.load_weights

    def also(loader: DummyModelLoader, model: torch.nn.Module, config: Any) -> None:
        load(loader, model, config)
        with torch.no_grad():
            for place, module in model.named_modules():
                for name, tensor in module.named_parameters(recurse=False):
                    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {place}.{name}".encode()))
                    tensor.copy_(_values(module, name, tensor, generator))

    with patch.object(DummyModelLoader, "load_weights", also), _mamba_checkpoints(), _flat_rotations():
        yield


def _values(module: torch.nn.Module, name: str, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.rand(like.shape, generator=generator) * (high - low) + low

    if name in ("A", "A_log"):
        decay = uniform(0.01, 0.1)
        return decay.log() if name == "A_log" else -decay
    if name == "dt_bias":
        return uniform(-4.0, -2.0)
    if name == "D":
        return torch.ones(like.shape)
    kind = type(module).__name__
    if like.ndim == 1:
        return torch.full(like.shape, float(name == "weight" and "Norm" in kind and "Gemma" not in kind))
    values = torch.randn(like.shape, generator=generator)
    if "Embedding" in kind:
        return values * 0.05
    values *= like.shape[-1] ** -0.5
    if isinstance(module, QKVParallelLinear):
        values *= 1.5
        values[-module.num_kv_heads * module.v_head_size :] *= 2.0
    return values


@contextmanager
def _mamba_checkpoints() -> Iterator[None]:
    """vLLM 0.32's CPU kernel of Mamba2 does not return the states inside of a chunk that the scheduler counts on.

    With prefix caching it dies of an IndexError in ``varlen_states[last_chunk_indices_p]``. Told that there are none,
    the scheduler ends chunks where it wants a state, as it does for kernels of other models.
    """
    spec = MambaMixer2.get_kv_cache_spec

    def without(mixer: MambaMixer2, config: Any) -> Any:
        found = spec(mixer, config)
        return found and replace(found, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)

    with patch.object(MambaMixer2, "get_kv_cache_spec", without):
        yield


@contextmanager
def _flat_rotations() -> Iterator[None]:
    """vLLM 0.32's CPU kernel of rotary embeddings takes queries of [tokens, heads, lanes] for [batch, tokens, lanes].

    LFM2 gives it such ones; what a token's keys are then depends on its place in the batch.
    """
    forward = RotaryEmbedding.forward_cpu

    def flat(rotary: RotaryEmbedding, positions: torch.Tensor, *states: torch.Tensor | None) -> Any:
        rotated = forward(rotary, positions, *[x if x is None else x.reshape(len(x), -1) for x in states])
        return tuple(x if x is None else x.view(like.shape) for x, like in zip(rotated, states, strict=True))

    with patch.object(RotaryEmbedding, "forward_cpu", flat):
        yield
