"""What the runtime ``litert`` (ai-edge-litert) allocates for a head.

It runs nearly all kernels through XNNPACK, which copies all weights into a layout of its own, keeps a table of pointers
into the input of each filter and pool whose window moves, and plans one workspace for all activations. The sizes follow
XNNPACK's sources and were checked against traced allocations, where they are exact to the byte. They are those of
x86-64 with AVX-512: other processors pad weights to smaller tiles, so they need no more.

The copy of float16 weights is float32. Where only weights are int8, filters and dense layers round their input to int8
first; depthwise filters have no such kernel and are left to TensorFlow Lite, which makes no copy, and transposed ones
are made float32.
"""

from __future__ import annotations

from functools import lru_cache

from converters.activations import Activations
from converters.arena import align, arena_bytes
from converters.kernels import HeadKernels, Kernel
from converters.peak_parts import FLOAT_BYTES, KNOWN_KERNELS, Parts, is_quantized, round_up, unpacked_bytes
from edge_sdk.manifest import Precision

POINTER_BYTES = 8

# Output and input channels are padded to these, and the output positions in a table of pointers (the tile of the
# kernel qs8_qc8w_igemm_7x16c8__avx512vnni); channels of a depthwise filter to its own. Floats need no padded input.
CHANNEL_TILE, DEPTH_TILE, ROW_TILE, DEPTHWISE_TILE, FLOAT_DEPTHWISE_TILE = 16, 8, 7, 32, 16
# Other tiles of channels: of float filters whose window moves, and of dense layers that round their input.
FLOAT_FILTER_TILE, ROUNDING_DENSE_TILE, ROUNDING_DENSE_DEPTH_TILE = 32, 64, 4
# Depthwise filters with more taps have no kernel: they run as a filter with as many groups as channels.
MAX_DEPTHWISE_TAPS = 25
# Beside the weights of each int8 channel stand a bias and a scale, and a sum for inputs that are rounded on the way;
# beside float ones a bias.
CHANNEL_EXTRA_BYTES, ROUNDED_EXTRA_BYTES, FLOAT_EXTRA_BYTES = 8, 12, 4


def litert_parts(head: HeadKernels, precision: Precision) -> Parts:
    """What this runtime allocates for ``head``."""
    weights = sum(packed_bytes(kernel, precision) for kernel in head.kernels)
    # Made float32 one by one, each beside its copy; the tables of embeddings stay.
    unpacked = [unpacked_bytes(kernel, precision) for kernel in head.kernels]
    weights += max(unpacked, default=0)
    weights += sum(size for size, kernel in zip(unpacked, head.kernels, strict=True) if kernel.kind == "gather")
    tables = sum(table_bytes(kernel) for kernel in head.kernels if _is_delegated(kernel, precision))
    return Parts(weights=weights, tables=tables, activations=_ACTIVATIONS[precision].bytes_of(head))


@lru_cache(maxsize=KNOWN_KERNELS)
def packed_bytes(kernel: Kernel, precision: Precision, *, float_filter_tile: int = FLOAT_FILTER_TILE) -> int:
    """XNNPACK's copy of a kernel's weights (``src/reference/packing.cc``)."""
    weights = kernel.weights
    if weights is None or not _is_delegated(kernel, precision):
        return 0
    if not is_quantized(kernel, precision):
        value_bytes, depth_tile, extra_bytes, depthwise_tile = FLOAT_BYTES, 1, FLOAT_EXTRA_BYTES, FLOAT_DEPTHWISE_TILE
    elif precision == "int8":
        value_bytes, depth_tile, extra_bytes, depthwise_tile = 1, DEPTH_TILE, CHANNEL_EXTRA_BYTES, DEPTHWISE_TILE
    else:
        depth_tile = ROUNDING_DENSE_DEPTH_TILE if kernel.kind == "dense" else DEPTH_TILE
        value_bytes, extra_bytes, depthwise_tile = 1, ROUNDED_EXTRA_BYTES, DEPTHWISE_TILE
    if _is_depthwise(kernel):
        return round_up(weights.channels, depthwise_tile) * (weights.taps * value_bytes + extra_bytes)
    channel_bytes = weights.taps * round_up(weights.depth, depth_tile) * value_bytes + extra_bytes
    if kernel.kind == "transpose_conv" and kernel.window is not None:
        # One filter for each position within the stride, each with biases and scales.
        channel_bytes += extra_bytes * (kernel.window.stride[0] * kernel.window.stride[1] - 1)
    channels, tile = -(-weights.channels // weights.groups), CHANNEL_TILE
    if not is_quantized(kernel, precision):
        if channels > CHANNEL_TILE and kernel.window is not None and kernel.window.moves:
            tile = float_filter_tile
    elif precision == "int8-weights" and kernel.kind == "dense":
        tile = ROUNDING_DENSE_TILE
    return weights.groups * round_up(channels, tile) * channel_bytes


@lru_cache(maxsize=KNOWN_KERNELS)
def table_bytes(kernel: Kernel) -> int:
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


def _is_delegated(kernel: Kernel, precision: Precision) -> bool:
    return precision == "int8" or not (kernel.kind == "depthwise" and is_quantized(kernel, precision))


def _rounds_input(kernel: Kernel) -> bool:
    return kernel.kind != "depthwise" and is_quantized(kernel, "int8-weights")


_ALL_DELEGATED = Activations(delegated=lambda kernel: True, workspace_bytes=arena_bytes)  # noqa: ARG005
_ACTIVATIONS: dict[Precision, Activations] = {
    "int8": _ALL_DELEGATED,
    "int8-weights": Activations(
        delegated=lambda kernel: _is_delegated(kernel, "int8-weights"),
        workspace_bytes=arena_bytes,
        rounds_input=_rounds_input,
    ),
    "float16": _ALL_DELEGATED,
    "float32": _ALL_DELEGATED,
}
