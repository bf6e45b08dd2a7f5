"""What a manager takes: bounds that both sides check."""

from collections.abc import Sequence

from kvhold.protocol.framing import MAX_FRAME, MAX_KEYS, SHARD_ALIGN

NAMESPACE_BYTES = 32
MAX_KEY_BYTES = 64
MAX_SPACES = 64
"""Spaces that one session may have open."""
MAX_SHARD = 1 << 40
"""Bytes of one rank's part of an object are below it."""
MAX_NUMBER = 1 << 32
"""Groups and depths are below it: it is what a record on an SSD has room for."""
_MARGIN = 4096
"""Bytes of a frame that its other fields may take."""


def space_fault(namespace: bytes, group: int, key_bytes: int, shards: Sequence[int], slots: int) -> str:
    """What keeps a space from being opened; empty if nothing does. ``shards`` are bytes by rank."""
    if len(namespace) != NAMESPACE_BYTES:
        return f"a namespace of {len(namespace)} bytes; it has {NAMESPACE_BYTES}"
    if not 0 <= group < MAX_NUMBER:
        return f"group {group}; it is from 0 to {MAX_NUMBER - 1}"
    if not 0 < key_bytes <= MAX_KEY_BYTES:
        return f"keys of {key_bytes} bytes; they have 1 to {MAX_KEY_BYTES}"
    for shard in shards:
        if not 0 < shard < MAX_SHARD or shard % SHARD_ALIGN:
            return f"a shard of {shard} bytes; it has a multiple of {SHARD_ALIGN}, below {MAX_SHARD}"
    return f"{slots} slots; they are 0 or more" if slots < 0 else ""


def most_keys(key_bytes: int) -> int:
    """How many keys of ``key_bytes`` one message may name."""
    return min(MAX_KEYS, (MAX_FRAME - _MARGIN) // key_bytes)
