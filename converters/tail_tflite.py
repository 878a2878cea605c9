"""The tail once more, as a float TensorFlow Lite model: on a CPU its runtime is often several times as fast.

``tail.tflite`` is made of the function that became the SavedModel, so it is the same graph: it takes the features as
they travel, under the same keys, its batch axis is free, and it returns float32. Not every graph converts; a bundle
does without it then, and its manifest says why.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from converters.keras_backend import load_tensorflow
from converters.lite_model import converted, packed
from edge_sdk.errors import SplitfleetError
from edge_sdk.manifest import CrossingSpec
from edge_sdk.runtime import Interpreter
from edge_sdk.wire import DTYPES

TOLERANCE = 1e-3
"""How far an output of one engine may be from that of another, in proportion to the latter's largest value."""

RUNTIME = "litert"
SEED = 1
# Larger and smaller again: a shape may have been fixed on the way.
_BATCHES = (1, 3, 1)
_REASON_CHARS = 500
# How the converter names an operation in what it says.
_OPERATION = re.compile(r'fused\["(\w+):"')

Arrays = Mapping[str, npt.NDArray[Any]]


def write_tail_tflite(function: Any, crossing: Sequence[CrossingSpec], keys: Sequence[str], path: Path) -> str:
    """Write the tail that the TensorFlow ``ConcreteFunction`` computes, from ``crossing`` to ``keys``, to ``path``.

    Returns why that is impossible, and then there is no such file: the converter refuses, or the runtime does, or what
    it computes is not what the function does. Empty: the file is there.
    """

    def run(features: Arrays) -> Arrays:
        made = function(*(load_tensorflow().constant(features[spec.name]) for spec in crossing))
        return {key: tensor.numpy() for key, tensor in zip(keys, made, strict=True)}

    reason = _convert(function, crossing, keys, path) or check_tail_tflite(path, run, crossing)
    if reason:
        path.unlink(missing_ok=True)
    return reason[:_REASON_CHARS]


def random_features(crossing: Sequence[CrossingSpec], batch: int) -> dict[str, npt.NDArray[Any]]:
    """Features (batch, *shape) of all kinds, by name: whatever an int8 one can be, of the others 0 to 1."""
    rng = np.random.default_rng(SEED)
    made = {}
    for spec in crossing:
        dtype = DTYPES[spec.dtype]
        shape = (batch, *spec.shape)
        if spec.scale is not None and dtype.kind in "iu":
            bounds = np.iinfo(dtype)
            made[spec.name] = rng.integers(bounds.min, bounds.max, shape, dtype, endpoint=True)
        elif dtype.kind == "f":
            made[spec.name] = rng.uniform(0, 1, shape).astype(dtype)
        else:
            # As an index it is in range.
            made[spec.name] = rng.integers(0, 2, shape).astype(dtype)
    return made


def disagreement(expected: Arrays, made: Arrays) -> float:
    """The largest difference between outputs by name, in proportion to the largest value of that output.

    Infinite where names or shapes differ, or where one is a finite number and the other is not.
    """
    if expected.keys() != made.keys():
        return float("inf")
    worst = 0.0
    for name, whole in expected.items():
        if whole.shape != made[name].shape:
            return float("inf")
        one, other = whole.astype(np.float64), made[name].astype(np.float64)
        finite = np.isfinite(one)
        if not np.array_equal(one[~finite], other[~finite], equal_nan=True):
            return float("inf")
        scale = float(np.abs(one[finite]).max(initial=0.0)) or 1.0
        difference = float(np.abs(one[finite] - other[finite]).max(initial=0.0))
        worst = max(worst, difference / scale if np.isfinite(difference) else float("inf"))
    return worst


def check_tail_tflite(path: Path, run: Callable[[Arrays], Arrays], crossing: Sequence[CrossingSpec]) -> str:
    """Why the file at ``path`` is not the tail that ``run`` computes, found on random features; empty where it is."""
    try:
        interpreter = Interpreter(path, runtime=RUNTIME)
        for batch in _BATCHES:
            features = random_features(crossing, batch)
            if features.keys() != interpreter.inputs.keys():
                return f"it takes {sorted(interpreter.inputs)} instead of {sorted(features)}"
            interpreter.resize(batch)
            far = disagreement(run(features), interpreter.run(features))
            if not far <= TOLERANCE:
                return (
                    f"it computes something else than the SavedModel: for a batch of {batch} the outputs differ by "
                    f"{far:.2g} of their largest value"
                )
    except SplitfleetError as error:
        return error.message
    return ""


def _convert(function: Any, crossing: Sequence[CrossingSpec], keys: Sequence[str], path: Path) -> str:
    try:
        data = packed(converted(function, [spec.name for spec in crossing], keys))
    except Exception as error:  # the converter raises RuntimeError, ValueError and exceptions of its own
        return f"TensorFlow Lite cannot convert the tail: {_reason(error)}"
    path.write_bytes(data)
    return ""


def _reason(error: Exception) -> str:
    """What the converter lacks, where it says so, else its first line that says something."""
    text = str(error)
    lacks = dict.fromkeys(_OPERATION.findall(text))
    lacks.pop("PartitionedCall", None)
    if lacks:
        return f"it has no kernel for {', '.join(lacks)}"
    return next(filter(None, map(str.strip, text.splitlines())), type(error).__name__)
