"""`splitfleet devices`: what the registry knows of the fleet's devices."""

from __future__ import annotations

from pathlib import Path

import click

from cloud_server.cli.allocation_options import open_registry, registry_options
from cloud_server.cli.output import json_option


@click.group()
def devices() -> None:
    """The devices that ever registered."""


@devices.command("list")
@registry_options
@json_option
def list_devices(home: Path | None, registry: str | None, as_json: bool) -> None:
    """List all devices with their resources, memory budget and allocation."""
    from dataclasses import asdict

    from cloud_server.cli.output import make_table, print_json, stdout
    from edge_sdk.sizes import format_size

    with open_registry(home, registry) as opened:
        known = opened.devices()
    if as_json:
        times = ("first_seen", "last_seen")
        print_json(
            {"devices": [asdict(each) | {name: getattr(each, name).isoformat() for name in times} for each in known]}
        )
        return
    table = make_table(
        "device",
        "profile",
        "emulated",
        "memory budget",
        "RAM",
        "cores",
        "runtimes",
        "allocation",
        "last seen",
        right=("memory budget", "RAM", "cores"),
    )
    for each in known:
        table.add_row(
            each.device_id,
            each.profile or "",
            ", ".join(each.emulation),
            format_size(each.model_ram_bytes),
            format_size(each.resources["ram_bytes"]),
            str(each.resources["cores"]),
            ", ".join(f"{name} {version}" for name, version in each.resources["runtimes"].items()),
            each.bundle[:12] if each.bundle else "",
            each.last_seen.astimezone().strftime("%Y-%m-%d %H:%M:%S"),
        )
    stdout().print(table)
