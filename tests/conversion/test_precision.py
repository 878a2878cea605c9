"""Precisions: each gives a head that runs, ``auto`` falls back for a reason that the manifest tells."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
import small_models

from converters import Recipe, Workshop
from converters.precision import PRECISIONS, Ladder
from edge_sdk.bundle import Bundle
from edge_sdk.errors import ConfigError, ConversionError, DoesNotFitError
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


def build(flat, k, samples, folder, precision="int8", max_error=None):
    from converters.bundles import build_bundle
    from converters.calibration import Calibration

    calibration = Calibration.of(flat.graph, samples)

    def attempt(wanted):
        place = folder / wanted.precision
        place.mkdir(parents=True)
        return build_bundle(
            flat,
            wanted.k,
            calibration,
            task="t",
            model=ModelRef(name="m", sha256="0" * 64),
            folder=place,
            precision=wanted.precision,
            max_error=wanted.max_error,
            before=wanted.before,
        )

    return Ladder.of(precision, max_error, lambda _: k).climb(attempt)


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


def error_at_the_end(bundle, flat, samples):
    """The output of head and tail, through their files, against that of the whole model."""
    import tensorflow

    from converters.deviation import deviation

    head = Head(bundle)
    tail = tensorflow.saved_model.load(str(bundle.tail_path))
    (name,) = samples
    rows = [head.run(sample).features for sample in samples[name]]
    sent = {each[0].name: np.concatenate([part.data for part in each]) for each in zip(*rows, strict=True)}
    made = tail.signatures["serving_default"](**sent)["output_0"]
    return deviation(np.asarray(made), np.asarray(flat.model(samples[name], training=False)))


@pytest.mark.parametrize("precision", PRECISIONS)
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
        for precision in PRECISIONS
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

    def test_falls_back_where_values_are_infinite(self, tmp_path):
        from converters.flatten import flatten

        flat, samples = flatten(small_models.overflow()), small_models.signal_samples()
        bundle = build(flat, 5, samples, tmp_path / "b", precision="auto")
        assert bundle.manifest.precision == "int8-weights"
        assert "to int8 (for the calibration data 'Exp' has infinite values)" in bundle.manifest.precision_reason

    def test_falls_back_where_int8_crashes(self, tmp_path):
        load = small_models.overflow_in_a_loop
        recipe = Recipe(task="t", model_name="m", load=load, calibration=small_models.signal_samples)
        with Workshop(tmp_path, workers=1) as workshop:
            with pytest.raises(ConversionError, match="the worker process was ended by SIG"):
                workshop.build(recipe, 4).result()
            manifest = Bundle.open(workshop.build(recipe, 4, "auto").result()).manifest
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
        assert re.match(
            r"int8: its error is [0-9.]+ of the signal of the (feature 'narrow'|output 'scores'), 0.1 is allowed",
            bundle.manifest.precision_reason,
        )
        assert error_of(bundle, flat, samples) <= 0.1

    def test_falls_back_where_the_tail_makes_much_of_a_small_error(self, tmp_path):
        """The huge value hides the error of all others, which are what the tail goes by."""
        flat, samples = flat_outliers(), small_models.outlier_samples()
        poor = build(flat, 1, samples, tmp_path / "int8", precision="int8")
        assert error_of(poor, flat, samples) <= 0.1
        assert error_at_the_end(poor, flat, samples) > 0.5
        manifest = build(flat, 1, samples, tmp_path / "auto", precision="auto").manifest
        assert manifest.precision == "int8-weights"
        assert re.match(
            r"int8: its error is [0-9.]+ of the signal of the output 'scores', 0.1 is allowed; "
            r"features in int8: its error is [0-9.]+ of the signal of the output 'scores', 0.1 is allowed$",
            manifest.precision_reason,
        )

    def test_sends_features_that_int8_would_spoil_as_they_are(self, tmp_path):
        flat, samples = flat_outliers(), small_models.outlier_samples()
        bundle = build(flat, 1, samples, tmp_path / "auto", precision="auto")
        assert [(spec.dtype, spec.scale) for spec in bundle.manifest.crossing] == [("float32", None)]
        assert error_at_the_end(bundle, flat, samples) <= 0.1

    @pytest.mark.parametrize("precision", ["auto", "float32"])
    def test_refuses_a_head_that_computes_something_else(self, tmp_path, precision):
        """As TensorFlow Lite, or Keras at a batch of one, may: no precision makes up for that."""
        from converters.flatten import flatten

        flat, samples = flatten(small_models.other_at_one()), small_models.signal_samples()
        with pytest.raises(ConversionError) as caught:
            build(flat, flat.graph.n - 1, samples, tmp_path / "b", precision=precision)
        tried = PRECISIONS if precision == "auto" else ("float32",)
        assert caught.value.message.count("its error is") == len(tried)
        assert caught.value.message.endswith(
            "0.1 is allowed: TensorFlow Lite computes something else than the model; cut before what it gets wrong"
        )

    def test_allows_the_error_that_it_is_told(self, tmp_path):
        flat, samples = flat_outliers(), small_models.outlier_samples()
        k = flat.graph.n - 1
        bundle = build(flat, k, samples, tmp_path / "lax", precision="auto", max_error=1e6)
        assert bundle.manifest.precision == "int8"
        # No head is that good: the last resort is taken, with its features as they are, and says so.
        bundle = build(flat, k, samples, tmp_path / "strict", precision="auto", max_error=1e-9)
        assert bundle.manifest.precision == "float32"
        assert bundle.manifest.precision_reason.count("1e-09 is allowed") == 4
        assert [spec.dtype for spec in bundle.manifest.crossing] == ["float32"]

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
        assert caught.value.message == "; ".join(f"{precision}: no {precision} today" for precision in PRECISIONS)


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
        Ladder.of(precision, max_error, lambda _: 1)


class TestDeviation:
    @pytest.mark.parametrize(
        ("made", "expected", "error"),
        [
            ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], 0.0),
            ([2.0, 2.0, 2.0], [1.0, 2.0, 3.0], 1.0),
            ([1.0, 2.0, float("nan")], [1.0, 2.0, 3.0], float("inf")),
            ([5.5, 5.5], [5.0, 5.0], 0.1),
            ([1.0, 7.0, 3.0], [1.0, float("-inf"), 3.0], 0.0),
            ([1.0, 7.0], [float("nan"), float("inf")], 0.0),
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


class TestLadder:
    @staticmethod
    def refuse(attempt):
        raise ConversionError(f"no {attempt.precision} at {attempt.k}")

    def test_tries_each_precision_at_its_own_cut(self):
        tried = []

        def build(attempt):
            tried.append((attempt.precision, attempt.k, attempt.max_error))
            if attempt.precision != "float16":
                self.refuse(attempt)
            return attempt.before

        cuts = {"int8": 9, "int8-weights": 7, "float16": 7, "float32": 2}
        assert Ladder.of("auto", 0.2, cuts.get).climb(build) == (
            "int8 at k=9: no int8 at 9; int8-weights at k=7: no int8-weights at 7"
        )
        assert tried == [("int8", 9, 0.2), ("int8-weights", 7, 0.2), ("float16", 7, 0.2)]

    def test_goes_on_past_a_precision_that_fits_nowhere(self):
        cuts = {"int8": 9, "int8-weights": "too large", "float16": 4, "float32": 3}
        made = Ladder.of("auto", None, cuts.get).climb(
            lambda attempt: attempt if attempt.precision == "float16" else self.refuse(attempt)
        )
        assert (made.k, made.before) == (4, "int8 at k=9: no int8 at 9; int8-weights: too large")

    def test_does_not_fit_where_the_good_precisions_do_not(self):
        cuts = {"int8": 9, "int8-weights": "too large", "float16": "far too large", "float32": "far too large"}
        with pytest.raises(DoesNotFitError) as caught:
            Ladder.of("auto", None, cuts.get).climb(self.refuse)
        assert caught.value.message == (
            "int8: no int8 at 9; int8-weights: too large; float16: far too large; float32: far too large"
        )

    def test_ends_when_the_workshop_does(self):
        tried = []

        def build(attempt):
            tried.append(attempt)
            raise ConversionError("the workshop is closed", closed=True)

        with pytest.raises(ConversionError, match=r"^the workshop is closed$"):
            Ladder.of("auto", None, lambda _: 3).climb(build)
        assert len(tried) == 1

    def test_of_one_precision_raises_what_came_of_it(self):
        with pytest.raises(ConversionError, match=r"^no float16 at 3$"):
            Ladder.of("float16", None, lambda _: 3).climb(self.refuse)
