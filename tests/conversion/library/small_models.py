"""Small Keras models of the kinds that users have, untrained but with weights that matter, and samples for them.

A plain module on ``sys.path`` (see conftest.py), so that worker processes can import it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def chain() -> Any:
    """Sequential, with everything that behaves otherwise in training."""
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input((12, 12, 1), name="image"),
            layers.Rescaling(1 / 255, name="rescale"),
            layers.Conv2D(4, 3, name="conv"),
            layers.BatchNormalization(name="norm"),
            layers.ReLU(name="relu"),
            layers.GaussianNoise(0.5, name="noise"),
            layers.MaxPooling2D(name="pool"),
            layers.Flatten(name="flatten"),
            layers.Dropout(0.5, name="dropout"),
            layers.Dense(10, activation="softmax", name="probabilities"),
        ],
        name="chain",
    )


def branches() -> Any:
    """Skips, concatenation, and an addition that is no layer: cuts carry up to three tensors."""
    import keras
    from keras import layers

    image = keras.Input((12, 12, 2), name="image")
    stem = layers.Conv2D(6, 3, padding="same", activation="relu", name="stem")(image)
    left = layers.Conv2D(6, 3, padding="same", activation="relu", name="left")(stem)
    right = layers.DepthwiseConv2D(3, padding="same", name="right")(stem)
    right = layers.BatchNormalization(name="right_norm")(right)
    both = layers.Concatenate(name="both")([left, right, stem])
    both = layers.Conv2D(6, 1, name="mix")(both)
    both = keras.ops.relu(both + stem)
    pooled = layers.GlobalAveragePooling2D(name="pool")(both)
    return keras.Model(image, layers.Dense(5, name="scores")(pooled), name="branches")


def two_ends() -> Any:
    """Two inputs, and three outputs of which the first lies early and the second is made in the middle and used on."""
    import keras
    from keras import layers

    image = keras.Input((8, 8, 1), name="image")
    facts = keras.Input((3,), name="facts")
    x = layers.Conv2D(4, 3, activation="relu", name="conv")(image)
    early = layers.GlobalMaxPooling2D(name="early")(x)
    y = layers.Dense(4, activation="relu", name="facts_dense")(facts)
    middle = layers.Concatenate(name="middle")([early, y])
    z = layers.Dense(8, activation="relu", name="late_dense")(middle)
    return keras.Model([image, facts], [early, middle, layers.Dense(2, name="late")(z)], name="two_ends")


def siamese() -> Any:
    """One encoder, two calls: the layers are shared."""
    import keras
    from keras import layers

    left, right = keras.Input((6, 6, 1), name="left"), keras.Input((6, 6, 1), name="right")
    conv = layers.Conv2D(3, 3, activation="relu", name="conv")
    dense = layers.Dense(4, name="code")

    def encode(x: Any) -> Any:
        return dense(layers.GlobalAveragePooling2D()(conv(x)))

    distance = layers.Subtract(name="difference")([encode(left), encode(right)])
    distance = layers.Dense(4, activation="relu", name="judge")(distance)
    return keras.Model([left, right], layers.Dense(1, activation="sigmoid", name="same")(distance), name="siamese")


def nested() -> Any:
    """A backbone as a layer, which holds a Sequential as a layer; the backbone is called twice."""
    import keras
    from keras import layers

    block = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(3, 3, padding="same", name="conv"),
            layers.BatchNormalization(name="norm"),
            layers.ReLU(name="relu"),
        ],
        name="block",
    )
    inner = keras.Input((8, 8, 3), name="inner")
    added = layers.Add(name="add")([block(inner), inner])
    backbone = keras.Model(inner, layers.Conv2D(3, 1, name="out")(added), name="backbone")
    image = keras.Input((8, 8, 3), name="image")
    x = layers.Rescaling(1 / 255, name="rescale")(image)
    x = backbone(backbone(x))
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(image, layers.Dense(3, name="scores")(x), name="nested")


def plain_operations() -> Any:
    """Operations that are no layers: slices, splits, functions with several results, a constant."""
    import keras
    from keras import layers

    image = keras.Input((8, 8, 4), name="image")
    x = layers.Conv2D(4, 3, padding="same", activation="relu", name="conv")(image)
    first, second = keras.ops.split(x, 2, axis=-1)
    x = first * keras.ops.sigmoid(second) + np.float32(0.5)
    x = keras.ops.mean(x[:, 1:7, :, :], axis=(1, 2))
    return keras.Model(image, layers.Dense(3, name="scores")(x), name="plain_operations")


def named() -> Any:
    """Inputs and outputs in dicts."""
    import keras
    from keras import layers

    inputs = {"wide": keras.Input((6,), name="wide"), "deep": keras.Input((4,), name="deep")}
    x = layers.Dense(5, activation="relu", name="first")(inputs["wide"])
    y = layers.Concatenate(name="joined")([x, inputs["deep"]])
    y = layers.Dense(5, activation="tanh", name="second")(y)
    outputs = {"score": layers.Dense(2, name="score_dense")(y), "code": layers.Dense(3, name="code_dense")(y)}
    return keras.Model(inputs, outputs, name="named")


KINDS: dict[str, Callable[[], Any]] = {
    build.__name__: build for build in (chain, branches, two_ends, siamese, nested, plain_operations, named)
}


def load(kind: str, seed: int = 0) -> Any:
    """A model of that kind whose every weight is random, moving statistics of normalizations included."""
    import keras

    keras.utils.set_random_seed(seed)
    model = KINDS[kind]()
    rng = np.random.default_rng(seed)
    for variable in model.weights:
        value = rng.normal(0.0, 0.5, variable.shape)
        if variable.path.endswith("moving_variance"):
            value = 0.5 + np.abs(value)
        variable.assign(value.astype(np.float32))
    return model


def samples(kind: str, count: int = 32) -> dict[str, np.ndarray[Any, Any]]:
    """Inputs for a model of that kind: pixels 0..255 for an ``image`` that is rescaled, else around 0."""
    shapes = {
        "chain": {"image": (12, 12, 1)},
        "branches": {"image": (12, 12, 2)},
        "two_ends": {"image": (8, 8, 1), "facts": (3,)},
        "siamese": {"left": (6, 6, 1), "right": (6, 6, 1)},
        "nested": {"image": (8, 8, 3)},
        "plain_operations": {"image": (8, 8, 4)},
        "named": {"wide": (6,), "deep": (4,)},
    }[kind]
    rng = np.random.default_rng(1)
    if kind in ("chain", "nested"):
        return {name: rng.integers(0, 256, (count, *shape), dtype=np.uint8) for name, shape in shapes.items()}
    return {name: rng.normal(0.0, 1.0, (count, *shape)).astype(np.float32) for name, shape in shapes.items()}


def killed() -> Any:
    """Loading that ends the process, as the kernel does when memory runs out."""
    import os
    import signal

    print("about to vanish", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def broken() -> Any:
    """Loading that fails in the user's own way."""
    print("a page of complaints", flush=True)
    raise KeyError("layer_7")


