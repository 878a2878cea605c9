"""Memory of worker processes: what one has, what one may have, and giving back what was freed."""

from __future__ import annotations

import ctypes
import gc
import os
from contextlib import suppress
from pathlib import Path

from edge_sdk.resources import Machine

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SHARE = 0.8


def rss_of(pid: int) -> int | None:
    """Bytes of memory that a process has; ``None``: there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return None


def default_budget(workers: int) -> int:
    """Bytes for each of ``workers``: an equal part of 80 % of the machine's memory, or of this container's."""
    return int(Machine().ram_bytes() * _SHARE / workers)


def give_back() -> None:
    """Return to the system what was freed; the allocator would keep it."""
    # Functions and variables of TensorFlow refer to each other in circles.
    gc.collect()
    with suppress(AttributeError):  # a C library other than GNU's
        ctypes.CDLL(None).malloc_trim(0)
