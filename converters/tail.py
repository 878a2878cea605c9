"""The tail as files: a half of a model becomes a SavedModel that takes the features as they travel.

Its one signature ``serving_default`` takes ``feature_0…`` of shape (batch, *shape), turns int8 into real numbers inside
the graph, and returns float32. The weights are constants of the graph: it loads without restoring variables, and
TensorFlow folds what it can. Beside it lies the same as a TensorFlow Lite model, where that is possible
(:mod:`converters.tail_tflite`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from converters.keras_backend import freeze, load_tensorflow
from converters.split import Half
from converters.tail_tflite import write_tail_tflite
from edge_sdk.manifest import TAIL_DIR, TAIL_TFLITE_FILE, CrossingSpec
from edge_sdk.runtime import SIGNATURE


def write_tail(
    half: Half, crossing: Sequence[CrossingSpec], keys: Sequence[str], folder: Path, tflite_failed: str = ""
) -> str:
    """Write ``half`` as ``tail/`` and, where that is possible, ``tail.tflite`` into the bundle's ``folder``.

    ``crossing`` describes its inputs, ``keys`` name its outputs; ``tflite_failed`` is why ``tail.tflite`` need not be
    tried. Returns why there is none, empty where there is.
    """
    tensorflow = load_tensorflow()
    signature = [tensorflow.TensorSpec((None, *spec.shape), spec.dtype, name=spec.name) for spec in crossing]
    real = half.tensors(half.inputs)

    def run(*features: Any) -> list[Any]:
        values = [
            tensorflow.cast(_dequantized(feature, spec), tensor.dtype)
            for feature, spec, tensor in zip(features, crossing, real, strict=True)
        ]
        return [tensorflow.cast(output, tensorflow.float32) for output in half(values)]

    frozen = freeze(tensorflow.function(run, signature, autograph=False).get_concrete_function())
    module = tensorflow.Module()
    module.run = tensorflow.function(
        lambda *values: dict(zip(keys, frozen(*values), strict=True)), signature, autograph=False
    )
    saved_model = folder / TAIL_DIR
    tensorflow.saved_model.save(module, str(saved_model), {SIGNATURE: module.run.get_concrete_function()})
    # Empty, and so not in the manifest: a folder laid out from the manifest's files lacks it too.
    (saved_model / "assets").rmdir()

    return tflite_failed or write_tail_tflite(frozen, crossing, keys, folder / TAIL_TFLITE_FILE)


def _dequantized(feature: Any, spec: CrossingSpec) -> Any:
    if spec.scale is None or spec.zero_point is None:
        return feature
    tensorflow = load_tensorflow()
    return (tensorflow.cast(feature, tensorflow.float32) - float(spec.zero_point)) * spec.scale
