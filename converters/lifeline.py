"""A lifeline: the reading end of a pipe that nobody writes to; a process that holds it ends when the other end closes.

That other end closes at the latest with the process that made it, however that one ends.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal


def end_with(lifeline: int) -> None:
    """Have the kernel kill this process when the other end of ``lifeline`` is closed.

    A thread that waited for it would itself wait for work that keeps the interpreter to itself, and a death signal
    would come when the thread that started this process ends, not the process.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    # It ends a process that is stopped, too.
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:
        # It was closed before the kernel was asked to tell.
        os._exit(1)
