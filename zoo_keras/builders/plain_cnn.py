"""Plain CNN: convolutions one after another and a wide fully connected layer, as in AlexNet and VGG.

It is the big one of the zoo: nearly all of its parameters sit in the one layer `wide_dense`, behind the pooling, where
they cost a server little and a small device its whole memory.
"""

from __future__ import annotations

from typing import Any

from zoo_keras.builders.blocks import classifier, convolution, image_input


def build(classes: int) -> Any:
    """An untrained `keras.Model` from `image` (28, 28, 1) to `probabilities` (classes,)."""
    import keras
    from keras import layers

    image, x = image_input()
    x = convolution(x, 24, name="stem", kernel=5, strides=2)
    x = convolution(x, 32, name="conv1")
    x = layers.MaxPooling2D(2, name="pool1")(x)
    x = convolution(x, 64, name="conv2")
    x = convolution(x, 64, name="conv3")
    x = layers.Flatten(name="flatten")(x)
    x = layers.Dropout(0.3, name="flatten_dropout")(x)
    x = layers.Dense(544, activation="relu", name="wide_dense")(x)
    return keras.Model(image, classifier(x, classes, dropout=0.4), name="plain-cnn")
