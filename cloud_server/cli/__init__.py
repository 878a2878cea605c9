"""The ``splitfleet`` command. One module a command; none is imported before it is called."""

from __future__ import annotations

import click

from edge_sdk.command import LazyGroup, run

COMMANDS = {
    "allocate": ("cloud_server.cli.allocate:allocate", "Give each device of the fleet a model and a cut."),
    "allocations": ("cloud_server.cli.allocations:allocations", "Look at past and present allocations."),
    "cuts": ("cloud_server.cli.cuts:cuts", "List where a model may be cut, and what the head needs."),
    "demo": ("cloud_server.cli.demo:demo", "Serve, emulate a fleet, allocate and infer, on this machine."),
    "devices": ("cloud_server.cli.devices:devices", "Look at the devices of the fleet."),
    "keys": ("cloud_server.cli.keys:keys", "Make and allow keys, for servers with CURVE on."),
    "lab": ("cloud_server.cli.lab:lab", "Emulate devices on this machine."),
    "models": ("cloud_server.cli.models:models", "Your own models: add, list, show, remove."),
    "profiles": ("cloud_server.cli.profiles:profiles", "Look at device profiles."),
    "serve": ("cloud_server.cli.serve:serve", "Run the cloud server."),
    "split": ("cloud_server.cli.split:split", "Cut a model into a bundle of head and tail."),
    "tasks": ("cloud_server.cli.tasks:tasks", "Your own tasks: add, list, show, remove."),
    "verify": ("cloud_server.cli.verify:verify", "Prove a bundle: files, head, tail, and both against the model."),
    "zoo": ("cloud_server.cli.zoo:zoo", "Look at the zoo's models, or train them."),
}


@click.group(cls=LazyGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="splitfleet")
def cli() -> None:
    """Run one neural network on two machines, for a whole fleet of devices."""


def main() -> None:
    """Entry point of the console script."""
    run(cli, "splitfleet")
