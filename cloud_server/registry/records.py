"""What the registry hands out: rows as frozen dataclasses, no SQL. All times are UTC and know it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Literal

from cloud_server.allocation.core import OutcomeState
from cloud_server.allocation.settings import AllocationSettings
from cloud_server.allocation.trial import Criterion, Evaluation, Placement, TrialState
from cloud_server.fleet import MARK_SEEN_EVERY_S, OFFLINE_AFTER_S

Variant = Literal["split", "cloud-only", "edge-only"]


class RunState(StrEnum):
    """Where a run stands; all but ``RUNNING`` are final. ``INTERRUPTED``: its allocator died."""

    RUNNING = "running"
    ACCEPTED = "accepted"
    INFEASIBLE = "infeasible"
    UNREACHABLE = "unreachable"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


# What a server that hears from a device records in time, if it is a little late.
_ONLINE_WITHIN = timedelta(seconds=MARK_SEEN_EVERY_S + 2 * OFFLINE_AFTER_S)


@dataclass(frozen=True, kw_only=True)
class DeviceRecord:
    """A device as it last registered. ``bundle`` is that of its active allocation."""

    device_id: str
    profile: str | None
    model_ram_bytes: int
    resources: dict[str, Any]
    emulation: dict[str, str]
    version: str
    first_seen: datetime
    last_seen: datetime
    bundle: str | None

    def is_online(self, now: datetime) -> bool:
        """Whether a server heard from it lately; a device whose server is gone is not online either."""
        return now - self.last_seen <= _ONLINE_WITHIN


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """An evaluation of a trial's split, or of a baseline of the same model beside it."""

    variant: Variant
    bundle: str
    k: int
    evaluation: Evaluation


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """One trial. ``float_accuracy`` is the whole model's on the validation set; ``test_accuracy`` the split's on the
    test set, over ``test_samples``.
    """

    trial_id: int
    run_id: int
    round: int
    device_id: str
    number: int
    model: str
    memory_budget_bytes: int
    state: TrialState
    missed: tuple[Criterion, ...]
    reason: str
    placement: Placement | None
    evaluations: tuple[EvaluationRecord, ...]
    float_accuracy: float | None
    test_accuracy: float | None
    test_samples: int | None
    started_at: datetime
    ended_at: datetime | None

    @property
    def evaluation(self) -> Evaluation | None:
        """That of the split itself."""
        return next((record.evaluation for record in self.evaluations if record.variant == "split"), None)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run of the allocator; ``rounds`` is how many were begun."""

    run_id: int
    settings: AllocationSettings
    state: RunState
    reason: str
    rounds: int
    started_at: datetime
    ended_at: datetime | None


@dataclass(frozen=True, kw_only=True)
class OutcomeRecord:
    """How a run ended for a device. ``trial_id``: its accepted trial, else its nearest miss, if it has one."""

    device_id: str
    state: OutcomeState
    trial_id: int | None


@dataclass(frozen=True, kw_only=True)
class AllocationRecord:
    """An accepted device -> bundle mapping."""

    device_id: str
    bundle: str
    run_id: int
    trial_id: int
    activated_at: datetime
