"""Copies between an engine's host memory and the arena, without Python's lock and in pieces as large as may be."""

import ctypes
from collections.abc import Iterable, Sequence

Buffer = Sequence[tuple[int, int]]
"""Where an engine has one object: (address, bytes) of its pieces, in the order in which they are in the object."""
Move = tuple[int, int, int]
"""(address in the engine, byte offset in the arena, bytes)."""


def moves(buffers: Sequence[Buffer], offsets: Sequence[int], size: int) -> list[Move]:
    """What is to be copied for objects of ``size`` bytes at ``offsets``; neighbours in both memories are one move.

    Raises ValueError for a buffer of another size, or too few or many of them.
    """
    if len(buffers) != len(offsets):
        raise ValueError(f"{len(buffers)} buffers were given for {len(offsets)} objects")
    made: list[Move] = []
    for number, (buffer, offset) in enumerate(zip(buffers, offsets, strict=True)):
        if (given := sum(length for _, length in buffer)) != size:
            raise ValueError(f"buffer {number} has {given} bytes; an object has {size}")
        for address, length in buffer:
            if made and made[-1][0] + made[-1][2] == address and made[-1][1] + made[-1][2] == offset:
                before = made.pop()
                made.append((before[0], before[1], before[2] + length))
            else:
                made.append((address, offset, length))
            offset += length
    return made


def copy_in(arena: int, made: Iterable[Move]) -> None:
    """Copy from the engine to the arena that is mapped at address ``arena``."""
    for address, offset, length in made:
        ctypes.memmove(arena + offset, address, length)


def copy_out(arena: int, made: Iterable[Move]) -> None:
    """Copy from the arena that is mapped at address ``arena`` to the engine."""
    for address, offset, length in made:
        ctypes.memmove(address, arena + offset, length)
