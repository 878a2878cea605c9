"""An allocation as a table: one row for each device, and beneath it what was measured beside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloud_server.cli.output import make_table
from edge_sdk.sizes import format_size

if TYPE_CHECKING:
    from rich.table import Table

    from cloud_server.allocation.result import AllocationResult, DeviceResult
    from cloud_server.allocation.settings import LatencyStatistic
    from cloud_server.allocation.trial import Evaluation
    from cloud_server.registry.records import TrialRecord

COLUMNS = (
    "device",
    "memory budget",
    "used",
    "model",
    "cut",
    "head",
    "peak",
    "accuracy",
    "edge+transfer+cloud",
    "total ms",
    "sent",
    "trials",
)
RIGHT = ("memory budget", "used", "head", "peak", "accuracy", "edge+transfer+cloud", "total ms", "sent", "trials")


def allocation_table(result: AllocationResult) -> Table:
    """The table; its caption says what is emulated and how the figures are to be read."""
    statistic = result.run.settings.thresholds.latency_statistic
    table = make_table(*COLUMNS, right=RIGHT, caption=_caption(result, statistic), caption_justify="left")
    for device in result.devices:
        _add_device(table, device, statistic)
    return table


def trials_table(result: AllocationResult) -> Table:
    """Every trial of a run, in the order in which they were begun."""
    statistic = result.run.settings.thresholds.latency_statistic
    latency = f"{statistic} ms"
    table = make_table(
        "round",
        "device",
        "trial",
        "model",
        "cut",
        "state",
        "accuracy",
        latency,
        "reason",
        right=("round", "trial", "accuracy", latency),
    )
    trials = sorted((trial for device in result.devices for trial in device.trials), key=lambda trial: trial.trial_id)
    for trial in trials:
        evaluation = trial.evaluation
        table.add_row(
            str(trial.round),
            trial.device_id,
            str(trial.number),
            trial.model,
            f"{trial.placement.k} of {trial.placement.n}" if trial.placement else "",
            trial.state.replace("_", " "),
            f"{evaluation.accuracy:.3f}" if evaluation else "",
            f"{evaluation.latency_ms(statistic):.1f}" if evaluation else "",
            trial.reason,
        )
    return table


def _add_device(table: Table, result: DeviceResult, statistic: LatencyStatistic) -> None:
    name = result.device_id + ("*" if result.device and result.device.emulation else "")
    trial = result.trial
    if trial is None:
        last = f": {result.trials[-1].reason}" if result.trials and result.trials[-1].reason else ""
        table.add_row(name, *[""] * 3, f"{result.state or 'unfinished'}{last}", *[""] * 6, str(len(result.trials)))
        return
    placement, evaluation = trial.placement, trial.evaluation
    assert placement is not None
    assert evaluation is not None
    if result.state != "accepted":
        name += f"\n{result.state}; nearest miss"
    table.add_row(
        name,
        format_size(trial.memory_budget_bytes),
        f"{placement.predicted_bytes / trial.memory_budget_bytes:.0%}",
        trial.model,
        f"{placement.cut}\n{_kind(placement.k, placement.n)}",
        *_figures(evaluation, statistic, _accuracy(trial)),
        str(len(result.trials)),
    )
    for variant, baseline in result.baselines.items():
        if baseline is not evaluation:
            table.add_row(
                f"  {variant}", "", "", "", "", *_figures(baseline, statistic, f"{baseline.accuracy:.3f}"), ""
            )
    if "edge-only" not in result.baselines and "cloud-only" in result.baselines:
        needs = f"does not fit: the whole model needs {format_size(placement.whole_bytes)}"
        table.add_row("  edge-only", "", "", "", needs, *[""] * 7)


def _kind(k: int, n: int) -> str:
    if k == n:
        return f"{k} of {n}: all on the device"
    return f"{k} of {n}" if k else f"{k} of {n}: all in the cloud"


def _accuracy(trial: TrialRecord) -> str:
    assert trial.evaluation is not None
    lines = [f"{trial.evaluation.accuracy:.3f}"]
    if trial.float_accuracy is not None:
        lines.append(f"float {trial.float_accuracy:.3f}")
    return "\n".join(lines)


def _figures(evaluation: Evaluation, statistic: LatencyStatistic, accuracy: str) -> tuple[str, ...]:
    total = f"{evaluation.latency_mean_ms:.1f}"
    if statistic != "mean":
        total += f"\n{statistic} {evaluation.latency_ms(statistic):.1f}"
    return (
        format_size(evaluation.head_bytes),
        format_size(evaluation.measured_peak_bytes),
        accuracy,
        f"{evaluation.edge_ms:.1f} + {evaluation.transfer_ms:.1f} + {evaluation.cloud_ms:.1f}",
        total,
        format_size(evaluation.sent_bytes),
    )


def _caption(result: AllocationResult, statistic: LatencyStatistic) -> str:
    from cloud_server.allocation.metrics import wilson_interval

    lines = [
        f"used: share of the budget that the head needs by the memory model '{result.run.settings.memory_model}'; "
        "peak: growth of a process on the device; times are means"
        + (f", beside them the {statistic}" if statistic != "mean" else "")
        + "; accuracy on the validation set"
    ]
    labels = sorted(
        {f"{part}: {label}" for each in result.devices if each.device for part, label in each.device.emulation.items()}
    )
    if labels:
        lines.append(f"* emulated on this machine ({'; '.join(labels)})")
    tested = []
    for each in result.devices:
        trial = each.trial
        if trial is not None and trial.test_accuracy is not None and trial.test_samples:
            low, high = wilson_interval(trial.test_accuracy, trial.test_samples)
            tested.append(f"{each.device_id} {trial.test_accuracy:.3f} ({low:.3f} to {high:.3f})")
    if tested:
        lines.append(f"test set, with 95 % intervals: {', '.join(tested)}")
    return "\n".join(lines)
