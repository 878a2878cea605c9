"""`splitfleet keys`: make keys for CURVE, and tell the server which ones it allows.

A secret key is made on the machine that uses it and never leaves its file; none is ever printed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cloud_server.cli.output import json_option

if TYPE_CHECKING:
    from cloud_server.allow_list import AllowList
    from edge_sdk.keys import KeyFile

home_option = click.option(
    "--home",
    type=click.Path(file_okay=False, path_type=Path),
    help="Home folder of the server.  [default: $SPLITFLEET_HOME or the user's data folder]",
)


@click.group()
def keys() -> None:
    """Keys for CURVE: who a device or an operator is to a server, and the other way round."""


@keys.group()
def server() -> None:
    """The key of this server."""


@server.command("new")
@home_option
@json_option
def new_server(home: Path | None, as_json: bool) -> None:
    """Make the key of this server, for 'splitfleet serve --key'. Devices and operators get its public part."""
    from cloud_server.home import Home
    from edge_sdk.keys import write_key_pair

    folder = Home.at(home).keys
    _tell_made(folder, write_key_pair(folder, "server", role="server"), as_json=as_json)


@keys.group()
def device() -> None:
    """Keys of devices: each belongs to one device id, and may register, infer and fetch."""


@keys.group()
def operator() -> None:
    """Keys of operators: they may allocate, upload, load tails and call devices."""


def _add_commands(group: click.Group, role: str, what: str) -> None:
    @group.command()
    @click.argument("name", metavar=what)
    @click.option(
        "--out",
        type=click.Path(file_okay=False, path_type=Path),
        default=Path(),
        help="Folder for the two files.  [default: this one]",
    )
    @json_option
    def new(name: str, out: Path, as_json: bool) -> None:
        from edge_sdk.keys import write_key_pair

        _tell_made(out, write_key_pair(out, name, role=role), as_json=as_json)

    new.help = f"Make a key pair on the machine of the {role} that uses it."

    @group.command("list")
    @home_option
    @json_option
    def list_keys(home: Path | None, as_json: bool) -> None:
        from cloud_server.cli.output import make_table, print_json, stdout

        allowed = [holder for holder in _allow_list(home).all() if holder.role == role]
        if as_json:
            print_json({"keys": [_document(holder) for holder in allowed]})
            return
        table = make_table(role, "fingerprint", "public key", text=(role,))
        for holder in allowed:
            table.add_row(holder.name, holder.fingerprint, holder.public)
        stdout().print(table)

    list_keys.help = f"List the {role} keys that the server allows."

    @group.command()
    @click.argument("public", metavar="FILE.pub", type=click.Path(dir_okay=False, path_type=Path))
    @click.option("--name", metavar=what, help=f"Whose key it is, {what}.  [default: what the file says]")
    @home_option
    @json_option
    def allow(public: Path, name: str | None, home: Path | None, as_json: bool) -> None:
        from cloud_server.allow_list import Holder, Role
        from cloud_server.cli.output import print_json
        from edge_sdk.errors import ConfigError
        from edge_sdk.keys import check_key_name, read_public

        found = read_public(public)
        if found.role not in (role, ""):
            raise ConfigError(f"{public} is a key for the role {found.role!r}, not for {role!r}")
        if not (name or found.name):
            raise ConfigError(f"{public} does not say whose key it is: add --name")
        holder = Holder(name=check_key_name(name or found.name), role=Role(role), public=found.public)
        allow_list = _allow_list(home)
        new = allow_list.allow(holder)
        count = sum((each.name, each.role) == (holder.name, holder.role) for each in allow_list.all())
        if as_json:
            print_json(_document(holder) | {"new": new})
        state = "is allowed from now on" if new else "was allowed before"
        others = f"; {count} keys are allowed for it, 'revoke' takes the old ones away" if count > 1 else ""
        click.echo(f"{role} {holder.name}: key {holder.fingerprint} {state}{others}", err=True)

    allow.help = f"Allow the key of a {role}, also at a server that runs."

    @group.command()
    @click.argument("key", metavar=f"{what}|FINGERPRINT")
    @home_option
    @json_option
    def revoke(key: str, home: Path | None, as_json: bool) -> None:
        from cloud_server.allow_list import Role
        from cloud_server.cli.output import print_json

        revoked = _allow_list(home).revoke(Role(role), key)
        if as_json:
            print_json({"revoked": [_document(holder) for holder in revoked]})
        for holder in revoked:
            click.echo(f"{role} {holder.name}: key {holder.fingerprint} is not allowed any more", err=True)

    revoke.help = f"Revoke keys of a {role}: a server that runs refuses them at once."


_add_commands(device, "device", "DEVICE-ID")
_add_commands(operator, "operator", "NAME")


def _allow_list(home: Path | None) -> AllowList:
    from cloud_server.allow_list import AllowList
    from cloud_server.home import Home

    return AllowList(Home.at(home).allowed_keys)


def _document(holder: Any) -> dict[str, Any]:
    return {
        "name": holder.name,
        "role": holder.role.value,
        "fingerprint": holder.fingerprint,
        "public_key": holder.public,
    }


def _tell_made(folder: Path, made: KeyFile, *, as_json: bool) -> None:
    from cloud_server.cli.output import print_json
    from edge_sdk.keys import PUBLIC_SUFFIX, SECRET_SUFFIX

    secret, public = (folder / f"{made.name}{suffix}" for suffix in (SECRET_SUFFIX, PUBLIC_SUFFIX))
    if as_json:
        print_json(
            {
                "name": made.name,
                "role": made.role,
                "public_key": made.public,
                "secret_file": str(secret),
                "public_file": str(public),
            }
        )
    else:
        click.echo(public)
    follow = (
        f"give {public.name} to devices and operators, and serve with --key {secret}"
        if made.role == "server"
        else f"'splitfleet keys {made.role} allow {public.name}' at the server allows it"
    )
    click.echo(f"{secret} is secret and stays here; {follow}", err=True)
