"""How far a head is from the float model that it was made of, on the calibration data.

The error of one tensor is its noise in proportion to its signal: the root mean square of the differences over the
standard deviation of the float values, over all samples. 0 is exact, 1 is as bad as always sending the mean. Of
integers and booleans it is the share of values that differ. That of a head is the largest among its features, as they
cross, and the outputs of the model: those that it returns, and those that the float tail makes of its features. A tail
may make more of a little noise than there was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from converters.calibration import Calibration
from converters.head import Head
from converters.quantization import Quantization, int8_of_range
from converters.split import Half, Split
from edge_sdk.errors import ConversionError
from edge_sdk.quantization import dequantize, quantize
from edge_sdk.runtime import Interpreter

# Enough for a ratio over all values of a tensor; running them through TensorFlow Lite takes a while.
COMPARED_SAMPLES = 32
BATCH = 16

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """The error of a head, and the tensor whose error that is, in words."""

    error: float
    tensor: str

    def __str__(self) -> str:
        return f"its error is {self.error:.3g} of the signal of {self.tensor}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Reference:
    """A split in float, beside which heads of it are judged.

    ``features`` and ``returned`` are the keys of what the head makes: tensors that cross, and outputs of the model.
    """

    halves: Split
    features: tuple[str, ...]
    returned: tuple[str, ...]
    calibration: Calibration

    def int8(self, key: str) -> Quantization:
        """The int8 quantization that covers the values of a floating-point feature for all the calibration data.

        Raises :class:`ConversionError` for values that are not finite.
        """
        return int8_of_range(np.array(self._ranges[key]))

    def run(self, path: Path, head: Head) -> dict[str, Array]:
        """What the head in the file ``path`` makes of the samples that heads are compared by, as real numbers."""
        interpreter = Interpreter(path)
        rows = [
            interpreter.run(
                {
                    key: _as_taken(array[number : number + 1], head.inputs[key])
                    for key, array in zip(head.inputs, self._samples, strict=True)
                }
            )
            for number in range(len(self._samples[0]))
        ]
        return {key: _as_real(np.concatenate([row[key] for row in rows]), head.outputs[key]) for key in rows[0]}

    def deviation(self, made: Mapping[str, Array], sent: Mapping[str, Quantization]) -> Deviation:
        """How far from float is what a head ``made``, when its features cross as ``sent`` says."""
        crossed = [_as_crossed(made[key], sent[key]) for key in self.features]
        graph = self._head.flat.graph
        found = [
            Deviation(error=deviation(array, expected), tensor=f"the feature {graph.tensors[position].name!r}")
            for array, position, expected in zip(crossed, self.halves.crossing, self._features, strict=True)
        ]
        places = (*self.halves.head_outputs, *self.halves.tail_outputs)
        outputs = (*(made[key] for key in self.returned), *self._finish(crossed))
        found += [
            Deviation(error=deviation(output, expected), tensor=f"the output {graph.output_names[place]!r}")
            for place, output, expected in zip(places, outputs, self._outputs, strict=True)
        ]
        return max(found, key=lambda each: each.error)

    @property
    def _head(self) -> Half:
        assert self.halves.head is not None
        return self.halves.head

    @cached_property
    def _samples(self) -> tuple[Array, ...]:
        """Those that heads are compared by, evenly spaced."""
        count = len(self.calibration.inputs[0])
        taken = np.unique(np.rint(np.linspace(0, count - 1, min(count, COMPARED_SAMPLES))).astype(np.int64))
        return tuple(array[taken] for array in self.calibration.inputs)

    @cached_property
    def _made(self) -> list[Array]:
        made = _run(self._head, self._samples)
        for array, position in zip(made, self._head.outputs, strict=True):
            self._require_finite(array, position)
        return made

    @property
    def _features(self) -> list[Array]:
        return self._made[: len(self.features)]

    @cached_property
    def _outputs(self) -> list[Array]:
        return [*self._made[len(self.features) :], *self._finish(self._features)]

    def _finish(self, features: Sequence[Array]) -> list[Array]:
        """What the tail makes of features."""
        tail = self.halves.tail
        if tail is None:
            return []
        dtypes = [array.dtype for array in self._features]
        return _run(tail, [array.astype(dtype) for array, dtype in zip(features, dtypes, strict=True)])

    @cached_property
    def _ranges(self) -> dict[str, tuple[float, float]]:
        """The smallest and the largest value of each floating-point feature."""
        ranges: dict[str, tuple[float, float]] = {}
        for start in range(0, len(self.calibration.inputs[0]), BATCH):
            made = self._head([array[start : start + BATCH] for array in self.calibration.inputs])
            for key, position, tensor in zip(self.features, self.halves.crossing, made, strict=False):
                array = np.asarray(tensor)
                if array.dtype.kind != "f":
                    continue
                self._require_finite(array, position)
                low, high = ranges.get(key, (np.inf, -np.inf))
                ranges[key] = min(low, float(array.min(initial=low))), max(high, float(array.max(initial=high)))
        return ranges

    def _require_finite(self, array: Array, position: int) -> None:
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            name = self._head.flat.graph.tensors[position].name
            raise ConversionError(f"for the calibration data {name!r} has values that are not finite numbers")


def _run(half: Half, inputs: Sequence[Array]) -> list[Array]:
    rows = [
        [np.asarray(value) for value in half([array[start : start + BATCH] for array in inputs])]
        for start in range(0, len(inputs[0]), BATCH)
    ]
    return [np.concatenate(parts) for parts in zip(*rows, strict=True)]


def _as_taken(array: Array, quantization: Quantization) -> Array:
    if quantization.scale is None or quantization.zero_point is None:
        return array.astype(quantization.dtype)
    return quantize(array, quantization.scale, quantization.zero_point, quantization.dtype)


def _as_real(made: Array, emitted: Quantization) -> Array:
    if emitted.scale is None or emitted.zero_point is None:
        return made
    return dequantize(made, emitted.scale, emitted.zero_point)


def _as_crossed(real: Array, sent: Quantization) -> Array:
    """What the tail has of a feature; rounding what was rounded the same way before changes nothing."""
    if sent.scale is None or sent.zero_point is None:
        return real
    return dequantize(quantize(real, sent.scale, sent.zero_point, sent.dtype), sent.scale, sent.zero_point)


def deviation(made: Array, expected: Array) -> float:
    """The error of one tensor, as the module says, of arrays of one shape.

    Where ``expected`` is not finite, as a masked score may be, nothing is compared; elsewhere what is not finite in
    ``made`` is an infinite error.
    """
    if expected.dtype.kind not in "fV":
        return float(np.mean(made != expected))
    real = expected.astype(np.float64)
    compared = np.isfinite(real)
    real = real[compared]
    if not real.size:
        return 0.0
    noise = float(np.sqrt(np.mean((made.astype(np.float64)[compared] - real) ** 2)))
    if not np.isfinite(noise):
        return float("inf")
    # A tensor that does not vary carries nothing that could be lost; its size is what the noise is small against.
    signal = float(real.std()) or float(np.abs(real).max(initial=0.0)) or 1.0
    return noise / signal
