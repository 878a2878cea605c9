"""What a prediction of memory is the sum of, whatever the runtime; and the part that all share, the head's file."""

from __future__ import annotations

from dataclasses import dataclass

from converters.kernels import HeadKernels

PAGE_BYTES = 4096

# What the file holds beside its constants: tables of the schema, options of a kernel; name, shape and quantization of a
# tensor; a channel's int32 bias, and for weights and bias each a float32 scale and an int64 zero point. The first three
# were fitted to heads of 28 models, the last is the schema's.
FILE_BYTES, KERNEL_BYTES, TENSOR_BYTES, CHANNEL_BYTES = 2500, 50, 200, 28


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the runtime allocates for one head, in bytes.

    ``weights``: its own copies of them, and what it needs to multiply with them. ``tables``: pointers into inputs.
    ``activations``: see :func:`converters.arena.activation_bytes`.
    """

    weights: int
    tables: int
    activations: int


def file_bytes(head: HeadKernels) -> int:
    """The pages of an int8 head's file. They are mapped, and all are read while it is loaded or run."""
    size = FILE_BYTES + KERNEL_BYTES * len(head.kernels) + TENSOR_BYTES * len(head.inputs)
    for kernel in head.kernels:
        size += kernel.constant_bytes + TENSOR_BYTES * (len(kernel.outputs) + (kernel.constant_bytes > 0))
        if kernel.weights is not None:
            size += kernel.weights.size_bytes + 2 * TENSOR_BYTES
    size += CHANNEL_BYTES * quantized_channels(head)
    return round_up(size, PAGE_BYTES)


def quantized_channels(head: HeadKernels) -> int:
    """How many channels have a scale of their own."""
    return sum(kernel.weights.channels for kernel in head.kernels if kernel.weights is not None)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
