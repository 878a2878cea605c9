"""What a device says of itself when it registers, checked before it is recorded, listed and reckoned with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from edge_sdk.errors import InvalidInputError
from edge_sdk.protocol import DEVICE_ID, DEVICE_ID_RULE, Register

# What the registry's columns hold.
MAX_INT = 2**63 - 1


def check_registration(registration: Register) -> None:
    """Raises :class:`InvalidInputError` for a value that no device can have."""
    device_id = registration.device_id
    if not DEVICE_ID.fullmatch(device_id):
        raise InvalidInputError(f"a device id has {DEVICE_ID_RULE}, got {device_id[:160]!r}")
    resources = registration.resources
    for name, value, least in (
        ("model_ram_bytes", registration.model_ram_bytes, 0),
        ("ram_bytes", resources.ram_bytes, 0),
        ("ram_available_bytes", resources.ram_available_bytes, 0),
        ("cores", resources.cores, 1),
    ):
        if not least <= value <= MAX_INT:
            raise InvalidInputError(f"device {device_id}: {name} must be {least} to 2**63 - 1, got {value}")
    for name, text in _texts(registration.to_body(), ""):
        # They end up on terminals.
        if not text.isprintable():
            shown = repr(text[:160])
            raise InvalidInputError(f"device {device_id}: {name} holds characters that cannot be printed: {shown}")
        if len(text) > 255:
            raise InvalidInputError(f"device {device_id}: {name} has {len(text)} characters, at most 255 are taken")


def _texts(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            inner = f"{name}.{key}" if name else str(key)
            yield f"a key of {name or 'the registration'}", str(key)
            yield from _texts(each, inner)
