"""Metrics: from the outputs that came back and the labels that never left, to one score per sample.

A task names its metric; what an allocation calls accuracy is the mean of the per-sample score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edge_sdk.errors import ConfigError, ModelError

Array = npt.NDArray[Any]
Scores = npt.NDArray[np.float64]

_Z_95 = 1.959963984540054


class Metric(Protocol):
    """Scores samples: ``outputs`` are the model's, in its order, each (N, …); ``labels`` are (N, …). Higher is better,
    the result is (N,), each between 0 and 1.
    """

    def __call__(self, outputs: Sequence[Array], labels: Array) -> Scores: ...


def accuracy(outputs: Sequence[Array], labels: Array) -> Scores:
    """1 where the largest entry of the first output, (N, classes), is at the label, else 0.

    Raises :class:`ModelError` for outputs that are not such.
    """
    scores = outputs[0]
    if scores.ndim != 2 or len(scores) != len(labels):
        raise ModelError(
            f"accuracy needs an output of shape ({len(labels)}, classes), got {list(scores.shape)}: "
            "the task's metric is not one for this model"
        )
    if not np.isfinite(scores).all():
        raise ModelError("the model's output holds values that are not finite")
    hits: Scores = (scores.argmax(axis=1) == labels).astype(np.float64)
    return hits


_METRICS: dict[str, Metric] = {"accuracy": accuracy}


def metric(name: str) -> Metric:
    """The metric of that name; :class:`ConfigError` names those that exist."""
    try:
        return _METRICS[name]
    except KeyError:
        raise ConfigError(f"there is no metric {name!r}; the metrics are: {', '.join(_METRICS)}") from None


def wilson_interval(proportion: float, samples: int) -> tuple[float, float]:
    """The 95 % interval of a proportion seen in ``samples`` samples (Wilson's score interval, Wilson 1927)."""
    if samples < 1 or not 0.0 <= proportion <= 1.0:
        raise ValueError(f"no interval for a proportion of {proportion} in {samples} samples")
    z2 = _Z_95**2 / samples
    center = (proportion + z2 / 2) / (1 + z2)
    half = _Z_95 / (1 + z2) * math.sqrt(proportion * (1 - proportion) / samples + z2 / (4 * samples))
    return max(0.0, center - half), min(1.0, center + half)
