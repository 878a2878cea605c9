"""Foresees the kernels of a head, operation by operation, without converting.

TensorFlow Lite's converter folds what follows a filter into it (batch normalization, ReLU), drops what does nothing at
inference, and takes composite layers apart; the rules (:mod:`converters.layer_kernels`,
:mod:`converters.composite_kernels`) were read off converted heads. An operation without a rule is taken for one without
an int8 kernel, which runs on floats between a kernel that dequantizes and one that quantizes: that errs towards more
memory. Heads of other precisions have the same kernels, all on floats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from converters import composite_kernels as composite
from converters import layer_kernels as rules
from converters.flatten import FlatModel
from converters.graph import Operation
from converters.kernel_builder import TAKE_ACTIVATION, TAKE_NORMALIZATION, KernelBuilder, Shape
from converters.kernels import Lowered

Rule = Callable[[KernelBuilder, Any, Sequence[int], Shape], int]

# They do nothing at inference, or are folded into what follows.
_NOTHING = frozenset(
    (
        "Dropout",
        "SpatialDropout1D",
        "SpatialDropout2D",
        "SpatialDropout3D",
        "GaussianDropout",
        "GaussianNoise",
        "AlphaDropout",
        "Identity",
        "ActivityRegularization",
        "RandomFlip",
        "RandomRotation",
        "RandomZoom",
        "RandomTranslation",
        "RandomCrop",
        "RandomContrast",
        "RandomBrightness",
        "RandomHeight",
        "RandomWidth",
        "StopGradient",
        "Copy",
        "Masking",
    )
)

# Operations with one int8 kernel from all inputs to the output. A second tensor that is a constant is none of them.
_PLAIN = {
    **dict.fromkeys(("Add",), "add"),
    **dict.fromkeys(("Subtract",), "sub"),
    **dict.fromkeys(("Multiply", "Divide", "TrueDivide"), "mul"),
    **dict.fromkeys(("Concatenate", "Stack"), "concat"),
    **dict.fromkeys(("Reshape", "Flatten", "ExpandDims", "Squeeze", "Ravel"), "reshape"),
    **dict.fromkeys(("Permute", "Transpose", "Moveaxis", "Swapaxes"), "transpose"),
    **dict.fromkeys(("GetItem", "Cropping1D", "Cropping2D", "Cropping3D", "CenterCrop", "Split"), "slice"),
    **dict.fromkeys(("Maximum", "Minimum", "Fmax", "Fmin"), "maximum"),
    **dict.fromkeys(("Mean", "GlobalAveragePooling1D", "GlobalAveragePooling2D", "GlobalAveragePooling3D"), "mean"),
    **dict.fromkeys(("Max", "Min", "Amax", "Amin", "GlobalMaxPooling1D", "GlobalMaxPooling2D"), "reduce_max"),
    **dict.fromkeys(("Sum",), "sum"),
    **dict.fromkeys(("Matmul", "Dot"), "batch_matmul"),
    **dict.fromkeys(("Repeat", "RepeatVector", "Tile", "BroadcastTo"), "tile"),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), "depth_to_space"),
    **dict.fromkeys(("Resizing",), "resize"),
}

_RULES: dict[str, Rule] = {
    "Conv1D": rules.convolution,
    "Conv2D": rules.convolution,
    "DepthwiseConv1D": rules.depthwise,
    "DepthwiseConv2D": rules.depthwise,
    "SeparableConv1D": rules.separable,
    "SeparableConv2D": rules.separable,
    "Conv2DTranspose": rules.transposed,
    "Conv3D": rules.volume,
    "Dense": rules.dense,
    "EinsumDense": rules.dense,
    "AveragePooling1D": rules.pool,
    "AveragePooling2D": rules.pool,
    "MaxPooling1D": rules.pool,
    "MaxPooling2D": rules.pool,
    "ZeroPadding1D": rules.padding,
    "ZeroPadding2D": rules.padding,
    "UpSampling1D": composite.upsampling,
    "UpSampling2D": composite.upsampling,
    "Rescaling": rules.rescaling,
    "Normalization": rules.scale_and_shift,
    "LayerNormalization": composite.layer_normalization,
    "GroupNormalization": composite.layer_normalization,
    "UnitNormalization": composite.layer_normalization,
    "RMSNormalization": composite.layer_normalization,
    "MultiHeadAttention": composite.attention,
    "SimpleRNN": composite.recurrent,
    "GRU": composite.recurrent,
    "LSTM": composite.recurrent,
    "Bidirectional": composite.recurrent,
    "RNN": composite.unrolled,
    "ConvLSTM1D": composite.unrolled,
    "ConvLSTM2D": composite.unrolled,
    "TimeDistributed": composite.unrolled,
    "Embedding": composite.embedding,
    "Average": composite.average,
    "CustomScaleLayer": composite.scaled_sum,
    "PReLU": composite.prelu,
}


def lower(flat: FlatModel, *, quantized: bool = True) -> Lowered:
    """The kernels of the whole model, from which those of every head follow: of int8 heads, or of all others."""
    return _Lowering(flat, quantized).run()


@dataclass
class _Lowering:
    flat: FlatModel
    quantized: bool

    def run(self) -> Lowered:
        graph = self.flat.graph
        builder = KernelBuilder(quantized=self.quantized)
        self._takers = Counter(position for operation in graph.operations for position in operation.inputs)
        self._takers.update(graph.outputs)
        places: dict[int, int] = {}
        for position in graph.inputs:
            places[position] = builder.tensor(graph.tensors[position].shape)
        for k, (operation, step) in enumerate(zip(graph.operations, self.flat.steps, strict=True), start=1):
            builder.k = k
            inputs = [places[position] for position in operation.inputs]
            made = self._operation(builder, operation, step.layer, inputs)
            places[operation.outputs[0]] = made
            for position in operation.outputs[1:]:
                places[position] = builder.tensor(graph.tensors[position].shape)
            for position in operation.outputs:
                info, place = graph.tensors[position], places[position]
                if not info.is_float:
                    builder.sizes_bytes[place] = info.int8_bytes
                if self._takers[position] != 1:
                    builder.close(place)
        for position in graph.inputs:
            if not graph.tensors[position].is_float:
                builder.sizes_bytes[places[position]] = graph.tensors[position].int8_bytes
        return Lowered(
            graph=graph,
            sizes_bytes=tuple(builder.sizes_bytes),
            kernels=tuple(builder.kernels),
            places=tuple(places.get(position, 0) for position in range(len(graph.tensors))),
        )

    def _operation(self, builder: KernelBuilder, operation: Operation, layer: Any, inputs: list[int]) -> int:
        shape = self.flat.graph.tensors[operation.outputs[0]].shape
        kind = operation.kind
        if not inputs:  # a constant that the model makes
            return builder.tensor(shape)
        # A user's class may bear the name of one that is known.
        if not type(layer).__module__.startswith("keras."):
            return rules.unknown(builder, operation.parameters, inputs, shape)
        if kind in _NOTHING or (kind == "LayerScale" and builder.takes(inputs[0], TAKE_NORMALIZATION)):
            return inputs[0]
        if kind == "BatchNormalization":
            if builder.takes(inputs[0], TAKE_NORMALIZATION):
                return inputs[0]
            return rules.scale_and_shift(builder, layer, inputs, shape)
        if (activation := rules.activation_of(kind, layer)) is not None:
            return rules.activation(builder, activation, inputs[0], shape)
        if kind in ("Divide", "TrueDivide") and len(inputs) > 1:
            return builder.emit_float(inputs, shape)
        if kind in _PLAIN:
            return self._plain(builder, _PLAIN[kind], inputs, shape)
        if (rule := _RULES.get(kind)) is not None and getattr(layer, "data_format", None) != "channels_first":
            return rule(builder, layer, inputs, shape)
        return rules.unknown(builder, operation.parameters, inputs, shape)

    @staticmethod
    def _plain(builder: KernelBuilder, kind: str, inputs: list[int], shape: Shape) -> int:
        # A constant is summed or multiplied into the filter before it.
        if kind in ("add", "sub", "mul") and len(inputs) == 1 and builder.takes(inputs[0], TAKE_NORMALIZATION):
            return inputs[0]
        if kind in TAKE_ACTIVATION and len(inputs) > 2:  # a sum of many is a chain of sums of two
            made = inputs[0]
            for other in inputs[1:]:
                made = builder.emit(kind, [made, other], shape)
            return made
        constants = shape[-1] if shape and kind in TAKE_ACTIVATION and len(inputs) == 1 else 0
        return builder.emit(kind, inputs, shape, constants=constants)
