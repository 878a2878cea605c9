"""A TensorFlow Lite model as an object: made of a traced function, changed at will, packed into the bytes of a file.

The converter takes the function's frozen graph. By way of a SavedModel, as ``tf.lite.TFLiteConverter`` goes, it makes
the same kernels in the same order, and takes several times as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from converters.keras_backend import frozen_graph, load_tensorflow, own_inputs
from converters.older_runtime import float_filters
from edge_sdk.manifest import Precision
from edge_sdk.runtime import SIGNATURE


def converted(function: Any, inputs: Sequence[str], outputs: Sequence[str], weights: Precision = "float32") -> Any:
    """The TensorFlow ``ConcreteFunction`` as a TensorFlow Lite model with activations of float32.

    ``inputs`` and ``outputs`` are the keys of its signature, in the function's order. ``weights`` is the precision of
    its weights, anything but int8 throughout, which is made of the result (:mod:`converters.int8`). Raises what the
    converter raises.
    """
    tensorflow = load_tensorflow()
    converter = tensorflow.compat.v1.lite.TFLiteConverter(
        frozen_graph(function), own_inputs(function), function.outputs
    )
    converter.exclude_conversion_metadata = True
    if weights != "float32":
        converter.optimizations = [tensorflow.lite.Optimize.DEFAULT]
        # With a scale for each channel tflite-runtime has no kernel of a dense layer.
        converter._experimental_disable_per_channel_quantization_for_dense_layers = True
    if weights == "float16":
        converter.target_spec.supported_types = [tensorflow.float16]
    model = unpacked(converter.convert())
    float_filters(model)
    main = model.subgraphs[0]
    sign(model, dict(zip(inputs, main.inputs, strict=True)), dict(zip(outputs, main.outputs, strict=True)))
    return model


def sign(model: Any, inputs: Mapping[str, int], outputs: Mapping[str, int]) -> None:
    """Give ``model`` its one signature: by key the number of a tensor."""
    from tensorflow.lite.python import schema_py_generated as schema

    def entries(keys: Mapping[str, int]) -> list[Any]:
        return [schema.TensorMapT(name=key, tensorIndex=int(tensor)) for key, tensor in keys.items()]

    model.signatureDefs = [
        schema.SignatureDefT(inputs=entries(inputs), outputs=entries(outputs), signatureKey=SIGNATURE)
    ]


def unpacked(data: bytes) -> Any:
    """The model in the bytes of a file: a ``ModelT`` of TensorFlow Lite's schema."""
    from tensorflow.lite.tools import flatbuffer_utils

    return flatbuffer_utils.convert_bytearray_to_object(data)


def packed(model: Any) -> bytes:
    """The bytes of a file that :func:`unpacked` reads."""
    from tensorflow.lite.tools import flatbuffer_utils

    return bytes(flatbuffer_utils.convert_object_to_bytearray(model))
