"""What the runtime ``litert`` (ai-edge-litert) allocates for an int8 head.

It runs int8 kernels through XNNPACK, which copies all weights into a layout of its own, keeps a table of pointers into
the input of each filter and pool whose window moves, and plans one workspace for all activations. The sizes follow
XNNPACK's sources and were checked against traced allocations, where they are exact to the byte. They are those of
x86-64 with AVX-512: other processors pad weights to smaller tiles, so they need no more.
"""

from __future__ import annotations

from converters.arena import activation_bytes, align
from converters.kernels import HeadKernels, Kernel
from converters.peak_parts import Parts, round_up

POINTER_BYTES = 8

# Output and input channels are padded to these, and the output positions in a table of pointers (the tile of the
# kernel qs8_qc8w_igemm_7x16c8__avx512vnni); channels of a depthwise filter to its own.
CHANNEL_TILE, DEPTH_TILE, ROW_TILE, DEPTHWISE_TILE = 16, 8, 7, 32
# Depthwise filters with more taps have no kernel: they run as a filter with as many groups as channels.
MAX_DEPTHWISE_TAPS = 25
# A bias and a scale stand beside the weights of each channel.
CHANNEL_EXTRA_BYTES = 8


def litert_parts(head: HeadKernels) -> Parts:
    """What this runtime allocates for ``head``."""
    return Parts(
        weights=sum(_packed_bytes(kernel) for kernel in head.kernels),
        tables=sum(_table_bytes(kernel) for kernel in head.kernels),
        activations=activation_bytes(head),
    )


def _packed_bytes(kernel: Kernel) -> int:
    """The copy of a kernel's weights (XNNPACK, ``src/reference/packing.cc``)."""
    weights = kernel.weights
    if weights is None:
        return 0
    if _is_depthwise(kernel):
        return round_up(weights.channels, DEPTHWISE_TILE) * (weights.taps + CHANNEL_EXTRA_BYTES)
    channel_bytes = weights.taps * round_up(weights.depth, DEPTH_TILE) + CHANNEL_EXTRA_BYTES
    if kernel.kind == "transpose_conv" and kernel.window is not None:
        # One filter for each position within the stride, each with biases and scales.
        channel_bytes += CHANNEL_EXTRA_BYTES * (kernel.window.stride[0] * kernel.window.stride[1] - 1)
    return weights.groups * round_up(-(-weights.channels // weights.groups), CHANNEL_TILE) * channel_bytes


def _table_bytes(kernel: Kernel) -> int:
    """Pointers to the input of each tap at each output position (XNNPACK, ``src/indirection.c``).

    Depthwise filters and pools share those of neighbouring positions; averages do without.
    """
    window = kernel.window
    if window is None or not window.moves or kernel.kind == "average_pool":
        return 0
    height, width = kernel.output_size
    if kernel.kind == "transpose_conv":
        return POINTER_BYTES * window.taps * height * width
    if kernel.kind == "max_pool" or _is_depthwise(kernel):
        column = min(window.stride[1], window.size[1]) * window.size[0]
        return align(POINTER_BYTES * height * (window.taps + (width - 1) * column))
    return POINTER_BYTES * window.taps * round_up(height * width, ROW_TILE)


def _is_depthwise(kernel: Kernel) -> bool:
    weights = kernel.weights
    return kernel.kind == "depthwise" and weights is not None and weights.taps <= MAX_DEPTHWISE_TAPS
