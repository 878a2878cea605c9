"""One model of each family of ``keras.applications``, cut at a quarter, a half and three quarters: what comes out.

Run as a program with a family's name it prints one JSON document: a process of its own gives its memory back.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tflite_runtime_venv import python_of_the_venv

# Keras's module: class, side of the square input. The smallest member, at about the smallest size that its layers take.
FAMILIES = {
    "convnext": ("ConvNeXtTiny", 64),
    "densenet": ("DenseNet121", 64),
    "efficientnet": ("EfficientNetB0", 64),
    "efficientnet_v2": ("EfficientNetV2B0", 64),
    "inception_resnet_v2": ("InceptionResNetV2", 75),
    "inception_v3": ("InceptionV3", 75),
    "mobilenet": ("MobileNet", 64),
    "mobilenet_v2": ("MobileNetV2", 64),
    "mobilenet_v3": ("MobileNetV3Small", 64),
    "nasnet": ("NASNetMobile", 64),
    "resnet": ("ResNet50", 64),
    "resnet_v2": ("ResNet50V2", 64),
    "vgg16": ("VGG16", 32),
    "vgg19": ("VGG19", 32),
    "xception": ("Xception", 71),
}
SHARES = (0.25, 0.5, 0.75)
SAMPLES = 12
HARMLESS = 0.05

Array = np.ndarray[Any, Any]


def load(family: str) -> Any:
    """The family's model with random weights, but such that rounding errors grow no more than in a trained one.

    Normalizations have the statistics of random images. Their offsets are 1, not 0: where half of the values are cut
    off by a ReLU, layer after layer, whatever noise there is grows until it drowns the signal. Scales of residual
    branches, which begin at a millionth, are such that the branches matter.
    """
    import keras

    name, side = FAMILIES[family]
    keras.utils.set_random_seed(0)
    model = getattr(keras.applications, name)(
        weights=None, input_shape=(side, side, 3), classes=10, classifier_activation=None
    )
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.0
            layer.beta.assign(np.ones(layer.beta.shape))
        elif type(layer).__name__ == "LayerScale":
            layer.gamma.assign(np.full(layer.gamma.shape, 0.3))
    model(images(family), training=True)
    return model


def images(family: str) -> Array:
    """Smooth random images of 0 to 255, as what is in them has edges and areas."""
    side = FAMILIES[family][1]
    coarse = np.random.default_rng(0).uniform(0, 255, (SAMPLES, side // 8 + 1, side // 8 + 1, 3))
    return coarse.repeat(8, axis=1).repeat(8, axis=2)[:, :side, :side].astype(np.float32)


def report(family: str) -> dict[str, Any]:
    from converters.cuts import cut_points
    from converters.flatten import flatten

    flat = flatten(load(family))
    legal = [cut.k for cut in cut_points(flat.graph) if cut.legal]
    expected = np.asarray(flat.model(images(family), training=False))
    return {
        "n": flat.graph.n,
        "legal": len(legal),
        "variation": float(expected.std(axis=0).min() / np.abs(expected).max()),
        "cuts": [
            cut_report(family, flat, min(legal, key=lambda k: abs(k - share * flat.graph.n)), expected)
            for share in SHARES
        ],
    }


def cut_report(family: str, flat: Any, k: int, expected: Array) -> dict[str, Any]:
    """How far the halves in float are from the whole, and the files from the halves.

    ``errors`` are those of the features that the head's file emits, by runtime, as :mod:`converters.deviation` has
    them; ``roundings`` what they would be if each tensor on the way were rounded to int8 and all else were exact;
    ``mistakes`` what they would be of exact features with a mistake in them.
    """
    from converters.bundles import build_bundle
    from converters.calibration import Calibration
    from converters.deviation import deviation
    from converters.head_runs import installed_runtimes, run_head
    from converters.keras_backend import load_tensorflow
    from converters.split import split
    from edge_sdk.manifest import ModelRef
    from edge_sdk.quantization import dequantize
    from edge_sdk.runtime import SIGNATURE

    inputs = images(family)
    halves = split(flat, k)
    features = [np.asarray(value) for value in halves.head([inputs])]
    late = np.asarray(halves.tail(features)[0])
    calibration = Calibration.of(flat.graph, {flat.graph.tensors[0].name: inputs})
    second = [python_of_the_venv()] if sys.version_info < (3, 12) else []
    with tempfile.TemporaryDirectory() as folder:
        bundle = build_bundle(
            flat, k, calibration, task="any", model=ModelRef(name=family, sha256="0" * 64), folder=Path(folder)
        )
        # Copies of all weights are left in cycles: more than the tail itself, of which another is about to come.
        gc.collect()
        sent = {run.name: run_head(bundle, run, [inputs]).features for run in installed_runtimes(bundle, second)}
        tail = load_tensorflow().saved_model.load(str(bundle.tail_path))
        crossing = bundle.manifest.crossing
        taken = {spec.name: feature for spec, feature in zip(crossing, sent["litert"], strict=True)}
        answer = np.asarray(tail.signatures[SIGNATURE](**taken)["output_0"])
    real = {
        runtime: [
            dequantize(feature, spec.scale, spec.zero_point) for spec, feature in zip(crossing, made, strict=True)
        ]
        for runtime, made in sent.items()
    }
    wrong = [
        {name: deviation(made, exact) for name, made in mistakes(features, place, crossing[place].scale)}
        for place, exact in enumerate(features)
    ]
    return {
        "k": k,
        "float_difference": _relative(late, expected),
        "tail_difference": _relative(answer, np.asarray(halves.tail(real["litert"])[0])),
        "errors": {
            runtime: [deviation(*pair) for pair in zip(each, features, strict=True)] for runtime, each in real.items()
        },
        "roundings": [deviation(*pair) for pair in zip(rounded(halves.head, inputs), features, strict=True)],
        # Of tensors that hardly differ either will do, and what is symmetric may be turned.
        "mistakes": [{name: error for name, error in each.items() if error > HARMLESS} for each in wrong],
    }


def rounded(half: Any, inputs: Array) -> list[Array]:
    """The outputs of a half in float where the input and what each operation makes are rounded to int8."""
    import keras

    def call(layer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return keras.tree.map_structure(in_int8, layer(*args, **kwargs))

    return [np.asarray(value) for value in half([in_int8(inputs)], call)]


def in_int8(values: Any) -> Any:
    """Numbers rounded to the 256 that cover their range."""
    from converters.quantization import int8_of_range
    from edge_sdk.quantization import dequantize, quantize

    values = np.asarray(values)
    if values.dtype.kind != "f":
        return values
    to = int8_of_range(values)
    return dequantize(quantize(values, to.scale, to.zero_point, to.dtype), to.scale, to.zero_point)


def mistakes(features: Sequence[Array], place: int, scale: float) -> Iterator[tuple[str, Array]]:
    """The feature at ``place`` as it would come out if a head were made wrongly, by what is wrong."""
    exact = features[place]
    yield "scale", exact * 1.5
    yield "zero point", exact + 32 * scale
    yield "sample", np.roll(exact, 1, axis=0)
    yield "channels", np.roll(exact, 1, axis=-1)
    if exact.ndim == 4 and exact.shape[1] > 1:
        yield "axes", exact.swapaxes(1, 2)
    for other, feature in enumerate(features):
        if other != place and feature.shape == exact.shape:
            yield f"feature {other}", feature


def _relative(made: Array, expected: Array) -> float:
    return float(np.abs(made - expected).max() / np.abs(expected).max())


if __name__ == "__main__":
    # TensorFlow's converter prints pages, past Python.
    document = os.dup(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    result = json.dumps(report(sys.argv[1]))
    os.write(document, result.encode() + b"\n")
