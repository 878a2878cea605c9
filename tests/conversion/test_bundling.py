"""A whole bundle: manifest, head and tail fit together and compute what the model computes."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import small_models

from edge_sdk.bundle import Bundle
from edge_sdk.errors import IllegalCutError
from edge_sdk.manifest import ModelRef
from edge_sdk.quantization import dequantize, quantize
from edge_sdk.runtime import Interpreter
from edge_sdk.self_check import compare, self_check_inputs

MODEL = ModelRef(name="small", sha256="0" * 64)


@pytest.fixture(scope="module")
def bundle(flat_model, tmp_path_factory):
    """Builds a bundle of a kind at a cut: the name of an operation, ``None`` for k = 0."""
    from converters.bundles import build_bundle
    from converters.calibration import Calibration

    def build(kind, cut):
        flat = flat_model(kind)
        k = 0 if cut is None else 1 + [operation.name for operation in flat.graph.operations].index(cut)
        calibration = Calibration.of(flat.graph, small_models.samples(kind))
        folder = tmp_path_factory.mktemp("bundle")
        return build_bundle(flat, k, calibration, task="small-task", model=MODEL, folder=folder)

    return functools.cache(build)


def tail_of(bundle):
    import tensorflow

    loaded = tensorflow.saved_model.load(str(bundle.tail_path))
    return loaded, loaded.signatures["serving_default"]


def run(bundle, samples):
    """All outputs of the model by name, through the bundle's files, as device and server run them."""
    manifest = bundle.manifest
    count = len(samples[manifest.inputs[0].name])
    raw = {
        f"input_{number}": quantize(samples[spec.name].astype(np.float32), spec.scale, spec.zero_point, "int8")
        for number, spec in enumerate(manifest.inputs)
    }
    if manifest.has_head:
        interpreter = Interpreter(bundle.head_path)
        rows = [interpreter.run({key: value[i : i + 1] for key, value in raw.items()}) for i in range(count)]
        sent = {key: np.concatenate([row[key] for row in rows]) for key in rows[0]}
    else:
        sent = {f"feature_{number}": raw[f"input_{number}"] for number in range(len(raw))}
    results = {}
    if manifest.has_tail:
        keep, signature = tail_of(bundle)
        results = signature(**{spec.name: sent[spec.name] for spec in manifest.crossing})
        del keep
    outputs = {}
    for place, spec in enumerate(manifest.outputs):
        key = f"output_{place}"
        if spec.side == "tail":
            outputs[spec.name] = np.asarray(results[key])
        else:
            outputs[spec.name] = dequantize(sent[key], spec.scale, spec.zero_point)
    return outputs


@pytest.mark.parametrize(
    ("kind", "cut"),
    [
        ("chain", None),
        ("chain", "pool"),
        ("chain", "probabilities"),
        ("branches", "right"),
        ("two_ends", None),
        ("two_ends", "facts_dense"),
        ("two_ends", "middle"),
        ("siamese", "code#2"),
        ("nested", "backbone/out"),
        ("named", "second"),
    ],
)
def test_a_bundle_computes_what_the_model_does(bundle, flat_model, kind, cut):
    import keras

    flat = flat_model(kind)
    made = bundle(kind, cut)
    samples = small_models.samples(kind)
    inputs = [samples[flat.graph.tensors[position].name].astype(np.float32) for position in flat.graph.inputs]
    if kind == "named":
        values = {name: value.astype(np.float32) for name, value in samples.items()}
    else:
        values = inputs[0] if len(inputs) == 1 else inputs
    expected = [np.asarray(value) for value in keras.tree.flatten(flat.model(values, training=False))]
    outputs = run(made, samples)
    assert tuple(outputs) == flat.graph.output_names
    for name, whole in zip(flat.graph.output_names, expected, strict=True):
        assert outputs[name].dtype == np.float32
        assert outputs[name].shape == whole.shape
        assert np.abs(outputs[name] - whole).mean() <= 0.05 * np.ptp(whole), name


def test_the_manifest_describes_the_files(bundle):
    made = bundle("two_ends", "middle")
    manifest = made.manifest
    made.verify()
    assert Bundle.open(made.path) == made
    assert made.digest == manifest.digest
    listed = {entry.path for entry in manifest.files}
    assert listed == {p.relative_to(made.path).as_posix() for p in made.path.rglob("*") if p.is_file()} - {
        "manifest.json"
    }
    assert (manifest.task, manifest.model, manifest.precision) == ("small-task", MODEL, "int8")
    assert (manifest.cut.k, manifest.cut.n, manifest.cut.name) == (4, 6, "middle")
    assert [(spec.name, spec.shape, spec.dtype) for spec in manifest.inputs] == [
        ("image", (8, 8, 1), "float32"),
        ("facts", (3,), "float32"),
    ]
    assert [(spec.name, spec.source, spec.shape, spec.dtype) for spec in manifest.crossing] == [
        ("feature_0", "middle", (8,), "int8")
    ]
    assert [(spec.name, spec.side, spec.scale is None) for spec in manifest.outputs] == [
        ("early", "head", False),
        ("middle", "head", False),
        ("late", "tail", True),
    ]
    assert set(manifest.versions) == {"splitfleet", "tensorflow", "keras", "numpy"}
    assert set(manifest.predicted_peak_bytes) == {"litert", "tflite-runtime"}
    assert manifest.cumulative_bytes > 0


