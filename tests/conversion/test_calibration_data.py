"""Calibration data: what is detected in what a user brings, and what stands in where nothing is brought."""

from __future__ import annotations

import numpy as np
import pytest
import small_models
import user_kinds

from converters.calibration import check_calibration, random_calibration
from converters.graph import TensorInfo
from edge_sdk.errors import InvalidInputError

IMAGE = TensorInfo(name="image", source="image", shape=(6, 6, 1), dtype="float32")
CODES = TensorInfo(name="codes", source="codes", shape=(4,), dtype="uint8")


def pixels(count=50, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, 6, 6, 1), dtype=np.uint8)


def tails(count, seed=0):
    return np.random.default_rng(seed).standard_t(3, (count, 6, 6, 1)).astype(np.float32)


def sparse(count, seed=0):
    rng = np.random.default_rng(seed)
    return np.where(rng.random((count, 6, 6, 1)) < 0.005, rng.random((count, 6, 6, 1)), 0.0).astype(np.float32)


@pytest.mark.parametrize(
    ("calibration", "validation"),
    [
        (pixels(), None),
        (pixels(), pixels(2000, 1)),
        (pixels(), pixels(2000, 1).astype(np.float64)),
        (pixels(3), pixels(2000, 1)),
        (pixels() / 255.0, pixels(500, 1) / 255.0),
        (tails(100), tails(5000, 1)),
        (sparse(400), sparse(400, 1)),
        (np.zeros((5, 6, 6, 1)), np.zeros((9, 6, 6, 1))),
    ],
)
def test_data_of_one_kind_are_taken(calibration, validation):
    check_calibration({"image": calibration}, [IMAGE], None if validation is None else {"image": validation})


@pytest.mark.parametrize(
    ("calibration", "validation"),
    [
        (pixels() / 255.0, pixels(500, 1)),
        (pixels(), pixels(500, 1) / 255.0),
        (pixels() / 127.5 - 1, pixels(500, 1) / 255.0),
        (pixels() / 255.0, pixels(500, 1) / 127.5 - 1),
        (np.zeros((5, 6, 6, 1)), pixels(500)),
        (sparse(400), sparse(400, 1) * 255),
    ],
)
def test_a_range_unlike_the_validation_datas_is_detected(calibration, validation):
    with pytest.raises(InvalidInputError, match=r"input 'image' has values from .*validation data from .*same way"):
        check_calibration({"image": calibration}, [IMAGE], {"image": validation})


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ({}, r"expected the inputs \['codes', 'image'\], got \[\]"),
        ({"image": pixels(), "codes": np.zeros((9, 4), np.uint8)}, r"same number of samples .*got \[50, 9\]"),
        (
            {"image": pixels()[:, :5], "codes": np.zeros((50, 4), np.uint8)},
            r"expected shape \(samples, \*\[6, 6, 1\]\)",
        ),
        ({"image": np.full((50, 6, 6, 1), np.inf), "codes": np.zeros((50, 4), np.uint8)}, "not finite"),
        ({"image": pixels(), "codes": np.full((50, 4), 256)}, "expected uint8, got int64 from 256 to 256"),
        ({"image": pixels(), "codes": np.full((50, 4), 0.5)}, "expected uint8, got float64 from 0.5 to 0.5"),
    ],
)
def test_data_of_another_model_are_detected(samples, says):
    with pytest.raises(InvalidInputError, match=says):
        check_calibration(samples, [IMAGE, CODES])


def test_validation_data_are_checked_too():
    with pytest.raises(InvalidInputError, match="validation data: input 'image': expected shape"):
        check_calibration({"image": pixels()}, [IMAGE], {"image": pixels()[:, :3]})


class TestRandom:
    def test_is_usable_and_repeatable(self, flat_model):
        flat = flat_model("two_ends")
        made = random_calibration(flat)
        check_calibration(made, [flat.graph.tensors[position] for position in flat.graph.inputs])
        again = random_calibration(flat)
        assert all(np.array_equal(made[name], again[name]) for name in made)

    def test_large_inputs_have_fewer(self):
        import keras

        from converters.flatten import flatten

        def count(*shape):
            inputs = keras.Input(shape, name="x")
            return len(random_calibration(flatten(keras.Model(inputs, keras.layers.Conv2D(1, 1)(inputs))))["x"])

        assert [count(4, 4, 1), count(1024, 512, 1), count(4096, 1024, 1)] == [100, 32, 4]

    def test_has_the_range_that_the_first_layer_tells(self, flat_model):
        from converters.flatten import flatten

        assert 250 < random_calibration(flat_model("chain"))["image"].max() <= 255
        tokens = random_calibration(flatten(user_kinds.load("masked")))["tokens"]
        assert (tokens.dtype, tokens.min(), tokens.max()) == (np.int32, 0, user_kinds.VOCABULARY - 1)
        images = random_calibration(flatten(user_kinds.load("preprocessing")))["image"]
        assert (images.dtype, images.min(), images.max()) == (np.uint8, 0, 255)

    def test_knows_a_normalization(self):
        import keras
        from keras import layers

        from converters.flatten import flatten

        x = keras.Input((3,), name="x")
        scaled = layers.Normalization(mean=[100.0, 0.0, -5.0], variance=[4.0, 1.0, 0.25])(x)
        made = random_calibration(flatten(keras.Model(x, layers.Dense(2)(scaled))), count=2000)["x"]
        assert np.allclose(made.mean(axis=0), [100, 0, -5], atol=0.2)
        assert np.allclose(made.std(axis=0), [2, 1, 0.5], rtol=0.1)

    def test_makes_a_bundle_without_any_data(self, tmp_path):
        import functools

        from converters import Recipe, Workshop
        from edge_sdk.bundle import Bundle

        recipe = Recipe(
            task="none", model_name="chain", load=functools.partial(small_models.load, "chain"), calibration=None
        )
        with Workshop(tmp_path, workers=1) as workshop:
            bundle = Bundle.open(workshop.build(recipe, 6, precision="auto").result())
        assert bundle.manifest.inputs[0].scale == pytest.approx(1.0, rel=0.01)
