"""Cut points on plain graphs: what crosses, and what is legal, for any graph."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from converters.cuts import crossing_positions, cut_points, require_legal
from converters.graph import Graph, Operation, TensorInfo
from converters.outline import Outline
from edge_sdk.errors import IllegalCutError, UnsupportedModelError


@st.composite
def graphs(draw):
    """A random model: some inputs, operations that take any earlier tensors, one or two results each."""
    inputs = draw(st.integers(1, 3))
    count = draw(st.integers(1, 12))
    tensors = [TensorInfo(name=f"in{i}", source=f"in{i}", shape=(i + 1,), dtype="float32") for i in range(inputs)]
    operations = []
    for number in range(count):
        taken = draw(st.lists(st.integers(0, len(tensors) - 1), min_size=1, max_size=3))
        made = []
        for result in range(draw(st.integers(1, 2))):
            made.append(len(tensors))
            shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
            dtype = draw(st.sampled_from(["float32", "float16", "int32", "bool"]))
            batched = draw(st.integers(0, 9)) > 0
            tensors.append(
                TensorInfo(name=f"op{number}:{result}", source=f"op{number}", shape=shape, dtype=dtype, batched=batched)
            )
        operations.append(
            Operation(
                name=f"op{number}",
                kind=draw(st.sampled_from(["Any", "BatchNormalization"])),
                layer=draw(st.integers(0, number)),
                parameters=draw(st.integers(0, 99)),
                inputs=tuple(taken),
                outputs=tuple(made),
            )
        )
    outputs = draw(st.lists(st.sampled_from(operations[-1].outputs), min_size=1, max_size=2, unique=True))
    return Graph(
        name="random",
        tensors=tuple(tensors),
        inputs=tuple(range(inputs)),
        operations=tuple(operations),
        outputs=tuple(outputs),
        output_names=tuple(f"out{number}" for number in range(len(outputs))),
    )


def computable(operations, given_tensors):
    """Whether ``operations``, in order, find all they take among ``given_tensors`` and their own results."""
    known = set(given_tensors)
    for operation in operations:
        if not set(operation.inputs) <= known:
            return False
        known.update(operation.outputs)
    return True


@given(graphs())
def test_the_crossing_tensors_are_exactly_what_the_tail_needs(graph):
    for cut in cut_points(graph):
        crossing = crossing_positions(graph, cut.k)
        assert tuple(graph.tensors[position] for position in crossing) == cut.crossing
        tail = graph.operations[cut.k :]
        assert computable(tail, crossing)
        for position in crossing:
            assert not computable(tail, set(crossing) - {position})


def shown_in(graph):
    """Positions of the tensors from which a way without weights leads back to an input of the model."""
    makers = {made: operation for operation in graph.operations for made in operation.outputs}

    def raw(position):
        if position not in makers:
            return True
        maker = makers[position]
        passes = not maker.parameters or maker.kind == "BatchNormalization"
        return passes and graph.tensors[position].dtype != "bool" and any(raw(taken) for taken in set(maker.inputs))

    return {position for position in range(len(graph.tensors)) if raw(position)}


@given(graphs())
def test_a_legal_cut_sends_no_raw_input_and_has_something_to_send(graph):
    cuts = cut_points(graph)
    raw = shown_in(graph)
    assert [cut.k for cut in cuts] == list(range(1, graph.n))
    for cut in cuts:
        crossing = set(crossing_positions(graph, cut.k))
        sound = bool(crossing) and not crossing & raw and all(graph.tensors[position].batched for position in crossing)
        assert cut.legal == sound
        assert bool(cut.reason) != cut.legal
        assert cut.name == graph.operations[cut.k - 1].name
        if cut.legal:
            require_legal(graph, cut.k)
        else:
            with pytest.raises(IllegalCutError) as caught:
                require_legal(graph, cut.k)
            assert cut.reason in caught.value.message


@given(graphs())
def test_crossing_tensors_are_in_the_order_they_are_made(graph):
    for cut in cut_points(graph):
        crossing = crossing_positions(graph, cut.k)
        assert list(crossing) == sorted(set(crossing))


@given(graphs())
def test_features_are_as_large_as_their_tensors(graph):
    sizes = {"float32": 1, "float16": 1, "int32": 4, "bool": 1}
    for cut in cut_points(graph):
        expected = 0
        for tensor in cut.crossing:
            size = sizes[tensor.dtype]
            for axis in tensor.shape:
                size *= axis
            expected += size
        assert cut.feature_bytes == expected


@given(graphs())
def test_an_outline_survives_its_json(graph):
    outline = Outline.of(graph, "0" * 64)
    assert Outline.from_json(outline.to_json()) == outline


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"model_sha256": "0", "n": 1, "operations": [{}], "cuts": []}'])
def test_json_of_no_outline_is_an_error(text):
    with pytest.raises((ValueError, TypeError, KeyError)):
        Outline.from_json(text)


def chain(*operations):
    """A graph of (name, inputs) with one result each; tensor 0 is the model's input."""
    return Graph(
        name="chain",
        tensors=tuple(
            TensorInfo(name=name, source=name, shape=(4,), dtype="float32")
            for name in ("image", *(name for name, _ in operations))
        ),
        inputs=(0,),
        operations=tuple(
            Operation(name=name, kind="Any", layer=number, parameters=1, inputs=inputs, outputs=(number + 1,))
            for number, (name, inputs) in enumerate(operations)
        ),
        outputs=(len(operations),),
        output_names=("out",),
    )


