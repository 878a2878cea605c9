"""Where commands write: data to stdout, everything else to stderr.

A command that is asked for ``--json`` prints exactly one document with :func:`print_json` and shows what else there is
on :func:`stderr`; without it a table that the user asked for is the data, and goes to :func:`stdout`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import click

from edge_sdk.command import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

# Without a terminal there is no width to fit into, and nothing to be gained from folding a table.
WIDTH_OF_A_FILE = 200
# How much of a line a longer text shall have at least.
TEXT_WIDTH = 30
# What a table has between two columns.
GAP = "   "


def json_option(function: Any) -> Any:
    """Add ``--json``; the command gets ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(function)


def print_json(document: Any) -> None:
    """Print a JSON document on stdout; one that cannot be JSON is a bug."""
    # What stdout cannot encode it writes with a backslash, which is JSON only where it begins ``\\u``.
    plain = not (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    click.echo(json.dumps(document, indent=2, ensure_ascii=plain, allow_nan=False))


def print_facts(facts: Mapping[str, Any]) -> None:
    """Print a line for each fact on stdout, its name first."""
    width = max(map(len, facts))
    for name, value in facts.items():
        click.echo(printable(f"{name:<{width}}  {value}"))


def stdout() -> Console:
    """The console of data."""
    return _console(stderr=False)


def stderr() -> Console:
    """The console of progress, warnings and all else."""
    return _console(stderr=True)


def make_table(*columns: str, right: Collection[str] = (), text: Collection[str] = (), **options: Any) -> Table:
    """A table with these columns; those in ``right`` are numbers, and only those in ``text`` may be broken into lines.

    ``options`` are those of ``rich.table.Table``.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, **options)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in right else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column not in text)
    return table


@dataclass(frozen=True)
class Group:
    """Columns of a table that belong together: beside each other where there is room, else one above the other.

    ``stacked`` are other titles for the latter. ``right`` says that they are numbers, ``text`` that they may be broken
    into lines.
    """

    titles: tuple[str, ...]
    stacked: tuple[str, ...] = ()
    right: bool = False
    text: bool = False


def grouped_table(
    groups: Sequence[Group], rows: Iterable[Sequence[Sequence[str]]], *, width: int, **options: Any
) -> Table:
    """A table of ``rows`` for a console of ``width``; a row has for each group its cells, as many as it has titles."""
    cells = [[tuple(printable(cell) for cell in part) for part in row] for row in rows]
    wide = _width(groups, cells) <= width
    titles = [group.titles if wide else ("\n".join(group.stacked or group.titles),) for group in groups]
    if not wide:
        # Rows of more than two lines would run into each other.
        options["leading"] = int(any(len(group.titles) > 2 for group in groups))
    table = make_table(
        *(title for each in titles for title in each),
        right={title for each, group in zip(titles, groups, strict=True) if group.right for title in each},
        text={title for each, group in zip(titles, groups, strict=True) if group.text for title in each},
        **options,
    )
    for row in cells:
        table.add_row(*(cell for part in row for cell in (part if wide else ("\n".join(part).rstrip("\n"),))))
    return table


def _width(groups: Sequence[Group], rows: Sequence[Sequence[Sequence[str]]]) -> int:
    """What a table takes whose groups are not stacked, its texts broken where they are long."""
    total = 0
    for place, group in enumerate(groups):
        for number, title in enumerate(group.titles):
            lines = (line for row in rows for line in row[place][number].split("\n"))
            longest = max(map(len, lines), default=0)
            total += max(len(title), min(longest, TEXT_WIDTH) if group.text else longest) + len(GAP)
    return total


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    class PlainConsole(Console):
        """Text as it is: no markup, and no control characters."""

        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

    def make(width: int | None) -> Console:
        return PlainConsole(stderr=stderr, highlight=False, markup=False, emoji=False, width=width)

    console = make(None)
    return console if console.is_terminal else make(WIDTH_OF_A_FILE)
