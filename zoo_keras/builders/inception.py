"""Inception-style CNN: four branches of different reach side by side, concatenated at the end of each block."""

from __future__ import annotations

from typing import Any

from zoo_keras.builders.blocks import classifier, convolution, image_input


def build(classes: int) -> Any:
    """An untrained `keras.Model` from `image` (28, 28, 1) to `probabilities` (classes,)."""
    import keras
    from keras import layers

    image, x = image_input()
    x = convolution(x, 24, name="stem", strides=2)
    x = _branches(x, name="mix1", point=12, near=16, far=12, pooled=8)
    x = layers.MaxPooling2D(2, name="pool1")(x)
    x = _branches(x, name="mix2", point=32, near=48, far=32, pooled=16)
    x = layers.MaxPooling2D(2, padding="same", name="pool2")(x)
    x = _branches(x, name="mix3", point=48, near=80, far=48, pooled=32)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(image, classifier(x, classes, dropout=0.2), name="inception")


def _branches(x: Any, *, name: str, point: int, near: int, far: int, pooled: int) -> Any:
    """Four branches: 1x1; 3x3; two 3x3 in a row (a reach of 5x5); pooling and 1x1."""
    from keras import layers

    one = convolution(x, point, name=f"{name}_point", kernel=1)
    two = convolution(x, near // 2, name=f"{name}_near_reduce", kernel=1)
    two = convolution(two, near, name=f"{name}_near")
    three = convolution(x, far // 2, name=f"{name}_far_reduce", kernel=1)
    three = convolution(three, far, name=f"{name}_far_first")
    three = convolution(three, far, name=f"{name}_far_second")
    four = layers.MaxPooling2D(3, strides=1, padding="same", name=f"{name}_pooled_pool")(x)
    four = convolution(four, pooled, name=f"{name}_pooled", kernel=1)
    return layers.Concatenate(name=f"{name}_concat")([one, two, three, four])
