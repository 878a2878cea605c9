"""One model of each family of ``keras.applications``, cut at a quarter, a half and three quarters: what comes out.

Run as a program with a family's name it prints one JSON document: a process of its own gives its memory back.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

# Family: class, side of the square input. The smallest member, at about the smallest size that its layers take.
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
    "vgg": ("VGG16", 32),
    "xception": ("Xception", 71),
}
SHARES = (0.25, 0.5, 0.75)
SAMPLES = 12


def load(family: str) -> Any:
    """The family's model with random weights; normalizations have the statistics of random images."""
    import keras

    name, side = FAMILIES[family]
    keras.utils.set_random_seed(0)
    model = getattr(keras.applications, name)(
        weights=None, input_shape=(side, side, 3), classes=10, classifier_activation=None
    )
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.0
    model(images(family), training=True)
    return model


def images(family: str) -> np.ndarray[Any, Any]:
    """Smooth random images of 0 to 255, as what is in them has edges and areas."""
    side = FAMILIES[family][1]
    coarse = np.random.default_rng(0).uniform(0, 255, (SAMPLES, side // 8 + 1, side // 8 + 1, 3))
    return coarse.repeat(8, axis=1).repeat(8, axis=2)[:, :side, :side].astype(np.float32)


def report(family: str) -> dict[str, Any]:
    from converters.bundles import build_bundle
    from converters.calibration import Calibration
    from converters.cuts import cut_points
    from converters.deviation import deviation
    from converters.flatten import flatten
    from converters.keras_backend import load_tensorflow
    from converters.split import split
    from edge_sdk.head import Head
    from edge_sdk.manifest import ModelRef
    from edge_sdk.quantization import dequantize

    flat = flatten(load(family))
    began = time.perf_counter()
    cuts = cut_points(flat.graph)
    listed_s = time.perf_counter() - began
    legal = [cut.k for cut in cuts if cut.legal]
    samples = {flat.graph.tensors[0].name: images(family)}
    expected = np.asarray(flat.model(images(family), training=False))
    found = []
    for share in SHARES:
        k = min(legal, key=lambda place: abs(place - share * flat.graph.n))
        halves = split(flat, k)
        features = [np.asarray(value) for value in halves.head([images(family)])]
        late = np.asarray(halves.tail(features)[0])
        with tempfile.TemporaryDirectory() as folder:
            bundle = build_bundle(
                flat,
                k,
                Calibration.of(flat.graph, samples),
                task="any",
                model=ModelRef(name=family, sha256="0" * 64),
                folder=Path(folder),
            )
            head = Head(bundle)
            tail = load_tensorflow().saved_model.load(str(bundle.tail_path))
            rows = [head.run(image).features for image in images(family)]
            sent = {each[0].name: np.concatenate([part.data for part in each]) for each in zip(*rows, strict=True)}
            answer = np.asarray(tail.signatures["serving_default"](**sent)["output_0"])
            real = [dequantize(sent[spec.name], spec.scale, spec.zero_point) for spec in bundle.manifest.crossing]
            exact = np.asarray(halves.tail(real)[0])
            found.append(
                {
                    "k": k,
                    "crossing": len(bundle.manifest.crossing),
                    "float_difference": float(np.abs(late - expected).max() / np.abs(expected).max()),
                    "head_error": max(deviation(*pair) for pair in zip(real, features, strict=True)),
                    "tail_difference": float(np.abs(answer - exact).max() / np.abs(exact).max()),
                }
            )
    return {"family": family, "n": flat.graph.n, "legal": len(legal), "listed_s": listed_s, "cuts": found}


if __name__ == "__main__":
    # TensorFlow's converter prints pages, past Python.
    document = os.dup(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    result = json.dumps(report(sys.argv[1]))
    os.write(document, result.encode() + b"\n")
