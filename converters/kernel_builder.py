"""Collects the kernels of a model while its operations are gone through, and fuses what the converter fuses.

Which kernels an operation becomes is :mod:`converters.lowering`'s matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from converters.kernels import Kernel, Window

FLOAT_BYTES = 4
Shape = tuple[int, ...]

# An activation right after one of these becomes part of it; so does a batch normalization, of those with weights.
TAKE_ACTIVATION = frozenset({"conv", "depthwise", "dense", "add", "sub", "mul", "average_pool", "max_pool"})
TAKE_NORMALIZATION = frozenset({"conv", "depthwise", "dense"})


@dataclass
class KernelBuilder:
    """The kernels so far, those of an int8 head (``quantized``) or of one that computes with floats.

    ``k`` is the operation under way; ``shapes`` of tensors have no batch axis.
    """

    quantized: bool = True
    k: int = 0
    shapes: list[Shape] = field(default_factory=list)
    sizes_bytes: list[int] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    _makers: dict[int, int] = field(default_factory=dict)
    _closed: set[int] = field(default_factory=set)
    _padding: dict[int, Shape] = field(default_factory=dict)
    _scaled: set[int] = field(default_factory=set)
    _known: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def tensor(self, shape: Shape, *, floats: bool = False) -> int:
        """A new tensor, of ``floats`` in an int8 head too."""
        self.shapes.append(shape)
        self.sizes_bytes.append(math.prod(shape) * (FLOAT_BYTES if floats or not self.quantized else 1))
        return len(self.shapes) - 1

    def emit(self, kind: str, inputs: Sequence[int], shape: Shape, *, floats: bool = False, **facts: Any) -> int:
        """Add a kernel with one output, which is returned; ``facts`` are those of :class:`Kernel`.

        The converter computes the same once: where a kernel without constants is there already, its output is returned.
        """
        same = (kind, tuple(inputs), shape, *sorted(facts.items()))
        if same in self._known:
            return self.close(self._known[same])
        made = self.tensor(shape, floats=floats)
        if not facts.get("weights") and not facts.get("constants"):
            self._known[same] = made
        self._makers[made] = len(self.kernels)
        self.kernels.append(Kernel(k=self.k, kind=kind, inputs=tuple(inputs), outputs=(made,), **facts))
        return made

    def emit_float(self, inputs: Sequence[int], shape: Shape, **facts: Any) -> int:
        """Add an operation that has no int8 kernel: it runs on floats."""
        return self.rounded(self.emit("float", [self.real(each) for each in inputs], shape, floats=True, **facts))

    def real(self, tensor: int) -> int:
        """``tensor`` as floats."""
        return self.emit("dequantize", [tensor], self.shapes[tensor], floats=True) if self.quantized else tensor

    def rounded(self, tensor: int) -> int:
        """A tensor of floats as int8, in an int8 head."""
        return self.emit("quantize", [tensor], self.shapes[tensor]) if self.quantized else tensor

    def close(self, tensor: int) -> int:
        """Let nothing more become part of the kernel that makes ``tensor``, which is returned."""
        self._closed.add(tensor)
        return tensor

    def takes(self, tensor: int, kinds: frozenset[str]) -> bool:
        """Whether what comes next may become part of the kernel that makes ``tensor``, being one of ``kinds``."""
        place = self._makers.get(tensor)
        return place is not None and tensor not in self._closed and self.kernels[place].kind in kinds

    def pad(self, tensor: int, shape: Shape, before: Shape) -> int:
        """Add a kernel that pads with zeros, ``before`` the first and after the last of each axis."""
        made = self.emit("pad", [tensor], shape)
        self._padding[made] = before
        return made

    def scale(self, tensor: int, shape: Shape) -> int:
        """Add a kernel that multiplies with a constant, which a filter that follows takes into its weights."""
        made = self.emit("mul", [tensor], shape, constants=1)
        self._scaled.add(made)
        return made

    def unscaled(self, tensor: int) -> int:
        """What a filter takes in place of ``tensor``."""
        if tensor not in self._scaled or tensor in self._closed:
            return tensor
        place = self._makers[tensor]
        self.kernels[place] = replace(self.kernels[place], absorbed_by=self.k)
        return self.kernels[place].inputs[0]

    def unpadded(self, tensor: int, window: Window, output_size: Shape) -> int:
        """What a filter takes in place of ``tensor``.

        Where that is padded just as the filter can do by itself ("same"), the padding becomes part of the filter.
        """
        before = self._padding.get(tensor)
        if before is None or tensor in self._closed:
            return tensor
        place = self._makers[tensor]
        source = self.kernels[place].inputs[0]
        for axis, (taps, stride, out) in enumerate(zip(window.size, window.stride, output_size, strict=True)):
            size, padded = self.shapes[source][axis], self.shapes[tensor][axis]
            needed = max((out - 1) * stride + taps - size, 0)
            if out != -(-size // stride) or padded - size != needed or before[axis] != needed // 2:
                return tensor
        self.kernels[place] = replace(self.kernels[place], absorbed_by=self.k)
        return source
