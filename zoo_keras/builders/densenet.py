"""Densely connected CNN, as in DenseNet: each convolution sees the concatenation of everything before it in its block.

Unlike the original the normalization follows the convolution, because only there can it be folded into the kernel.
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
    x = _dense_block(x, name="dense1", depth=3, growth=12)
    x = _transition(x, 32, name="trans1")
    x = _dense_block(x, name="dense2", depth=4, growth=16)
    x = _transition(x, 56, name="trans2")
    x = _dense_block(x, name="dense3", depth=4, growth=24)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(image, classifier(x, classes), name="densenet")


def _dense_block(x: Any, *, name: str, depth: int, growth: int) -> Any:
    from keras import layers

    for i in range(1, depth + 1):
        new = convolution(x, growth, name=f"{name}_{i}")
        x = layers.Concatenate(name=f"{name}_{i}_concat")([x, new])
    return x


def _transition(x: Any, filters: int, *, name: str) -> Any:
    from keras import layers

    x = convolution(x, filters, name=name, kernel=1)
    return layers.AveragePooling2D(2, padding="same", name=f"{name}_pool")(x)
