"""The architectures: one interface, really different insides."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from edge_sdk.errors import ConfigError
from zoo_keras.builders import ARCHITECTURES, architecture
from zoo_keras.quiet import load_keras


@pytest.fixture(scope="module")
def models():
    load_keras()
    return {name: entry.build(10) for name, entry in ARCHITECTURES.items()}


def _operations(model) -> Counter[str]:
    return Counter(type(layer).__name__ for layer in model.layers)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_takes_raw_pixels_and_returns_probabilities(models, name):
    model = models[name]
    (image,) = model.inputs
    assert model.name == name
    assert (image.name, image.shape, image.dtype) == ("image", (None, 28, 28, 1), "float32")
    assert model.layers[-1].name == "probabilities"
    probabilities = model(np.full((3, 28, 28, 1), 255.0, np.float32)).numpy()
    assert probabilities.shape == (3, 10)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0, atol=1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_is_made_of_stock_layers_and_reloads_in_safe_mode(models, name, tmp_path):
    keras = load_keras()
    model = models[name]
    assert not any(isinstance(layer, keras.layers.Lambda) for layer in model.layers)
    assert all(type(layer).__module__.startswith("keras.") for layer in model.layers)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras", safe_mode=True)
    image = np.random.default_rng(0).integers(0, 256, (2, 28, 28, 1)).astype(np.float32)
    np.testing.assert_array_equal(model(image).numpy(), again(image).numpy())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_layer_names_do_not_depend_on_what_was_built_before(models, name):
    again = ARCHITECTURES[name].build(10)
    assert [layer.name for layer in again.layers] == [layer.name for layer in models[name].layers]
    assert [weight.path for weight in again.weights] == [weight.path for weight in models[name].weights]


def test_sizes_span_two_orders_of_magnitude(models):
    sizes = sorted(model.count_params() for model in models.values())
    assert 15_000 <= sizes[0] <= 30_000
    assert 1_500_000 <= sizes[-1] <= 2_100_000
    assert sum(sizes) < 3_000_000, "float16 weights must stay under 6 MB together"


def test_families_differ_in_kind(models):
    assert len(models) >= 7
    assert len({entry.family for entry in ARCHITECTURES.values()}) == len(ARCHITECTURES)
    operations = {name: _operations(model) for name, model in models.items()}
    without_counts = {frozenset(counter) for counter in operations.values()}
    assert len(without_counts) == len(models), "two models are made of the same kinds of layers"
    assert operations["mobile"]["DepthwiseConv2D"] >= 3
    assert operations["residual"]["Add"] >= 3
    assert operations["densenet"]["Concatenate"] >= 8
    assert operations["inception"]["Concatenate"] == 3
    assert operations["squeeze-excite"]["Multiply"] >= 3
    assert operations["mlp-mixer"]["Permute"] >= 4
    assert operations["vision-transformer"]["MultiHeadAttention"] >= 2


def test_unknown_architecture_names_those_that_exist():
    with pytest.raises(ConfigError, match=r"no model 'lenet'.*mobile.*vision-transformer"):
        architecture("lenet")
