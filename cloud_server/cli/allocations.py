"""`splitfleet allocations`: past and present runs, from the registry."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cloud_server.cli.allocation_options import open_registry, registry_options
from cloud_server.cli.output import json_option

if TYPE_CHECKING:
    from cloud_server.registry.records import RunRecord


@click.group()
def allocations() -> None:
    """Runs of the allocator, and what came of them."""


@allocations.command("list")
@registry_options
@json_option
def list_runs(home: Path | None, registry: str | None, as_json: bool) -> None:
    """List all runs, the newest first."""
    from datetime import UTC, datetime

    from cloud_server.cli.allocation_table import runs_table
    from cloud_server.cli.output import print_json, stdout

    with open_registry(home, registry, reading=True) as opened:
        opened.interrupt_dead_runs(now=datetime.now(UTC))
        runs = opened.runs()
        active = opened.active_allocations()
    if as_json:
        devices = [
            {
                "device_id": each.device_id,
                "bundle": each.bundle,
                "run": each.run_id,
                "since": each.activated_at.isoformat(),
            }
            for each in active
        ]
        print_json({"runs": [_run_document(run) for run in runs], "active": devices})
        return
    console = stdout()
    console.print(runs_table(runs, active, width=console.width))


@allocations.command()
@click.argument("run", type=click.IntRange(1, 2**31 - 1), required=False)
@registry_options
@json_option
def show(run: int | None, home: Path | None, registry: str | None, as_json: bool) -> None:
    """Show RUN, or the newest one: each device with its allocation or nearest miss, and every trial."""
    from datetime import UTC, datetime

    from cloud_server.allocation.result import read_result
    from cloud_server.cli.allocation_table import allocation_table, trials_table
    from cloud_server.cli.output import print_json, stdout
    from edge_sdk.errors import ConfigError

    with open_registry(home, registry, reading=True) as opened:
        opened.interrupt_dead_runs(now=datetime.now(UTC))
        if run is None:
            runs = opened.runs()
            if not runs:
                raise ConfigError(f"the registry {opened.url} has no run; 'splitfleet allocate' makes one")
            run = runs[0].run_id
        result = read_result(opened, run)
    if as_json:
        print_json(result.to_document())
        return
    console = stdout()
    reason = f" ({result.run.reason})" if result.run.reason else ""
    console.print(f"run {run}: {result.run.settings.task}: {result.run.state}{reason}", soft_wrap=True)
    console.print(allocation_table(result))
    console.print(trials_table(result, width=console.width))


def _run_document(run: RunRecord) -> dict[str, Any]:
    return {
        "run": run.run_id,
        "task": run.settings.task,
        "state": run.state,
        "reason": run.reason,
        "rounds": run.rounds,
        "started_at": run.started_at.isoformat(),
        "ended_at": run.ended_at.isoformat() if run.ended_at else None,
    }