def spectrum() -> Any:
    """A model that full int8 cannot express: TensorFlow Lite has no int8 kernel for a Fourier transform."""
    import keras
    from keras import layers

    signal_in = keras.Input((16,), name="signal")
    real, imaginary = keras.ops.fft((signal_in, signal_in * 0.0))
    x = layers.Dense(4, name="mix")(real + imaginary)
    return keras.Model(signal_in, layers.Dense(2, name="scores")(x), name="spectrum")


def signal_samples() -> dict[str, np.ndarray[Any, Any]]:
    return {"signal": np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)}


def outliers() -> Any:
    """A model whose first layer makes one value in a thousand huge, which the second one takes away again."""
    import keras
    from keras import layers

    signal_in = keras.Input((8,), name="signal")
    wide = layers.Dense(64, activation="relu", name="wide")
    narrow = layers.Dense(8, activation="tanh", name="narrow")
    scores = layers.Dense(2, name="scores")
    model = keras.Model(signal_in, scores(narrow(wide(signal_in))), name="outliers")
    rng = np.random.default_rng(0)
    kernel, back = rng.normal(size=(8, 64)), rng.normal(size=(64, 8)) * 0.1
    kernel[:, 0] *= 3000.0
    back[0] = 0.0
    wide.set_weights([kernel, np.zeros(64)])
    narrow.set_weights([back, np.zeros(8)])
    scores.set_weights([rng.normal(size=(8, 2)), np.zeros(2)])
    return model


def outlier_samples() -> dict[str, np.ndarray[Any, Any]]:
    return {"signal": np.random.default_rng(1).normal(size=(40, 8)).astype(np.float32)}


def other_at_one() -> Any:
    """A model with a layer that computes something else for a batch of one, as a head has it."""
    import keras
    from keras import layers

    class Other(layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return keras.ops.flip(x, axis=-1) if x.shape[0] == 1 else x

    signal_in = keras.Input((16,), name="signal")
    x = Other(name="other")(layers.Dense(6, name="wide")(signal_in))
    return keras.Model(signal_in, layers.Dense(2, name="scores")(x), name="other_at_one")


def dead() -> Any:
    """A layer whose values are always zero, and so have no range that int8 could be spread over."""
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    image = keras.Input((8, 8, 2), name="image")
    x = layers.Conv2D(4, 3, name="first")(image)
    x = layers.Conv2D(4, 3, name="second")(layers.ReLU(name="nothing")(x - 1e4))
    return keras.Model(image, layers.Dense(2, name="scores")(layers.Flatten()(x)), name="dead")


def dead_samples() -> dict[str, np.ndarray[Any, Any]]:
    return {"image": np.random.default_rng(1).normal(size=(10, 8, 8, 2)).astype(np.float32)}


def overflow() -> Any:
    """Infinite in the middle, finite in the end."""
    import keras
    from keras import layers

    signal_in = keras.Input((16,), name="signal")
    x = keras.ops.exp(layers.Dense(8, name="steep", kernel_initializer="ones")(signal_in) * 100.0)
    return keras.Model(signal_in, layers.Dense(2, name="scores")(1.0 / (1.0 + x)), name="overflow")


def overflow_in_a_loop() -> Any:
    """The same within a loop: TensorFlow Lite crashes when it is to find a range for that."""
    import keras
    from keras import layers

    class Once(layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            start = (keras.ops.convert_to_tensor(0), x)
            return keras.ops.while_loop(lambda i, _: i < 1, lambda i, y: (i + 1, keras.ops.exp(y * 100.0)), start)[1]

    signal_in = keras.Input((16,), name="signal")
    x = Once(name="once")(layers.Dense(8, name="steep", kernel_initializer="ones")(signal_in))
    return keras.Model(signal_in, layers.Dense(2, name="scores")(1.0 / (1.0 + x)), name="overflow_in_a_loop")
