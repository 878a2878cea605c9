"""The head as a file: a half of a model becomes a TensorFlow Lite model, of int8 throughout or of another precision.

Its one signature ``serving_default`` takes ``input_0…`` and returns the keys it is told, at batch 1: a device runs one
sample at a time, and fixed shapes save it the planning. An int8 head takes and returns int8 where the model has
floating-point numbers; any other takes and returns float32. TensorFlow prints pages while it converts; who
minds calls this in a process of its own (:mod:`converters.workshop`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converters.calibration import Calibration
from converters.int8 import quantized
from converters.keras_backend import load_tensorflow
from converters.lite_model import converted, packed
from converters.quantization import Quantization
from converters.recurrent import unrolled
from converters.scratch import is_of_the_disk
from converters.split import Half
from converters.substitutes import call_on_device, exact_one_hot
from edge_sdk.errors import ConversionError, RuntimeUnavailableError
from edge_sdk.manifest import Precision
from edge_sdk.runtime import Interpreter
from edge_sdk.runtime import TensorInfo as RuntimeTensor


@dataclass(frozen=True, kw_only=True)
class Head:
    """What the file takes and returns, by signature key."""

    inputs: dict[str, Quantization]
    outputs: dict[str, Quantization]


def input_keys(count: int) -> tuple[str, ...]:
    """Signature keys of the inputs."""
    return tuple(f"input_{number}" for number in range(count))


def write_head(
    half: Half, keys: Sequence[str], calibration: Calibration, path: Path, precision: Precision = "int8"
) -> Head:
    """Write ``half`` as a TensorFlow Lite model to ``path``; ``keys`` name its outputs.

    Raises :class:`ConversionError` when TensorFlow Lite has no kernel of that precision for something in it, or no
    runtime runs it.
    """
    takes = half.tensors(half.inputs)
    names = input_keys(len(takes))
    try:
        path.write_bytes(_converted(half, names, keys, calibration, precision))
    except Exception as error:  # the converter raises RuntimeError, ValueError and exceptions of its own
        if is_of_the_disk(error):
            raise
        raise ConversionError(
            f"TensorFlow Lite cannot convert the first {len(half.steps)} operations of model "
            f"{half.flat.graph.name!r} to {precision} ({_first_line(error)}); cut before what it lacks, or replace that"
        ) from error
    try:
        interpreter = Interpreter(path)
    except RuntimeUnavailableError as error:
        raise ConversionError(
            f"the first {len(half.steps)} operations of model {half.flat.graph.name!r} became a head that cannot run, "
            f"as happens when a tensor is all zeros for the calibration data: {error.message.removeprefix(f'{path}: ')}"
        ) from error
    head = Head(
        inputs={key: _quantization(info) for key, info in interpreter.inputs.items()},
        outputs={key: _quantization(info) for key, info in interpreter.outputs.items()},
    )
    made = {key: info.shape for key, info in (interpreter.inputs | interpreter.outputs).items()}
    expected = dict(zip((*names, *keys), ((1, *t.shape) for t in (*takes, *half.tensors(half.outputs))), strict=True))
    if made != expected:
        raise ConversionError(f"TensorFlow Lite made a head with the tensors {made}; expected {expected}")
    return head


def _converted(
    half: Half, names: Sequence[str], keys: Sequence[str], calibration: Calibration, precision: Precision
) -> bytes:
    function = traced(half, names)
    if precision == "int8":
        return quantized(converted(function, names, keys), calibration.inputs)
    return packed(converted(function, names, keys, precision))


def traced(half: Half, names: Sequence[str]) -> Any:
    """The half as a TensorFlow ``ConcreteFunction`` at batch 1, of what a device has kernels for."""
    tensorflow = load_tensorflow()
    signature = [
        tensorflow.TensorSpec((1, *tensor.shape), tensor.dtype, name=name)
        for tensor, name in zip(half.tensors(half.inputs), names, strict=True)
    ]
    with unrolled(step.layer for step in half.steps), exact_one_hot():
        return tensorflow.function(
            lambda *values: half(values, call_on_device), signature, autograph=False
        ).get_concrete_function()


def _quantization(info: RuntimeTensor) -> Quantization:
    return Quantization(dtype=info.dtype.name, scale=info.scale, zero_point=info.zero_point)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
