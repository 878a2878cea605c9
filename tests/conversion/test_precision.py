"""Precisions: each gives a head that runs, ``auto`` falls back for a reason that the manifest tells."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import small_models

from converters import Recipe, Workshop
from converters.precision import LADDER, checked_request
from edge_sdk.bundle import Bundle
from edge_sdk.errors import ConfigError, ConversionError
from edge_sdk.head import Head
from edge_sdk.manifest import ModelRef
from edge_sdk.quantization import dequantize


@functools.cache
def flat_outliers():
    from converters.flatten import flatten

    return flatten(small_models.outliers())


@functools.cache
def flat_dead():
    from converters.flatten import flatten

    return flatten(small_models.dead())


def build(flat, k, samples, folder, **wanted):
    from converters.bundles import build_bundle
    from converters.calibration import Calibration

    model = ModelRef(name="m", sha256="0" * 64)
    calibration = Calibration.of(flat.graph, samples)
    folder.mkdir()
    return build_bundle(flat, k, calibration, task="t", model=model, folder=folder, **wanted)


def error_of(bundle, flat, samples):
    """The features of the bundle's head against the float half."""
    from converters.deviation import deviation
    from converters.split import split

    head = Head(bundle)
    (name,) = samples
    rows = [head.run(sample).features for sample in samples[name]]
    expected = split(flat, bundle.manifest.cut.k).head([samples[name].astype(np.float32)])
    errors = []
    for number, spec in enumerate(bundle.manifest.crossing):
        assert spec.dtype == "int8"
        sent = np.concatenate([row[number].data for row in rows])
        errors.append(deviation(dequantize(sent, spec.scale, spec.zero_point), np.asarray(expected[number])))
    return max(errors)


@pytest.mark.parametrize("precision", LADDER)
def test_each_precision_runs_and_sends_int8_features(flat_model, tmp_path, precision):
    flat, samples = flat_model("branches"), small_models.samples("branches")
    bundle = build(flat, 5, samples, tmp_path / "b", precision=precision)
    assert (bundle.manifest.precision, bundle.manifest.precision_reason) == (precision, "")
    assert error_of(bundle, flat, samples) <= 0.03
    assert (bundle.manifest.inputs[0].scale is not None) == (precision == "int8")


def test_files_grow_with_the_precision(tmp_path):
    import keras
    from keras import layers

    from converters.flatten import flatten

    image = keras.Input((40,), name="image")
    x = layers.Dense(200, activation="relu")(image)
    flat = flatten(keras.Model(image, layers.Dense(3)(layers.Dense(200)(x))))
    samples = {"image": np.random.default_rng(0).normal(size=(20, 40)).astype(np.float32)}
    sizes = {
        precision: build(flat, 2, samples, tmp_path / precision, precision=precision).head_path.stat().st_size
        for precision in LADDER
    }
    assert sizes["float32"] > 1.8 * sizes["float16"]
    assert sizes["float16"] > 1.8 * max(sizes["int8"], sizes["int8-weights"])


def test_the_classic_rule_counts_bytes_of_the_precision(flat_model, tmp_path):
    from converters.memory import operation_memory

    flat, samples = flat_model("chain"), small_models.samples("chain")
    parameters = sum(operation.parameters for operation in flat.graph.operations[:6])
    values = sum(operation.output_bytes for operation in operation_memory(flat.graph)[:6])
    sizes = {"int8": (1, 1), "int8-weights": (1, 4), "float16": (2, 4), "float32": (4, 4)}
    for precision, (weight_bytes, value_bytes) in sizes.items():
        manifest = build(flat, 6, samples, tmp_path / precision, precision=precision).manifest
        assert manifest.cumulative_bytes == parameters * weight_bytes + values * value_bytes


def test_outputs_inside_the_head_are_real_numbers_in_each_precision(flat_model, tmp_path):
    flat, samples = flat_model("two_ends"), small_models.samples("two_ends")
    made = {}
    for precision in ("int8", "float32"):
        bundle = build(flat, 4, samples, tmp_path / precision, precision=precision)
        made[precision] = Head(bundle).run({name: array[0] for name, array in samples.items()}).outputs
    for name in ("early", "middle"):
        assert np.abs(made["int8"][name] - made["float32"][name]).max() <= 0.05 * np.ptp(made["float32"][name])


