"""Silence for what libraries write to file descriptor 2 as they start, past ``sys.stderr``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_turn = Lock()


@contextmanager
def stderr_discarded() -> Iterator[None]:
    """Discard what C++ code writes to file descriptor 2, which knows nothing of ``sys.stderr``.

    It is everybody's descriptor: a log that must not be lost meanwhile goes to a duplicate of it. One at a time.
    """
    with _turn:
        sys.stderr.flush()
        kept = os.dup(2)
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            os.close(null)
