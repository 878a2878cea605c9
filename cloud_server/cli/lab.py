"""`splitfleet lab`: emulate devices on this machine."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from pathlib import Path

import click

from edge_sdk.command import ENDPOINT, keys_options

DEFAULT_SERVER = "tcp://127.0.0.1:5555"
WATCH_S = 0.5


@click.group()
def lab() -> None:
    """Emulate devices of given profiles on this machine; everything emulated is labelled."""


@lab.command()
@click.argument("fleet", type=click.Path(path_type=Path))
@click.option(
    "--server", type=ENDPOINT, help=f"Endpoint of the server.  [default: what FLEET says, else {DEFAULT_SERVER}]"
)
@click.option("--home", type=click.Path(file_okay=False, path_type=Path), help="Stores and logs go below this folder.")
@click.option(
    "--profiles-dir",
    "directories",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Look here for profiles first; may be repeated.",
)
@click.option(
    "--ready-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a JSON file once all devices are registered.",
)
@keys_options
@click.option(
    "--device-keys",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder with the secret key of each device, DEVICE-ID.key; goes with --key, an operator's.",
)
def run(
    fleet: Path,
    server: str | None,
    home: Path | None,
    directories: tuple[Path, ...],
    ready_file: Path | None,
    key: Path | None,
    server_key: Path | None,
    device_keys: Path | None,
) -> None:
    """Run the devices of a FLEET file until SIGINT or SIGTERM, each as a process of its own."""
    from cloud_server.home import Home
    from cloud_server.lab.devices import DeviceKeys
    from cloud_server.lab.fleet_file import load_fleet
    from cloud_server.lab.lab import Lab
    from edge_sdk.channel import Channel
    from edge_sdk.errors import ConfigError, LabError
    from edge_sdk.keys import CurveKeys

    keys = CurveKeys.load_both(key, server_key)
    if (keys is None) != (device_keys is None):
        raise ConfigError("--device-keys goes with --key and --server-key: with CURVE on, each device has its own key")
    theirs = None
    if device_keys is not None and server_key is not None:
        theirs = DeviceKeys(folder=device_keys, server_key=server_key)
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    plan = load_fleet(fleet, directories)
    endpoint = server or plan.server or DEFAULT_SERVER
    folder = Home.at(home).path / "lab"
    died = 0
    with contextlib.ExitStack() as stack:
        channel = stack.enter_context(Channel(endpoint, keys=keys))
        devices = stack.enter_context(Lab(plan, server=endpoint, folder=folder, keys=theirs))
        for device in devices.devices:
            click.echo(device.describe(), err=True)
        for reference in sorted({p.profile.reference for p in plan.devices if p.profile.reference is not None}):
            click.echo(f"This machine stands for the reference of the profiles: {reference}", err=True)
        devices.start(channel)
        devices.wait_until_registered(channel, stopping=stopping)
        if not stopping.is_set():
            click.echo(f"ready: {len(devices.devices)} emulated devices are registered at {endpoint}", err=True)
            if ready_file is not None:
                ids = [device.device_id for device in devices.devices]
                ready_file.write_text(json.dumps({"server": endpoint, "devices": ids}) + "\n")
        while not stopping.wait(WATCH_S):
            for death in devices.new_deaths():
                died += 1
                click.echo(f"error: {death}", err=True)
            if devices.alive == 0:
                raise LabError("no device is left")
    if died:
        raise LabError(f"{died} of {len(plan.devices)} devices died while the lab ran")
