"""Tiny models of one task: which half of an 8 x 8 picture is brighter, the lower (0) or the upper (1)?

Their weights are set by hand, so that they are right whatever the random numbers of a library.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

SHAPE = (8, 8, 1)


def samples(count, seed):
    """Pictures in 0 to 1 and their labels."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, count)
    pictures = rng.uniform(0.0, 0.5, (count, *SHAPE)).astype(np.float32)
    for picture, label in zip(pictures, labels, strict=True):
        picture[:4] += 0.4 * label
        picture[4:] += 0.4 * (1 - label)
    return pictures, labels


def build(filters, *, classes=2, name=None, custom=False, shape=SHAPE):
    """A model with this many filters; ``name`` is that of its input, else Keras makes one up."""
    import keras

    inputs = keras.Input(shape, name=name)
    hidden = inputs
    if custom:
        from own_layers import Halve

        hidden = Halve(name="halve")(hidden)
    hidden = keras.layers.Conv2D(filters, 1, activation="relu", name="first")(hidden)
    hidden = keras.layers.AveragePooling2D(2, name="pool")(hidden)
    hidden = keras.layers.Conv2D(filters, 1, activation="relu", name="second")(hidden)
    if None in shape:
        hidden = keras.layers.GlobalAveragePooling2D(name="flat")(hidden)
    else:
        hidden = keras.layers.Flatten(name="flat")(hidden)
    outputs = keras.layers.Dense(classes, activation="softmax", name="classes")(hidden)
    model = keras.Model(inputs, outputs)
    model.get_layer("first").set_weights([np.full((1, 1, 1, filters), 1.0), np.zeros(filters)])
    model.get_layer("second").set_weights([np.eye(filters)[np.newaxis, np.newaxis], np.zeros(filters)])
    dense = model.get_layer("classes")
    weights = np.zeros(dense.kernel.shape)
    upper = np.arange(len(weights)) < len(weights) / 2
    weights[:, 0], weights[:, 1] = np.where(upper, -1.0, 1.0) / filters, np.where(upper, 1.0, -1.0) / filters
    dense.set_weights([weights, np.zeros(classes)])
    return model


def two_inputs():
    """A model with a list of inputs and a dict of outputs, whose first in Keras's order is ``class``."""
    import keras

    left, right = keras.Input((6,), name="left"), keras.Input((4,), name="right", dtype="int32")
    words = keras.layers.Flatten()(keras.layers.Embedding(10, 3)(right))
    mixed = keras.layers.Dense(8, activation="relu", name="mix")(keras.layers.Concatenate()([left, words]))
    return keras.Model([left, right], {"extra": keras.layers.Dense(1)(mixed), "class": keras.layers.Dense(3)(mixed)})


def two_input_samples(count):
    """What it takes, by name, not in its order."""
    rng = np.random.default_rng(4)
    return {"right": rng.integers(0, 10, (count, 4)), "left": rng.normal(size=(count, 6)).astype(np.float32)}


def make_files(folder: Path) -> None:
    """All models and sets that the tests use."""
    build(2).save(folder / "narrow.keras")
    build(4, name="image").save(folder / "wide.keras")
    build(2).save(folder / "legacy.h5")
    build(2, custom=True).save(folder / "custom.keras")
    build(2, shape=(None, None, 1)).save(folder / "free.keras")
    build(2, shape=(4, 4, 1)).save(folder / "small.keras")
    two_inputs().save(folder / "pair.keras")
    np.savez(folder / "pair.npz", **two_input_samples(20))
    for name, count, seed in (("validation", 60, 1), ("calibration", 40, 2), ("test", 50, 3)):
        pictures, labels = samples(count, seed)
        np.savez(folder / f"{name}.npz", picture=pictures, labels=labels)
