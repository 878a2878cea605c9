"""The rules of :mod:`converters.lowering` for filters, pools and activations.

Each takes the builder, the Keras layer, the tensors that it is called on and the shape of its output, and returns the
tensor that holds the output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from converters.kernel_builder import TAKE_ACTIVATION, KernelBuilder, Shape
from converters.kernels import Weights, Window

# Activations with one int8 kernel, by the names of Keras's functions and operations, in lower case.
_ONE_KERNEL = frozenset(
    ("relu", "relu6", "sigmoid", "tanh", "softmax", "log_softmax", "gelu", "leaky_relu", "hard_silu", "hard_swish")
)
_OPERATIONS = {
    "Relu": "relu",
    "Relu6": "relu6",
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
    "Softmax": "softmax",
    "LogSoftmax": "log_softmax",
    "Gelu": "gelu",
    "LeakyRelu": "leaky_relu",
    "LeakyReLU": "leaky_relu",
    "HardSilu": "hard_silu",
    "Silu": "silu",
    "HardSigmoid": "hard_sigmoid",
    "Elu": "elu",
    "ELU": "elu",
}


def activation_of(kind: str, layer: Any) -> str | None:
    """The activation that an operation is, by the name of Keras's function; ``None`` where it is none."""
    if kind == "Activation":
        return str(getattr(layer.activation, "__name__", type(layer.activation).__name__))
    if kind == "ReLU":
        plain = not layer.negative_slope and not layer.threshold and layer.max_value in (None, 6, 6.0)
        return "relu" if plain else "clipped_relu"
    return _OPERATIONS.get(kind)


def activation(builder: KernelBuilder, name: str, tensor: int, shape: Shape) -> int:
    """An activation by its Keras name."""
    if name == "linear":
        return tensor
    if name in ("relu", "relu6") and builder.takes(tensor, TAKE_ACTIVATION):
        return builder.close(tensor)
    if name in _ONE_KERNEL:
        return builder.emit(name, [tensor], shape)
    if name in ("silu", "swish"):
        return builder.emit("mul", [tensor, builder.emit("sigmoid", [tensor], shape)], shape)
    if name == "hard_sigmoid":
        return builder.emit("mul", [builder.emit("add", [tensor], shape, constants=1)], shape, constants=1)
    return builder.emit_float([tensor], shape)


