"""Whom the kernel prefers where processes outnumber the cores: the loop that all engines wait for, if that is allowed.

A loop that sleeps most of the time was seen to wait for a core for half a second beside vLLM's workers, which spin
while they have nothing to do, and the hits that it had answered for were late.
"""

import contextlib
import os
import threading
from pathlib import Path

NICENESS = -10
"""Of the loop's thread, and of the session that the manager leads (see sched(7), "The autogroup feature")."""


def prefer_this_thread() -> bool:
    """Raise the priority of the thread that calls; False where that takes CAP_SYS_NICE, which is lacking.

    Threads that it starts from then on inherit it.
    """
    thread = threading.get_native_id()
    if os.getpriority(os.PRIO_PROCESS, thread) > NICENESS:
        try:
            os.setpriority(os.PRIO_PROCESS, thread, NICENESS)
        except PermissionError:
            return False
    # Where it is on, a thread's niceness counts among those of its session alone.
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(NICENESS))
    return True
