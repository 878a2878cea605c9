"""Kinds of models that users bring: for each the legal cuts, the exact float halves, and a bundle that runs."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import user_kinds

from edge_sdk.head import Head
from edge_sdk.manifest import ModelRef

# What crosses in the middle of a kind's legal cuts, as the bundle sends it: the source of each tensor and its dtype.
CROSSING = {
    "u_net": ["int8"] * 3,
    "inception": ["int8", "int8"],
    "dense_net": ["int8", "int8"],
    "ten_branches": ["int8"] * 10,
    "other_shape": ["int8"] * 3,
    "recurrent": ["int8", "int8"],
    "masked": ["not_equal:bool", "lstm:int8"],
    "masked_nested": ["not_equal:bool", "encoder/dense:int8"],
    "whole_numbers": ["int8", "bool"],
}


@functools.cache
def flat_kind(kind):
    from converters.flatten import flatten

    return flatten(user_kinds.load(kind))


def legal_cuts(kind):
    from converters.cuts import cut_points

    return [cut.k for cut in cut_points(flat_kind(kind).graph) if cut.legal]


@functools.cache
def whole(kind):
    """Samples by the name of the input, and the outputs of the whole model on them, in order."""
    import keras

    flat = flat_kind(kind)
    samples = user_kinds.samples(flat.model)
    values = [samples[flat.graph.tensors[position].name] for position in flat.graph.inputs]
    packed = keras.tree.pack_sequence_as(getattr(flat.model, "_inputs_struct", [None]), values)
    outputs = flat.model(packed, training=False)
    return samples, [np.asarray(output) for output in keras.tree.flatten(outputs)]


@pytest.mark.parametrize("kind", user_kinds.KINDS)
def test_head_and_tail_in_float_are_the_whole_at_every_legal_cut(kind):
    from converters.split import split

    flat = flat_kind(kind)
    samples, expected = whole(kind)
    cuts = legal_cuts(kind)
    assert cuts
    values = [samples[flat.graph.tensors[position].name] for position in flat.graph.inputs]
    for k in cuts:
        halves = split(flat, k)
        made = halves.head(values)
        # As numpy arrays: what Keras attaches to its tensors, such as masks, does not cross.
        late = halves.tail([np.asarray(value) for value in made[: len(halves.crossing)]])
        places = (*halves.head_outputs, *halves.tail_outputs)
        outputs = dict(zip(places, (*made[len(halves.crossing) :], *late), strict=True))
        for place, output in enumerate(expected):
            assert np.asarray(outputs[place]).dtype == output.dtype
            difference = np.abs(np.asarray(outputs[place]).astype(np.float64) - output.astype(np.float64))
            assert difference.max() <= 1e-5, (k, place)


# Where int8 makes too large an error, in a feature or in what the tail makes of it: the place among the legal cuts.
NOT_INT8 = {("u_net", "last"), ("bidirectional", "first"), ("bidirectional", "middle")}


@pytest.mark.parametrize("kind", user_kinds.KINDS)
def test_a_bundle_runs_and_is_close_to_the_whole(kind, tmp_path):
    assert_bundle_is_close(kind, "middle", tmp_path, CROSSING.get(kind))


def test_integers_and_booleans_of_the_head_and_the_last_cut(tmp_path):
    assert_bundle_is_close("whole_numbers", "last", tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("kind", user_kinds.KINDS)
def test_bundles_of_the_first_and_the_last_cut(kind, place, tmp_path):
    assert_bundle_is_close(kind, place, tmp_path)


def assert_bundle_is_close(kind, place, folder, sources=None):
    """Through its files, as a device and a server run them; ``sources`` end what crosses, with its dtype."""
    import tensorflow

    from converters.bundles import build_bundle
    from converters.calibration import Calibration
    from converters.deviation import deviation
    from converters.precision import Ladder

    flat = flat_kind(kind)
    samples, expected = whole(kind)
    calibration = Calibration.of(flat.graph, samples)
    cuts = legal_cuts(kind)
    k = cuts[{"first": 0, "middle": len(cuts) // 2, "last": -1}[place]]

    def build(attempt):
        (folder / attempt.precision).mkdir()
        return build_bundle(
            flat,
            k,
            calibration,
            task="any",
            model=ModelRef(name=kind, sha256="0" * 64),
            folder=folder / attempt.precision,
            precision=attempt.precision,
            max_error=attempt.max_error,
            before=attempt.before,
        )

    bundle = Ladder.of("auto", None, lambda _: k).climb(build)
    manifest = bundle.manifest
    if (kind, place) in NOT_INT8:
        assert manifest.precision == "int8-weights"
        assert manifest.precision_reason.startswith("int8: its error is 0.1")
    else:
        assert (manifest.precision, manifest.precision_reason) == ("int8", "")
    if sources is not None:
        crossing = [f"{spec.source}:{spec.dtype}" for spec in manifest.crossing]
        assert len(crossing) == len(sources)
        assert all(made.endswith(wanted) for made, wanted in zip(crossing, sources, strict=True)), crossing
    head = Head(bundle)
    keep = tensorflow.saved_model.load(str(bundle.tail_path))
    rows = []
    for number in range(len(next(iter(samples.values())))):
        made = head.run({name: array[number] for name, array in samples.items()})
        late = keep.signatures["serving_default"](**{feature.name: feature.data for feature in made.features})
        rows.append(
            [
                made.outputs[spec.name] if spec.side == "head" else np.asarray(late[f"output_{place}"])[0]
                for place, spec in enumerate(manifest.outputs)
            ]
        )
    assert tuple(spec.name for spec in manifest.outputs) == flat.graph.output_names
    for spec, output, column in zip(manifest.outputs, expected, zip(*rows, strict=True), strict=True):
        made = np.stack(column)
        assert made.shape == output.shape
        if output.dtype.kind == "f":
            assert spec.dtype == "float32"
            assert deviation(made, output.astype(np.float32)) <= 0.1, spec.name
        else:
            assert spec.dtype == output.dtype.name
            assert np.mean(made.astype(output.dtype) == output) >= 0.9, spec.name


def legal_names(kind):
    graph = flat_kind(kind).graph
    return [graph.operations[k - 1].name for k in legal_cuts(kind)]


def reason(kind, name):
    from converters.cuts import cut_points

    return next(cut.reason for cut in cut_points(flat_kind(kind).graph) if cut.name == name)


def test_ten_tensors_may_cross():
    from converters.cuts import cut_points

    assert max(len(cut.crossing) for cut in cut_points(flat_kind("ten_branches").graph)) == 10


def test_the_mask_must_cross_with_what_it_masks():
    assert legal_names("masked") == ["not_equal", "lstm", "pool"]
    assert "raw input 'tokens'" in reason("masked", "embedding")


def test_a_recurrent_layer_over_many_steps_is_in_the_tail_only():
    from converters.outline import Outline
    from converters.split import split
    from edge_sdk.errors import IllegalCutError

    assert legal_names("long_series") == ["conv"]
    assert reason("long_series", "lstm") == (
        "the head would hold what belongs into the tail: 'lstm' (LSTM) runs over 298 steps; a device runs recurrent "
        "layers unrolled, over at most 256 steps: cut before it"
    )
    flat = flat_kind("long_series")
    assert "298 steps" in Outline.of(flat.graph, "0" * 64).edge_only_reason
    assert Outline.of(flat_kind("recurrent").graph, "0" * 64).edge_only_reason == ""
    with pytest.raises(IllegalCutError, match=r"cannot run on a device as a whole: 'lstm' \(LSTM\) runs over 298"):
        split(flat, flat.graph.n)


def test_there_is_no_cut_point_inside_a_recurrent_layer():
    assert [operation.kind for operation in flat_kind("recurrent").graph.operations] == [
        "LSTM", "GRU", "SimpleRNN", "Dense",
    ]  # fmt: skip


def test_a_cut_inside_of_one_is_refused_with_the_reason():
    from cloud_server.cut_lookup import find_cut
    from converters.outline import Outline
    from edge_sdk.errors import IllegalCutError

    outline = Outline.of(flat_kind("recurrent").graph, "0" * 64)
    with pytest.raises(
        IllegalCutError, match=r"'lstm/lstm_cell' lies inside the recurrent layer 'lstm' \(LSTM\), whose"
    ):
        find_cut("m", outline, "lstm/lstm_cell")
    assert find_cut("m", outline, "gru") == 2


def test_layers_are_as_before_once_a_head_was_unrolled():
    from converters.recurrent import recurrent_layers, unrolled

    layers = [step.layer for step in flat_kind("bidirectional").steps]
    inner = [each for layer in layers for each in recurrent_layers(layer)]
    assert len(inner) == 4
    with unrolled(layers):
        assert all(each.unroll for each in inner)
    assert not any(each.unroll for each in inner)


def test_flattening_a_nested_model_for_its_calls_leaves_no_trace():
    from converters.flatten import flatten

    model = user_kinds.load("other_shape")
    inner = [model.get_layer("shared").get_layer(name) for name in ("relu", "block")]
    nodes = [len(layer._inbound_nodes) for layer in inner]
    assert flatten(model).graph == flatten(model).graph
    assert [len(layer._inbound_nodes) for layer in inner] == nodes


@pytest.mark.parametrize("kind", ["mixed_float16", "mixed_bfloat16", "half_precision"])
def test_a_model_of_another_float_type_is_computed_in_float32(kind):
    import keras

    given = user_kinds.load(kind)
    flat = flat_kind(kind)
    assert flat.model is not given
    assert {tensor.dtype for tensor in flat.graph.tensors} == (
        {"float16", "float32"} if kind == "half_precision" else {"float32"}
    )
    samples, expected = whole(kind)
    original = np.asarray(keras.ops.cast(given(samples["image"], training=False), "float32"))
    assert np.abs(original - expected[0]).max() <= 0.02


def test_a_model_in_float32_is_taken_as_it_is():
    model = user_kinds.load("dense_net")
    from converters.flatten import flatten

    assert flatten(model).model is model
