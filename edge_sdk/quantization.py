"""Affine quantization as TensorFlow Lite defines it: real = scale × (value - zero_point).

It leaves to others which tensors have a scale: the manifest and the head's file say so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def quantize(real: Array, scale: float, zero_point: int, dtype: npt.DTypeLike) -> Array:
    """``real`` (finite numbers, any shape) as integers of ``dtype``; values outside its range saturate.

    Rounds half away from zero and divides in float32, as TFLite's QUANTIZE kernel does (``AffineQuantize``), so that a
    device's bytes do not depend on who quantizes.
    """
    bounds = np.iinfo(dtype)
    # The sum with 0.5 is exact in float64; in float32, 0.49999997 would round up.
    steps = (real.astype(np.float32, copy=False) / np.float32(scale)).astype(np.float64)
    steps += np.copysign(0.5, steps)
    np.trunc(steps, out=steps)
    steps += zero_point
    np.clip(steps, bounds.min, bounds.max, out=steps)
    return steps.astype(dtype)


def dequantize(values: Array, scale: float, zero_point: int) -> npt.NDArray[np.float32]:
    """The float32 numbers that the integers ``values`` (of at most 16 bits) stand for."""
    return (values.astype(np.float32) - np.float32(zero_point)) * np.float32(scale)