class TestAuto:
    def test_is_int8_where_that_is_good(self, flat_model, tmp_path):
        bundle = build(flat_model("chain"), 6, small_models.samples("chain"), tmp_path / "b", precision="auto")
        assert (bundle.manifest.precision, bundle.manifest.precision_reason) == ("int8", "")

    def test_falls_back_where_int8_does_not_run(self, tmp_path):
        flat, samples = flat_dead(), small_models.dead_samples()
        k = flat.graph.n - 1
        with pytest.raises(ConversionError, match="cannot run, as happens when a tensor is all zeros"):
            build(flat, k, samples, tmp_path / "int8", precision="int8")
        bundle = build(flat, k, samples, tmp_path / "auto", precision="auto")
        assert bundle.manifest.precision == "int8-weights"
        assert bundle.manifest.precision_reason.startswith("int8: the first 5 operations of model 'dead' became")
        assert error_of(bundle, flat, samples) <= 0.1

    def test_falls_back_where_int8_crashes(self, tmp_path):
        recipe = Recipe(
            task="t", model_name="overflow", load=small_models.overflow, calibration=small_models.signal_samples
        )
        with Workshop(tmp_path, workers=1) as workshop:
            with pytest.raises(ConversionError, match="the worker process was ended by SIG"):
                workshop.build(recipe, 5).result()
            manifest = Bundle.open(workshop.build(recipe, 5, "auto").result()).manifest
        assert manifest.precision == "int8-weights"
        assert manifest.precision_reason.startswith("int8: the worker process was ended by SIG")

    def test_falls_back_where_the_error_is_too_large(self, tmp_path):
        """Within the head one value in a thousand is a thousand times larger: int8 rounds all others to nothing."""
        flat, samples = flat_outliers(), small_models.outlier_samples()
        k = flat.graph.n - 1
        poor = build(flat, k, samples, tmp_path / "int8", precision="int8")
        assert error_of(poor, flat, samples) > 0.5
        bundle = build(flat, k, samples, tmp_path / "auto", precision="auto")
        assert bundle.manifest.precision in ("int8-weights", "float16")
        assert "int8: its error is" in bundle.manifest.precision_reason
        assert "of the signal, 0.1 is allowed" in bundle.manifest.precision_reason
        assert error_of(bundle, flat, samples) <= 0.1

    def test_allows_the_error_that_it_is_told(self, tmp_path):
        flat, samples = flat_outliers(), small_models.outlier_samples()
        k = flat.graph.n - 1
        bundle = build(flat, k, samples, tmp_path / "lax", precision="auto", max_error=1e6)
        assert bundle.manifest.precision == "int8"
        # No head is that good, since features are rounded to int8: the last resort is taken, and says so.
        bundle = build(flat, k, samples, tmp_path / "strict", precision="auto", max_error=1e-9)
        assert bundle.manifest.precision == "float32"
        assert bundle.manifest.precision_reason.count("1e-09 is allowed") == 4

    def test_of_a_cloud_only_bundle_is_int8(self, flat_model, tmp_path):
        bundle = build(flat_model("chain"), 0, small_models.samples("chain"), tmp_path / "b", precision="auto")
        assert bundle.manifest.precision == "int8"

    def test_names_every_failure_when_nothing_works(self, flat_model, tmp_path, monkeypatch):
        from converters import head_choice

        def refuse(*arguments):
            raise ConversionError(f"no {arguments[-1]} today")

        monkeypatch.setattr(head_choice, "write_head", refuse)
        with pytest.raises(ConversionError) as caught:
            build(flat_model("chain"), 6, small_models.samples("chain"), tmp_path / "b", precision="auto")
        assert caught.value.message == "; ".join(f"{precision}: no {precision} today" for precision in LADDER)


@pytest.mark.parametrize(
    ("precision", "max_error", "says"),
    [
        ("int4", None, "'int4' is no precision; expected one of int8, int8-weights, float16, float32, auto"),
        ("auto", 0.0, "must be a positive number, got 0.0"),
        ("auto", float("nan"), "must be a positive number, got nan"),
        ("int8", 0.2, "goes with the precision 'auto' only, got it with 'int8'"),
    ],
)
def test_what_is_no_request_is_refused(precision, max_error, says):
    with pytest.raises(ConfigError, match=says):
        checked_request(precision, max_error)


class TestDeviation:
    @pytest.mark.parametrize(
        ("made", "expected", "error"),
        [
            ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], 0.0),
            ([2.0, 2.0, 2.0], [1.0, 2.0, 3.0], 1.0),
            ([1.0, 2.0, float("nan")], [1.0, 2.0, 3.0], float("inf")),
            ([5.5, 5.5], [5.0, 5.0], 0.1),
            ([0.25, 0.0], [0.0, 0.0], 0.25 / 2**0.5),
        ],
    )
    def test_is_noise_over_signal(self, made, expected, error):
        from converters.deviation import deviation

        assert deviation(np.float32(made), np.float32(expected)) == pytest.approx(error)

    def test_of_integers_is_the_share_that_differs(self):
        from converters.deviation import deviation

        assert deviation(np.int32([1, 2, 3, 4]), np.int32([1, 2, 3, 5])) == 0.25
        assert deviation(np.bool_([True, False]), np.bool_([True, True])) == 0.5
