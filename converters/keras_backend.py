"""Keras on TensorFlow: the one place that imports them, and what of them is not public but needed."""

from __future__ import annotations

import os
import re
from typing import Any

from edge_sdk.errors import ConfigError

GRADIENT_ATTRIBUTE = "_gradient_op_type"
LOOP_ATTRIBUTE = "_lower_using_switch_merge"


def load_keras() -> Any:
    """The module ``keras``. The first call in a process takes seconds: call it inside functions only."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import keras

    if keras.backend.backend() != "tensorflow":
        raise ConfigError(
            f"Keras runs on the backend {keras.backend.backend()!r}, splitting needs 'tensorflow': "
            "unset KERAS_BACKEND, and the backend in ~/.keras/keras.json"
        )
    return keras


def load_tensorflow() -> Any:
    """The module ``tensorflow``."""
    load_keras()
    import tensorflow

    return tensorflow


def valid_name(name: str) -> str:
    """``name`` as a scope of TensorFlow's graphs may be called; Keras itself also takes spaces and any script."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
    return plain if plain[:1].isalnum() or plain[:1] == "." else f"layer{plain}"


def freeze(function: Any) -> Any:
    """A TensorFlow ``ConcreteFunction`` without variables: the same function with their values as constants.

    Its inputs have the names of those of ``function``, its flat outputs are in the order of that one's.
    """
    from tensorflow.python.framework import convert_to_constants

    # Swish, for one, has a gradient of its own, and a function that names one cannot be saved without it.
    for operation in function.graph.get_operations():
        if GRADIENT_ATTRIBUTE in operation.node_def.attr:
            operation._clear_attr(GRADIENT_ATTRIBUTE)

    graph = frozen_graph(function)
    if any(LOOP_ATTRIBUTE in node.attr for node in graph.node):
        # Takes long, and makes loops and branches of operations, which run faster than functions.
        return convert_to_constants.convert_variables_to_constants_v2(function)
    tensorflow = load_tensorflow()
    inputs = own_inputs(function)
    return tensorflow.function(
        lambda *values: tensorflow.graph_util.import_graph_def(
            graph,
            {tensor.name: value for tensor, value in zip(inputs, values, strict=True)},
            [tensor.name for tensor in function.outputs],
            name="",
        ),
        [tensorflow.TensorSpec(tensor.shape, tensor.dtype, name=tensor.op.name) for tensor in inputs],
        autograph=False,
    ).get_concrete_function()


def frozen_graph(function: Any) -> Any:
    """The ``GraphDef`` of a ``ConcreteFunction``, of one piece but for loops and branches, its variables constants."""
    from tensorflow.python.framework import convert_to_constants

    data = convert_to_constants._FunctionConverterDataInEager(
        func=function, lower_control_flow=False, aggressive_inlining=False
    )
    return convert_to_constants._replace_variables_by_constants(converter_data=data)[0]


def own_inputs(function: Any) -> list[Any]:
    """The inputs of a ``ConcreteFunction`` without what it captured, which comes after them."""
    return list(function.inputs[: len(function.inputs) - len(function.captured_inputs)])
