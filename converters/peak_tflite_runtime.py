"""What the runtime ``tflite-runtime`` 2.14 allocates for an int8 head.

It runs TensorFlow Lite's own kernels. Weights stay in the file. The arena holds the activations and, for a filter whose
window moves, all its windows unrolled (im2col). While a filter runs, twice the size of its weights is allocated (room
to unpack weights of 4 bits, whether they are that or not), and the matrix library ruy copies both factors of a product
into a buffer that grows to the largest product and stays.

The sizes follow the sources of TensorFlow Lite and ruy and were checked against traced allocations.
"""

from __future__ import annotations

from collections.abc import Sequence

from converters.arena import activation_bytes, align
from converters.kernels import HeadKernels, Kernel
from converters.peak_parts import Parts, round_up

# ruy pads channels and rows to a tile, depth to groups of 4, and adds some bytes to each packed factor.
TILE, DEPTH_TILE, FACTOR_EXTRA_BYTES, PRODUCT_EXTRA_BYTES = 16, 4, 1024, 576
SUM_BYTES = 4


def tflite_runtime_parts(head: HeadKernels) -> Parts:
    """What this runtime allocates for ``head``."""
    return Parts(
        weights=_products_bytes(head.kernels),
        tables=0,
        activations=activation_bytes(head, [_scratch_bytes(kernel) for kernel in head.kernels]),
    )


def _scratch_bytes(kernel: Kernel) -> int:
    """Unrolled windows (``tensorflow/lite/kernels/conv.cc``), the int32 sums of a transposed filter."""
    weights, window = kernel.weights, kernel.window
    if weights is None or window is None:
        return 0
    if kernel.kind == "conv" and window.moves:
        return kernel.rows * weights.taps * weights.depth
    if kernel.kind == "transpose_conv":
        height, width = kernel.output_size
        return SUM_BYTES * weights.channels * (kernel.rows * weights.taps + height * width)
    return 0


def _products_bytes(kernels: Sequence[Kernel]) -> int:
    """The peak of ruy's buffer and what is allocated beside it.

    What does not fit into the buffer is allocated beside it; after the product the buffer is replaced by one as large
    as both (``ruy/allocator.cc``), whose pages count as they are written. Once the largest product has been seen,
    nothing grows any more.
    """
    buffer = written = peak = largest = 0
    for kernel in kernels:
        weights = kernel.weights
        if weights is None:
            continue
        used = beside = 0
        if kernel.kind != "depthwise" and weights.groups == 1:
            for size in _factor_sizes(kernel):
                if used + size <= buffer:
                    used += size
                else:
                    beside += size
        written = max(written, used)
        largest = max(largest, used + beside)
        peak = max(peak, _unpacked_bytes(kernel) + written + beside)
        if beside:
            buffer, written = buffer + beside, 0
    return max(peak, largest + max((_unpacked_bytes(kernel) for kernel in kernels), default=0))


def _unpacked_bytes(kernel: Kernel) -> int:
    if kernel.weights is None or kernel.kind == "dense":
        return 0
    return 2 * kernel.weights.size_bytes


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
