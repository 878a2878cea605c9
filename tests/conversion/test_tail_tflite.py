"""The tail as a TensorFlow Lite model computes what the SavedModel does; where there is none, the bundle says why."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import small_models
import user_kinds

from converters import Recipe, Workshop
from converters.tail_tflite import disagreement, random_features
from edge_sdk.bundle import Bundle
from edge_sdk.manifest import CrossingSpec, ModelRef
from edge_sdk.runtime import Interpreter
from zoo_keras.builders import ARCHITECTURES

# Of an output's largest value: the rounding of float32, summed up in another order.
ROUNDING = 2e-5


def crossing_of(flat, halves):
    """Features as a bundle might have them; the range does not matter here."""
    specs = []
    for number, position in enumerate(halves.crossing):
        tensor = flat.graph.tensors[position]
        sent = {"dtype": "int8", "scale": 0.03, "zero_point": -5} if tensor.is_float else {"dtype": tensor.dtype}
        specs.append(CrossingSpec(name=f"feature_{number}", source=tensor.source, shape=tensor.shape, **sent))
    return specs


def write(flat, k, folder):
    """The tail of a model cut after ``k``: its crossing tensors, its keys, and why it has no ``tail.tflite``."""
    from converters.split import split
    from converters.tail import write_tail

    halves = split(flat, k)
    crossing = crossing_of(flat, halves)
    keys = [f"output_{place}" for place in halves.tail_outputs]
    folder.mkdir()
    return crossing, keys, write_tail(halves.tail, crossing, keys, folder)


def assert_equal(folder, crossing, keys, batches=(1, 3, 8)):
    import tensorflow

    loaded = tensorflow.saved_model.load(str(folder / "tail"))
    signature = loaded.signatures["serving_default"]
    interpreter = Interpreter(folder / "tail.tflite", runtime="litert")
    assert list(interpreter.inputs) == [spec.name for spec in crossing]
    assert sorted(interpreter.outputs) == sorted(keys)
    for batch in batches:
        features = random_features(crossing, batch)
        expected = {key: value.numpy() for key, value in signature(**features).items()}
        interpreter.resize(batch)
        made = interpreter.run(features)
        assert all(value.dtype == np.float32 and len(value) == batch for value in made.values())
        assert disagreement(expected, made) <= ROUNDING, batch


def legal_cuts(flat):
    from converters.cuts import cut_points

    return [cut.k for cut in cut_points(flat.graph) if cut.legal and cut.k < flat.graph.n]


# Convolutions alone, two crossing tensors, shapes that are computed from the batch.
@pytest.mark.parametrize("name", ["mobile", "residual", "vision-transformer"])
def test_a_zoo_tail_equals_its_saved_model(zoo_model, tmp_path, name):
    flat = zoo_model(name)
    cuts = legal_cuts(flat)
    crossing, keys, reason = write(flat, cuts[len(cuts) // 2], tmp_path / "bundle")
    assert reason == ""
    assert_equal(tmp_path / "bundle", crossing, keys)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_tails_of_each_zoo_model_equal_their_saved_models(tmp_path, name):
    import zoo_keras
    from converters.flatten import flatten

    flat = flatten(zoo_keras.load_model("fashion-mnist", name))
    cuts = legal_cuts(flat)
    for k in sorted({0, *cuts[:: max(1, len(cuts) // 6)], cuts[-1]}):
        folder = tmp_path / str(k)
        crossing, keys, reason = write(flat, k, folder)
        assert reason == "", k
        assert_equal(folder, crossing, keys)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", user_kinds.KINDS)
def test_the_tails_of_user_models_equal_their_saved_models_or_say_what_lacks(tmp_path, kind):
    from converters.flatten import flatten

    flat = flatten(user_kinds.load(kind))
    cuts = legal_cuts(flat)
    for k in sorted({cuts[0], cuts[len(cuts) // 2], cuts[-1]}):
        folder = tmp_path / str(k)
        crossing, keys, reason = write(flat, k, folder)
        if reason:
            assert reason.startswith("TensorFlow Lite cannot convert the tail: it has no kernel for ")
            assert not (folder / "tail.tflite").exists()
        else:
            assert_equal(folder, crossing, keys)


@pytest.mark.parametrize(
    ("kind", "k", "features", "keys"),
    [
        ("branches", 3, ["left:int8", "stem:int8", "right:int8"], ["output_0"]),
        ("two_ends", 3, ["early:int8", "facts_dense:int8"], ["output_1", "output_2"]),
        ("two_ends", 0, ["image:int8", "facts:int8"], ["output_0", "output_1", "output_2"]),
    ],
)
def test_several_tensors_in_and_out_keep_their_names(flat_model, tmp_path, kind, k, features, keys):
    """Outputs that lie in the head are not among those of the tail; the numbers of the others are the model's."""
    flat = flat_model(kind)
    crossing, written, reason = write(flat, k, tmp_path / "bundle")
    assert reason == ""
    assert sorted(f"{spec.source}:{spec.dtype}" for spec in crossing) == sorted(features)
    assert written == keys
    assert_equal(tmp_path / "bundle", crossing, keys)


def build(flat, k, samples, folder):
    from converters.bundles import build_bundle
    from converters.calibration import Calibration

    folder.mkdir()
    calibration = Calibration.of(flat.graph, samples)
    return build_bundle(flat, k, calibration, task="t", model=ModelRef(name="m", sha256="0" * 64), folder=folder)