def unknown(builder: KernelBuilder, parameters: int, inputs: Sequence[int], shape: Shape) -> int:
    """An operation that nothing is known of; its parameters are taken for the weights of one filter."""
    if not parameters:
        return builder.emit_float(inputs, shape)
    channels = shape[-1] if shape else 1
    weights = Weights(channels=channels, depth=-(-parameters // channels))
    return builder.emit_float(inputs, shape, weights=weights, rows=rows_of(shape))


def convolution(builder: KernelBuilder, layer: Any, inputs: Sequence[int], shape: Shape) -> int:
    *size, depth, channels = layer.kernel.shape
    weights = Weights(channels=channels, depth=depth, taps=math.prod(size), groups=layer.groups)
    return _filter(builder, "conv", layer, weights, inputs[0], shape)


def depthwise(builder: KernelBuilder, layer: Any, inputs: Sequence[int], shape: Shape) -> int:
    taps = math.prod(layer.kernel_size)
    weights = Weights(channels=shape[-1], depth=1, taps=taps, groups=shape[-1])
    return _filter(builder, "depthwise", layer, weights, inputs[0], shape)


def separable(builder: KernelBuilder, layer: Any, inputs: Sequence[int], shape: Shape) -> int:
    *size, depth, multiplier = layer.depthwise_kernel.shape
    channels = depth * multiplier
    weights = Weights(channels=channels, depth=1, taps=math.prod(size), groups=channels)
    wide = _filter(builder, "depthwise", layer, weights, inputs[0], (*shape[:-1], channels), activate=False)
    weights = Weights(channels=shape[-1], depth=channels)
    # One-dimensional ones run between the reshapes of the first.
    made = builder.emit(
        "conv",
        [wide],
        shape,
        weights=weights,
        window=Window(size=(1, 1)),
        output_size=_plane(shape[:-1]),
        rows=rows_of(shape),
    )
    return _activated(builder, layer, made, shape)


def transposed(builder: KernelBuilder, layer: Any, inputs: Sequence[int], shape: Shape) -> int:
    *size, channels, depth = layer.kernel.shape
    made = builder.emit(
        "transpose_conv",
        inputs,
        shape,
        weights=Weights(channels=channels, depth=depth, taps=math.prod(size)),
        window=Window(size=_plane(size), stride=_plane(layer.strides)),
        output_size=_plane(shape[:-1]),
        rows=rows_of(builder.shapes[inputs[0]]),
    )
    return _activated(builder, layer, builder.close(made), shape)


def volume(builder: KernelBuilder, layer: Any, inputs: Sequence[int], shape: Shape) -> int:
    """Filters in three dimensions have no int8 kernel: on floats, all windows are unrolled, then packed to multiply."""
    *_, depth, _ = layer.kernel.shape
    unrolled = (*shape[:-1], math.prod(layer.kernel_size) * depth)
    windows = builder.emit("unroll", [builder.real(inputs[0])], unrolled, floats=True)
    packed = builder.emit("pack", [windows], unrolled, floats=True)
    made = builder.emit("float", [packed], shape, floats=True, constants=math.prod(layer.kernel.shape))
    return _activated(builder, layer, builder.rounded(made), shape)


def dense(builder: KernelBuilder, layer: Any, inputs: Sequence[int], shape: Shape) -> int:
    """``Dense`` and ``EinsumDense``."""
    channels = math.prod(layer.bias.shape) if layer.bias is not None else shape[-1]
    made = dense_kernel(builder, inputs[0], shape, math.prod(layer.kernel.shape) // channels, channels)
    return _activated(builder, layer, made, shape)


def pool(builder: KernelBuilder, layer: Any, inputs: Sequence[int], shape: Shape) -> int:
    kind = "max_pool" if type(layer).__name__.startswith("Max") else "average_pool"
    window = Window(size=_plane(layer.pool_size), stride=_plane(layer.strides))
    return _in_plane(
        builder,
        inputs[0],
        shape,
        lambda tensor, made: builder.emit(kind, [tensor], made, window=window, output_size=_plane(shape[:-1])),
    )


def padding(builder: KernelBuilder, layer: Any, inputs: Sequence[int], shape: Shape) -> int:
    amounts = [layer.padding] if isinstance(layer.padding[0], int) else layer.padding
    return builder.pad(inputs[0], shape, tuple(before for before, _ in amounts))


def scale_and_shift(builder: KernelBuilder, layer: Any, inputs: Sequence[int], shape: Shape) -> int:  # noqa: ARG001
    """A normalization with constant statistics that no filter takes up."""
    scaled = builder.emit("mul", inputs[:1], shape, constants=shape[-1] if shape else 1)
    return builder.emit("add", [scaled], shape, constants=shape[-1] if shape else 1)


def rescaling(builder: KernelBuilder, layer: Any, inputs: Sequence[int], shape: Shape) -> int:
    scalar = not isinstance(layer.scale, (list, tuple)) and not isinstance(layer.offset, (list, tuple))
    if scalar and layer.offset == 0:
        return builder.scale(inputs[0], shape)
    return scale_and_shift(builder, layer, inputs, shape)


def _filter(
    builder: KernelBuilder,
    kind: str,
    layer: Any,
    weights: Weights,
    tensor: int,
    shape: Shape,
    *,
    activate: bool = True,
) -> int:
    tensor = builder.unscaled(tensor)
    size = tuple(
        (taps - 1) * dilation + 1 for taps, dilation in zip(layer.kernel_size, layer.dilation_rate, strict=True)
    )
    if layer.padding == "valid" and len(size) == 2:
        reach = Window(size=(size[0], size[1]), stride=_plane(layer.strides))
        tensor = builder.unpadded(tensor, reach, shape[:2])
    window = Window(size=_plane(layer.kernel_size), stride=_plane(layer.strides))
    made = _in_plane(
        builder,
        tensor,
        shape,
        lambda tensor, made: builder.emit(
            kind,
            [tensor],
            made,
            weights=weights,
            window=window,
            output_size=_plane(shape[:-1]),
            rows=rows_of(shape),
        ),
    )
    return _activated(builder, layer, made, shape) if activate else made


def _in_plane(builder: KernelBuilder, tensor: int, shape: Shape, run: Any) -> int:
    """What works on (height, width) works on one axis between two reshapes."""
    if len(shape) != 2:
        return int(run(tensor, shape))
    row = builder.emit("reshape", [tensor], (1, *builder.shapes[tensor]))
    return builder.emit("reshape", [run(row, (1, *shape))], shape)


def dense_kernel(builder: KernelBuilder, tensor: int, shape: Shape, depth: int, channels: int) -> int:
    weights = Weights(channels=channels, depth=depth)
    return builder.emit("dense", [tensor], shape, weights=weights, rows=max(math.prod(shape) // channels, 1))


def _activated(builder: KernelBuilder, layer: Any, tensor: int, shape: Shape) -> int:
    function = getattr(layer, "activation", None)
    name = "linear" if function is None else str(getattr(function, "__name__", type(function).__name__))
    return activation(builder, name, tensor, shape)


def _plane(sizes: Sequence[int]) -> tuple[int, int]:
    """The last two of ``sizes``; one is a width."""
    return (int(sizes[-2]), int(sizes[-1])) if len(sizes) > 1 else (1, int(sizes[0]))


def rows_of(shape: Shape) -> int:
    return math.prod(shape[:-1])
