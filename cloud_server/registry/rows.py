"""Rows to records, and records to the columns of rows."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any, cast

from cloud_server.allocation.core import OutcomeState
from cloud_server.allocation.settings import AllocationSettings, Thresholds
from cloud_server.allocation.trial import Criterion, Evaluation, Placement, TrialState
from cloud_server.registry.records import (
    AllocationRecord,
    DeviceRecord,
    EvaluationRecord,
    OutcomeRecord,
    RunRecord,
    RunState,
    TrialRecord,
    Variant,
)
from cloud_server.registry.schema import AllocationRow, DeviceRow, EvaluationRow, OutcomeRow, RunRow, TrialRow

_THRESHOLDS = tuple(field.name for field in fields(Thresholds))
_SETTINGS = tuple(field.name for field in fields(AllocationSettings) if field.name not in ("thresholds", "devices"))
_EVALUATION = tuple(field.name for field in fields(Evaluation))
_PLACEMENT = tuple(field.name for field in fields(Placement))


def settings_columns(settings: AllocationSettings) -> dict[str, Any]:
    """Settings as columns of a run: the thresholds beside the rest."""
    columns: dict[str, Any] = asdict(settings)
    thresholds = columns.pop("thresholds")
    return {**columns, **thresholds, "devices": list(settings.devices)}


def evaluation_columns(evaluation: Evaluation) -> dict[str, Any]:
    """An evaluation as columns."""
    return asdict(evaluation)


def device(row: DeviceRow, bundle: str | None) -> DeviceRecord:
    return DeviceRecord(
        device_id=row.id,
        profile=row.profile,
        model_ram_bytes=row.model_ram_bytes,
        resources=row.resources,
        emulation={part: label for part, label in row.emulation.items() if label},
        version=row.version,
        first_seen=row.first_seen,
        last_seen=row.last_seen,
        bundle=bundle,
    )


def run(row: RunRow) -> RunRecord:
    return RunRecord(
        run_id=row.id,
        settings=AllocationSettings(
            thresholds=Thresholds(**{name: getattr(row, name) for name in _THRESHOLDS}),
            devices=tuple(row.devices),
            **{name: getattr(row, name) for name in _SETTINGS},
        ),
        state=RunState(row.state),
        reason=row.reason,
        rounds=len(row.rounds),
        started_at=row.started_at,
        ended_at=row.ended_at,
    )


def trial(row: TrialRow) -> TrialRecord:
    missed: list[Criterion] = []
    if row.missed_accuracy:
        missed.append("accuracy")
    if row.missed_latency:
        missed.append("latency")
    return TrialRecord(
        trial_id=row.id,
        run_id=row.run_id,
        round=row.round.number,
        device_id=row.device_id,
        number=row.number,
        model=row.model,
        memory_budget_bytes=row.memory_budget_bytes,
        state=TrialState(row.state),
        missed=tuple(missed),
        reason=row.reason,
        placement=_placement(row),
        evaluations=tuple(map(_evaluation, row.evaluations)),
        float_accuracy=row.float_accuracy,
        test_accuracy=row.test_accuracy,
        test_samples=row.test_samples,
        started_at=row.started_at,
        ended_at=row.ended_at,
    )


def _placement(row: TrialRow) -> Placement | None:
    values = {name: getattr(row, name) for name in _PLACEMENT}
    return None if None in values.values() else Placement(**values)


def _evaluation(row: EvaluationRow) -> EvaluationRecord:
    return EvaluationRecord(
        variant=cast("Variant", row.variant),
        bundle=row.bundle,
        k=row.k,
        evaluation=Evaluation(**{name: getattr(row, name) for name in _EVALUATION}),
    )


def outcome(row: OutcomeRow) -> OutcomeRecord:
    return OutcomeRecord(device_id=row.device_id, state=OutcomeState(row.state), trial_id=row.trial_id)


def allocation(row: AllocationRow) -> AllocationRecord:
    return AllocationRecord(
        device_id=row.device_id,
        bundle=row.bundle,
        run_id=row.trial.run_id,
        trial_id=row.trial_id,
        activated_at=row.activated_at,
    )
