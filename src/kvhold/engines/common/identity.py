"""The names of what is stored: equal for two engines only if every byte of an object means the same to both.

What an engine is made of it describes itself, as plain data whose digest all of its workers report.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhold.engines.common.weights import weights_digest

PRIVATE = "private"
"""Stands for what cannot be identified: an engine with it in its identity shares nothing with any other."""
LAYOUT_VERSION = 2
"""Of kvhold's own order of bytes in an object."""


@dataclass(frozen=True, slots=True)
class Hashing:
    """How an engine makes the keys of its blocks, of ``key_bytes`` each.

    ``private`` says that no other engine can have the same ones, because their seed is random.
    """

    algorithm: str
    seed: str
    key_bytes: int
    private: bool


def digest(identity: dict[str, Any]) -> bytes:
    """The 32-byte digest of what an engine is made of."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).digest()


def named_weights(name: str) -> str:
    """A string that stands for weights which the operator has named."""
    return f"named {hashlib.sha256(name.encode()).hexdigest()}"


def weights_in(folder: Path | None) -> str:
    """A string that differs for other weights than those in ``folder``; PRIVATE where they cannot be identified."""
    found = weights_digest(folder) if folder is not None else None
    return found.hex() if found is not None else PRIVATE


def namespace(digests: Sequence[bytes], hashing: Hashing, salt: bytes) -> bytes:
    """The namespace of an engine whose workers agree on ``digests``, all of one length.

    ``salt`` is empty, or a :func:`variant`.
    """
    return hashlib.sha256(b"\0".join((*digests, hashing.algorithm.encode(), hashing.seed.encode(), salt))).digest()


def variant(epoch: str, salt: bytes, adapter: bytes) -> bytes:
    """What sets namespaces of the same weights apart: the operator's epoch, a re-keying's salt, an adapter's digest.

    Empty if there is none of them.
    """
    parts = (epoch.encode(), salt, adapter)
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest() if any(parts) else b""
