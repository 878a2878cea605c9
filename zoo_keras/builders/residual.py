"""Residual CNN, as in ResNet: pairs of convolutions with a shortcut around each pair.

A cut inside a pair must carry the shortcut too, so these features are larger than those between the pairs.
"""

from __future__ import annotations

from typing import Any

from zoo_keras.builders.blocks import classifier, convolution, image_input


def build(classes: int) -> Any:
    """An untrained `keras.Model` from `image` (28, 28, 1) to `probabilities` (classes,)."""
    import keras
    from keras import layers

    image, x = image_input()
    x = convolution(x, 16, name="stem", strides=2)
    x = _pair(x, 16, name="res1", strides=1)
    x = _pair(x, 40, name="res2", strides=2)
    x = _pair(x, 88, name="res3", strides=2)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(image, classifier(x, classes, dropout=0.2), name="residual")


def _pair(x: Any, filters: int, *, name: str, strides: int) -> Any:
    from keras import layers

    shortcut = x
    if strides != 1 or x.shape[-1] != filters:
        shortcut = convolution(x, filters, name=f"{name}_shortcut", kernel=1, strides=strides, activate=False)
    x = convolution(x, filters, name=f"{name}_first", strides=strides)
    x = convolution(x, filters, name=f"{name}_second", activate=False)
    x = layers.Add(name=f"{name}_add")([x, shortcut])
    return layers.ReLU(name=f"{name}_relu")(x)
