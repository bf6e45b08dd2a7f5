"""The engine's block hashes: how they are made, and what they do not say of a request.

Blocks are known by vLLM's own hashes, over a request's tokens, adapter, images, salt and prompt embeddings. Where a
request's KV depends on something else, another request may have the same hashes and other KV.
"""

import os
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvhold.engines.common.identity import Hashing

if TYPE_CHECKING:
    import torch
    from vllm.v1.request import Request

log = init_logger(__name__)

_RANDOM = ("xxhash", "xxhash_cbor")
"""Algorithms whose seed is random unless the environment has one."""
_BESIDE_TOKENS = "compressed_token_type_ids"
"""Of a pooling request: segments of its prompt, which are an input of the model."""


def tell_all(request: "Request", dtype: "torch.dtype") -> bool:
    """Whether whatever has the same block hashes as ``request`` has the same KV, in a model that computes in ``dtype``.

    Three inputs are left out of the hashes: which positions of a prompt take their embeddings from tokens and which
    from the given rows, where both occur (a row's position counts as token 0); the type of the given rows, of which
    only the bytes are hashed; and segments of a pooling request.
    """
    embeds, pooling = request.prompt_embeds, request.pooling_params
    return (
        request.prompt_is_token_ids is None
        and (embeds is None or embeds.dtype == dtype)
        and not (pooling is not None and _BESIDE_TOKENS in (pooling.extra_kwargs or {}))
    )


def hashing(algorithm: str) -> Hashing:
    """How block hashes are made: read at first use, for vLLM settles their seed after it has built the scheduler."""
    from vllm.v1.core.kv_cache_utils import NONE_HASH, get_none_hash_seed

    private = algorithm in _RANDOM and "PYTHONHASHSEED" not in os.environ
    if private:
        log.warning_once(
            "kvhold: block hashes by %s have a random seed, so this engine shares with no other; "
            "set PYTHONHASHSEED or use sha256",
            algorithm,
        )
    return Hashing(algorithm, get_none_hash_seed(), len(NONE_HASH), private)
