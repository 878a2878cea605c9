"""How far a head is from the float half that it was made of, on the calibration data.

The error of one tensor is its noise in proportion to its signal: the root mean square of the differences over the
standard deviation of the float values, over all samples. 0 is exact, 1 is as bad as always sending the mean. Of
integers and booleans it is the share of values that differ. That of a head is the largest of its tensors, as they
cross: rounded to int8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from converters.calibration import Calibration
from converters.head import Head
from converters.quantization import Quantization, int8_of_range
from converters.split import Half
from edge_sdk.errors import ConversionError
from edge_sdk.quantization import dequantize, quantize
from edge_sdk.runtime import Interpreter

# Enough for a ratio over all values of a tensor; running them through TensorFlow Lite takes a while.
COMPARED_SAMPLES = 32
BATCH = 16

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Reference:
    """What a half computes in float for all of the calibration data: by key an array (samples, …)."""

    inputs: tuple[Array, ...]
    outputs: dict[str, Array]

    @classmethod
    def of(cls, half: Half, keys: Sequence[str], calibration: Calibration) -> Reference:
        """Run ``half``, whose outputs are ``keys``. Raises :class:`ConversionError` for what is not finite."""
        count = len(calibration.inputs[0])
        rows = [
            [np.asarray(value) for value in half([array[start : start + BATCH] for array in calibration.inputs])]
            for start in range(0, count, BATCH)
        ]
        outputs = {key: np.concatenate(parts) for key, parts in zip(keys, zip(*rows, strict=True), strict=True)}
        for key, position in zip(keys, half.outputs, strict=True):
            if outputs[key].dtype.kind == "f" and not np.isfinite(outputs[key]).all():
                name = half.flat.graph.tensors[position].name
                raise ConversionError(f"for the calibration data {name!r} has values that are not finite numbers")
        return cls(inputs=calibration.inputs, outputs=outputs)

    def int8(self, key: str) -> Quantization:
        """The int8 quantization that covers the values of a floating-point output."""
        return int8_of_range(self.outputs[key])

    def error(self, path: Path, head: Head, sent: Mapping[str, Quantization]) -> float:
        """The error of the head in the file ``path``; ``sent`` says how what the head emits as float crosses."""
        interpreter = Interpreter(path)
        count = min(len(self.inputs[0]), COMPARED_SAMPLES)
        taken = np.unique(np.rint(np.linspace(0, len(self.inputs[0]) - 1, count)).astype(np.int64))
        rows = [
            interpreter.run(
                {
                    key: _as_taken(array[number : number + 1], head.inputs[key])
                    for key, array in zip(head.inputs, self.inputs, strict=True)
                }
            )
            for number in taken
        ]
        errors = [0.0]
        for key, expected in self.outputs.items():
            made = np.concatenate([row[key] for row in rows])
            errors.append(deviation(_as_crossed(made, head.outputs[key], sent.get(key)), expected[taken]))
        return max(errors)


def _as_taken(array: Array, quantization: Quantization) -> Array:
    if quantization.scale is None or quantization.zero_point is None:
        return array.astype(quantization.dtype)
    return quantize(array, quantization.scale, quantization.zero_point, quantization.dtype)


def _as_crossed(made: Array, emitted: Quantization, sent: Quantization | None) -> Array:
    if emitted.scale is not None and emitted.zero_point is not None:
        return dequantize(made, emitted.scale, emitted.zero_point)
    if sent is not None and sent.scale is not None and sent.zero_point is not None:
        return dequantize(quantize(made, sent.scale, sent.zero_point, sent.dtype), sent.scale, sent.zero_point)
    return made


def deviation(made: Array, expected: Array) -> float:
    """The error of one tensor, as the module says, of arrays of one shape; infinite where it is not finite."""
    if expected.dtype.kind not in "fV":
        return float(np.mean(made != expected))
    real = expected.astype(np.float64)
    noise = float(np.sqrt(np.mean((made.astype(np.float64) - real) ** 2)))
    if not np.isfinite(noise):
        return float("inf")
    # A tensor that does not vary carries nothing that could be lost; its size is what the noise is small against.
    signal = float(real.std()) or float(np.abs(real).max(initial=0.0)) or 1.0
    return noise / signal
