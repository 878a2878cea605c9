"""Trained weights as float16 in one compressed npz file per model, one array per variable, never a pickle.

Float16 halves what every device downloads with the package; the models compute in float32.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from edge_sdk.errors import ConfigError, IntegrityError, ModelError


def save_float16(model: Any, path: Path) -> tuple[int, str]:
    """Write the weights of a `keras.Model`, rounded to float16; returns the file's size in bytes and its SHA-256.

    Raises `ModelError` when a weight is not finite or lies beyond the range of float16.
    """
    arrays = {}
    for variable in model.weights:
        exact = variable.numpy()
        with np.errstate(over="ignore"):
            rounded = exact.astype(np.float16)
        if not np.isfinite(rounded).all():
            raise ModelError(
                f"model {model.name!r}: the weight {variable.path!r} has values that float16 cannot hold "
                f"(largest magnitude {np.abs(exact).max()}); the training diverged"
            )
        arrays[variable.path] = rounded
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part.npz")
    np.savez_compressed(temporary, **arrays)
    content = temporary.read_bytes()
    temporary.replace(path)
    return len(content), hashlib.sha256(content).hexdigest()


def load_float16(model: Any, path: Path, *, sha256: str) -> None:
    """Set the weights of a freshly built `keras.Model` from `path`, cast to the dtype of each variable.

    Raises `ConfigError` when the file is missing, `IntegrityError` when it is not the one that `sha256` names,
    `ModelError` when its arrays are not those of the model.
    """
    try:
        received = hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: install the package again") from None
    if received != sha256:
        raise IntegrityError(
            f"{path}: expected a file of SHA-256 {sha256}, received {received}; install the package again"
        )
    with np.load(path, allow_pickle=False) as archive:
        expected = {variable.path: tuple(variable.shape) for variable in model.weights}
        stored = {name: archive[name] for name in archive.files}
    if expected != {name: array.shape for name, array in stored.items()}:
        differing = sorted(
            name
            for name in expected.keys() | stored.keys()
            if name not in stored or stored[name].shape != expected.get(name)
        )
        raise ModelError(
            f"{path} does not belong to the model {model.name!r} as it is built now: {len(differing)} weights differ "
            f"in name or shape, the first is {differing[0]!r}. Train it again with "
            f"'splitfleet zoo train --model {model.name} --force'"
        )
    for variable in model.weights:
        variable.assign(stored[variable.path].astype(variable.dtype))