def test_scales_are_those_of_the_file(bundle):
    made = bundle("branches", "right")
    interpreter = Interpreter(made.head_path)
    assert len(made.manifest.crossing) == 2
    for number, spec in enumerate(made.manifest.inputs):
        info = interpreter.inputs[f"input_{number}"]
        assert (spec.scale, spec.zero_point) == (info.scale, info.zero_point)
    for spec in made.manifest.crossing:
        info = interpreter.outputs[spec.name]
        assert (spec.scale, spec.zero_point, spec.dtype) == (info.scale, info.zero_point, info.dtype.name)


def test_the_self_check_holds_on_this_machine(bundle):
    made = bundle("two_ends", "middle")
    check = made.manifest.self_check
    outputs = Interpreter(made.head_path).run(self_check_inputs(made.manifest.inputs, check.seed))
    assert set(check.expected) == {"feature_0", "output_0", "output_1"}
    assert compare(check.expected, outputs) == 0


def test_a_cloud_only_bundle_sends_the_raw_input_quantized(bundle):
    manifest = bundle("chain", None).manifest
    assert (manifest.cut.k, manifest.has_head, manifest.self_check) == (0, False, None)
    assert manifest.cumulative_bytes == 0
    (feature,) = manifest.crossing
    assert (feature.source, feature.shape, feature.dtype) == ("image", (12, 12, 1), "int8")
    assert (feature.scale, feature.zero_point) == (1.0, -128)
    assert (manifest.inputs[0].scale, manifest.inputs[0].zero_point) == (1.0, -128)


def test_an_edge_only_bundle_has_no_tail(bundle):
    made = bundle("chain", "probabilities")
    assert not made.manifest.has_tail
    assert not made.tail_path.exists()
    assert [entry.path for entry in made.manifest.files] == ["head.tflite"]
    assert made.manifest.crossing == ()


def test_the_tail_takes_any_batch_and_each_row_is_its_own(bundle):
    made = bundle("branches", "right")
    keep, tail = tail_of(made)
    rng = np.random.default_rng(0)
    features = {spec.name: rng.integers(-128, 128, (5, *spec.shape), dtype=np.int8) for spec in made.manifest.crossing}
    together = np.asarray(tail(**features)["output_0"])
    assert together.dtype == np.float32
    for row in range(5):
        alone = np.asarray(tail(**{name: value[row : row + 1] for name, value in features.items()})["output_0"])
        assert np.allclose(alone[0], together[row], atol=1e-5)
    del keep


def test_the_tail_is_exactly_the_half_on_the_dequantized_features(bundle, flat_model):
    from converters.split import split

    made = bundle("branches", "right")
    keep, tail = tail_of(made)
    rng = np.random.default_rng(1)
    features = {spec.name: rng.integers(-128, 128, (3, *spec.shape), dtype=np.int8) for spec in made.manifest.crossing}
    real = [dequantize(features[spec.name], spec.scale, spec.zero_point) for spec in made.manifest.crossing]
    (expected,) = split(flat_model("branches"), made.manifest.cut.k).tail(real)
    assert np.allclose(np.asarray(tail(**features)["output_0"]), np.asarray(expected), atol=1e-5)
    del keep


def test_the_tail_is_in_inference_mode_and_holds_no_variables(bundle):
    made = bundle("chain", "relu")
    loaded, tail = tail_of(made)
    features = {
        spec.name: np.random.default_rng(0).integers(-128, 128, (4, *spec.shape), dtype=np.int8)
        for spec in made.manifest.crossing
    }
    first, second = (np.asarray(tail(**features)["output_0"]) for _ in range(2))
    assert np.array_equal(first, second)
    assert not getattr(loaded, "variables", ())
    assert set(loaded.signatures) == {"serving_default"}


def test_the_tail_declares_the_features_as_they_travel(bundle):
    made = bundle("branches", "right")
    keep, tail = tail_of(made)
    declared = tail.structured_input_signature[1]
    for spec in made.manifest.crossing:
        assert declared[spec.name].shape.as_list() == [None, *spec.shape]
        assert declared[spec.name].dtype.name == "int8"
    del keep


def test_an_illegal_cut_is_refused(bundle):
    with pytest.raises(IllegalCutError, match="raw input"):
        bundle("siamese", "conv")
