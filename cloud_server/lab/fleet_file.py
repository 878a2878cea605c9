"""``fleet.yaml``: which devices a lab emulates. What is wrong in it is named with file, line and key."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

import device_profiles
from device_profiles.document import Document, Size, StrictModel, read_document
from device_profiles.loader import SUFFIXES
from device_profiles.schema import Link, PositiveMbit, Profile, RoundTripMs
from edge_sdk.errors import ConfigError

MAX_DEVICES = 100
ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
ENDPOINT_PATTERN = r"^tcp://[^/\s]+:\d{1,5}$"


class LinkOverride(StrictModel):
    """What differs from the link of the profile."""

    uplink_mbit_s: PositiveMbit | None = None
    downlink_mbit_s: PositiveMbit | None = None
    rtt_ms: RoundTripMs | None = None


class FleetDevice(StrictModel):
    """One device: a profile and what differs from it."""

    id: Annotated[str, Field(pattern=ID_PATTERN)]
    profile: Annotated[str, Field(min_length=1)]
    ram_bytes: Annotated[Size | None, Field(alias="ram")] = None
    model_ram_bytes: Size | None = None
    link: LinkOverride | None = None


class FleetFile(StrictModel):
    """The whole file."""

    schema_version: Literal[1]
    server: Annotated[str, Field(pattern=ENDPOINT_PATTERN)] | None = None
    devices: tuple[FleetDevice, ...]


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """One device to emulate; ``profile`` is the named one with the device's own facts put in."""

    device_id: str
    profile: Profile


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The devices of a lab, and the server that the file names."""

    server: str | None
    devices: tuple[DevicePlan, ...]


def load_fleet(path: Path | str, directories: Iterable[Path | str] = ()) -> Fleet:
    """Read ``path``; profiles are searched in ``directories`` first, one given as a file relative to the fleet file.

    Raises :class:`ConfigError` naming file, line and key.
    """
    document = read_document(path)
    content = document.build(FleetFile)
    if not 1 <= len(content.devices) <= MAX_DEVICES:
        text = f"expected 1 to {MAX_DEVICES} devices, received {len(content.devices)}"
        raise ConfigError(document.complaint(("devices",), text))
    directories = tuple(directories)
    seen: dict[str, int] = {}
    plans = []
    for number, device in enumerate(content.devices):
        place = ("devices", number, "id")
        if device.id in seen:
            raise ConfigError(
                document.complaint(place, f"{device.id!r} is there twice; the first is in line {seen[device.id]}")
            )
        seen[device.id] = document.line(place)
        plans.append(DevicePlan(device_id=device.id, profile=_profile(document, number, device, directories)))
    return Fleet(server=content.server, devices=tuple(plans))


def _profile(document: Document, number: int, device: FleetDevice, directories: tuple[Path | str, ...]) -> Profile:
    name: str | Path = device.profile
    if "/" in device.profile or device.profile.endswith(SUFFIXES):
        name = document.path.parent / device.profile
    try:
        profile = device_profiles.load(name, directories)
    except ConfigError as error:
        raise ConfigError(document.complaint(("devices", number, "profile"), error.message)) from None
    changes: dict[str, object] = {}
    if device.ram_bytes is not None:
        changes["ram_bytes"] = device.ram_bytes
    if device.model_ram_bytes is not None:
        changes["model_ram_bytes"] = device.model_ram_bytes
    if device.link is not None:
        link = (profile.link.model_dump() if profile.link else {}) | device.link.model_dump(exclude_none=True)
        missing = sorted(set(Link.model_fields) - set(link))
        if missing:
            text = f"the profile has no link, so {', '.join(missing)} must be given too"
            raise ConfigError(document.complaint(("devices", number, "link"), text))
        changes["link"] = Link(**link)
    changed = profile.model_copy(update=changes)
    if changed.memory_budget_bytes > changed.ram_bytes:
        text = f"{changed.memory_budget_bytes} bytes exceed the RAM of the device, {changed.ram_bytes} bytes"
        raise ConfigError(document.complaint(("devices", number, "model_ram_bytes"), text))
    return changed
