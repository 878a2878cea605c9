"""Where commands write: data to stdout, everything else to stderr.

A command that is asked for ``--json`` prints exactly one document with :func:`print_json` and shows what else there is
on :func:`stderr`; without it a table that the user asked for is the data, and goes to :func:`stdout`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Without a terminal there is no width to fit into, and nothing to be gained from folding a table.
WIDTH_OF_A_FILE = 200


def json_option(function: Any) -> Any:
    """Add ``--json``; the command gets ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(function)


def print_json(document: Any) -> None:
    """Print a JSON document on stdout; one that cannot be JSON is a bug."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))


def stdout() -> Console:
    """The console of data."""
    return _console(stderr=False)


def stderr() -> Console:
    """The console of progress, warnings and all else."""
    return _console(stderr=True)


def make_table(*columns: str, right: tuple[str, ...] = (), **options: Any) -> Table:
    """A table with these columns; those in ``right`` are numbers. ``options`` are those of ``rich.table.Table``."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, **options)
    for number, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if column in right else "left"
        # What a row is about is never folded.
        table.add_column(column, justify=justify, overflow="fold", no_wrap=number == 0)
    return table


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=False)
    return (
        console
        if console.is_terminal
        else Console(stderr=stderr, highlight=False, markup=False, emoji=False, width=WIDTH_OF_A_FILE)
    )
