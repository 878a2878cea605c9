"""How far the outputs of a split model are from those of the whole one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# Rows that sum up to 1 within this are probabilities, rounded to int8 or not.
PROBABILITY_TOLERANCE = 0.02

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How far head and tail together are from the whole model, over all samples and outputs.

    ``relative_error`` is the noise of the worst output in proportion to its signal: the root mean square of the
    differences over the standard deviation of the whole model's values. ``top1_agreement`` is the share of samples in
    which both prefer the same class, ``None`` unless the model is a classifier.
    """

    max_abs_error: float
    mean_abs_error: float
    relative_error: float
    top1_agreement: float | None


def compare(outputs: Sequence[Array], whole: Sequence[Array], classifier: bool) -> Comparison:
    """Compare all outputs in the model's order, each (N, …), with those of the ``whole`` model.

    A model whose first output are probabilities is a classifier; ``classifier`` says so of another.
    """
    differences = [
        np.abs(made.astype(np.float64) - real.astype(np.float64)) for made, real in zip(outputs, whole, strict=True)
    ]
    everything = np.concatenate([difference.reshape(-1) for difference in differences])
    return Comparison(
        max_abs_error=_finite(float(everything.max(initial=0.0))),
        mean_abs_error=_finite(float(everything.mean()) if everything.size else 0.0),
        relative_error=max(_relative(difference, real) for difference, real in zip(differences, whole, strict=True)),
        top1_agreement=_agreement(outputs[0], whole[0]) if classifier or _probabilities(whole[0]) else None,
    )


def _relative(difference: Array, real: Array) -> float:
    noise = _finite(math.sqrt(float(np.mean(difference**2))) if difference.size else 0.0)
    values = real.astype(np.float64)
    # An output that does not vary carries nothing that could be lost; its size is what the noise is small against.
    signal = float(values.std()) or float(np.abs(values).max(initial=0.0)) or 1.0
    return noise / signal


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _probabilities(output: Array) -> bool:
    """Whether these are the probabilities of two or more classes."""
    if output.ndim != 2 or output.shape[1] < 2 or output.dtype.kind != "f":
        return False
    sums = output.astype(np.float64).sum(axis=1)
    return bool((output >= 0).all() and (np.abs(sums - 1) <= PROBABILITY_TOLERANCE).all())


def _agreement(made: Array, real: Array) -> float | None:
    if real.ndim != 2 or real.shape[1] < 2:
        return None
    return float((made.argmax(axis=1) == real.argmax(axis=1)).mean())
