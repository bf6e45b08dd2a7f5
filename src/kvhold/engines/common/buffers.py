"""Copies between an engine's host memory and the arena, without Python's lock and in pieces as large as may be."""

import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

Buffer = Sequence[tuple[int, int]]
"""Where an engine has one object: (address, bytes) of its pieces, in the order in which they are in the object."""
Move = tuple[int, int, int]
"""(address in the engine, byte offset in the arena, bytes)."""
_THREADS = min(4, len(os.sched_getaffinity(0)) // 2)
"""Threads that one copy may keep busy: half of the cores at most, for the engine has work for the others."""
_SHARE = 8 << 20
"""Bytes that are worth a thread."""


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


def shares(made: Sequence[Move], count: int) -> list[list[Move]]:
    """``made`` as at most ``count`` lists of about as many bytes each; a long move is cut."""
    total = sum(length for _, _, length in made)
    each = -(-total // count) if total else 0
    cut: list[list[Move]] = [[]]
    room = each
    for address, offset, length in made:
        while length:
            if not room:
                cut.append([])
                room = each
            part = min(length, room)
            cut[-1].append((address, offset, part))
            address, offset, length, room = address + part, offset + part, length - part, room - part
    return cut


def copy_in(arena: int, made: Sequence[Move]) -> None:
    """Copy from the engine to the arena that is mapped at address ``arena``."""
    _share_out(made, lambda some: _run(some, lambda address, offset: (arena + offset, address)))


def copy_out(arena: int, made: Sequence[Move]) -> None:
    """Copy from the arena that is mapped at address ``arena`` to the engine."""
    _share_out(made, lambda some: _run(some, lambda address, offset: (address, arena + offset)))


def _run(made: Iterable[Move], ends: Callable[[int, int], tuple[int, int]]) -> None:
    for address, offset, length in made:
        to, source = ends(address, offset)
        ctypes.memmove(to, source, length)


def _share_out(made: Sequence[Move], run: Callable[[Sequence[Move]], None]) -> None:
    """Have several threads ``run`` what is long, and return when all have."""
    count = min(_THREADS, sum(length for _, _, length in made) // _SHARE)
    if count <= 1:
        run(made)
        return
    mine, *others = shares(made, count)
    helping = [_helpers().submit(run, some) for some in others]
    try:
        run(mine)
    finally:
        for each in helping:
            each.result()


@cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS - 1, "kvhold-copy")
