"""How a tensor is quantized: real = scale × (value - zero point), one scale for the whole tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

INT8_MIN, INT8_MAX = -128, 127


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """A tensor's dtype in a file; ``scale`` and ``zero_point`` are ``None`` where its values are the real ones."""

    dtype: str
    scale: float | None = None
    zero_point: int | None = None


def int8_of_range(values: npt.NDArray[Any]) -> Quantization:
    """The int8 quantization that covers ``values`` and zero, by the formula that TensorFlow Lite uses for inputs."""
    low = min(float(values.min(initial=0.0)), 0.0)
    high = max(float(values.max(initial=0.0)), 0.0)
    if low == high:
        return Quantization(dtype="int8", scale=1.0, zero_point=0)
    scale = float(np.float32((high - low) / (INT8_MAX - INT8_MIN)))
    return Quantization(dtype="int8", scale=scale, zero_point=int(np.clip(round(INT8_MIN - low / scale), -128, 127)))
