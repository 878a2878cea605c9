"""What the runtime ``tflite-runtime`` 2.14 allocates for a head.

It runs int8 kernels with TensorFlow Lite's own code. Weights stay in the file. The arena holds the activations and, for
a filter whose window moves, all its windows unrolled (im2col). While a filter runs, twice the size of its weights is
allocated (room to unpack weights of 4 bits, whether they are that or not), and the matrix library ruy copies both
factors of a product into a buffer that grows to the largest product and stays.

Kernels on floats it runs through an XNNPACK of its age, which copies weights and keeps tables as litert's does. It
plans its workspace worse: nothing is ever placed before what is there already. float16 weights are made float32 first,
and these stay. Kernels of which only the weights are int8 are TensorFlow Lite's own again; they round their inputs.

The sizes follow the sources of TensorFlow Lite and ruy and were checked against traced allocations.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from converters.activations import Activations
from converters.arena import align, drifting_bytes
from converters.kernels import HeadKernels, Kernel
from converters.peak_litert import CHANNEL_TILE, packed_bytes, table_bytes
from converters.peak_parts import FLOAT_BYTES, Parts, float_bytes, is_quantized, round_up, unpacked_bytes
from converters.precision import PRECISIONS
from edge_sdk.manifest import Precision

# ruy pads channels and rows to a tile, depth to groups of 4, and adds some bytes to each packed factor.
TILE, DEPTH_TILE, FACTOR_EXTRA_BYTES, PRODUCT_EXTRA_BYTES = 16, 4, 1024, 576
SUM_BYTES = 4

# What XNNPACK of that age does not run. Of what nothing is known the same is assumed.
_NOT_DELEGATED = frozenset(
    ("float", "gelu", "rsqrt", "gather", "tile", "reduce_max", "sum", "batch_matmul", "log_softmax", "unroll", "pack")
)


def tflite_runtime_parts(head: HeadKernels, precision: Precision) -> Parts:
    """What this runtime allocates for ``head``."""
    delegated = [kernel for kernel in head.kernels if _is_delegated(kernel, precision)]
    weights = _products_bytes([kernel for kernel in head.kernels if is_quantized(kernel, precision)], precision)
    weights += sum(packed_bytes(kernel, precision, float_filter_tile=CHANNEL_TILE) for kernel in delegated)
    weights += sum(unpacked_bytes(kernel, precision) for kernel in head.kernels)
    # Whatever these do with them.
    weights += sum(float_bytes(kernel) for kernel in head.kernels if kernel.kind == "float" and kernel.weights)
    return Parts(
        weights=weights,
        tables=sum(table_bytes(kernel) for kernel in delegated),
        activations=_ACTIVATIONS[precision].bytes_of(head),
    )


def _is_delegated(kernel: Kernel, precision: Precision) -> bool:
    return precision != "int8" and kernel.kind not in _NOT_DELEGATED and not is_quantized(kernel, precision)


def _scratch_bytes(precision: Precision, kernel: Kernel, head: HeadKernels) -> int:
    """Unrolled windows (``tensorflow/lite/kernels/conv.cc``), the int32 sums of a transposed filter; a rounded input
    and its products.
    """
    weights, window = kernel.weights, kernel.window
    if weights is None or not is_quantized(kernel, precision):
        return 0
    scratch = 0
    if precision == "int8-weights":
        scratch += head.sizes_bytes[kernel.inputs[0]] // FLOAT_BYTES
        if kernel.kind != "depthwise":
            scratch += SUM_BYTES * kernel.rows * weights.channels
    if window is not None and kernel.kind == "conv" and window.moves:
        scratch += kernel.rows * weights.taps * weights.depth
    if window is not None and kernel.kind == "transpose_conv":
        height, width = kernel.output_size
        scratch += SUM_BYTES * weights.channels * (kernel.rows * weights.taps + height * width)
    return scratch


def _products_bytes(kernels: Sequence[Kernel], precision: Precision) -> int:
    """The peak of ruy's buffer and what is allocated beside it.

    What does not fit into the buffer is allocated beside it; after the product the buffer is replaced by one as large
    as both (``ruy/allocator.cc``), whose pages count as they are written. Once the largest product has been seen,
    nothing grows any more.
    """
    buffer = written = peak = largest = 0
    for kernel in kernels:
        weights = kernel.weights
        assert weights is not None
        used = beside = 0
        if kernel.kind != "depthwise" and weights.groups == 1:
            for size in _factor_sizes(kernel):
                if used + size <= buffer:
                    used += size
                else:
                    beside += size
        written = max(written, used)
        largest = max(largest, used + beside)
        peak = max(peak, _room_bytes(kernel, precision) + written + beside)
        if beside:
            buffer, written = buffer + beside, 0
    return max(peak, largest + max((_room_bytes(kernel, precision) for kernel in kernels), default=0))


def _room_bytes(kernel: Kernel, precision: Precision) -> int:
    """For weights of 4 bits."""
    if kernel.weights is None or kernel.kind == "dense" or precision != "int8":
        return 0
    return 2 * kernel.weights.count


def _factor_sizes(kernel: Kernel) -> tuple[int, ...]:
    """What ruy allocates for one product: both factors, the sums of their rows or columns, and a little."""
    assert kernel.weights is not None
    depth = round_up(kernel.weights.depth * kernel.weights.taps, DEPTH_TILE)
    channels, rows = round_up(kernel.weights.channels, TILE), round_up(kernel.rows, TILE)
    return tuple(
        align(size)
        for size in (
            channels * depth + FACTOR_EXTRA_BYTES,
            channels * SUM_BYTES,
            rows * depth + FACTOR_EXTRA_BYTES,
            rows * SUM_BYTES,
            PRODUCT_EXTRA_BYTES,
        )
    )


def _activations(precision: Precision) -> Activations:
    return Activations(
        delegated=lambda kernel: _is_delegated(kernel, precision),
        workspace_bytes=drifting_bytes,
        scratch_bytes=functools.partial(_scratch_bytes, precision),
        in_place=precision != "int8",
    )


_ACTIVATIONS = {precision: _activations(precision) for precision in PRECISIONS}
