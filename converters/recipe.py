"""A recipe: how a worker process gets at a model and its calibration data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """``load`` returns a ``keras.Model``; ``calibration`` real samples of its inputs, name -> array (N, …).

    Without ``calibration`` random samples stand in, which puts the accuracy at risk.

    Both are called in another process, so they must be picklable: functions of a module, or ``functools.partial`` of
    such. ``fingerprint`` stands for everything that they return: who gives one promises that it changes whenever the
    weights, the architecture or the calibration data do. With it, what was made before is found without loading the
    model.
    """

    task: str
    model_name: str
    load: Callable[[], Any]
    calibration: Callable[[], Mapping[str, npt.NDArray[Any]]] | None
    fingerprint: str | None = None
