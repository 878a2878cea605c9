"""Small vision transformer: a convolutional stem makes 49 tokens, attention mixes them.

The position embedding is the bias of `tokens_project`, which has one value for each token and channel: the stock layer
that holds a constant per position, added to a projection.
"""

from __future__ import annotations

from typing import Any

from zoo_keras.builders.blocks import classifier, convolution, image_input

TOKENS = 49
CHANNELS = 64
HEADS = 4


def build(classes: int) -> Any:
    """An untrained `keras.Model` from `image` (28, 28, 1) to `probabilities` (classes,)."""
    import keras
    from keras import layers

    image, x = image_input()
    x = convolution(x, 16, name="stem1", strides=2)
    x = convolution(x, 32, name="stem2")
    x = convolution(x, CHANNELS, name="stem3", strides=2)
    x = layers.Reshape((TOKENS, CHANNELS), name="tokens")(x)
    x = layers.EinsumDense("btc,cd->btd", (TOKENS, CHANNELS), bias_axes="td", name="tokens_project")(x)
    for name in ("block1", "block2"):
        x = _encoder(x, name=name)
    x = layers.LayerNormalization(epsilon=1e-5, name="final_norm")(x)
    x = layers.GlobalAveragePooling1D(name="pool")(x)
    return keras.Model(image, classifier(x, classes), name="vision-transformer")


def _encoder(x: Any, *, name: str) -> Any:
    from keras import layers

    y = layers.LayerNormalization(epsilon=1e-5, name=f"{name}_attention_norm")(x)
    y = layers.MultiHeadAttention(HEADS, CHANNELS // HEADS, name=f"{name}_attention")(y, y)
    x = layers.Add(name=f"{name}_attention_add")([x, y])
    y = layers.LayerNormalization(epsilon=1e-5, name=f"{name}_mlp_norm")(x)
    y = layers.Dense(2 * CHANNELS, activation="relu", name=f"{name}_mlp_widen")(y)
    y = layers.Dense(CHANNELS, name=f"{name}_mlp_narrow")(y)
    return layers.Add(name=f"{name}_mlp_add")([x, y])
