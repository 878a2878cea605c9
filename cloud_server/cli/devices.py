"""`splitfleet devices`: what the registry knows of the fleet's devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cloud_server.cli.allocation_options import open_registry, registry_options
from cloud_server.cli.output import Group, grouped_table, json_option
from edge_sdk.sizes import format_size

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from rich.table import Table

    from cloud_server.registry.records import DeviceRecord


@click.group()
def devices() -> None:
    """The devices that ever registered."""


@devices.command("list")
@registry_options
@json_option
def list_devices(home: Path | None, registry: str | None, as_json: bool) -> None:
    """List all devices with their resources, memory budget and allocation.

    A device is online if a server heard from it within the last seconds.
    """
    from datetime import UTC, datetime

    from cloud_server.cli.output import print_json, stdout

    with open_registry(home, registry, reading=True) as opened:
        known = opened.devices()
    now = datetime.now(UTC)
    if as_json:
        print_json({"devices": [_document(each, now) for each in known]})
        return
    console = stdout()
    console.print(devices_table(known, now=now, width=console.width))


def devices_table(devices: Sequence[DeviceRecord], *, now: datetime, width: int) -> Table:
    """A row for each device; an asterisk says that it is emulated, the caption how."""
    from cloud_server.cli.allocation_table import emulation_note

    groups = (
        Group(("device", "profile")),
        Group(("state", "last seen")),
        Group(("memory budget", "RAM", "cores"), ("budget", "RAM", "cores"), right=True),
        Group(("runtimes",), text=True),
        Group(("allocation",)),
    )
    rows = [
        (
            (each.device_id + ("*" if each.emulation else ""), each.profile or ""),
            (
                "online" if each.is_online(now) else "offline",
                f"{_shortly(now - each.last_seen)} ago",
            ),
            (
                format_size(each.model_ram_bytes),
                format_size(each.resources["ram_bytes"]),
                str(each.resources["cores"]),
            ),
            ("\n".join(f"{name} {version}" for name, version in each.resources["runtimes"].items()),),
            (each.bundle[:12] if each.bundle else "",),
        )
        for each in devices
    ]
    return grouped_table(groups, rows, width=width, caption=emulation_note(devices), caption_justify="left")


def _shortly(time: timedelta) -> str:
    """A time in its largest whole unit."""
    seconds = max(int(time.total_seconds()), 0)
    count, unit = next(
        (seconds // size, unit)
        for size, unit in ((86_400, "days"), (3_600, "h"), (60, "min"), (1, "s"))
        if seconds >= size or size == 1
    )
    return "1 day" if (count, unit) == (1, "days") else f"{count} {unit}"


def _document(device: DeviceRecord, now: datetime) -> dict[str, Any]:
    times = {name: getattr(device, name).isoformat() for name in ("first_seen", "last_seen")}
    return asdict(device) | times | {"online": device.is_online(now)}
