"""Keras on TensorFlow, loaded without the lines that TensorFlow's libraries write to stderr while they start."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def load_keras() -> Any:
    """The module `keras`. The first call in a process takes seconds: call it inside functions only."""
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    if "tensorflow" in sys.modules:
        import keras
    else:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        with _stderr_discarded():
            import keras
    return keras


@contextmanager
def _stderr_discarded() -> Iterator[None]:
    """Discard what C++ code writes to file descriptor 2; an exception passes as always."""
    sys.stderr.flush()
    kept = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
