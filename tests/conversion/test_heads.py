"""The int8 head: one signature whose keys mean what they say, quantized by real data, close to the float half."""

from __future__ import annotations

import numpy as np
import pytest
import small_models

from edge_sdk.errors import ConversionError, InvalidInputError
from edge_sdk.quantization import dequantize, quantize
from edge_sdk.runtime import Interpreter
from zoo_keras.builders import ARCHITECTURES


def calibration_of(flat, samples):
    from converters.calibration import Calibration

    return Calibration.of(flat.graph, samples)


def convert(flat, k, samples, path):
    """The head of ``flat`` at ``k``, as bundles make it, and the float half it was made from."""
    from converters.head import write_head
    from converters.split import split

    halves = split(flat, k)
    keys = [f"feature_{number}" for number in range(len(halves.crossing))]
    keys += [f"output_{place}" for place in halves.head_outputs]
    return halves.head, keys, write_head(halves.head, keys, calibration_of(flat, samples), path)


def assert_close_to_float(flat, k, samples, path, *, tolerance):
    """Each key of the file gives what the half gives at that place: relative to its range, on the mean of samples."""
    half, keys, head = convert(flat, k, samples, path)
    interpreter = Interpreter(path)
    assert set(interpreter.outputs) == set(keys)
    inputs = [samples[flat.graph.tensors[p].name].astype(np.float32) for p in flat.graph.inputs]
    for key, position, expected in zip(keys, half.outputs, half(inputs), strict=True):
        expected = np.asarray(expected)
        spec = head.outputs[key]
        assert interpreter.outputs[key].shape == (1, *flat.graph.tensors[position].shape)
        assert spec.dtype == "int8"
        differences = []
        for number in range(len(inputs[0])):
            raw = {
                name: quantize(value[number : number + 1], taken.scale, taken.zero_point, "int8")
                for (name, taken), value in zip(head.inputs.items(), inputs, strict=True)
            }
            made = dequantize(interpreter.run(raw)[key], spec.scale, spec.zero_point)
            differences.append(np.abs(made - expected[number : number + 1]).mean())
        assert np.mean(differences) <= tolerance * (np.ptp(expected) + 1e-6), (k, key)


@pytest.mark.parametrize(
    ("kind", "cut"),
    [
        ("chain", "relu"),
        ("chain", "probabilities"),
        ("branches", "right_norm"),
        ("two_ends", "facts_dense"),
        ("two_ends", "middle"),
        ("two_ends", "late"),
        ("siamese", "conv#2"),
        ("siamese", "code#2"),
        ("nested", "backbone/out"),
        ("plain_operations", "conv"),
        ("named", "second"),
    ],
)
def test_every_key_is_close_to_its_float_tensor(flat_model, tmp_path, kind, cut):
    flat = flat_model(kind)
    k = 1 + [operation.name for operation in flat.graph.operations].index(cut)
    assert_close_to_float(flat, k, small_models.samples(kind, 16), tmp_path / "head.tflite", tolerance=0.03)


def test_ten_and_more_crossing_tensors_keep_their_places(tmp_path):
    """``feature_10`` sorts before ``feature_2``, and all have one shape: only their values tell them apart."""
    import keras
    from keras import layers

    from converters.flatten import flatten

    image = keras.Input((4, 4, 1), name="image")
    stem = layers.Conv2D(3, 2, name="stem")(image)
    parts = [
        layers.Rescaling(float(number), offset=number * 1.0, name=f"part{number}")(stem) for number in range(1, 13)
    ]
    total = layers.Concatenate(name="joined")(parts)
    flat = flatten(keras.Model(image, layers.Dense(2, name="scores")(layers.Flatten(name="flat")(total))))
    k = flat.graph.n - 3
    samples = {"image": np.random.default_rng(0).normal(size=(12, 4, 4, 1)).astype(np.float32)}
    _, keys, head = convert(flat, k, samples, tmp_path / "head.tflite")
    assert keys == [f"feature_{number}" for number in range(12)]
    assert_close_to_float(flat, k, samples, tmp_path / "head.tflite", tolerance=0.02)
    offsets = [dequantize(np.int8([[0]]), head.outputs[key].scale, head.outputs[key].zero_point) for key in keys]
    assert len(np.unique(offsets)) == 12


