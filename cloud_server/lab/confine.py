"""Puts limits on this process and then becomes the command it was given; run by path, before anything else is loaded.

Usage: ``python -I -S confine.py --parent PID [--signal N] [--join GROUP_FOLDER] [--data-bytes N] -- COMMAND…``. It runs
between fork and command because a function that does this in the forked child of a program with threads can deadlock.
The command dies with its parent (``PR_SET_PDEATHSIG``), so no device outlives a lab that was killed. Which limits are
wanted is decided in :mod:`cloud_server.lab.limits`.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Confine this process and replace it by the command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--signal", type=int, default=signal.SIGKILL)
    parser.add_argument("--join")
    parser.add_argument("--data-bytes", type=int)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, options.signal, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != options.parent:
        # The lab died before the signal was asked for, so it will not come.
        sys.exit("the lab is gone")
    if options.join is not None:
        with open(os.path.join(options.join, "cgroup.procs"), "w") as procs:  # noqa: PTH118, PTH123 (pathlib loads slowly)
            procs.write(str(os.getpid()))
    if options.data_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (options.data_bytes, options.data_bytes))
    os.execvp(options.command[0], options.command)


if __name__ == "__main__":
    main()
