"""Allocations as tables: one row for each device and beneath it what was measured beside; all trials; all runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from cloud_server.cli.output import Group, grouped_table, make_table
from edge_sdk.sizes import format_size

if TYPE_CHECKING:
    from rich.table import Table

    from cloud_server.allocation.result import AllocationResult, DeviceResult
    from cloud_server.allocation.settings import LatencyStatistic
    from cloud_server.allocation.trial import Evaluation, Placement
    from cloud_server.registry.records import AllocationRecord, DeviceRecord, RunRecord, TrialRecord


def allocation_table(result: AllocationResult) -> Table:
    """The table, for 80 columns; its caption says what is emulated and how the figures are to be read."""
    statistic = result.run.settings.thresholds.latency_statistic
    whose, which = "device, trials\nhead of the budget\nmeasured peak", "model\ncut\nk of n, head size"
    table = make_table(
        whose,
        which,
        "accuracy\nfloat",
        f"edge+transfer+cloud\n= total ms{'' if statistic == 'mean' else f', {statistic}'}\nsent a request",
        text=(whose, which),
        caption=_caption(result, statistic),
        caption_justify="left",
    )
    for device in result.devices:
        _add_device(table, device, statistic)
        if result.run.settings.baselines:
            _add_baselines(table, device, statistic)
        table.add_section()
    return table


def trials_table(result: AllocationResult, *, width: int) -> Table:
    """Every trial of a run, in the order in which they were begun."""
    statistic = result.run.settings.thresholds.latency_statistic
    groups = (
        Group(("round", "trial"), right=True),
        Group(("device", "model", "cut"), text=True),
        Group(("state",)),
        Group(("accuracy", f"{statistic} ms"), right=True),
        Group(("reason",), text=True),
    )
    trials = sorted((trial for device in result.devices for trial in device.trials), key=lambda trial: trial.trial_id)
    return grouped_table(groups, [_trial_cells(trial, statistic) for trial in trials], width=width)


def _trial_cells(trial: TrialRecord, statistic: LatencyStatistic) -> tuple[tuple[str, ...], ...]:
    accuracy = f"{trial.evaluation.accuracy:.3f}" if trial.evaluation else ""
    latency = f"{trial.evaluation.latency_ms(statistic):.1f}" if trial.evaluation else ""
    return (
        (str(trial.round), str(trial.number)),
        (trial.device_id, trial.model, _cut(trial.placement)),
        (trial.state.replace("_", " "),),
        (accuracy, latency),
        ("; ".join(filter(None, (trial.reason, _precision_reason(trial.placement)))),),
    )


def runs_table(runs: Sequence[RunRecord], active: Sequence[AllocationRecord], *, width: int) -> Table:
    """A row for each run; ``active`` are the allocations that devices have now."""
    groups = (
        Group(("run",), right=True),
        Group(("task", "state"), text=True),
        Group(("rounds", "devices now"), right=True),
        Group(("started", "took")),
        Group(("reason",), text=True),
    )
    rows = [
        (
            (str(run.run_id),),
            (run.settings.task, run.state),
            (str(run.rounds), str(sum(each.run_id == run.run_id for each in active))),
            (
                run.started_at.astimezone().strftime("%Y-%m-%d %H:%M"),
                f"{(run.ended_at - run.started_at).total_seconds():.0f} s" if run.ended_at else "",
            ),
            (run.reason,),
        )
        for run in runs
    ]
    return grouped_table(groups, rows, width=width)


def emulation_note(devices: Iterable[DeviceRecord]) -> str | None:
    """What the asterisk of emulated devices means; ``None`` without any."""
    # How, not how much: that differs from device to device, and the JSON document has it.
    means = sorted(
        {f"{part} by {label.rpartition(' by ')[2]}" for device in devices for part, label in device.emulation.items()}
    )
    return f"* emulated on this machine: {', '.join(means)}" if means else None


def _cut(placement: Placement | None) -> str:
    if placement is None:
        return ""
    cut = f"{placement.k} of {placement.n}"
    return cut if placement.precision == "int8" else f"{cut}, {placement.precision}"


def _precision_reason(placement: Placement | None) -> str:
    """Why a head is no smaller."""
    if placement is None or not placement.precision_reason:
        return ""
    return f"the head is {placement.precision}: {placement.precision_reason}"


def _add_device(table: Table, result: DeviceResult, statistic: LatencyStatistic) -> None:
    name = result.device_id + ("*" if result.device and result.device.emulation else "")
    count = len(result.trials)
    name += f", {count} {'trial' if count == 1 else 'trials'}"
    trial = result.trial
    if trial is None or trial.placement is None or trial.evaluation is None:
        # There is no nearest miss: none of its trials came so far as to be measured.
        table.add_row(f"{name}\n{result.state or 'unfinished'}", _reasons(result.trials), "", "")
        return
    placement, evaluation = trial.placement, trial.evaluation
    if result.state != "accepted":
        missed = trial.reason.replace(", ", "\n")
        name += f"\n{result.state or 'unfinished'}, nearest miss:" + (f"\n{missed}" if missed else "")
    share = f", {placement.predicted_bytes / trial.memory_budget_bytes:.0%}" if trial.memory_budget_bytes else ""
    memory = f"{format_size(placement.predicted_bytes)} of {format_size(trial.memory_budget_bytes)}{share}"
    floating = "" if trial.float_accuracy is None else f"\n{trial.float_accuracy:.3f}"
    table.add_row(
        f"{name}\n{memory}\npeak {format_size(evaluation.measured_peak_bytes)}",
        f"{trial.model}\n{placement.cut}\n{placement.k} of {placement.n}, {format_size(evaluation.head_bytes)}"
        + ("" if placement.precision == "int8" else f"\n{placement.precision}"),
        f"{evaluation.accuracy:.3f}{floating}",
        _latency(evaluation, statistic),
    )


def _reasons(trials: Iterable[TrialRecord]) -> str:
    """Why no trial of a device was measured; a reason that several models share is told once."""
    models: dict[str, list[str]] = {}
    for trial in trials:
        models.setdefault(trial.reason or trial.state.replace("_", " "), []).append(trial.model)
    return "\n".join(f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in models.items())


def _add_baselines(table: Table, result: DeviceResult, statistic: LatencyStatistic) -> None:
    if result.state != "accepted" or result.trial is None or result.trial.placement is None:
        return
    cloud_only = result.baselines.get("cloud-only")
    if cloud_only is not None:
        table.add_row("  cloud-only", "", f"{cloud_only.accuracy:.3f}", _latency(cloud_only, statistic))
    whole = f"needs {format_size(result.trial.placement.whole_bytes)}:\ndoes not fit"
    table.add_row("  edge-only", "all of it fits:\nsee above" if "edge-only" in result.baselines else whole, "", "")


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
    if (note := emulation_note(each.device for each in result.devices if each.device)) is not None:
        lines.append(note)
    tested = []
    for each in result.devices:
        trial = each.trial
        if trial is not None and trial.test_accuracy is not None and trial.test_samples:
            low, high = wilson_interval(trial.test_accuracy, trial.test_samples)
            tested.append(f"{each.device_id} {trial.test_accuracy:.3f} ({low:.3f} to {high:.3f})")
    for each in result.devices:
        placement = each.trial.placement if each.trial is not None else None
        if reason := _precision_reason(placement):
            lines.append(f"{each.device_id}: {reason}")
    if tested:
        lines.append(f"test set, with 95 % intervals: {', '.join(tested)}")
    return "\n".join(lines)


def _beside(statistic: LatencyStatistic) -> str:
    return "" if statistic == "mean" else f", beside them the {statistic}"
