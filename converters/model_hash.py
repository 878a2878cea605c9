"""The hash of a model: SHA-256 over what it computes, its graph, the configuration of its layers and its weights."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import numpy as np

from converters.flatten import FlatModel
from converters.keras_backend import load_keras
from converters.user_code import code_sha256, modules_of
from edge_sdk.errors import UnsupportedModelError


def model_sha256(flat: FlatModel) -> str:
    """64 hex digits; equal for two models only if they are interchangeable, names included.

    Of a user's own layers and functions it sees the code, too. Raises :class:`UnsupportedModelError` for a layer that
    cannot tell its configuration.
    """
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(flat.graph), sort_keys=True).encode())
    hashed: set[int] = set()
    modules: set[str] = set()
    for operation, step in zip(flat.graph.operations, flat.steps, strict=True):
        digest.update(_recorded(step.arguments).encode())
        if operation.layer in hashed:
            continue
        hashed.add(operation.layer)
        digest.update(_configuration(operation.name, step.layer).encode())
        for variable in getattr(step.layer, "weights", ()):
            value = np.asarray(variable)
            digest.update(f"{value.dtype.str} {value.shape}".encode())
            digest.update(np.ascontiguousarray(value).tobytes())
        modules |= modules_of(step.layer)
    digest.update(code_sha256(modules).encode())
    return digest.hexdigest()


def _configuration(name: str, layer: Any) -> str:
    kind = type(layer)
    try:
        config = layer.get_config()
    except Exception as error:  # a user's layer may raise anything
        raise UnsupportedModelError(
            f"operation {name!r} ({kind.__name__}) cannot tell its configuration ({error}); implement get_config()"
        ) from error
    return json.dumps([kind.__module__, kind.__qualname__, config], sort_keys=True, default=_stable)


def _recorded(arguments: Any) -> str:
    """The constants that an operation was called with, and where its tensors stand among them."""
    keras = load_keras()
    return json.dumps([arguments.args, arguments.kwargs], sort_keys=True, default=_stable) + str(
        len(keras.tree.flatten((arguments.args, arguments.kwargs)))
    )


def _stable(value: Any) -> Any:
    """What JSON lacks, as something that is the same in every process."""
    keras = load_keras()
    if isinstance(value, keras.KerasTensor):
        return "tensor"
    if isinstance(value, bytes):
        return value.hex()
    try:
        array = np.asarray(value)
    except Exception:
        return repr(value)
    if array.dtype == object:
        return repr(value)
    return [array.dtype.str, array.shape, hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()]
