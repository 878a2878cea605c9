"""What tflite-runtime, the older of the two TFLite runtimes, has no kernel of, and how a head does without.

It ended with TensorFlow 2.14, and devices with 32-bit ARM have no other. Read off heads of all operations that Keras
has and TensorFlow Lite converts.
"""

from __future__ import annotations

from typing import Any

INT8_LACKS = ("DIV", "LOG", "SQRT")
"""Operations without an int8 kernel. They run on floats, between a kernel that dequantizes and one that quantizes.

The newer runtime has int8 kernels of them, of which the first refuses to divide by what is rounded to zero.
"""


def float_filters(model: Any) -> None:
    """Have a TensorFlow Lite model (:mod:`converters.lite_model`) turn int8 filters of transposed convolutions into
    floats before it uses them: of int8 filters on floats there is no such kernel.
    """
    from tensorflow.lite.python import schema_py_generated as schema

    kinds = schema.BuiltinOperator
    code = None
    for graph in model.subgraphs:
        for operator in tuple(graph.operators):
            if model.operatorCodes[operator.opcodeIndex].builtinCode != kinds.TRANSPOSE_CONV:
                continue
            shape, filters, features, *rest = operator.inputs
            tensor = graph.tensors[filters]
            if tensor.type != schema.TensorType.INT8 or graph.tensors[features].type != schema.TensorType.FLOAT32:
                continue
            if code is None:
                code = _added(model.operatorCodes, schema.OperatorCodeT(**_dequantize(kinds.DEQUANTIZE)))
            floats = schema.TensorT(
                name=tensor.name + b"_floats", shape=tensor.shape, type=schema.TensorType.FLOAT32, buffer=0
            )
            place = _added(graph.tensors, floats)
            operator.inputs = [shape, place, features, *rest]
            made = schema.OperatorT(opcodeIndex=code, inputs=[filters], outputs=[place])
            graph.operators.insert(graph.operators.index(operator), made)


def _dequantize(kind: int) -> dict[str, int]:
    # Since its version 5 it takes a scale for each channel.
    return {"builtinCode": kind, "deprecatedBuiltinCode": kind, "version": 5}


def _added(items: list[Any], item: Any) -> int:
    items.append(item)
    return len(items) - 1
