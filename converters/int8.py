"""An int8 model of a float one: the range that each tensor takes on calibration data, then TensorFlow Lite's quantizer.

A range is from the smallest to the largest value, which is what TensorFlow's own calibrator looks for. But that one
runs slow kernels, and where a kernel writes over its input, it takes the values of the output for those of the input,
whose range is too wide then, at times a thousandfold. Here the model returns all its tensors, so that none is written
over, and runs as fast as on a device.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from converters.keras_backend import load_tensorflow
from converters.lite_model import packed, sign
from converters.older_runtime import INT8_LACKS
from edge_sdk.errors import ConversionError
from edge_sdk.runtime import Interpreter

Array = npt.NDArray[Any]


def quantized(model: Any, samples: Sequence[Array]) -> bytes:
    """The int8 file of a float model (:mod:`converters.lite_model`), whose tensors it marks with their ranges.

    ``samples`` are parallel to the model's inputs, each (N, …). What is a floating-point number in inputs and outputs
    becomes an int8 there, too. Raises :class:`ConversionError` where values are infinite,
    :class:`RuntimeUnavailableError` where no runtime runs the float model, and what the quantizer raises.
    """
    from tensorflow.lite.python import convert

    int8 = load_tensorflow().int8
    made = convert.mlir_quantize(
        _calibrated(model, samples), input_data_type=int8, output_data_type=int8, denylisted_ops=list(INT8_LACKS)
    )
    return bytes(convert.deduplicate_readonly_buffers(made))


def _calibrated(model: Any, samples: Sequence[Array]) -> bytes:
    from tensorflow.lite.python.optimize.calibrator import Calibrator
    from tensorflow.lite.python.schema_py_generated import QuantizationParametersT

    if len(model.subgraphs) > 1:
        # What is computed inside a loop or a branch, that one sees and nobody outside.
        rows = [[array[place : place + 1] for array in samples] for place in range(len(samples[0]))]
        return bytes(Calibrator(packed(model)).calibrate(lambda: rows))
    tensors = model.subgraphs[0].tensors
    for number, (low, high) in ranges(model, samples).items():
        if math.isinf(low) or math.isinf(high):
            raise ConversionError(f"for the calibration data {tensors[number].name.decode()!r} has infinite values")
        tensors[number].quantization = QuantizationParametersT(min=[low], max=[high])
    return packed(model)


def ranges(model: Any, samples: Sequence[Array]) -> dict[int, tuple[float, float]]:
    """The smallest and the largest value of each float32 tensor that a model of one graph takes or computes, by number.

    Values that are no numbers do not count. A tensor without any other has no range.
    """
    found: dict[int, tuple[float, float]] = {}
    for number, values in _values(model, samples):
        low, high = float(np.fmin.reduce(values, None)), float(np.fmax.reduce(values, None))
        if not math.isnan(low):
            known = found.get(number, (math.inf, -math.inf))
            found[number] = (min(low, known[0]), max(high, known[1]))
    return found


def _values(model: Any, samples: Sequence[Array]) -> Iterator[tuple[int, Array]]:
    """For one sample after the other the values of all float32 tensors that are not constants."""
    from tensorflow.lite.python.schema_py_generated import TensorType

    main = copy.copy(model.subgraphs[0])
    made = {int(number) for operator in main.operators for number in operator.outputs}
    main.outputs = sorted(number for number in made if main.tensors[number].type == TensorType.FLOAT32)
    talkative = copy.copy(model)
    talkative.subgraphs = [main]
    taken = {f"input_{place}": number for place, number in enumerate(main.inputs)}
    sign(talkative, taken, {str(number): number for number in main.outputs})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "float.tflite"
        path.write_bytes(packed(talkative))
        interpreter = Interpreter(path)
    for place in range(len(samples[0])):
        given = {key: array[place : place + 1] for key, array in zip(taken, samples, strict=True)}
        for key, values in interpreter.run(given).items():
            yield int(key), values
    for number, array in zip(main.inputs, samples, strict=True):
        if array.dtype == np.float32:
            yield int(number), array
