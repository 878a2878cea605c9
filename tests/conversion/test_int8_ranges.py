"""Calibration: each tensor of an int8 head is quantized for the range that it really takes on the calibration data."""

from __future__ import annotations

import numpy as np
import pytest

from edge_sdk.errors import ConversionError
from edge_sdk.runtime import Interpreter

SAMPLES = 24


def samples(seed=0):
    return np.random.default_rng(seed).normal(size=(SAMPLES, 6, 6, 2)).astype(np.float32)


def convert(inputs, outputs, data, path):
    """Write the int8 head that is the whole model."""
    import keras

    from converters.calibration import Calibration
    from converters.flatten import flatten
    from converters.head import write_head
    from converters.split import split

    flat = flatten(keras.Model(inputs, outputs, name="m"))
    calibration = Calibration.of(flat.graph, {"image": data})
    return write_head(split(flat, flat.graph.n).head, ["output_0"], calibration, path)


def spans(path):
    """The range that each int8 tensor with one scale can hold, by its name in the file."""
    from tensorflow.lite.tools import flatbuffer_utils

    (graph,) = flatbuffer_utils.convert_bytearray_to_object(path.read_bytes()).subgraphs
    found = {}
    for tensor in graph.tensors:
        quantization = tensor.quantization
        if quantization is not None and quantization.scale is not None and len(quantization.scale) == 1:
            scale, zero_point = float(quantization.scale[0]), int(quantization.zeroPoint[0])
            found[tensor.name.decode()] = (scale * (-128 - zero_point), scale * (127 - zero_point))
    return found


def image():
    import keras

    return keras.Input((6, 6, 2), name="image")


def test_a_tensor_that_a_kernel_writes_over_keeps_its_own_range(tmp_path):
    """A sum is written over its first operand; TensorFlow's calibrator took the sum's range for that one's."""
    import keras
    from keras import layers

    inputs = image()
    small = layers.Conv2D(2, 3, padding="same", name="small")
    branch = small(inputs)
    total = layers.Add(name="total")([branch, inputs])
    end = layers.ReLU(name="end")(layers.Conv2D(3, 1, name="last")(total))
    data = samples()
    small.set_weights([0.001 * array for array in small.get_weights()])
    convert(inputs, end, data, tmp_path / "head.tflite")
    values = np.asarray(keras.Model(inputs, branch)(data))
    (held,) = [span for name, span in spans(tmp_path / "head.tflite").items() if "small" in name]
    assert held == pytest.approx((values.min(), values.max()), rel=0.02)


def test_ranges_are_those_of_all_samples(tmp_path):
    """Of a model of several inputs, too: the n-th samples of all of them belong together."""
    import keras
    from keras import layers

    from converters.calibration import Calibration
    from converters.flatten import flatten
    from converters.head import write_head
    from converters.split import split

    first, second = keras.Input((4,), name="first"), keras.Input((4,), name="second")
    joined = layers.Dense(3, name="joined")(layers.Subtract(name="apart")([first, second]))
    flat = flatten(keras.Model([first, second], joined))
    near = np.random.default_rng(0).uniform(-50, 50, (SAMPLES, 4)).astype(np.float32)
    shift = np.random.default_rng(1).uniform(0.25, 1, near.shape).astype(np.float32)
    calibration = Calibration.of(flat.graph, {"first": near + shift, "second": near})
    path = tmp_path / "head.tflite"
    head = write_head(split(flat, flat.graph.n).head, ["output_0"], calibration, path)
    (apart,) = [span for name, span in spans(path).items() if "sub" in name.lower()]
    assert apart == pytest.approx((0, 1), abs=0.02)
    for key, values in (("input_0", near + shift), ("input_1", near)):
        assert head.inputs[key].scale == pytest.approx(np.ptp(values) / 255, rel=1e-5)


def test_values_that_are_no_numbers_do_not_count(tmp_path):
    import keras
    from keras import layers

    inputs = image()
    logarithm = keras.ops.log(inputs)
    filled = keras.ops.where(inputs > 0, logarithm, 0.0)
    data = np.abs(samples()) + 0.01
    data[:, 0, 0, 0] *= -1
    head = convert(inputs, layers.Activation("linear")(filled), data, tmp_path / "head.tflite")
    known = np.where(data > 0, np.log(np.abs(data)), 0)
    assert head.outputs["output_0"].scale == pytest.approx(np.ptp(known) / 255, rel=1e-3)


def test_infinite_values_are_refused(tmp_path):
    """TensorFlow's quantizer ends the process."""
    import keras

    inputs = image()
    bounded = 1.0 / (1.0 + keras.ops.exp(200.0 * inputs))
    with pytest.raises(ConversionError, match=r"for the calibration data 'Exp' has infinite values"):
        convert(inputs, bounded, samples(), tmp_path / "head.tflite")


def test_what_is_inside_a_loop_is_int8_too(tmp_path):
    import keras
    from keras import layers
    from tensorflow.lite.python.schema_py_generated import TensorType
    from tensorflow.lite.tools import flatbuffer_utils

    class Thrice(layers.Layer):
        def build(self, shape):
            self.inner = layers.Dense(shape[-1], name="inner")
            self.inner.build(shape)

        def call(self, x):
            start = (keras.ops.convert_to_tensor(0), x)
            return keras.ops.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, self.inner(y)), start)[1]

    inputs = image()
    data = samples()
    turns = Thrice(name="turns")
    head = convert(inputs, turns(layers.Flatten()(inputs)), data, tmp_path / "head.tflite")
    graphs = flatbuffer_utils.convert_bytearray_to_object((tmp_path / "head.tflite").read_bytes()).subgraphs
    assert len(graphs) > 1
    kernels = [tensor for graph in graphs for tensor in graph.tensors if list(tensor.shape) == [72, 72]]
    assert {tensor.type for tensor in kernels} == {TensorType.INT8}
    assert list(Interpreter(tmp_path / "head.tflite").outputs) == ["output_0"]
    assert head.outputs["output_0"].dtype == "int8"
