"""The rules of :mod:`converters.lowering` for layers that are taken apart into many kernels, and a few odd ones.

The signature is that of :mod:`converters.layer_kernels`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from converters.kernel_builder import TAKE_NORMALIZATION, KernelBuilder, Shape
from converters.layer_kernels import dense_kernel, rows_of

KERNELS_OF_A_CELL = 16


def upsampling(builder: KernelBuilder, layer: Any, inputs: Sequence[int], shape: Shape) -> int:
    """Nearest neighbours are repeated axis by axis, each a reshape and a tile."""
    if getattr(layer, "interpolation", "nearest") != "nearest":
        return builder.emit("resize", inputs, shape)
    tensor = inputs[0]
    size = builder.shapes[tensor]
    for axis in range(len(shape) - 1):
        taller = (*size[:axis], shape[axis], *size[axis + 1 :])
        tensor = builder.emit("tile", [builder.emit("reshape", [tensor], size)], taller)
        size = taller
    return builder.emit("reshape", [tensor], shape)


def average(builder: KernelBuilder, layer: Any, inputs: Sequence[int], shape: Shape) -> int:  # noqa: ARG001
    total = inputs[0]
    for other in inputs[1:]:
        total = builder.emit("add", [total, other], shape)
    return builder.emit("mul", [total], shape, constants=1)


def scaled_sum(builder: KernelBuilder, layer: Any, inputs: Sequence[int], shape: Shape) -> int:  # noqa: ARG001
    """The residual of Keras's InceptionResNetV2: the first plus a multiple of the second."""
    second = inputs[1]
    if not builder.takes(second, TAKE_NORMALIZATION):
        second = builder.emit("mul", [second], shape, constants=1)
    return builder.emit("add", [inputs[0], second], shape)


def prelu(builder: KernelBuilder, layer: Any, inputs: Sequence[int], shape: Shape) -> int:
    return builder.emit("prelu", inputs, shape, constants=math.prod(layer.alpha.shape))


def embedding(builder: KernelBuilder, layer: Any, inputs: Sequence[int], shape: Shape) -> int:
    return builder.emit("gather", inputs, shape, constants=math.prod(layer.embeddings.shape))


def layer_normalization(builder: KernelBuilder, layer: Any, inputs: Sequence[int], shape: Shape) -> int:  # noqa: ARG001
    """Mean, variance, and the normalization proper in twelve steps; the mean's negation runs on floats."""
    tensor, last = inputs[0], shape[-1] if shape else 1
    line = (*shape[:-1], 1)
    mean = builder.emit("mean", [tensor], line)
    negative = builder.emit_float([mean], line)
    squares = builder.emit("squared_difference", [tensor, mean], shape)
    variance = builder.emit("add", [builder.emit("mean", [squares], line)], line, constants=1)
    factor = builder.emit("mul", [builder.emit("rsqrt", [variance], line)], shape, constants=last)
    scaled = builder.emit("mul", [tensor, factor], shape)
    moved = builder.emit("add", [builder.emit("mul", [negative, factor], shape)], shape, constants=last)
    return builder.emit("add", [scaled, moved], shape)


def attention(builder: KernelBuilder, layer: Any, inputs: Sequence[int], shape: Shape) -> int:
    """Three projections into heads, scores, their softmax, the weighted values and the projection back."""
    # With grouped queries the names are others; keys and values of a group are repeated for each of its queries.
    heads = getattr(layer, "num_heads", None) or layer.num_query_heads
    query_size = getattr(layer, "key_dim", None) or layer.head_dim
    value_size = getattr(layer, "value_dim", None) or query_size
    query, value = inputs[0], inputs[1] if len(inputs) > 1 else inputs[0]
    key = inputs[2] if len(inputs) > 2 else value
    there, here = rows_of(builder.shapes[value]), rows_of(builder.shapes[query])

    def projected(tensor: int, rows: int, size: int) -> int:
        depth = builder.shapes[tensor][-1]
        flat = dense_kernel(builder, tensor, (rows, heads * size), depth, heads * size)
        split = builder.emit("reshape", [flat], (rows, heads, size))
        return builder.emit("transpose", [split], (heads, rows, size))

    queries, keys = projected(query, here, query_size), projected(key, there, query_size)
    scores = builder.emit("batch_matmul", [queries, keys], (heads, here, there))
    scores = builder.emit("mul", [scores], (heads, here, there), constants=1)
    scores = builder.emit("softmax", [scores], (heads, here, there))
    values = builder.emit("batch_matmul", [scores, projected(value, there, value_size)], (heads, here, value_size))
    joined = builder.emit("transpose", [values], (here, heads, value_size))
    joined = builder.emit("reshape", [joined], (here, heads * value_size))
    return dense_kernel(builder, joined, shape, heads * value_size, shape[-1])


def recurrent(builder: KernelBuilder, layer: Any, inputs: Sequence[int], shape: Shape) -> int:
    """Unrolled: the cell once for each step, with weights of its own in the runtime."""
    layers = (layer.forward_layer, layer.backward_layer) if hasattr(layer, "forward_layer") else (layer,)
    if any(type(each).__name__ not in ("SimpleRNN", "GRU", "LSTM") for each in layers):
        return unrolled(builder, layer, inputs, shape)
    outputs = []
    for cell in (each.cell for each in layers):
        depth, gates = cell.kernel.shape
        units = cell.recurrent_kernel.shape[0]
        state = builder.emit("reshape", inputs[:1], (depth,))
        for _ in range(builder.shapes[inputs[0]][0]):
            new = dense_kernel(builder, builder.emit("slice", inputs[:1], (depth,)), (gates,), depth, gates)
            old = dense_kernel(builder, state, (gates,), units, gates)
            total = builder.emit("add", [new, builder.emit("reshape", [old], (gates,))], (gates,))
            parts = [builder.emit("split", [total], (units,)) for _ in range(gates // units)]
            opened = [builder.emit("sigmoid", [part], (units,)) for part in parts]
            state = builder.emit("tanh", [builder.emit("mul", opened[:2], (units,))], (units,))
            for gate in opened[2:]:
                state = builder.emit("add", [state, builder.emit("mul", [state, gate], (units,))], (units,))
        outputs.append(state)
    return builder.emit("concat", outputs, shape)


def unrolled(builder: KernelBuilder, layer: Any, inputs: Sequence[int], shape: Shape) -> int:
    """What does something for each step: a filter of all weights, and as many kernels as a cell of LSTM has."""
    steps, *rest = builder.shapes[inputs[0]]
    parameters = sum(math.prod(weight.shape) for weight in layer.weights)
    made = inputs[0]
    for _ in range(steps):
        made = dense_kernel(builder, made, (*rest[:-1], shape[-1]), -(-parameters // shape[-1]), shape[-1])
        for _ in range(KERNELS_OF_A_CELL):
            made = builder.emit("mul", [made], (*rest[:-1], shape[-1]))
    return builder.emit("concat", [made], shape)
