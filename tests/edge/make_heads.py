"""Makes the int8 heads that the tests of the device side run: ``python make_heads.py FOLDER``. Needs TensorFlow.

``split.tflite``: an image in, a feature map and an early output out. ``whole.tflite``: a whole model.
``pair.tflite``: a model of two inputs, one of them an index.
"""

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

generator = np.random.default_rng(0)


def weights(*shape):
    return tf.constant(generator.normal(size=shape).astype(np.float32))


KERNEL, DENSE, TABLE, MIX = weights(3, 3, 1, 4), weights(4, 3), weights(5, 4), weights(4, 3)


class Split(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec((1, 8, 8, 1), tf.float32, name="input_0")])
    def __call__(self, input_0):
        features = tf.nn.relu(tf.nn.conv2d(input_0, KERNEL, 2, "SAME"))
        return {"feature_0": features, "output_1": tf.nn.softmax(tf.reduce_mean(features, (1, 2)) @ DENSE)}


class Whole(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec((1, 8, 8, 1), tf.float32, name="input_0")])
    def __call__(self, input_0):
        features = tf.nn.relu(tf.nn.conv2d(input_0, KERNEL, 2, "SAME"))
        return {"output_0": tf.nn.softmax(tf.reduce_mean(features, (1, 2)) @ DENSE)}


class Pair(tf.Module):
    @tf.function(
        input_signature=[
            tf.TensorSpec((1, 4), tf.float32, name="input_0"),
            tf.TensorSpec((1, 1), tf.int32, name="input_1"),
        ]
    )
    def __call__(self, input_0, input_1):
        return {"output_0": (input_0 + tf.gather(TABLE, input_1[:, 0])) @ MIX}


def image():
    return {"input_0": generator.random((1, 8, 8, 1)).astype(np.float32)}


def pair():
    return {
        "input_0": generator.random((1, 4)).astype(np.float32),
        "input_1": generator.integers(0, 5, (1, 1)).astype(np.int32),
    }


def main(folder):
    for name, module, sample in (("split", Split(), image), ("whole", Whole(), image), ("pair", Pair(), pair)):
        saved = folder / f"{name}.saved"
        tf.saved_model.save(module, str(saved), signatures={"serving_default": module.__call__})
        converter = tf.lite.TFLiteConverter.from_saved_model(str(saved), signature_keys=["serving_default"])
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
        converter.representative_dataset = lambda sample=sample: (sample() for _ in range(32))
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
        converter.inference_input_type = tf.int8
        converter.inference_output_type = tf.int8
        (folder / f"{name}.tflite").write_bytes(converter.convert())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
