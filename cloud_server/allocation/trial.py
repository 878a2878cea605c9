"""A trial: one candidate on one device, its state and its evaluation. Pure data and the arithmetic of thresholds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from cloud_server.allocation.settings import LatencyStatistic, Thresholds
from edge_sdk.manifest import Precision

Criterion = Literal["accuracy", "latency"]
Tag = Literal["measured", "estimated"]


class TrialState(StrEnum):
    """Where a trial stands. All but ``RUNNING`` are final.

    ``MISSED``: evaluated, and short of a threshold. ``DOES_NOT_FIT``: no head of this model fits the device.
    ``FAILED``: it could not be built, installed or run, and that is the candidate's fault. ``BROKEN_OFF``: something
    else was at fault, such as a full disk; it says nothing of the candidate. ``UNREACHABLE``: the device vanished or
    hung. ``INTERRUPTED``: the allocator died meanwhile.
    """

    RUNNING = "running"
    ACCEPTED = "accepted"
    MISSED = "missed"
    DOES_NOT_FIT = "does_not_fit"
    FAILED = "failed"
    BROKEN_OFF = "broken_off"
    UNREACHABLE = "unreachable"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Accuracy and latency of one candidate.

    ``accuracy`` is the mean score over ``samples`` samples; the latency statistics are over ``latency_samples``
    requests. ``edge_ms``, ``transfer_ms`` and ``cloud_ms`` are means, so that they add up to ``latency_mean_ms``.
    ``sent_bytes`` is the mean size of a request on the wire (0 for edge-only); ``measured_peak_bytes`` the growth of a
    fresh process on the device that runs the head.
    """

    tag: Tag = "measured"
    samples: int
    accuracy: float
    latency_samples: int
    latency_mean_ms: float
    latency_p50_ms: float
    latency_p95_ms: float
    edge_ms: float
    transfer_ms: float
    cloud_ms: float
    sent_bytes: float
    head_bytes: int
    measured_peak_bytes: int

    def latency_ms(self, statistic: LatencyStatistic) -> float:
        """The latency that a threshold for ``statistic`` is compared with."""
        return {"mean": self.latency_mean_ms, "p50": self.latency_p50_ms, "p95": self.latency_p95_ms}[statistic]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a trial has no evaluation; ``state`` is ``DOES_NOT_FIT``, ``FAILED``, ``BROKEN_OFF`` or ``UNREACHABLE``.

    ``needed_bytes``: the memory that would do for what does not fit, where that is known.
    """

    state: TrialState
    reason: str
    needed_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A candidate to try: ``trial`` counts a device's trials from 1, in whatever round they come."""

    round: int
    device_id: str
    trial: int
    model: str


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a trial's model is cut, after operation ``k`` of ``n``, and the digest of the bundle that became of it.

    ``precision`` is the head's, ``precision_reason`` says why it is no smaller one. ``predicted_bytes`` is what the
    memory model says of the head, ``whole_bytes`` what it says of the whole model in that precision.
    """

    k: int
    n: int
    cut: str
    predicted_bytes: int
    whole_bytes: int
    bundle: str
    precision: Precision
    precision_reason: str


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A draw and what came of it. ``missed`` names every threshold that was missed, ``reason`` says it in words;
    ``needed_bytes`` is that of :class:`Failure`.
    """

    draw: Draw
    state: TrialState
    evaluation: Evaluation | None = None
    missed: tuple[Criterion, ...] = ()
    reason: str = ""
    needed_bytes: int | None = None


def judge(draw: Draw, result: Evaluation | Failure, thresholds: Thresholds) -> Trial:
    """The finished trial: thresholds are inclusive, and both are looked at whatever the first says."""
    if isinstance(result, Failure):
        return Trial(draw=draw, state=result.state, reason=result.reason, needed_bytes=result.needed_bytes)
    missed: list[Criterion] = []
    reasons: list[str] = []
    wanted, limit_ms = thresholds.min_accuracy, thresholds.max_latency_ms
    if wanted is not None and result.accuracy < wanted:
        missed.append("accuracy")
        reasons.append(f"accuracy {result.accuracy:.4f} < {wanted:g}")
    latency_ms = result.latency_ms(thresholds.latency_statistic)
    if limit_ms is not None and latency_ms > limit_ms:
        missed.append("latency")
        reasons.append(f"{thresholds.latency_statistic} latency {latency_ms:.2f} ms > {limit_ms:g} ms")
    return Trial(
        draw=draw,
        state=TrialState.MISSED if missed else TrialState.ACCEPTED,
        evaluation=result,
        missed=tuple(missed),
        reason=", ".join(reasons),
    )


def shortfall(evaluation: Evaluation, thresholds: Thresholds) -> float:
    """How far an evaluation is from acceptance: the sum over the thresholds of what is missing, relative to each.

    Accuracy 0.81 against 0.90 is 0.1 short, 60 ms against 50 ms is 0.2; 0 means that all are met.
    """
    total = 0.0
    if thresholds.min_accuracy:
        total += max(0.0, thresholds.min_accuracy - evaluation.accuracy) / thresholds.min_accuracy
    if thresholds.max_latency_ms is not None:
        over_ms = evaluation.latency_ms(thresholds.latency_statistic) - thresholds.max_latency_ms
        total += max(0.0, over_ms) / thresholds.max_latency_ms
    return total
