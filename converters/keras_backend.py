"""Keras on TensorFlow: the one place that imports them, and what of them is not public but needed."""

from __future__ import annotations

import os
from typing import Any

from edge_sdk.errors import ConfigError

GRADIENT_ATTRIBUTE = "_gradient_op_type"


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


def freeze(function: Any) -> Any:
    """A TensorFlow ``ConcreteFunction`` without variables: the same function with their values as constants.

    Its flat outputs are in the order of those of ``function``.
    """
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    # Swish, for one, has a gradient of its own, and a function that names one cannot be saved without it.
    for operation in function.graph.get_operations():
        if GRADIENT_ATTRIBUTE in operation.node_def.attr:
            operation._clear_attr(GRADIENT_ATTRIBUTE)

    return convert_variables_to_constants_v2(function)


def frozen_graph(function: Any) -> Any:
    """The ``GraphDef`` of a TensorFlow ``ConcreteFunction``, inlined and with constants in place of variables.

    It is what :func:`freeze` makes a function of again, which takes ten times as long.
    """
    from tensorflow.python.framework import convert_to_constants

    data = convert_to_constants._FunctionConverterDataInEager(
        func=function, lower_control_flow=False, aggressive_inlining=False
    )
    return convert_to_constants._replace_variables_by_constants(converter_data=data)[0]
