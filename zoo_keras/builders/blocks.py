"""Layer sequences that several families share, with one naming scheme: `<block>_<part>`.

A convolution is followed by its own batch normalization, without a bias between them, so that a converter can fold the
normalization into the kernel and nothing is lost when the result is quantized.
"""

from __future__ import annotations

from typing import Any

IMAGE_SHAPE = (28, 28, 1)


def image_input() -> tuple[Any, Any]:
    """The input every model of an image task has: raw pixels 0..255, scaled to 0..1 inside the model.

    Returns the input tensor `image`, float32 (batch, 28, 28, 1), and the scaled tensor of the same shape.
    """
    import keras

    image = keras.Input(IMAGE_SHAPE, name="image", dtype="float32")
    return image, keras.layers.Rescaling(1.0 / 255.0, name="rescale")(image)


def convolution(x: Any, filters: int, *, name: str, kernel: int = 3, strides: int = 1, activate: bool = True) -> Any:
    """Convolution, batch normalization and (unless `activate` is false) ReLU on (batch, height, width, channels)."""
    from keras import layers

    x = layers.Conv2D(filters, kernel, strides=strides, padding="same", use_bias=False, name=f"{name}_conv")(x)
    x = layers.BatchNormalization(name=f"{name}_norm")(x)
    return layers.ReLU(name=f"{name}_relu")(x) if activate else x


def classifier(x: Any, classes: int, *, dropout: float = 0.0) -> Any:
    """The last layer of every model: class probabilities, float32 (batch, classes), from (batch, channels)."""
    from keras import layers

    if dropout:
        x = layers.Dropout(dropout, name="dropout")(x)
    return layers.Dense(classes, activation="softmax", name="probabilities")(x)
