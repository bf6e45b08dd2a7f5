"""The process that speaks to a store. It may be killed at any moment, and never outlives the manager.

One thread asks, others move bytes, another removes, so a question never waits behind bytes.
"""

import ctypes
import mmap
import os
import queue
import signal
import socket
import time
from collections.abc import Sequence
from threading import Thread
from typing import Final, NoReturn

from msgspec.structs import replace

from kvhold.tiers.remote import messages as ms
from kvhold.tiers.remote.calls import Calls, said
from kvhold.tiers.remote.stores import connect
from kvhold.tiers.remote.url import RemoteConfig, parse_remote

MOVERS: Final = 3
"""Threads that move bytes."""
READY: Final = 0
"""The call that is answered first, unasked: the store is connected, or why it is not."""
_PR_SET_PDEATHSIG: Final = 1

Jobs = queue.SimpleQueue[ms.Call]


def main(arguments: Sequence[str]) -> NoReturn:
    """``arguments``: the URL, then numbers.

    These are the arena's descriptor and its bytes, the socket's descriptor, who has to be the parent, and 1 if nothing
    in the store may be changed.
    """
    url, arena, size, sock, parent, read_only = arguments[0], *map(int, arguments[1:])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # meant for the manager, which ends this process by its socket
    channel = socket.socket(fileno=sock)
    config = parse_remote(url)
    asking: Jobs = queue.SimpleQueue()
    moving: Jobs = queue.SimpleQueue()
    removing: Jobs = queue.SimpleQueue()

    def serve() -> None:
        """In a thread of its own: a store that cannot be reached must not keep this process from its socket's end."""
        try:
            calls = Calls(connect(config), config.pool, memoryview(mmap.mmap(arena, size)), bool(read_only))
        except Exception as error:  # noqa: BLE001 - whatever a library raises, the manager is told
            channel.send(ms.encode(ms.Answer(READY, error=cannot(config, error))))
            return
        for jobs in (asking, removing, *[moving] * MOVERS):
            Thread(target=_lane, args=(calls, jobs, channel), name="kvhold-remote-lane", daemon=True).start()
        channel.send(ms.encode(ms.Answer(READY)))

    Thread(target=serve, name="kvhold-remote-connect", daemon=True).start()
    while data := channel.recv(ms.LARGEST):
        call = ms.decode_call(data)
        if isinstance(call, ms.Exists):
            asking.put(call)
        elif isinstance(call, ms.Get | ms.Put):
            moving.put(call)
        else:
            removing.put(call)
    os._exit(0)


def _lane(calls: Calls, jobs: Jobs, channel: socket.socket) -> None:
    while True:
        call = jobs.get()
        began = time.monotonic()
        try:
            answer = calls.carry_out(call)
        except Exception as error:  # noqa: BLE001 - a library's own: nothing is known of this call
            answer = ms.Answer(call.call, error=said(error)[:500])
        answer = replace(answer, seconds=time.monotonic() - began)
        try:
            channel.send(ms.encode(answer))
        except OSError:
            os._exit(0)  # nobody is there any more


def cannot(config: RemoteConfig, error: Exception) -> str:
    """Why a store cannot be used, with what helps."""
    if isinstance(error, ImportError):
        missing = str(error)
        if ".so" in missing:
            return f"{missing}; install the system's library (for libibverbs.so.1: apt-get install libibverbs1)"
        return f"{missing}; install it with: pip install 'kvhold[{config.extra}]'"
    return said(error)[:500]
