"""A model that computes in another floating-point type, as the same model in float32.

A head is made of a float32 model: TensorFlow Lite quantizes no other, and runs float16 in float32 anyway. The weights
keep their values, so where a policy was mixed (float32 weights, computed with in float16) the copy is the exact one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from converters.keras_backend import load_keras
from edge_sdk.errors import UnsupportedModelError


def in_float32(model: Any) -> Any:
    """``model`` itself where all of its layers compute in float32, else a copy that does.

    It has a graph: a Functional or Sequential model. Inputs keep their dtypes. Raises
    :class:`UnsupportedModelError` for a model whose weights are not floating-point numbers any more.
    """
    keras = load_keras()
    for layer in model._flatten_layers(include_self=False):
        if (mode := getattr(layer, "quantization_mode", None)) is not None:
            raise UnsupportedModelError(
                f"model {model.name!r}: its layer {layer.name!r} was quantized by Keras ({mode}); bring the model from "
                "before that, since heads are quantized here, with calibration data"
            )
    if not any(_computes_otherwise(layer) for layer in model._flatten_layers(include_self=False)):
        return model

    def copied(operation: Any) -> Any:
        if not isinstance(operation, keras.Layer):
            return operation
        config = _rewritten(keras.saving.serialize_keras_object(operation)["config"])
        return type(operation).from_config(config)

    copy = keras.models.clone_model(model, clone_function=copied, recursive=True)
    for ours, theirs in zip(copy.weights, model.weights, strict=True):
        ours.assign(np.asarray(theirs).astype(ours.dtype))
    return copy


def _computes_otherwise(layer: Any) -> bool:
    return str(layer.compute_dtype) in ("float16", "bfloat16", "float64")


def _rewritten(config: Any) -> Any:
    """A configuration with float32 for every floating-point dtype policy in it, at any depth."""
    if isinstance(config, dict):
        if config.get("class_name") == "DTypePolicy":
            return "float32"
        return {key: "float32" if _is_policy(key, value) else _rewritten(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return type(config)(_rewritten(value) for value in config)
    return config


def _is_policy(key: str, value: Any) -> bool:
    names = ("float16", "bfloat16", "float64", "mixed_float16", "mixed_bfloat16")
    return key == "dtype" and isinstance(value, str) and value in names
