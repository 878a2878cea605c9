"""Squeeze-and-excitation CNN: after each convolution the channels are weighted by what the whole image holds.

A cut between squeeze and excitation must carry both the gate's few numbers and the map they will weight.
"""

from __future__ import annotations

from typing import Any

from zoo_keras.builders.blocks import classifier, convolution, image_input


def build(classes: int) -> Any:
    """An untrained `keras.Model` from `image` (28, 28, 1) to `probabilities` (classes,)."""
    import keras
    from keras import layers

    image, x = image_input()
    x = convolution(x, 16, name="stem", kernel=5, strides=2)
    for name, filters, strides in (("se1", 24, 1), ("se2", 48, 2), ("se3", 64, 1), ("se4", 112, 2)):
        x = convolution(x, filters, name=name, strides=strides)
        x = _gate(x, name=name)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(image, classifier(x, classes, dropout=0.2), name="squeeze-excite")


def _gate(x: Any, *, name: str) -> Any:
    from keras import layers

    channels = x.shape[-1]
    gate = layers.GlobalAveragePooling2D(keepdims=True, name=f"{name}_squeeze")(x)
    gate = layers.Conv2D(channels // 4, 1, activation="relu", name=f"{name}_reduce")(gate)
    gate = layers.Conv2D(channels, 1, activation="sigmoid", name=f"{name}_excite")(gate)
    return layers.Multiply(name=f"{name}_scale")([x, gate])
