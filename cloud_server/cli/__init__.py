"""The ``splitfleet`` command. One module a command; none is imported before it is called."""

from __future__ import annotations

import click

from edge_sdk.command import LazyGroup, run

COMMANDS = {
    "allocate": ("cloud_server.cli.allocate:allocate", "Give each device of the fleet a model and a cut."),
    "allocations": ("cloud_server.cli.allocations:allocations", "Look at past and present allocations."),
    "demo": ("cloud_server.cli.demo:demo", "Serve, emulate a fleet, allocate and infer, on this machine."),
    "devices": ("cloud_server.cli.devices:devices", "Look at the devices of the fleet."),
    "lab": ("cloud_server.cli.lab:lab", "Emulate devices on this machine."),
    "profiles": ("cloud_server.cli.profiles:profiles", "Look at device profiles."),
    "serve": ("cloud_server.cli.serve:serve", "Run the cloud server."),
    "zoo": ("cloud_server.cli.zoo:zoo", "Look at the zoo's models, or train them."),
}


@click.group(cls=LazyGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="splitfleet")
def cli() -> None:
    """Run one neural network on two machines, for a whole fleet of devices."""


def main() -> None:
    """Entry point of the console script."""
    run(cli, "splitfleet")
