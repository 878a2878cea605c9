"""Jobs for worker processes."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from pathlib import Path
from typing import NoReturn


def leave_files() -> str:
    """Temporary files that nobody removes; returns where."""
    handle, name = tempfile.mkstemp()
    os.close(handle)
    tempfile.mkdtemp()
    return name


def die_and_leave_files() -> NoReturn:
    leave_files()
    os._exit(7)


def hang_with_the_interpreter(told: str) -> None:
    """Write the process's id, then block in C, holding the interpreter as a conversion may."""
    Path(told).write_text(str(os.getpid()))
    ctypes.PyDLL(None).pause()


def full_disk() -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "tail/variables")


def full_disk_as_tensorflow_tells_it() -> NoReturn:
    raise RuntimeError(f"tail/variables; {os.strerror(errno.ENOSPC)}")
