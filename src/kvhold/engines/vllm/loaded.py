"""What is loaded in a worker: a digest of the model's tensors, whatever has put them there.

vLLM tells a connector neither that weights were changed nor that they were not: a reset of its caches comes before an
update, after one, and without any. So what is loaded is looked at.
"""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from vllm.logger import init_logger
from vllm.v1.worker.worker_base import WorkerBase

from kvhold.engines.vllm.callers import callers

if TYPE_CHECKING:
    from torch import nn

log = init_logger(__name__)

_PIECE = 64 << 20
"""Bytes that are copied from a device and hashed at once; each thread has one piece."""


class Loaded:
    """The models of the worker that is being set up by the caller's callers.

    vLLM hands no connector its model. The worker is on the stack while it makes its connector.
    """

    def __init__(self) -> None:
        self._worker = next(callers(WorkerBase), None)
        self._started = False
        self._packed: WeakKeyDictionary[FunctionType, bytes] = WeakKeyDictionary()  # what stands for their weights

    def digest(self) -> bytes:
        """A SHA-256 over all parameters and buffers as they are now; empty if they cannot be looked at."""
        try:
            models = self._models()
            digest = hashlib.sha256()
            for model in models:
                for name, module in model.named_modules():
                    for found in self._taken_elsewhere(module):
                        digest.update(f"{name}\0".encode() + found)
            for name, found in _digests(models):
                digest.update(f"{name}\0".encode() + found)
            self._started = True
            return digest.digest() if models else b""
        except LookupError as error:
            log.info(
                "kvhold: after a reset this engine starts cold, because its weights cannot be looked at: %s", error
            )
            return b""
        except Exception:
            log.exception("kvhold: the loaded weights cannot be looked at")
            return b""

    def _taken_elsewhere(self, module: "nn.Module") -> list[bytes]:
        """What stands for weights that were taken out of a module, and left an empty parameter behind.

        vLLM's CPU backend packs a layer's weights into a function, which nobody can look into and nothing changes. One
        that was there at the start has what the model's files say, another one may have any. Raises LookupError where
        there is no such function.
        """
        empty = [name for name, values in module.named_parameters(recurse=False) if not values.numel()]
        functions = [value for value in vars(module).values() if isinstance(value, FunctionType)] if empty else []
        if empty and not functions:
            raise LookupError(f"{type(module).__name__} keeps no {' and no '.join(empty)}")
        return [self._packed.setdefault(function, os.urandom(16) if self._started else b"") for function in functions]

    def _models(self) -> "list[nn.Module]":
        if self._worker is None:
            return []
        runner = self._worker.model_runner
        drafter = getattr(runner, "get_draft_model", lambda: None)()
        return [self._worker.get_model(), *([drafter] if drafter is not None else [])]


def _digests(models: "list[nn.Module]") -> Iterator[tuple[str, bytes]]:
    """Names and digests of all pieces of all tensors."""

    def hashed(piece: tuple[str, torch.Tensor]) -> tuple[str, bytes]:
        name, values = piece
        return name, hashlib.sha256(values.cpu().contiguous().view(torch.uint8).numpy()).digest()

    with ThreadPoolExecutor(max(1, min(8, len(os.sched_getaffinity(0))))) as threads:
        yield from threads.map(hashed, [piece for model in models for piece in _pieces(model)])


def _pieces(model: "nn.Module") -> Iterator[tuple[str, torch.Tensor]]:
    named = [*model.named_parameters(), *model.named_buffers()]
    for outer, tensor in named:
        for name, values in _plain(outer, tensor.detach()):
            flat = values.reshape(-1)
            count = max(1, _PIECE // max(1, flat.element_size()))
            label = f"{name} {values.dtype} {tuple(values.shape)}"
            for start in range(0, max(1, flat.numel()), count):
                yield f"{label} {start}", flat[start : start + count]


def _plain(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor that has its values in others (quantised ones may) as those."""
    partitions = getattr(tensor, "partitions", None)
    if isinstance(partitions, dict):
        for key, part in partitions.items():
            yield from _plain(f"{name}.{key}", part)
    elif is_traceable_wrapper_subclass(tensor):
        for attribute in tensor.__tensor_flatten__()[0]:
            yield from _plain(f"{name}.{attribute}", getattr(tensor, attribute))
    else:
        yield name, tensor
