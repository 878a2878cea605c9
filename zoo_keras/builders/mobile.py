"""Depthwise-separable CNN, as in MobileNet: a spatial filter per channel, then a 1x1 convolution that mixes channels.

It is the smallest one of the zoo: a stem of stride 4 keeps even its first feature small, at the price of accuracy.
"""

from __future__ import annotations

from typing import Any

from zoo_keras.builders.blocks import classifier, convolution, image_input


def build(classes: int) -> Any:
    """An untrained `keras.Model` from `image` (28, 28, 1) to `probabilities` (classes,)."""
    import keras
    from keras import layers

    image, x = image_input()
    x = convolution(x, 16, name="stem", strides=4)
    for name, filters, strides in (("sep1", 32, 1), ("sep2", 64, 2), ("sep3", 96, 1), ("sep4", 96, 1)):
        x = _separable(x, filters, name=name, strides=strides)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(image, classifier(x, classes), name="mobile")


def _separable(x: Any, filters: int, *, name: str, strides: int) -> Any:
    from keras import layers

    x = layers.DepthwiseConv2D(3, strides=strides, padding="same", use_bias=False, name=f"{name}_depthwise")(x)
    x = layers.BatchNormalization(name=f"{name}_depthwise_norm")(x)
    x = layers.ReLU(max_value=6.0, name=f"{name}_depthwise_relu")(x)
    x = layers.Conv2D(filters, 1, use_bias=False, name=f"{name}_pointwise")(x)
    x = layers.BatchNormalization(name=f"{name}_pointwise_norm")(x)
    return layers.ReLU(max_value=6.0, name=f"{name}_pointwise_relu")(x)
