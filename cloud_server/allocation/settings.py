"""What a user asks of an allocation: the task, the thresholds, and how the loop may go about it. Pure data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from edge_sdk.errors import ConfigError

LatencyStatistic = Literal["mean", "p50", "p95"]
Redraw = Literal["failing", "worst"]
MemoryModelName = Literal["peak", "cumulative"]

LATENCY_STATISTICS: tuple[LatencyStatistic, ...] = get_args(LatencyStatistic)
REDRAWS: tuple[Redraw, ...] = get_args(Redraw)
MEMORY_MODELS: tuple[MemoryModelName, ...] = get_args(MemoryModelName)


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """What an evaluation must reach; both bounds are inclusive, and ``None`` asks for nothing."""

    min_accuracy: float | None = None
    max_latency_ms: float | None = None
    latency_statistic: LatencyStatistic = "p50"

    def __post_init__(self) -> None:
        if self.min_accuracy is not None and not 0.0 <= self.min_accuracy <= 1.0:
            raise ConfigError(f"the accuracy threshold must be between 0 and 1, got {self.min_accuracy}")
        if self.max_latency_ms is not None and not (math.isfinite(self.max_latency_ms) and self.max_latency_ms > 0):
            raise ConfigError(f"the latency threshold must be a positive number of ms, got {self.max_latency_ms}")
        _one_of("latency statistic", self.latency_statistic, LATENCY_STATISTICS)


@dataclass(frozen=True, kw_only=True)
class AllocationSettings:
    """One allocation as asked for.

    ``devices``: ids of those to allocate, empty for all that are registered. ``memory_model``: whether a budget bounds
    what a process grows by (``peak``; a device refuses a head that is measured above it) or the sum of layer sizes
    (``cumulative``). ``max_rounds``: ``None`` goes on until each device has its allocation or has had every model.
    ``device_timeout_s``: how long a device may be silent or make no progress. ``baselines``: measure cloud-only and
    edge-only beside each accepted split.
    """

    task: str
    thresholds: Thresholds = field(default_factory=Thresholds)
    devices: tuple[str, ...] = ()
    latency_samples: int = 100
    redraw: Redraw = "failing"
    memory_model: MemoryModelName = "peak"
    max_rounds: int | None = None
    device_timeout_s: float = 60.0
    seed: int = 0
    baselines: bool = False

    def __post_init__(self) -> None:
        if self.latency_samples < 1:
            raise ConfigError(f"at least one latency sample is needed, got {self.latency_samples}")
        if self.max_rounds is not None and self.max_rounds < 1:
            raise ConfigError(f"at least one round is needed, got {self.max_rounds}")
        if not (math.isfinite(self.device_timeout_s) and self.device_timeout_s > 0):
            raise ConfigError(f"the device timeout must be a positive number of seconds, got {self.device_timeout_s}")
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"the seed must fit into 64 bits, got {self.seed}")
        _one_of("redraw", self.redraw, REDRAWS)
        _one_of("memory model", self.memory_model, MEMORY_MODELS)


def _one_of(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"the {what} must be one of {', '.join(known)}, got {value!r}")
