"""`splitfleet demo`: the whole product once, on this machine."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cloud_server.cli.output import json_option

if TYPE_CHECKING:
    from rich.table import Table

    from cloud_server.lab.demo import DemoResult

DEFAULT_HOME = Path(".demo")


@click.command()
@click.option(
    "--home",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_HOME,
    show_default=True,
    help="Registry, artifacts, caches and logs go there; a second run finds its conversions in the caches.",
)
@click.option("--seed", type=int, help="Makes the draws repeatable.  [default: one that shows both kinds of redraw]")
@json_option
def demo(home: Path, seed: int | None, as_json: bool) -> None:
    """Serve, emulate a fleet of five devices, allocate models to them and infer, all on this machine.

    Takes some minutes the first time. The tables go to stdout, the rest to stderr.
    """
    from cloud_server.cli.allocation_progress import AllocationProgress
    from cloud_server.cli.allocation_table import allocation_table
    from cloud_server.cli.output import print_json, stderr, stdout
    from cloud_server.home import Home
    from cloud_server.lab.demo import DEFAULT_SEED, run_demo

    # As Ctrl-C does, so that all is stopped in order.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    told = stderr()
    place = Home.at(home)
    with place.claim("demo"), AllocationProgress(told) as progress:
        result = run_demo(
            place,
            seed=DEFAULT_SEED if seed is None else seed,
            say=lambda line: told.print(line, soft_wrap=True),
            observer=progress,
        )
    if as_json:
        print_json(result.to_document())
    shown = told if as_json else stdout()
    shown.print(allocation_table(result.allocation))
    if result.inferences:
        shown.print(_inference_table(result))
    told.print(f"All has stopped after {result.duration_s:.0f} s.")
    told.print(f"Look at it again:  splitfleet allocations show --home {home}", soft_wrap=True)
    result.allocation.raise_if_incomplete()


def _inference_table(result: DemoResult) -> Table:
    from cloud_server.cli.output import make_table

    times = ("edge ms", "transfer ms", "cloud ms", "total ms")
    right = sum(each.label == each.prediction for each in result.inferences)
    table = make_table(
        "label",
        "prediction",
        *times,
        right=times,
        title=f"Inferred on {result.device_id} (emulated): {right} of {len(result.inferences)} right",
        title_justify="left",
    )
    for each in result.inferences:
        milliseconds = (each.edge_ms, each.transfer_ms, each.cloud_ms, each.total_ms)
        table.add_row(each.label, each.prediction, *(f"{value:.1f}" for value in milliseconds))
    return table