def test_a_skip_from_the_input_forbids_all_cuts_below_it():
    cuts = cut_points(chain(("a", (0,)), ("b", (1,)), ("add", (2, 0)), ("c", (3,))))
    assert [cut.legal for cut in cuts] == [False, False, True]
    assert cuts[1].reason == "it would send the raw input 'image' to the server, which 'add' takes after the cut"


@pytest.mark.parametrize(
    "preprocess",
    ["rescale", "normalize", "resize", "crop", "pad", "flatten", "plain", "augment", "pool", "batch_norm", "nested"],
)
def test_an_input_that_is_only_preprocessed_is_still_raw(preprocess):
    """The first cut that is legal lies after the convolution (or the dense layer), the first thing learned."""
    import keras
    from keras import layers

    from converters.flatten import flatten

    image = keras.Input((8, 8, 3), name="image")
    steps = {
        "rescale": [layers.Rescaling(1 / 255)],
        "normalize": [layers.Normalization(mean=[1.0, 2.0, 3.0], variance=[1.0, 2.0, 3.0])],
        "resize": [layers.Resizing(6, 6), layers.Rescaling(1 / 255)],
        "crop": [layers.CenterCrop(6, 6), layers.Cropping2D(1)],
        "pad": [layers.ZeroPadding2D(1), layers.Permute((2, 1, 3)), layers.Activation("tanh")],
        "flatten": [layers.Reshape((64, 3)), layers.Reshape((8, 8, 3)), layers.Identity()],
        "plain": [
            lambda x: (x - 127.0) / 64.0,
            lambda x: x[:, ::2, ::2],
            lambda x: keras.ops.transpose(x, (0, 2, 1, 3)),
        ],
        "augment": [layers.RandomFlip(), layers.RandomRotation(0.1), layers.Dropout(0.2), layers.GaussianNoise(0.1)],
        "pool": [layers.AveragePooling2D(2)],
        "batch_norm": [layers.BatchNormalization()],
        "nested": [keras.Sequential([keras.Input((8, 8, 3)), layers.Rescaling(1 / 255), layers.ZeroPadding2D(1)])],
    }[preprocess]
    x = image
    for step in steps:
        x = step(x)
    x = layers.Conv2D(4, 3, name="conv")(x)
    x = layers.Flatten(name="flat")(x)
    graph = flatten(keras.Model(image, layers.Dense(2, name="scores")(x))).graph
    cuts = cut_points(graph)
    assert [cut.name for cut in cuts if cut.legal] == ["conv", "flat"]
    for cut in cuts:
        if not cut.legal:
            assert cut.reason.startswith("it would send the raw input 'image' to the server, only preprocessed: ")
            assert cut.crossing[0].name in cut.reason


def test_what_shows_the_input_next_to_something_learned_is_raw():
    """Tensors: 0 image, 1 learned from it, 2 both without weights, 3 learned from both."""
    graph = chain(("learned", (0,)), ("joined", (1, 0)), ("mixed", (2,)), ("end", (3,)))
    operations = tuple(
        dataclasses.replace(operation, parameters=0) if operation.name == "joined" else operation
        for operation in graph.operations
    )
    cuts = cut_points(dataclasses.replace(graph, operations=operations))
    assert [cut.legal for cut in cuts] == [False, False, True]
    assert cuts[1].reason == (
        "it would send the raw input 'image' to the server, only preprocessed: 'joined', which 'mixed' takes after the "
        "cut, is made of it without anything learned"
    )


def test_a_skip_crosses_as_one_more_tensor():
    cuts = cut_points(chain(("a", (0,)), ("b", (1,)), ("c", (2,)), ("add", (3, 1))))
    assert [[tensor.name for tensor in cut.crossing] for cut in cuts] == [["a"], ["a", "b"], ["a", "c"]]


def test_operations_out_of_order_are_refused():
    with pytest.raises(UnsupportedModelError, match="'a' needs 'b'"):
        chain(("a", (2,)), ("b", (0,)))
