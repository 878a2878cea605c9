"""`splitfleet profiles`: list, show and validate the facts of device kinds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cloud_server.cli.output import json_option

if TYPE_CHECKING:
    from device_profiles import Profile

DIRECTORIES_OPTION = click.option(
    "--profiles-dir",
    "directories",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Look here for profiles first; may be repeated. Then come $SPLITFLEET_PROFILES and the shipped ones.",
)


@click.group()
def profiles() -> None:
    """Device profiles: RAM, cores, speed and link of a kind of device."""


@profiles.command("list")
@DIRECTORIES_OPTION
@json_option
def list_profiles(directories: tuple[Path, ...], as_json: bool) -> None:
    """List all profiles."""
    import device_profiles
    from cloud_server.cli.output import make_table, print_json, stdout

    found = [device_profiles.load(name, directories) for name in device_profiles.names(directories)]
    if as_json:
        print_json({"profiles": [_document(profile) for profile in found]})
        return
    from edge_sdk.sizes import format_size

    figures = ("RAM", "model", "cores", "CPU ×", "up/down", "RTT ms")
    table = make_table("profile", *figures, right=figures)
    for profile in found:
        link = profile.link
        table.add_row(
            profile.name,
            format_size(profile.ram_bytes),
            format_size(profile.memory_budget_bytes),
            str(profile.cores),
            "" if profile.cpu_slowdown is None else f"{profile.cpu_slowdown:g}",
            "" if link is None else f"{link.uplink_mbit_s:g}/{link.downlink_mbit_s:g}",
            "" if link is None else f"{link.rtt_ms:g}",
        )
    stdout().print(table)
    click.echo("model: what a model may use; up/down: payload, Mbit/s; CPU ×: how many times longer than", err=True)
    for reference in sorted({profile.reference for profile in found if profile.reference is not None}):
        click.echo(f"  one core of: {reference}", err=True)


@profiles.command()
@click.argument("profile")
@DIRECTORIES_OPTION
@json_option
def show(profile: str, directories: tuple[Path, ...], as_json: bool) -> None:
    """Show one PROFILE, a name or a file."""
    import device_profiles
    from cloud_server.cli.output import print_json

    document = _document(device_profiles.load(profile, directories))
    if as_json:
        print_json(document)
        return
    import yaml

    click.echo(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), nl=False)


@profiles.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@json_option
def validate(files: tuple[Path, ...], as_json: bool) -> None:
    """Check profile FILES, YAML or JSON, and say what is wrong in which line."""
    import device_profiles
    from cloud_server.cli.output import print_json
    from edge_sdk.errors import ConfigError

    complaints: dict[Path, str | None] = {}
    for path in files:
        try:
            device_profiles.load(path)
            complaints[path] = None
        except ConfigError as error:
            complaints[path] = error.message
    if as_json:
        results = [{"file": str(path), "ok": text is None, "error": text} for path, text in complaints.items()]
        print_json({"files": results})
    else:
        for path, text in complaints.items():
            click.echo(f"{path}: ok" if text is None else text, err=text is not None)
    wrong = sum(text is not None for text in complaints.values())
    if wrong:
        raise ConfigError(f"{wrong} of {len(complaints)} files {'is' if wrong == 1 else 'are'} not valid")


def _document(profile: Profile) -> dict[str, Any]:
    """The profile as in its file, with sizes in bytes."""
    return profile.model_dump(by_alias=True, exclude_none=True)
