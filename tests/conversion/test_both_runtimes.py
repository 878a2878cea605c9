"""Heads of every precision run under tflite-runtime as they do under ai-edge-litert, whatever is in them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import user_kinds

from edge_sdk.manifest import ModelRef

pytestmark = pytest.mark.skipif(sys.version_info >= (3, 12), reason="tflite-runtime has wheels up to Python 3.11 only")
PRECISIONS = ("int8", "int8-weights", "float16", "float32")


@pytest.fixture(autouse=True)
def _splitfleet_is_found_there(monkeypatch):
    """The environment of the other runtime has all that the SDK needs, but not the SDK."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def runs(model, samples, precision, folder):
    """What the head of all of ``model``, or of as much as a device can have, makes under each runtime: by runtime the
    features as real numbers, then its own outputs.
    """
    from tflite_runtime_venv import python_of_the_venv

    from converters.bundles import build_bundle
    from converters.calibration import Calibration
    from converters.cuts import cut_points
    from converters.flatten import flatten
    from converters.head_runs import installed_runtimes, run_head
    from edge_sdk.quantization import dequantize

    flat = flatten(model)
    graph = flat.graph
    k = max(cut.k for cut in cut_points(graph) if cut.legal) if graph.obstacle(graph.n) else graph.n
    bundle = build_bundle(
        flat,
        k,
        Calibration.of(graph, samples),
        task="any",
        model=ModelRef(name="any", sha256="0" * 64),
        folder=folder,
        precision=precision,
    )
    assert bundle.manifest.precision == precision
    values = [samples[graph.tensors[position].name] for position in graph.inputs]
    made = {}
    for runtime in installed_runtimes(bundle, [python_of_the_venv()]):
        run = run_head(bundle, runtime, values)
        features = [
            feature if spec.scale is None else dequantize(feature, spec.scale, spec.zero_point)
            for spec, feature in zip(bundle.manifest.crossing, run.features, strict=True)
        ]
        made[runtime.name] = [*features, *run.outputs.values()]
    assert set(made) == {"litert", "tflite-runtime"}
    return made


def assert_same(made, limit):
    from converters.deviation import deviation

    for new, old in zip(made["litert"], made["tflite-runtime"], strict=True):
        assert deviation(old, new) <= limit


def quotients():
    """What the older runtime has no int8 kernels of: divisions (of the masked mean, too), roots and logarithms."""
    import keras
    from keras import layers, ops

    tokens = keras.Input((7,), dtype="int32", name="tokens")
    x = layers.Embedding(20, 6, mask_zero=True, name="embedding")(tokens)
    mean = layers.GlobalAveragePooling1D(name="pool")(x)
    spread = ops.std(ops.softplus(x), axis=1)
    return keras.Model(tokens, layers.Dense(3)(mean / (ops.abs(spread) + 0.5)))


def test_quotients_roots_and_logarithms_in_int8(tmp_path):
    import keras

    from converters.deviation import deviation

    keras.utils.set_random_seed(0)
    model = quotients()
    tokens = np.random.default_rng(0).integers(1, 20, (24, 7)).astype(np.int32)
    tokens[:12, 4:] = 0
    made = runs(model, {"tokens": tokens}, "int8", tmp_path)
    assert_same(made, 0.03)
    expected = np.asarray(model(tokens, training=False))
    assert all(deviation(each, expected) <= 0.08 for (each,) in made.values())


def test_a_mean_over_nothing_is_no_failure(tmp_path):
    """All of it is masked: the model itself divides by zero."""
    tokens = np.random.default_rng(0).integers(1, 20, (24, 7)).astype(np.int32)
    tokens[3] = 0
    made = runs(quotients(), {"tokens": tokens}, "int8", tmp_path)
    assert all(np.isfinite(each).all() for (each,) in made.values())


@pytest.mark.parametrize("precision", PRECISIONS[1:])
def test_weights_of_another_precision_than_the_features(tmp_path, precision):
    """As many as the converter cares to make smaller."""
    import keras
    from keras import layers

    from converters.deviation import deviation

    keras.utils.set_random_seed(0)
    image = keras.Input((8, 8, 8), name="image")
    x = layers.Conv2DTranspose(24, 3, strides=2, activation="relu")(layers.Conv2D(16, 3, activation="relu")(image))
    x = layers.Conv2DTranspose(24, 3)(layers.DepthwiseConv2D(7)(x))
    model = keras.Model(image, layers.Dense(10)(layers.Dense(128, activation="relu")(layers.Flatten()(x))))
    images = np.random.default_rng(0).normal(size=(8, 8, 8, 8)).astype(np.float32)
    made = runs(model, {"image": images}, precision, tmp_path)
    assert_same(made, 1e-3)
    expected = np.asarray(model(images, training=False))
    limit = {"int8-weights": 0.03, "float16": 2e-3, "float32": 1e-5}[precision]
    assert all(deviation(each, expected) <= limit for (each,) in made.values())


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", user_kinds.KINDS)
def test_every_kind_of_model_in_every_precision(tmp_path, kind):
    for precision in PRECISIONS:
        (tmp_path / precision).mkdir()
        model = user_kinds.load(kind)
        made = runs(model, user_kinds.samples(model), precision, tmp_path / precision)
        assert_same(made, 0.1 if precision == "int8" else 0.01)
