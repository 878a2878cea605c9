"""Keras on TensorFlow, loaded without the log lines that TensorFlow writes to stderr while it starts."""

from __future__ import annotations

import os
from typing import Any


def load_keras() -> Any:
    """The module `keras`. The first call in a process takes seconds: call it inside functions only."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import keras

    return keras