def test_an_activation_with_a_gradient_of_its_own(tmp_path):
    """Swish is one; the half of every EfficientNet begins with it."""
    import keras

    from converters.flatten import flatten

    inputs = keras.Input((6, 6, 2), name="image")
    flat = flatten(keras.Model(inputs, keras.layers.Conv2D(4, 3, activation="swish")(inputs)))
    samples = {"image": np.random.default_rng(0).normal(size=(8, 6, 6, 2)).astype(np.float32)}
    assert_close_to_float(flat, flat.graph.n, samples, tmp_path / "x.tflite", tolerance=0.02)


def test_pixels_are_taken_as_they_are(flat_model, tmp_path):
    _, _, head = convert(flat_model("chain"), 4, small_models.samples("chain"), tmp_path / "head.tflite")
    assert (head.inputs["input_0"].scale, head.inputs["input_0"].zero_point) == (1.0, -128)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_zoo_heads_take_pixels_and_are_close_to_float(zoo_model, tmp_path, name):
    import zoo_keras

    flat = zoo_model(name)
    samples = {"image": zoo_keras.task("fashion-mnist").samples("calibration").inputs["image"][:60]}
    _, _, head = convert(flat, 4, samples, tmp_path / "head.tflite")
    assert (head.inputs["input_0"].scale, head.inputs["input_0"].zero_point) == (1.0, -128)
    assert_close_to_float(flat, flat.graph.n // 2, samples, tmp_path / "half.tflite", tolerance=0.05)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_legal_cut_of_a_zoo_model_converts(tmp_path, name):
    import zoo_keras
    from converters.cuts import cut_points
    from converters.flatten import flatten

    flat = flatten(zoo_keras.load_model("fashion-mnist", name))
    samples = {"image": zoo_keras.task("fashion-mnist").samples("calibration").inputs["image"][:100]}
    for cut in cut_points(flat.graph):
        if cut.legal:
            assert_close_to_float(flat, cut.k, samples, tmp_path / "head.tflite", tolerance=0.08)


def test_what_has_no_int8_kernel_is_refused(tmp_path):
    from converters.flatten import flatten

    flat = flatten(small_models.spectrum())
    with pytest.raises(ConversionError, match=r"first \d+ operations of model 'spectrum' to int8 \(\S"):
        convert(flat, flat.graph.n, small_models.signal_samples(), tmp_path / "head.tflite")


class TestCalibration:
    def test_the_extremes_are_always_taken(self, flat_model):
        images = np.full((1000, 12, 12, 1), 100, np.uint8)
        images[777, 3, 3] = 255
        images[333, 0, 0] = 0
        calibration = calibration_of(flat_model("chain"), {"image": images})
        assert len(calibration.inputs[0]) <= 200
        assert calibration.inputs[0].dtype == np.float32
        assert (calibration.inputs[0].min(), calibration.inputs[0].max()) == (0, 255)

    def test_the_same_samples_of_all_inputs_are_taken(self, flat_model):
        rng = np.random.default_rng(0)
        numbers = rng.permutation(500).astype(np.float32)
        samples = {
            "image": np.broadcast_to(numbers[:, None, None, None], (500, 8, 8, 1)),
            "facts": np.broadcast_to(numbers[:, None], (500, 3)),
        }
        image, facts = calibration_of(flat_model("two_ends"), samples).inputs
        assert np.array_equal(image[:, 0, 0, 0], facts[:, 0])

    def test_the_hash_is_of_all_the_data(self, flat_model):
        flat = flat_model("chain")
        images = small_models.samples("chain", 400)["image"]
        first = calibration_of(flat, {"image": images}).sha256
        assert calibration_of(flat, {"image": images.copy()}).sha256 == first
        other = images.copy()
        other[201, 5, 5] ^= 1
        assert calibration_of(flat, {"image": other}).sha256 != first

    @pytest.mark.parametrize(
        ("samples", "message"),
        [
            ({}, r"expected the inputs \['image'\], got \[\]"),
            ({"image": np.zeros((3, 12, 12))}, r"expected shape \(samples, \*\[12, 12, 1\]\), got \[3, 12, 12\]"),
            ({"image": np.zeros((0, 12, 12, 1))}, "at least one"),
            ({"image": np.full((3, 12, 12, 1), np.nan)}, "not finite"),
            ({"image": np.full((3, 12, 12, 1), "x")}, "expected numbers"),
        ],
    )
    def test_data_of_another_model_is_refused(self, flat_model, samples, message):
        with pytest.raises(InvalidInputError, match=message):
            calibration_of(flat_model("chain"), samples)


def test_a_file_that_cannot_be_written_is_no_failed_conversion(flat_model, tmp_path):
    with pytest.raises(FileNotFoundError):
        convert(flat_model("chain"), 2, small_models.samples("chain"), tmp_path / "nowhere" / "head.tflite")
