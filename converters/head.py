"""The head as a file: a half of a model becomes a TensorFlow Lite model, of int8 throughout or of another precision.

Its one signature ``serving_default`` takes ``input_0…`` and returns the keys it is told, at batch 1: a device runs one
sample at a time, and fixed shapes save it the planning. An int8 head takes and returns int8 where the model has
floating-point numbers; any other takes and returns float32. TensorFlow prints pages while it converts; who
minds calls this in a process of its own (:mod:`converters.workshop`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from converters.calibration import Calibration
from converters.graph import TensorInfo
from converters.keras_backend import freeze, load_tensorflow
from converters.quantization import Quantization
from converters.recurrent import unrolled
from converters.split import Half
from converters.substitutes import call_on_device, exact_one_hot
from edge_sdk.errors import ConversionError, RuntimeUnavailableError
from edge_sdk.manifest import Precision
from edge_sdk.runtime import Interpreter
from edge_sdk.runtime import TensorInfo as RuntimeTensor

Array = npt.NDArray[Any]


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
    tensorflow = load_tensorflow()
    takes = half.tensors(half.inputs)
    names = input_keys(len(takes))
    module = _signature_module(half, takes, names, keys)
    converter = tensorflow.lite.TFLiteConverter.from_concrete_functions([module.run.get_concrete_function()], module)
    _set_precision(converter, precision, lambda: _samples(names, calibration))
    try:
        path.write_bytes(converter.convert())
    except Exception as error:  # the converter raises RuntimeError, ValueError and exceptions of its own
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


def _set_precision(converter: Any, precision: Precision, samples: Callable[[], Iterator[dict[str, Array]]]) -> None:
    lite = load_tensorflow().lite
    if precision == "float32":
        return
    converter.optimizations = [lite.Optimize.DEFAULT]
    if precision == "float16":
        converter.target_spec.supported_types = [load_tensorflow().float16]
    elif precision == "int8":
        converter.representative_dataset = samples
        converter.target_spec.supported_ops = [lite.OpsSet.TFLITE_BUILTINS_INT8]
        converter.inference_input_type = load_tensorflow().int8
        converter.inference_output_type = load_tensorflow().int8


def _signature_module(half: Half, takes: Sequence[TensorInfo], names: Sequence[str], keys: Sequence[str]) -> Any:
    """A module whose function ``run`` is the half with constant weights, from ``names`` to a dict of ``keys``."""
    tensorflow = load_tensorflow()
    signature = [
        tensorflow.TensorSpec((1, *tensor.shape), tensor.dtype, name=name)
        for tensor, name in zip(takes, names, strict=True)
    ]
    with unrolled(step.layer for step in half.steps), exact_one_hot():
        traced = tensorflow.function(
            lambda *values: half(values, call_on_device), signature, autograph=False
        ).get_concrete_function()
    frozen = freeze(traced)
    module = tensorflow.Module()
    module.run = tensorflow.function(
        lambda *values: dict(zip(keys, frozen(*values), strict=True)), signature, autograph=False
    )
    return module


def _samples(names: Sequence[str], calibration: Calibration) -> Iterator[dict[str, Array]]:
    for number in range(len(calibration.inputs[0])):
        yield {name: array[number : number + 1] for name, array in zip(names, calibration.inputs, strict=True)}


def _quantization(info: RuntimeTensor) -> Quantization:
    return Quantization(dtype=info.dtype.name, scale=info.scale, zero_point=info.zero_point)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
