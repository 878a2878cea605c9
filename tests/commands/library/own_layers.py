"""A layer as a user writes it, for the tests of ``--custom-objects``."""

import keras


class Halve(keras.layers.Layer):
    """Half of what it takes."""

    def call(self, inputs):
        return inputs * 0.5
