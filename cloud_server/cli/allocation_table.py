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


def allocation_table(result: AllocationResult) -> Table:
    """The table, for 80 columns; its caption says what is emulated and how the figures are to be read."""
    statistic = result.run.settings.thresholds.latency_statistic
    table = make_table(
        "device, trials\nhead of the budget\nmeasured peak",
        "model\ncut\nk of n, head size",
        "accuracy\nfloat",
        f"edge+transfer+cloud\n= total ms{'' if statistic == 'mean' else f', {statistic}'}\nsent a request",
        caption=_caption(result, statistic),
        caption_justify="left",
    )
    for device in result.devices:
        _add_device(table, device, statistic)
        if result.run.settings.baselines:
            _add_baselines(table, device, statistic)
        table.add_section()
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
    count = len(result.trials)
    name += f", {count} {'trial' if count == 1 else 'trials'}"
    trial = result.trial
    if trial is None or trial.placement is None or trial.evaluation is None:
        last = f":\n{result.trials[-1].reason}" if result.trials and result.trials[-1].reason else ""
        table.add_row(name, f"{result.state or 'unfinished'}{last}", "", "")
        return
    placement, evaluation = trial.placement, trial.evaluation
    if result.state != "accepted":
        name += f"\n{result.state}, nearest miss:"
    share = f", {placement.predicted_bytes / trial.memory_budget_bytes:.0%}" if trial.memory_budget_bytes else ""
    memory = f"{format_size(placement.predicted_bytes)} of {format_size(trial.memory_budget_bytes)}{share}"
    floating = "" if trial.float_accuracy is None else f"\n{trial.float_accuracy:.3f}"
    table.add_row(
        f"{name}\n{memory}\npeak {format_size(evaluation.measured_peak_bytes)}",
        f"{trial.model}\n{placement.cut}\n{placement.k} of {placement.n}, {format_size(evaluation.head_bytes)}",
        f"{evaluation.accuracy:.3f}{floating}",
        _latency(evaluation, statistic),
    )


def _add_baselines(table: Table, result: DeviceResult, statistic: LatencyStatistic) -> None:
    if result.state != "accepted" or result.trial is None or result.trial.placement is None:
        return
    cloud_only = result.baselines.get("cloud-only")
    if cloud_only is not None:
        table.add_row("  cloud-only", "", f"{cloud_only.accuracy:.3f}", _latency(cloud_only, statistic))
    whole = f"needs {format_size(result.trial.placement.whole_bytes)}:\ndoes not fit"
    table.add_row("  edge-only", "as above" if "edge-only" in result.baselines else whole, "", "")


def _latency(evaluation: Evaluation, statistic: LatencyStatistic) -> str:
    total = f"= {evaluation.latency_mean_ms:.1f}"
    if statistic != "mean":
        total += f", {statistic} {evaluation.latency_ms(statistic):.1f}"
    parts = f"{evaluation.edge_ms:.1f} + {evaluation.transfer_ms:.1f} + {evaluation.cloud_ms:.1f}"
    return f"{parts}\n{total}\n{format_size(evaluation.sent_bytes)}"


def _caption(result: AllocationResult, statistic: LatencyStatistic) -> str:
    from cloud_server.allocation.metrics import wilson_interval

    lines = [
        f"the budget is compared with the head's size by the memory model '{result.run.settings.memory_model}'; "
        "the peak is the growth of a process on the device that runs the head; accuracy is that of the validation set, "
        f"beneath it that of the whole model in floating point; times are means{_beside(statistic)}"
    ]
    # How, not how much: that differs from device to device, and the JSON document has it.
    means = sorted(
        {
            f"{part} by {label.rpartition(' by ')[2]}"
            for each in result.devices
            if each.device
            for part, label in each.device.emulation.items()
        }
    )
    if means:
        lines.append(f"* emulated on this machine: {', '.join(means)}")
    tested = []
    for each in result.devices:
        trial = each.trial
        if trial is not None and trial.test_accuracy is not None and trial.test_samples:
            low, high = wilson_interval(trial.test_accuracy, trial.test_samples)
            tested.append(f"{each.device_id} {trial.test_accuracy:.3f} ({low:.3f} to {high:.3f})")
    if tested:
        lines.append(f"test set, with 95 % intervals: {', '.join(tested)}")
    return "\n".join(lines)


def _beside(statistic: LatencyStatistic) -> str:
    return "" if statistic == "mean" else f", beside them the {statistic}"
