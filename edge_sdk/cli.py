"""The ``splitfleet-edge`` command. Its commands' imports come when they are called."""

from __future__ import annotations

import os

import click

from edge_sdk.command import LazyGroup, run

COMMANDS = {
    "detect": ("edge_sdk.commands:detect", "Describe this machine as a device profile."),
    "infer": ("edge_sdk.commands:infer", "Infer one sample through a bundle."),
    "measure": ("edge_sdk.commands:measure", "Measure the memory that a bundle's head takes here."),
    "run": ("edge_sdk.commands:run", "Run the agent of this device."),
}


@click.group(cls=LazyGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="splitfleet")
def cli() -> None:
    """The device side of splitfleet: run heads here, their tails on a server."""


def main() -> None:
    """Entry point of the console script."""
    # numpy's OpenBLAS sets 32 MB aside for each core, for threads that no head ever uses; read when numpy is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    run(cli, "splitfleet-edge")
