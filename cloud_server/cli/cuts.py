"""`splitfleet cuts`: where a model may be cut, what crosses there, and what the head needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cloud_server.cli.allocation_options import registry_options
from cloud_server.cli.model_options import PRECISIONS, LoadingChoice, budget_options, find_source, model_options
from cloud_server.cli.output import Group, grouped_table, json_option
from edge_sdk.sizes import format_size

if TYPE_CHECKING:
    from rich.table import Table

    from cloud_server.allocation.settings import MemoryModelName
    from cloud_server.cut_report import Budget, CutReport, CutRow
    from converters.graph import TensorInfo
    from edge_sdk.manifest import Precision


@click.command()
@model_options
@budget_options
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    default=PRECISIONS[0],
    show_default=True,
    help="Of the heads whose memory is told.",
)
@click.option("--all", "illegal", is_flag=True, help="List the cuts that are not legal too, with the reason.")
@click.option(
    "--plot",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write feature bytes and memory over k as a picture, such as cuts.png; needs matplotlib.",
)
@registry_options
@json_option
def cuts(
    model: str,
    loading: LoadingChoice,
    budget: Budget | None,
    memory_model: MemoryModelName,
    precision: Precision,
    illegal: bool,
    plot: Path | None,
    home: Path | None,
    registry: str | None,
    as_json: bool,
) -> None:
    """List the cut points of MODEL in order.

    MODEL is a .keras file, a legacy .h5 or .hdf5 file, zoo:NAME or registry:NAME. With --profile or --ram, the cut that
    the memory model picks is marked, and whether each head fits.
    """
    from cloud_server.cli.cut_plot import terminal_plot, write_plot
    from cloud_server.cli.output import print_json, stdout
    from cloud_server.cli.waiting import waiting
    from cloud_server.cut_report import cut_report
    from cloud_server.home import Home
    from converters import Workshop

    source = find_source(model, loading, home=home, registry=registry)
    with waiting(f"reading {model}"), Workshop(Home.at(home).conversions, workers=1) as workshop:
        outline = workshop.outline(source.recipe(source.calibration)).result()
    report = cut_report(model, outline, memory_model, budget, precision)
    if plot is not None:
        write_plot(report, plot)
    if as_json:
        print_json(report.to_document(illegal=illegal))
        return
    console = stdout()
    console.print(cuts_table(report, illegal=illegal, width=console.width))
    console.print(terminal_plot(report), soft_wrap=True)
    console.print(_verdict(report), soft_wrap=True)


def cuts_table(report: CutReport, *, illegal: bool, width: int) -> Table:
    """One line a cut where ``width`` allows it, else figures that belong together one above the other."""
    rows = report.rows if illegal else report.legal
    runtimes = tuple(report.whole.peak_bytes)
    groups = (
        Group(("k",), right=True),
        Group(("cut after", "crossing tensors"), text=True),
        Group(("feature int8", "float"), right=True),
        Group(("head parameters", "cumulative"), ("head params", "cumulative"), right=True),
        Group(tuple(f"peak {runtime}" for runtime in runtimes), (f"peak {runtimes[0]}", *runtimes[1:]), right=True),
        Group(("fits", ""), text=True),
    )
    return grouped_table(groups, [_cells(report, row, runtimes) for row in rows], width=width)


def _cells(report: CutReport, row: CutRow, runtimes: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [
        (str(row.k),),
        (row.name, "\n".join(_tensor(tensor, row) for tensor in row.tensors)),
        (format_size(row.feature_bytes_int8), format_size(row.feature_bytes_float)),
        (f"{row.head_parameters:,}", format_size(row.cumulative_bytes)),
        tuple(format_size(row.peak_bytes[runtime]) for runtime in runtimes),
        (_fits(row), ", ".join(report.marks(row))) if row.legal else ("", f"illegal: {row.reason}"),
    ]


def _tensor(tensor: TensorInfo, row: CutRow) -> str:
    shape = "×".join(map(str, tensor.shape)) or "scalar"
    # The result of the very operation that the row names; what passes by it has its own name.
    return shape if tensor.name == row.name else f"{tensor.name} {shape}"


def _fits(row: CutRow) -> str:
    return "" if row.fits is None else "yes" if row.fits else "no"


def _verdict(report: CutReport) -> str:
    count = len(report.legal)
    whole = f"{report.model}: {count} legal {'cut' if count == 1 else 'cuts'} of {report.operations} operations"
    if report.budget is None:
        return f"{whole}; --profile or --ram picks one"
    size = format_size(report.budget.budget_bytes)
    named = f"{size} ({report.budget.profile})" if report.budget.profile else size
    rule = f"the memory model '{report.memory_model}'"
    if report.memory_model == "peak":
        rule += f" for {report.runtime}"
    if report.precision != "int8":
        rule += f" and heads in {report.precision}"
    if report.chosen is None:
        return f"{whole}; {rule} finds none for {named}: {report.refusal}"
    if report.chosen == report.operations:
        return f"{whole}; all of it fits into {named}: it runs on the device alone"
    return f"{whole}; for {named}, {rule} cuts after operation {report.chosen}"
