"""Models of every kind of cache group: the smallest of each family that the CPU engine runs, and how to judge outputs.

Their weights are made in the engine's own process, by :func:`weights` around every engine, because each family has its
own names of tensors in a checkpoint.
"""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from testbed.engine.bed import LLM, Output, Tokens, close, engine, free_blocks, generate, prompt, scheduler, settle
from testbed.engine.kvhold_bed import check_nothing_held, connect, warm_up
from testbed.engine.models import write_config
from testbed.process.manager_process import Manager
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader


@dataclass(frozen=True)
class Family:
    """One model: its config, options of its engine, and a ``pool`` of blocks too small for several requests of 256
    tokens."""

    name: str
    kind: str
    pool: int
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        return write_config(folder / self.name, self.kind, **self.config)


FAMILIES = [
    Family("mistral", "mistral", 10),
    Family("gemma3", "gemma3", 40),
    Family("gpt_oss", "gpt_oss", 20),
    Family("llama4", "llama4", 36),
    Family("qwen3_next", "qwen3_next", 20, {"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}),
    Family("granite_partial", "granite", 14, {"mamba_d_state": 32}, {"prefix_match_unit": 32}),
    Family("falcon_h1", "falcon_h1", 12),
    Family("mamba2", "mamba2", 8),
    Family("lfm2", "lfm2", 24),
    Family("deepseek_v2", "deepseek_v2", 24, {}, {"block_size": 16}),
]

LONG_FAMILIES = [  # which have the groups of one above in another order or number
    Family("gemma2", "gemma2", 20),
    Family("granite", "granite", 20),
    Family("nemotron_h", "nemotron_h", 16),
]


# How answers are compared


LEAST_NOISE = 2.0**-17
"""What is allowed where answers may differ at all: some 60 roundings of float32, whatever was measured. A flipped sign
somewhere in a cache makes a hundred times as much, a wrong block more."""


def differing(outputs: Sequence[Output], expected: Sequence[Output], noise: float = 0.0) -> list[int]:
    """Which outputs are not what was expected; without ``noise`` to the last bit."""
    return [i for i, (a, b) in enumerate(zip(outputs, expected, strict=True)) if not (a == b or apart(a, b) <= noise)]


def apart(output: Output, expected: Output) -> float:
    """The greatest difference of the logprobs of each place's most probable token.

    Only as far as the tokens before it are the same: where two are about as probable, what follows is another text.
    """
    assert (len(output.tokens), output.finish_reason) == (len(expected.tokens), expected.finish_reason)
    same = next((i for i, (a, b) in enumerate(zip(output.tokens, expected.tokens, strict=True)) if a != b), None)
    until = None if same is None else same + 1
    pairs = zip(output.logprobs[:until], expected.logprobs[:until], strict=True)
    return max(abs(a - b) for a, b in pairs)


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

    def own(self, prompts: Sequence[Tokens], max_tokens: int | Sequence[int] = 8) -> list[Output]:
        """What the engine says without kvhold, one request after the other, each with what its own cache has by then.

        A request that resumes from kvhold does what one does that resumes from the engine's own cache at the same
        boundary: the same kernels on the same bytes, in the same order. So the two are equal to the last bit, on any
        processor. Of an engine that has no cache of its own, this is the truth, with how far a hit would reach.
        """
        limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        llm = self.alone()
        if self.caches_itself:
            return [generate(llm, [tokens], limit)[0] for tokens, limit in zip(prompts, limits, strict=True)]
        outputs: list[Output] = []
        earlier: list[Tokens] = []
        for tokens, output in zip(prompts, self.truth(prompts, limits), strict=True):
            outputs.append(replace(output, cached=max((self._common(tokens, other) for other in earlier), default=0)))
            earlier.append([*tokens, *output.tokens[:-1]])
        return outputs

    def _common(self, tokens: Tokens, earlier: Tokens) -> int:
        """How far full attention would hit in ``tokens`` after ``earlier``."""
        common = next((i for i, (a, b) in enumerate(zip(tokens, earlier, strict=False)) if a != b), len(earlier))
        return min(common, len(tokens) - 1) // self.unit * self.unit

    def equals_own(self, outputs: Sequence[Output], own: Sequence[Output]) -> bool:
        """Whether ``outputs`` are those of :meth:`own`, and as much was found for them."""
        noise = 0.0 if self.caches_itself else self.noise
        return not differing(outputs, own, noise) and [o.cached for o in outputs] == [o.cached for o in own]

    @cached_property
    def unit(self) -> int:
        """The distance in tokens at which hits can end."""
        return hit_unit(self.alone())

    @cached_property
    def caches_itself(self) -> bool:
        """Whether the engine has prefix caching for this model here: vLLM's plain CPU kernels of MLA have none."""
        return bool(self.alone().llm_engine.vllm_config.cache_config.enable_prefix_caching)

    @cached_property
    def recurrent(self) -> bool:
        return bool(scheduler(self.alone()).has_mamba_layers)

    @property
    def noise(self) -> float:
        """How far answers may be apart where an engine without kvhold cannot be made to compute in the same steps.

        Several times as far as the engine's own are apart, for the same prompts, measured where this runs: alone, in a
        batch, after hits of its own cache, in pieces, and decoded or prefilled. How kernels sum depends on all of this.
        """
        key = repr((self.family.kind, self.family.config, self.family.options))
        if key not in _noises:
            _noises[key] = max(4 * self._measure_noise(), LEAST_NOISE)
        return _noises[key]

    def _measure_noise(self) -> float:
        prompts = [prompt(100 + 31 * i, 200 + i) for i in range(5)]
        alone = self.truth(prompts, 12)
        following = [tokens + list(output.tokens[:8]) for tokens, output in zip(prompts, alone, strict=True)]
        pairs = list(zip(self.truth(following, 4), [after(output, 8) for output in alone], strict=True))
        for options in ({}, {"max_num_batched_tokens": 96}):
            for _ in range(2):
                pairs += zip(generate(self.alone(**options), prompts, 12), alone, strict=True)
        return max(apart(a, b) for a, b in pairs)

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


_noises: dict[str, float] = {}
"""By model, for all tests of this process."""


def after(output: Output, tokens: int) -> Output:
    """What follows the first ``tokens`` of an output."""
    return replace(output, tokens=output.tokens[tokens:], logprobs=output.logprobs[tokens:])


def hit_unit(llm: LLM) -> int:
    """The distance in tokens at which hits of this engine can end.

    It may depend on the processor: what vLLM's kernels there take decides how large a recurrent state is, and attention
    blocks are as large as states.
    """
    engine = scheduler(llm)
    return int(engine.hash_block_size if engine.mamba_partial_cache_hit else engine.block_size)


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
