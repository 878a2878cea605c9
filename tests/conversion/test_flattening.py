"""Flattening: a Keras model becomes a plain graph, in a fixed order, nested models taken apart."""

from __future__ import annotations

import numpy as np
import pytest
import small_models

from edge_sdk.errors import UnsupportedModelError
from zoo_keras.builders import ARCHITECTURES


@pytest.fixture(scope="module")
def keras():
    from converters.keras_backend import load_keras

    return load_keras()


def names(flat):
    return [operation.name for operation in flat.graph.operations]


def test_a_sequential_model_is_the_chain_of_its_layers(flat_model):
    graph = flat_model("chain").graph
    assert names(flat_model("chain")) == [
        "rescale", "conv", "norm", "relu", "noise", "pool", "flatten", "dropout", "probabilities",
    ]  # fmt: skip
    assert [graph.tensors[position].name for position in graph.inputs] == ["image"]
    assert graph.tensors[graph.inputs[0]].shape == (12, 12, 1)
    assert graph.output_names == ("probabilities",)
    assert [operation.parameters for operation in graph.operations] == [0, 40, 16, 0, 0, 0, 0, 0, 1010]
    assert [operation.kind for operation in graph.operations][:3] == ["Rescaling", "Conv2D", "BatchNormalization"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_order_is_that_of_the_model(zoo_model, name):
    flat = zoo_model(name)
    layers = [layer.name for layer in flat.model.layers if type(layer).__name__ != "InputLayer"]
    assert sorted(names(flat)) == sorted(layers)
    place = {layer: number for number, layer in enumerate(layers)}
    depth_order = [place[operation] for operation in names(flat)]
    assert depth_order == sorted(depth_order)


def test_flattening_twice_gives_the_same_graph(flat_model):
    from converters.flatten import flatten

    for kind in small_models.KINDS:
        flat = flat_model(kind)
        assert flatten(flat.model).graph == flat.graph


def test_a_shared_layer_is_an_operation_for_each_call(flat_model):
    graph = flat_model("siamese").graph
    convolutions = [operation for operation in graph.operations if operation.kind == "Conv2D"]
    assert [operation.name for operation in convolutions] == ["conv", "conv#2"]
    assert len({operation.layer for operation in convolutions}) == 1
    assert [graph.tensors[position].name for position in graph.inputs] == ["left", "right"]


def test_nested_models_are_taken_apart_at_any_depth(flat_model):
    flat = flat_model("nested")
    block = ["backbone/block/conv", "backbone/block/norm", "backbone/block/relu", "backbone/add", "backbone/out"]
    again = [f"{name}#2" for name in block]
    assert names(flat) == ["rescale", *block, *again, "pool", "scores"]
    by_name = {operation.name: operation for operation in flat.graph.operations}
    assert by_name["backbone/out"].layer == by_name["backbone/out#2"].layer
    assert by_name["backbone/block/conv#2"].inputs == by_name["backbone/out"].outputs
    assert by_name["backbone/add#2"].inputs == (
        *by_name["backbone/block/relu#2"].outputs,
        *by_name["backbone/out"].outputs,
    )


def test_operations_without_layers_and_with_several_results(flat_model):
    graph = flat_model("plain_operations").graph
    split = next(operation for operation in graph.operations if operation.kind == "Split")
    assert len(split.outputs) == 2
    assert [graph.tensors[position].name for position in split.outputs] == [f"{split.name}:0", f"{split.name}:1"]
    assert {graph.tensors[position].source for position in split.outputs} == {split.name}
    assert split.parameters == 0


def test_inputs_and_outputs_in_dicts_are_named_by_their_keys(flat_model):
    graph = flat_model("named").graph
    assert [graph.tensors[position].name for position in graph.inputs] == ["deep", "wide"]
    assert graph.output_names == ("code", "score")


def test_a_nested_model_of_another_dtype_gets_its_cast(keras):
    from converters.flatten import flatten

    inner_input = keras.Input((4,), dtype="float32", name="x")
    inner = keras.Model(inner_input, keras.layers.Dense(2, name="d")(inner_input), name="inner")
    outer = keras.Input((4,), dtype="float16", name="half")
    flat = flatten(keras.Model(outer, inner(keras.ops.multiply(outer, 2.0))))
    cast = flat.graph.operations[1]
    assert (cast.kind, cast.name) == ("Cast", "inner/cast")
    assert flat.graph.tensors[cast.outputs[0]].dtype == "float32"


def test_a_subclassed_model_is_refused_by_name(keras):
    from converters.flatten import flatten

    class Handwritten(keras.Model):
        def call(self, x):
            return x

    with pytest.raises(UnsupportedModelError, match=r"'by_hand' is a subclassed model \(Handwritten\).*Functional"):
        flatten(Handwritten(name="by_hand"))


def test_a_functional_model_that_overrides_call_is_refused(keras):
    from converters.flatten import flatten

    class Doubled(keras.Model):
        def call(self, x, training=None, mask=None):
            return super().call(x, training=training, mask=mask) * 2

    image = keras.Input((3,))
    with pytest.raises(UnsupportedModelError, match="Doubled"):
        flatten(Doubled(image, keras.layers.Dense(2)(image)))


def test_a_sequential_model_without_input_shape_is_refused(keras):
    from converters.flatten import flatten

    with pytest.raises(UnsupportedModelError, match=r"'open' is a Sequential model that was never built; .*Input"):
        flatten(keras.Sequential([keras.layers.Dense(3)], name="open"))


def test_free_dimensions_are_refused_with_the_shape(keras):
    from converters.flatten import flatten

    image = keras.Input((None, None, 3), name="image")
    with pytest.raises(UnsupportedModelError, match=r"'image' has free dimensions: \(None, None, None, 3\)"):
        flatten(keras.Model(image, keras.layers.Conv2D(2, 3)(image)))


@pytest.mark.parametrize("dtype", ["bfloat16", "uint64", "string"])
def test_inputs_that_cannot_travel_are_refused(keras, dtype):
    from converters.flatten import flatten

    given = keras.Input((3,), name="given", dtype=dtype)
    with pytest.raises(UnsupportedModelError, match=f"its input 'given' has dtype {dtype}; expected one of int8"):
        flatten(keras.Model(given, keras.layers.Identity()(given)))


def test_what_is_no_model_is_refused():
    from converters.flatten import flatten

    with pytest.raises(UnsupportedModelError, match=r"expected a keras\.Model, got dict"):
        flatten({})


def test_an_output_that_is_an_input_is_refused(keras):
    from converters.flatten import flatten

    image = keras.Input((3,), name="image")
    with pytest.raises(UnsupportedModelError, match="raw input"):
        flatten(keras.Model(image, [keras.layers.Dense(2)(image), image]))


def test_the_hash_follows_weights_configuration_and_wiring(keras):
    from converters.flatten import flatten
    from converters.model_hash import model_sha256

    def hashed(kind="branches", seed=0, change=None):
        keras.backend.clear_session()
        model = small_models.load(kind, seed)
        if change:
            change(model)
        return model_sha256(flatten(model))

    assert hashed() == hashed()
    assert hashed("plain_operations") == hashed("plain_operations")
    different = {
        hashed(),
        hashed(seed=1),
        hashed("chain"),
        hashed(change=lambda model: setattr(model.get_layer("right_norm"), "epsilon", 0.5)),
        hashed(change=lambda model: model.get_layer("scores").bias.assign_add([0, 0, 0, 0, 1e-3])),
    }
    assert len(different) == 5


def test_constants_of_a_call_are_part_of_the_hash(keras):
    from converters.flatten import flatten
    from converters.model_hash import model_sha256

    def hashed(constant):
        keras.backend.clear_session()
        x = keras.Input((3,), name="x")
        return model_sha256(flatten(keras.Model(x, keras.ops.add(x, np.array(constant, np.float32)))))

    assert hashed([1.0, 2.0, 3.0]) == hashed([1.0, 2.0, 3.0])
    assert hashed([1.0, 2.0, 3.0]) != hashed([1.0, 2.0, 4.0])


def test_a_model_that_keras_quantized_is_refused(keras):
    from converters.flatten import flatten

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="few"), keras.layers.Dense(2)])
    model.quantize("int8")
    with pytest.raises(
        UnsupportedModelError, match=r"its layer 'few' was quantized by Keras \(int8\); bring the model"
    ):
        flatten(model)
