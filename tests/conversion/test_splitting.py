"""Split equals whole: float head and float tail together compute exactly what the model does, at every legal cut."""

from __future__ import annotations

import numpy as np
import pytest
import small_models

from edge_sdk.errors import IllegalCutError
from zoo_keras.builders import ARCHITECTURES

TOLERANCE = 1e-5


def legal_cuts(flat):
    from converters.cuts import cut_points

    return [cut.k for cut in cut_points(flat.graph) if cut.legal]


def whole(flat, inputs):
    """Outputs of the model itself, in the order of its outputs."""
    import keras

    names = [flat.graph.tensors[position].name for position in flat.graph.inputs]
    values = inputs[0] if len(inputs) == 1 else inputs
    if flat.graph.name == "named":
        values = dict(zip(names, inputs, strict=True))
    return [np.asarray(output) for output in keras.tree.flatten(flat.model(values, training=False))]


def halves_together(flat, k, inputs):
    """Outputs of head and tail at cut ``k``, in the order of the model's outputs."""
    from converters.split import split

    halves = split(flat, k)
    made = halves.head(inputs)
    crossing, early = made[: len(halves.crossing)], made[len(halves.crossing) :]
    late = halves.tail([np.asarray(value) for value in crossing])
    by_place = dict(zip((*halves.head_outputs, *halves.tail_outputs), (*early, *late), strict=True))
    return [np.asarray(by_place[place]) for place in range(len(flat.graph.outputs))]


def assert_equals_whole(flat, cuts, inputs):
    expected = whole(flat, inputs)
    for k in cuts:
        for name, one, other in zip(flat.graph.output_names, expected, halves_together(flat, k, inputs), strict=True):
            assert one.shape == other.shape, (k, name)
            assert np.max(np.abs(one - other)) <= TOLERANCE, (k, name)


def small_inputs(flat, kind):
    samples = small_models.samples(kind, 3)
    return [samples[flat.graph.tensors[position].name].astype(np.float32) for position in flat.graph.inputs]


def pixels(count=2):
    return [np.random.default_rng(0).integers(0, 256, (count, 28, 28, 1)).astype(np.float32)]


@pytest.mark.parametrize("kind", small_models.KINDS)
def test_every_legal_cut_of_a_small_model(flat_model, kind):
    flat = flat_model(kind)
    cuts = legal_cuts(flat)
    assert cuts
    assert_equals_whole(flat, cuts, small_inputs(flat, kind))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_some_legal_cuts_of_a_zoo_architecture(zoo_model, name):
    flat = zoo_model(name)
    cuts = legal_cuts(flat)
    assert_equals_whole(flat, cuts[:: max(1, len(cuts) // 6)], pixels())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_legal_cut_of_a_zoo_model(name):
    import zoo_keras
    from converters.flatten import flatten

    flat = flatten(zoo_keras.load_model("fashion-mnist", name))
    images = zoo_keras.task("fashion-mnist").samples("validation").inputs["image"][:16].astype(np.float32)
    assert_equals_whole(flat, legal_cuts(flat), [images])


def test_splitting_leaves_no_trace_in_the_layers(flat_model):
    from converters.split import split

    flat = flat_model("branches")
    nodes = [len(layer._inbound_nodes) for layer in flat.model.layers]
    for k in legal_cuts(flat):
        halves = split(flat, k)
        halves.tail(halves.head(small_inputs(flat, "branches")))
    assert [len(layer._inbound_nodes) for layer in flat.model.layers] == nodes


def test_outputs_inside_the_head_are_returned_by_it(flat_model):
    from converters.split import split

    flat = flat_model("two_ends")
    names = [operation.name for operation in flat.graph.operations]
    assert flat.graph.output_names == ("early", "middle", "late")
    before = split(flat, names.index("middle"))
    assert (before.head_outputs, before.tail_outputs) == ((0,), (1, 2))
    after = split(flat, names.index("middle") + 1)
    assert (after.head_outputs, after.tail_outputs) == ((0, 1), (2,))
    assert after.crossing == (flat.graph.outputs[1],)
    assert after.head.outputs == (flat.graph.outputs[1], flat.graph.outputs[0], flat.graph.outputs[1])


def test_the_ends_are_the_whole_model_on_one_side(flat_model):
    from converters.split import split

    flat = flat_model("two_ends")
    cloud, edge = split(flat, 0), split(flat, flat.graph.n)
    assert cloud.head is None
    assert cloud.crossing == flat.graph.inputs
    assert edge.tail is None
    assert edge.crossing == ()
    inputs = small_inputs(flat, "two_ends")
    for one, other, expected in zip(cloud.tail(inputs), edge.head(inputs), whole(flat, inputs), strict=True):
        assert np.array_equal(one, expected)
        assert np.array_equal(other, expected)


def test_what_is_no_cut_point_is_refused(flat_model):
    from converters.split import split

    flat = flat_model("siamese")
    for k in (-1, flat.graph.n + 1):
        with pytest.raises(IllegalCutError, match="its cut points are 1 to"):
            split(flat, k)
    with pytest.raises(IllegalCutError, match=r"cannot be cut after operation 1 \('conv'\): .*raw input 'right'"):
        split(flat, 1)


def test_a_half_is_in_inference_mode(flat_model):
    from converters.split import split

    flat = flat_model("chain")
    halves = split(flat, flat.graph.n)
    inputs = small_inputs(flat, "chain")
    assert np.array_equal(halves.head(inputs)[0], halves.head(inputs)[0])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((6, 6), (6, 1)),
        ((6, 1), (1, 6)),
        ((6, 1), (6,)),
        ((5, 6, 6), (1, 6, 1)),
        ((5, 6, 6), (5, 1, 1)),
    ],
)
def test_a_sum_of_one_sample_is_that_of_many(tmp_path, first, second):
    """Keras takes the second term for a bias of the channels where a batch of 1 makes it look like one."""
    import keras

    from converters.calibration import Calibration
    from converters.flatten import flatten
    from converters.head import write_head
    from converters.split import split
    from edge_sdk.runtime import Interpreter

    size, other = int(np.prod(first)), int(np.prod(second))
    ends = keras.Input((size,), name="a"), keras.Input((other,), name="b")
    # A vector is constant: all others have the batch axis.
    term = np.arange(other, dtype=np.float32) if len(second) == 1 else keras.ops.reshape(ends[1], (-1, *second))
    total = keras.ops.reshape(ends[0], (-1, *first)) + term
    used = ends if len(second) > 1 else ends[:1]
    flat = flatten(keras.Model(list(used), total))
    rng = np.random.default_rng(0)
    samples = {end.name: rng.normal(size=(4, end.shape[1])).astype(np.float32) for end in used}
    terms = [samples["a"].reshape(4, *first), samples["b"].reshape(4, *second) if "b" in samples else term]
    expected = terms[0] + terms[1]
    head = split(flat, flat.graph.n).head
    assert np.array_equal(np.asarray(head(list(samples.values()))[0]), expected)
    assert np.array_equal(np.asarray(head([array[:1] for array in samples.values()])[0]), expected[:1])
    path = tmp_path / "head.tflite"
    write_head(head, ["output_0"], Calibration.of(flat.graph, samples), path, "float32")
    taken = {f"input_{number}": array[:1] for number, array in enumerate(samples.values())}
    assert np.allclose(Interpreter(path).run(taken)["output_0"], expected[:1])
