"""Feature bytes and memory over the cut points of a model: bars in the terminal, or a picture."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edge_sdk.errors import ConfigError
from edge_sdk.sizes import format_size

if TYPE_CHECKING:
    from cloud_server.cut_report import CutReport

HEIGHT = 5
WIDTH = 72
STEPS = " ▁▂▃▄▅▆▇█"


def terminal_plot(report: CutReport) -> str:
    """Two rows of bars over the legal cuts, each with its largest value; ``▲`` is the chosen cut. Empty without cuts.

    Where there are more cuts than columns a bar is the largest value of several.
    """
    rows = report.legal
    if not rows:
        return ""
    columns = _columns(len(rows), WIDTH)
    lines = ["features of a sample as int8, over the legal cuts"]
    lines += _bars([row.feature_bytes_int8 for row in rows], columns)
    lines.append(report.memory_title)
    lines += _bars([report.needed_bytes(row) for row in rows], columns)
    chosen = next((place for place, row in enumerate(rows) if row.k == report.chosen), None)
    if chosen is not None:
        column = next(number for number, (start, end) in enumerate(columns) if start <= chosen < end)
        lines.append(" " * column + f"▲ k={report.chosen}")
    lines.append(f"k={rows[0].k} to {rows[-1].k}")
    return "\n".join(lines)


def _columns(count: int, width: int) -> list[tuple[int, int]]:
    """``count`` values over at most ``width`` columns, as first and end of each."""
    columns = min(count, width)
    edges = [round(number * count / columns) for number in range(columns + 1)]
    return list(itertools.pairwise(edges))


def _bars(values: Sequence[int], columns: Sequence[tuple[int, int]]) -> list[str]:
    largest = max(values)
    heights = [
        math.ceil(max(values[start:end]) / largest * HEIGHT * (len(STEPS) - 1)) if largest else 0
        for start, end in columns
    ]
    lines = []
    for row in range(HEIGHT - 1, -1, -1):
        cells = (min(max(height - row * (len(STEPS) - 1), 0), len(STEPS) - 1) for height in heights)
        lines.append("".join(STEPS[cell] for cell in cells).rstrip())
    lines[0] = f"{lines[0]:<{len(columns)}}  {format_size(largest)}"
    return lines


def write_plot(report: CutReport, path: Path) -> None:
    """Write the plot as a picture; the suffix of ``path`` names the format.

    Raises :class:`ConfigError` when matplotlib is not installed, or does not know or cannot write the file.
    """
    try:
        matplotlib = importlib.import_module("matplotlib")
        # The one backend that needs no display; to be chosen before pyplot comes.
        matplotlib.use("Agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise ConfigError("--plot needs matplotlib: install it with  pip install matplotlib") from None

    rows = report.legal
    figure, (features, memory) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 6), layout="constrained")
    k = [row.k for row in rows]
    features.set_title(f"{report.model}: {len(rows)} legal cuts of {report.operations} operations")
    features.step(k, [row.feature_bytes_int8 / 1e3 for row in rows], where="mid", label="as int8")
    features.set_ylabel("features of a sample, kB")
    features.set_yscale("log")
    for label, values in report.memory_series().items():
        memory.step(k, [value / 1e6 for value in values], where="mid", label=label)
    memory.set_ylabel("memory of the head, MB")
    memory.set_xlabel("cut after operation k")
    if report.budget is not None:
        memory.axhline(report.budget.budget_bytes / 1e6, color="black", linestyle=":", label="budget")
    for axes in (features, memory):
        if report.chosen is not None:
            axes.axvline(report.chosen, color="tab:red", linestyle="--", label=f"chosen: k={report.chosen}")
        axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise ConfigError(f"--plot {path}: cannot be written ({reason or error})") from None
    finally:
        pyplot.close(figure)
