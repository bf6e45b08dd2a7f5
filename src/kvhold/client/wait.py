"""Waiting for a descriptor with a deadline finer than a millisecond.

Python's ``poll`` counts in milliseconds, ``select`` refuses descriptors from 1024 on, and a socket's own timeout is
rounded to the kernel's tick, which may be ten milliseconds. ``ppoll`` is exact.
"""

import ctypes


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_ppoll = ctypes.CDLL(None).ppoll
_ppoll.argtypes = (ctypes.POINTER(_PollFd), ctypes.c_ulong, ctypes.POINTER(_TimeSpec), ctypes.c_void_p)


def wait_for(descriptor: int, events: int, seconds: float) -> None:
    """Return when one of ``events`` is there, when ``seconds`` have passed, or at a signal."""
    whole = int(seconds)
    timeout = _TimeSpec(whole, int((seconds - whole) * 1e9))
    _ppoll(ctypes.byref(_PollFd(descriptor, events, 0)), 1, ctypes.byref(timeout), None)