def test_the_file_is_the_servers_alone(flat_model, tmp_path):
    bundle = build(flat_model("two_ends"), 4, small_models.samples("two_ends"), tmp_path / "bundle")
    manifest = bundle.manifest
    assert manifest.has_tail_tflite
    assert manifest.tail_tflite_reason == ""
    assert bundle.tail_tflite_path.is_file()
    assert [entry.path for entry in manifest.head_files] == ["head.tflite"]
    edge_only = build(flat_model("two_ends"), 6, small_models.samples("two_ends"), tmp_path / "edge")
    assert not edge_only.manifest.has_tail_tflite
    assert edge_only.manifest.tail_tflite_reason == ""


def test_what_does_not_convert_is_told_and_fails_no_split(tmp_path):
    from converters.flatten import flatten

    flat = flatten(user_kinds.load("recurrent"))
    bundle = build(flat, 1, user_kinds.samples(flat.model), tmp_path / "bundle")
    assert not bundle.manifest.has_tail_tflite
    assert not bundle.tail_tflite_path.exists()
    assert bundle.manifest.tail_tflite_reason == (
        "TensorFlow Lite cannot convert the tail: it has no kernel for TensorListReserve"
    )
    bundle.verify()


def test_a_file_that_computes_something_else_is_not_kept(flat_model, tmp_path, monkeypatch):
    from converters import tail_tflite

    other = tmp_path / "other"
    write(flat_model("chain"), 7, other)
    wrong = (other / "tail.tflite").read_bytes()
    # The same shapes, other weights.
    monkeypatch.setattr(tail_tflite, "_convert", lambda *arguments: str(arguments[-1].write_bytes(wrong))[:0])
    variables = flat_model("chain").model.get_layer("probabilities").weights
    kept = [variable.numpy() for variable in variables]
    try:
        variables[0].assign(-kept[0])
        *_, reason = write(flat_model("chain"), 7, tmp_path / "bundle")
    finally:
        variables[0].assign(kept[0])
    assert reason.startswith("it computes something else than the SavedModel: for a batch of 1 the outputs differ by ")
    assert not (tmp_path / "bundle" / "tail.tflite").exists()
    assert (tmp_path / "bundle" / "tail" / "saved_model.pb").exists()


def chain_with_a_deadly_converter():
    """What a worker process loads; from then on it dies of converting a tail to TensorFlow Lite."""
    from converters import tail_tflite

    tail_tflite._convert = lambda *_: os.kill(os.getpid(), signal.SIGSEGV)
    return small_models.load("chain")


@pytest.mark.exhaustive
def test_a_crash_of_the_converter_fails_no_split(tmp_path):
    recipe = Recipe(task="t", model_name="chain", load=chain_with_a_deadly_converter, calibration=None)
    with Workshop(tmp_path, workers=1) as workshop:
        bundle = Bundle.open(workshop.build(recipe, 7).result())
    assert not bundle.manifest.has_tail_tflite
    assert bundle.manifest.tail_tflite_reason.startswith("the worker process was ended by SIGSEGV")


def one(*values):
    return {"output_0": np.array(values, np.float32)}


@pytest.mark.parametrize(
    ("expected", "made", "far"),
    [
        (one(1, -4), one(1, -4), 0.0),
        (one(1, -4), one(1.5, -4), 0.125),
        (one(0, 0), one(0, 0.25), 0.25),
        (one(1, np.nan, np.inf), one(1, np.nan, np.inf), 0.0),
        (one(1, np.inf), one(1, -np.inf), np.inf),
        (one(1, np.nan), one(1, 2), np.inf),
        (one(1, 2), one(1, np.nan), np.inf),
        (one(1, 2), one(1), np.inf),
        (one(1), {"output_1": np.ones(1, np.float32)}, np.inf),
        ({**one(100), "output_1": np.ones(1)}, {**one(100), "output_1": np.full(1, 1.5)}, 0.5),
    ],
)
def test_how_far_outputs_are_apart(expected, made, far):
    assert disagreement(expected, made) == far


def test_random_features_are_of_all_kinds_and_always_the_same():
    specs = [
        CrossingSpec(name="feature_0", source="a", shape=(50, 40), dtype="int8", scale=0.1, zero_point=0),
        CrossingSpec(name="feature_1", source="b", shape=(50, 40), dtype="bool"),
        CrossingSpec(name="feature_2", source="c", shape=(50, 40), dtype="int32"),
        CrossingSpec(name="feature_3", source="d", shape=(50, 40), dtype="float32"),
    ]
    made = random_features(specs, 2)
    assert {name: (array.dtype.name, array.shape) for name, array in made.items()} == {
        spec.name: (spec.dtype, (2, 50, 40)) for spec in specs
    }
    assert (made["feature_0"].min(), made["feature_0"].max()) == (-128, 127)
    assert set(made["feature_1"].flat) == {False, True}
    assert set(made["feature_2"].flat) == {0, 1}
    assert 0 <= made["feature_3"].min() < 0.1 < 0.9 < made["feature_3"].max() <= 1
    again = random_features(specs, 2)
    assert all(np.array_equal(made[name], again[name]) for name in made)
