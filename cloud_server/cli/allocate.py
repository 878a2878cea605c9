"""`splitfleet allocate`: the allocation loop, in a process of its own."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import click

from cloud_server.cli.allocation_options import MakeSettings, allocation_options, registry_options
from cloud_server.cli.output import json_option
from edge_sdk.command import ENDPOINT, keys_options


@click.command()
@click.option("--task", required=True, help="The task to allocate models of, such as fashion-mnist.")
@click.option(
    "--server",
    "endpoint",
    type=ENDPOINT,
    default="tcp://127.0.0.1:5555",
    show_default=True,
    help="Endpoint of 'splitfleet serve'.",
)
@allocation_options
@registry_options
@keys_options
@json_option
def allocate(
    task: str,
    endpoint: str,
    settings: MakeSettings,
    home: Path | None,
    registry: str | None,
    key: Path | None,
    server_key: Path | None,
    as_json: bool,
) -> None:
    """Give each device of the fleet a model and a cut.

    Models are drawn at random and measured on the devices, round by round, until every device meets the thresholds.
    Ends with 0 then, with 3 when a device has had every model, with 4 when a device or the server is out of reach, and
    with 1 when something else was at fault, such as a full disk, or when it was stopped by Ctrl-C or SIGTERM.
    """
    from cloud_server.allocation import run_allocation
    from cloud_server.cli.allocation_progress import AllocationProgress
    from cloud_server.cli.allocation_table import allocation_table
    from cloud_server.cli.output import print_json, stderr, stdout
    from cloud_server.home import Home
    from edge_sdk.keys import CurveKeys

    keys = CurveKeys.load_both(key, server_key)
    place = Home.at(home)
    wanted = settings(task=task)
    with _stopped_by_sigterm(), AllocationProgress(stderr()) as progress:
        result = run_allocation(
            wanted,
            endpoint=endpoint,
            registry_url=registry or place.registry_url,
            home=place,
            observer=progress,
            keys=keys,
        )
    if as_json:
        print_json(result.to_document())
    (stderr() if as_json else stdout()).print(allocation_table(result))
    result.raise_if_incomplete()


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """SIGTERM is as Ctrl-C: the run is recorded as interrupted, and what it began is tidied up."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(*_: object) -> NoReturn:
    # A second one must not break off the tidying up.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt
