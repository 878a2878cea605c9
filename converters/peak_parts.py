"""What a prediction of memory is the sum of, whatever the runtime; and the part that all share, the head's file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from converters.kernels import HeadKernels, Kernel
from edge_sdk.manifest import Precision

PAGE_BYTES = 4096
FLOAT_BYTES = 4
# Of so many kernels is remembered what they take: the heads of a model are made of the same ones.
KNOWN_KERNELS = 16_384

# What the file holds beside its constants: tables of the schema, options of a kernel; name, shape and quantization of a
# tensor. They were fitted to heads of 28 models. The schema's are: a channel's bias, and for what is int8 a float32
# scale and an int64 zero point.
FILE_BYTES, KERNEL_BYTES, TENSOR_BYTES = 2500, 50, 200
BIAS_BYTES, SCALE_BYTES = 4, 12

# TensorFlow Lite leaves weights of fewer numbers as they are, where only weights become int8.
LEAST_QUANTIZED = 1024
# Where only weights become int8: these multiply with them; the filters of transposed convolutions and the tables of
# embeddings are only stored so.
_MULTIPLY_INT8 = frozenset({"conv", "depthwise", "dense"})
_STORE_INT8 = _MULTIPLY_INT8 | {"transpose_conv", "gather"}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the runtime allocates for one head, in bytes.

    ``weights``: its own copies of them, and what it needs to multiply with them. ``tables``: pointers into inputs.
    ``activations``: see :mod:`converters.activations`.
    """

    weights: int
    tables: int
    activations: int


def file_bytes(head: HeadKernels, precision: Precision) -> int:
    """The pages of a head's file. They are mapped, and all are read while it is loaded or run."""
    size = FILE_BYTES + TENSOR_BYTES * len(head.inputs) + sum(_stored_bytes(each, precision) for each in head.kernels)
    return round_up(size, PAGE_BYTES)


@lru_cache(maxsize=KNOWN_KERNELS)
def _stored_bytes(kernel: Kernel, precision: Precision) -> int:
    """What the file holds of a kernel."""
    size = KERNEL_BYTES + TENSOR_BYTES * len(kernel.outputs)
    if kernel.constants:
        size += kernel.constants * _number_bytes(kernel, kernel.constants, precision) + TENSOR_BYTES
    if kernel.weights is not None:
        size += kernel.weights.count * _number_bytes(kernel, kernel.weights.count, precision) + 2 * TENSOR_BYTES
        size += kernel.weights.channels * _channel_bytes(kernel, precision)
    if precision == "float16":
        size += (KERNEL_BYTES + TENSOR_BYTES) * _constants_of(kernel)
    return size


@lru_cache(maxsize=KNOWN_KERNELS)
def is_quantized(kernel: Kernel, precision: Precision) -> bool:
    """Whether a kernel has weights and multiplies with them as int8."""
    if kernel.weights is None or kernel.kind == "float":
        return False
    if precision == "int8-weights":
        return kernel.kind in _MULTIPLY_INT8 and kernel.weights.count >= LEAST_QUANTIZED
    return precision == "int8"


def quantized_channels(head: HeadKernels, precision: Precision) -> int:
    """How many channels have a scale of their own."""
    return sum(
        kernel.weights.channels
        for kernel in head.kernels
        if kernel.weights is not None and _has_scales(kernel, precision)
    )


def _has_scales(kernel: Kernel, precision: Precision) -> bool:
    """Where only weights are int8, those of a dense layer share one scale."""
    return is_quantized(kernel, precision) and not (precision == "int8-weights" and kernel.kind == "dense")


def _channel_bytes(kernel: Kernel, precision: Precision) -> int:
    """What the file holds for a channel beside its weights: a bias, int32 or a float, and scales of both."""
    if precision == "float16":
        return BIAS_BYTES // 2
    if not _has_scales(kernel, precision):
        return BIAS_BYTES
    return BIAS_BYTES + (2 if precision == "int8" else 1) * SCALE_BYTES


def unpacked_constants(head: HeadKernels, precision: Precision) -> int:
    """How many constants of a float16 head a kernel of its own makes float32 again."""
    return sum(map(_constants_of, head.kernels)) if precision == "float16" else 0


def _constants_of(kernel: Kernel) -> int:
    """Weights, biases, and others."""
    return 2 * (kernel.weights is not None) + (kernel.constants > 0)


def unpacked_bytes(kernel: Kernel, precision: Precision) -> int:
    """What those constants of a kernel take as float32 that are made so before they are used."""
    weights = kernel.weights
    if precision == "int8-weights" and kernel.kind == "transpose_conv" and weights is not None:
        return FLOAT_BYTES * weights.count if weights.count >= LEAST_QUANTIZED else 0
    return 0 if precision != "float16" else float_bytes(kernel)


def float_bytes(kernel: Kernel) -> int:
    """What the constants of a kernel take as float32."""
    weights = kernel.weights
    return FLOAT_BYTES * (kernel.constants + (weights.count + weights.channels if weights is not None else 0))


def _number_bytes(kernel: Kernel, count: int, precision: Precision) -> int:
    if precision == "float16":
        return 2
    if precision == "int8":
        return FLOAT_BYTES if kernel.kind == "float" else 1
    small = precision == "int8-weights" and kernel.kind in _STORE_INT8 and count >= LEAST_QUANTIZED
    return 1 if small else FLOAT_BYTES


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
