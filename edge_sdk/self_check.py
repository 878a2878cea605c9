"""The self check of a head: inputs made from a seed, and the outputs they gave where the head was made.

Who makes a bundle and the device that installs it call the same functions. A runtime rounds as it likes, so results
are compared in steps of the quantized output, and how many steps are too many is the device's decision.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_sdk.errors import BundleError
from edge_sdk.manifest import InputSpec
from edge_sdk.wire import DTYPES

MAX_VALUES = 256
STEPS = 255

Array = npt.NDArray[Any]


def self_check_inputs(inputs: Sequence[InputSpec], seed: int) -> dict[str, Array]:
    """The head's inputs by signature key, ``input_0…``: shape (1, *shape), in the dtype that the head takes.

    They are read one after another from the bytes of ``SHAKE-128(str(seed))``. An input with a scale takes int8, a byte
    each; a float one a byte each too, spread over 0 to 1; any other is 0 or 1, which is in range as an index.
    """
    sizes = [math.prod(spec.shape) for spec in inputs]
    stream = np.frombuffer(hashlib.shake_128(str(seed).encode()).digest(sum(sizes)), np.uint8)
    made = {}
    offset = 0
    for number, (spec, size) in enumerate(zip(inputs, sizes, strict=True)):
        data = stream[offset : offset + size].reshape(1, *spec.shape)
        offset += size
        if spec.scale is not None:
            made[f"input_{number}"] = data.view(np.int8)
        elif spec.dtype.startswith("float"):
            made[f"input_{number}"] = (data / np.float32(255)).astype(DTYPES[spec.dtype])
        else:
            made[f"input_{number}"] = (data & 1).astype(DTYPES[spec.dtype])
    return made


def observe(outputs: Mapping[str, Array]) -> dict[str, tuple[float, ...]]:
    """What is kept of the head's raw outputs: at most 256 evenly spaced values each, first and last among them."""
    return {key: tuple(float(value) for value in _spaced(output)) for key, output in sorted(outputs.items())}


def compare(expected: Mapping[str, Sequence[float]], outputs: Mapping[str, Array]) -> float:
    """The largest difference between ``expected`` and the head's raw ``outputs``, in steps of a quantized output.

    A step of a float output is what it would be if that were quantized: a 255th of the range of what is expected. Of
    booleans and larger integers, which name things rather than measure them, the share that differs counts as if it
    were of 255. Infinite where an output is not a finite number.

    Raises :class:`BundleError` when the outputs are not those that are expected, or not of their size.
    """
    if set(expected) != set(outputs):
        raise BundleError(f"self check: expected the outputs {sorted(expected)}, the head gave {sorted(outputs)}")
    worst = 0.0
    for key, values in expected.items():
        actual = _spaced(outputs[key]).astype(np.float64)
        if len(actual) != len(values):
            raise BundleError(f"self check: output {key!r}: expected {len(values)} values, the head gave {len(actual)}")
        if len(actual):
            difference = _steps(np.asarray(values, np.float64), actual, outputs[key].dtype)
            worst = max(worst, difference if math.isfinite(difference) else math.inf)
    return worst


def _steps(expected: Array, actual: Array, dtype: np.dtype[Any]) -> float:
    if dtype.kind == "f":
        span = float(np.ptp(expected)) or float(np.abs(expected).max()) or 1.0
        return float(np.max(np.abs(actual - expected))) / span * STEPS
    if dtype.kind == "b" or dtype.itemsize > 2:
        return float(np.mean(actual != expected)) * STEPS
    return float(np.max(np.abs(actual - expected)))


def _spaced(output: Array) -> Array:
    flat = np.asarray(output).reshape(-1)
    places = np.rint(np.linspace(0, flat.size - 1, min(flat.size, MAX_VALUES))).astype(np.int64)
    spaced: Array = flat[places]
    return spaced
