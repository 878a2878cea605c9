"""An int8 head made in the usual way, to compare splitfleet's with: ``tf.lite.TFLiteConverter`` on a Keras half whose
weights are variables, with a representative data set, which is what ``TFLiteConverter.from_keras_model`` does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

# Of these a head's error is taken.
COMPARED_SAMPLES = 32


def write_usual_head(half: Any, keys: Sequence[str], samples: Sequence[Any], path: Path) -> None:
    """Write the head; ``samples`` are parallel to its inputs, each (N, …)."""
    import tensorflow

    from converters.substitutes import call_on_device

    lite = tensorflow.lite
    names = [f"input_{number}" for number in range(len(samples))]
    signature = [
        tensorflow.TensorSpec((1, *tensor.shape), tensor.dtype, name=name)
        for tensor, name in zip(half.tensors(half.inputs), names, strict=True)
    ]
    module = tensorflow.Module()
    module.weights = [variable.value for step in half.steps for variable in getattr(step.layer, "variables", ())]
    module.run = tensorflow.function(
        lambda *values: dict(zip(keys, half(values, call_on_device), strict=True)), signature, autograph=False
    )
    converter = lite.TFLiteConverter.from_concrete_functions([module.run.get_concrete_function()], module)
    converter.optimizations = [lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: (
        dict(zip(names, (array[number : number + 1] for array in samples), strict=True))
        for number in range(len(samples[0]))
    )
    converter.target_spec.supported_ops = [lite.OpsSet.TFLITE_BUILTINS_INT8]
    converter.inference_input_type = converter.inference_output_type = tensorflow.int8
    path.write_bytes(converter.convert())


def run_head(path: Path, samples: Sequence[Any]) -> dict[str, Any]:
    """What the head in a file makes of real ``samples`` (N, …), as real numbers (N, …) by key."""
    from edge_sdk.quantization import dequantize, quantize
    from edge_sdk.runtime import Interpreter

    interpreter = Interpreter(path)
    given = {
        key: quantize(array, info.scale, info.zero_point, info.dtype.name)
        if info.scale is not None and info.zero_point is not None
        else array.astype(info.dtype)
        for (key, info), array in zip(sorted(interpreter.inputs.items()), samples, strict=True)
    }
    rows = [
        interpreter.run({key: array[number : number + 1] for key, array in given.items()})
        for number in range(len(samples[0]))
    ]
    return {
        key: dequantize(np.concatenate([row[key] for row in rows]), info.scale, info.zero_point)
        for key, info in interpreter.outputs.items()
    }


def error_of(path: Path, half: Any, keys: Sequence[str], samples: Sequence[Any]) -> float:
    """The largest error of a feature (:mod:`converters.deviation`) over some of ``samples``."""
    from converters.deviation import deviation

    some = [array[:: max(1, len(array) // COMPARED_SAMPLES)] for array in samples]
    made = run_head(path, some)
    return max(deviation(made[key], np.asarray(expected)) for key, expected in zip(keys, half(some), strict=True))


@contextmanager
def silence() -> Iterator[None]:
    """The converter prints pages, past Python."""
    sys.stdout.flush()
    kept = [os.dup(1), os.dup(2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        for number in (*kept, nowhere):
            os.close(number)
