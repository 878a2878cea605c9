"""Legacy files as the old Keras wrote them, and what becomes of them. Run as a program, where tf_keras is installed.

Arguments: a folder. Prints one JSON document: for each file what was loaded and how far it is from the old model.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np


def models() -> dict[str, Any]:
    import tensorflow as tf
    import tf_keras
    from tf_keras import layers

    image = tf_keras.Input((16, 16, 3), name="image")
    x = image / 127.5 - 1.0
    x = layers.Conv2D(4, 3, activation="relu", name="block/conv")(x)
    x = layers.BatchNormalization()(x)
    x = tf.nn.relu6(x + 3.0) * (1 / 6.0)
    x = tf.concat([x[:, 1:, 1:, :], tf.math.sigmoid(x)[:, :-1, :-1, :]], axis=-1)
    x = layers.DepthwiseConv2D(3, name="depthwise")(x)
    inner = tf_keras.Sequential([layers.InputLayer((11, 11, 8)), layers.Conv2D(3, 1, name="c"), layers.ReLU()], "inner")
    scores = layers.Dense(3, activation="softmax", name="scores")(tf.reduce_mean(inner(x), axis=[1, 2]))
    series = tf_keras.Input((6, 3), name="series")
    y = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(series)
    y = layers.Dense(2)(layers.GRU(3)(y))
    tokens = tf_keras.Input((5,), name="tokens", dtype="int32")
    z = layers.LSTM(3)(layers.Embedding(9, 4, mask_zero=True, name="embedding")(tokens))
    writing = tf_keras.Input((2,), name="x")
    w = layers.Dense(2)(writing)
    tf_keras.backend.clear_session()
    return {
        "operations": tf_keras.Model(image, scores, name="operations"),
        "recurrent": tf_keras.Model(series, y, name="recurrent"),
        "plain": tf_keras.Sequential(
            [layers.InputLayer((8, 8, 3)), layers.DepthwiseConv2D(3), layers.Flatten(), layers.Dense(2)], name="plain"
        ),
        "mobilenet": tf_keras.applications.MobileNetV3Small((32, 32, 3), weights=None, classes=4, alpha=0.75),
        "masked": tf_keras.Model(tokens, z, name="masked"),
        "writing": tf_keras.Model(writing, tf.io.encode_base64(tf.strings.as_string(w)), name="writing"),
    }


def report(folder: Path) -> dict[str, Any]:
    from converters.bundles import build_bundle
    from converters.calibration import Calibration, random_calibration
    from converters.cuts import cut_points
    from converters.flatten import flatten
    from converters.loading import load_model
    from edge_sdk.errors import SplitfleetError
    from edge_sdk.head import Head
    from edge_sdk.manifest import ModelRef

    made: dict[str, Any] = {}
    for name, old in models().items():
        path = folder / f"{name}.h5"
        old.save(path)
        try:
            flat = flatten(load_model(path))
        except SplitfleetError as error:
            made[name] = {"error": error.message}
            continue
        values = np.random.default_rng(0).uniform(0, 255, (3, *old.input_shape[1:])).astype(np.float32)
        difference = np.abs(np.asarray(flat.model(values, training=False)) - np.asarray(old(values, training=False)))
        legal = [cut.k for cut in cut_points(flat.graph) if cut.legal]
        calibration = Calibration.of(flat.graph, random_calibration(flat))
        k = legal[len(legal) // 2]
        target = folder / name
        target.mkdir()
        bundle = build_bundle(
            flat,
            k,
            calibration,
            task="t",
            model=ModelRef(name=name, sha256="0" * 64),
            folder=target,
            precision="int8-weights",
        )
        made[name] = {
            "difference": float(difference.max()),
            "operations": [f"{operation.name}:{operation.kind}" for operation in flat.graph.operations],
            "features": len(Head(bundle).run(values[0]).features),
        }
    return made


if __name__ == "__main__":
    document = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    result = json.dumps(report(Path(sys.argv[1])))
    os.write(document, result.encode() + b"\n")
