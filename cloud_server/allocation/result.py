"""The result of a run, as the registry has it: for each device its outcome, trial and baselines; and as a document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cloud_server.allocation.core import OutcomeState
from cloud_server.allocation.metrics import wilson_interval
from cloud_server.allocation.trial import Evaluation
from cloud_server.registry import Registry
from cloud_server.registry.records import DeviceRecord, RunRecord, RunState, TrialRecord
from edge_sdk.errors import DeviceUnreachableError, InfeasibleError, SplitfleetError


@dataclass(frozen=True, kw_only=True)
class DeviceResult:
    """How it stands for a device. ``state`` is ``None`` while the run goes on, or when it was cut short.

    ``trial``: the accepted one, else the nearest miss, if there is one; ``trials``: all of them in order.
    """

    device_id: str
    device: DeviceRecord | None
    state: OutcomeState | None
    trial: TrialRecord | None
    trials: tuple[TrialRecord, ...]

    @property
    def baselines(self) -> Mapping[str, Evaluation]:
        """Evaluations of the same model on this device, cut elsewhere, by variant.

        Edge-only is the split itself where the whole model runs on the device.
        """
        if self.trial is None or self.trial.placement is None:
            return {}
        found: dict[str, Evaluation] = {
            record.variant: record.evaluation for record in self.trial.evaluations if record.variant != "split"
        }
        if self.trial.placement.k == self.trial.placement.n and self.trial.evaluation is not None:
            found["edge-only"] = self.trial.evaluation
        return found


@dataclass(frozen=True, kw_only=True)
class AllocationResult:
    """A run and its devices, by device id."""

    run: RunRecord
    devices: tuple[DeviceResult, ...]

    def error(self) -> SplitfleetError | None:
        """``None`` when every device has its allocation; else what a command ends with."""
        if self.run.state is RunState.ACCEPTED:
            return None
        run = self.run
        if run.state is RunState.INFEASIBLE:
            return InfeasibleError(
                f"run {run.run_id}: no allocation was found that meets the thresholds on all devices; {run.reason}"
            )
        if run.state is RunState.UNREACHABLE:
            return DeviceUnreachableError(f"run {run.run_id}: some devices are without an allocation; {run.reason}")
        return SplitfleetError(f"run {run.run_id} ended {run.state}: {run.reason}")

    def raise_if_incomplete(self) -> None:
        """Raise :meth:`error`, if there is one: :class:`InfeasibleError`, :class:`DeviceUnreachableError`."""
        error = self.error()
        if error is not None:
            raise error

    def to_document(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        settings = asdict(self.run.settings)
        return {
            "run": self.run.run_id,
            "task": settings.pop("task"),
            "state": self.run.state,
            "reason": self.run.reason,
            "started_at": self.run.started_at.isoformat(),
            "ended_at": self.run.ended_at.isoformat() if self.run.ended_at else None,
            "rounds": self.run.rounds,
            "thresholds": settings.pop("thresholds"),
            "settings": settings,
            "devices": [_device_document(result) for result in self.devices],
        }


def read_result(registry: Registry, run_id: int) -> AllocationResult:
    """What the registry knows of a run, finished or not. Raises :class:`ConfigError` when there is none of that id."""
    run = registry.run(run_id)
    devices = {device.device_id: device for device in registry.devices()}
    outcomes = {outcome.device_id: outcome for outcome in registry.outcomes(run_id)}
    trials = registry.trials(run_id)
    results = []
    for device_id in sorted(outcomes.keys() | {trial.device_id for trial in trials}):
        own = tuple(trial for trial in trials if trial.device_id == device_id)
        outcome = outcomes.get(device_id)
        results.append(
            DeviceResult(
                device_id=device_id,
                device=devices.get(device_id),
                state=None if outcome is None else outcome.state,
                trial=next((trial for trial in own if outcome and trial.trial_id == outcome.trial_id), None),
                trials=own,
            )
        )
    return AllocationResult(run=run, devices=tuple(results))


def _device_document(result: DeviceResult) -> dict[str, Any]:
    accepted = result.state is OutcomeState.ACCEPTED
    trial = None if result.trial is None else _trial_document(result.trial)
    device = result.device
    return {
        "device_id": result.device_id,
        "profile": device.profile if device else None,
        "emulation": device.emulation if device else {},
        "memory_budget_bytes": result.trials[-1].memory_budget_bytes if result.trials else None,
        "outcome": result.state,
        "allocation": trial if accepted else None,
        "nearest_miss": None if accepted else trial,
        "baselines": {variant: asdict(evaluation) for variant, evaluation in result.baselines.items()},
        "trials_used": len(result.trials),
        "trials_by_state": dict(Counter(trial.state for trial in result.trials)),
        "trials": [_trial_document(trial) for trial in result.trials],
    }


def _trial_document(trial: TrialRecord) -> dict[str, Any]:
    placement = asdict(trial.placement) if trial.placement else {}
    test = None
    if trial.test_accuracy is not None and trial.test_samples:
        test = {
            "accuracy": trial.test_accuracy,
            "samples": trial.test_samples,
            "interval_95": list(wilson_interval(trial.test_accuracy, trial.test_samples)),
        }
    return {
        "trial": trial.number,
        "round": trial.round,
        "model": trial.model,
        "state": trial.state,
        "missed": list(trial.missed),
        "reason": trial.reason,
        "bundle": placement.pop("bundle", None),
        "predicted_bytes": placement.pop("predicted_bytes", None),
        "whole_bytes": placement.pop("whole_bytes", None),
        "precision": placement.pop("precision", None),
        "precision_reason": placement.pop("precision_reason", None),
        "cut": {"k": placement["k"], "n": placement["n"], "name": placement["cut"]} if placement else None,
        "evaluation": asdict(trial.evaluation) if trial.evaluation else None,
        "float_accuracy": trial.float_accuracy,
        "test": test,
    }
