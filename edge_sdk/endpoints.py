"""Endpoints as people write them: one to connect to, or one to listen at. Nothing is resolved or opened here."""

from __future__ import annotations

import re

from edge_sdk.errors import ConfigError

_CONNECT = re.compile(r"tcp://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%]+\]):(\d{1,5})|ipc://.+")
_BIND = re.compile(r"tcp://(?P<host>[^/\s]+):(?P<port>\*|\d{1,5})|ipc://.+")


def check_endpoint(endpoint: str) -> str:
    """``endpoint`` if one can connect to it. Raises :class:`ConfigError`."""
    match = _CONNECT.fullmatch(endpoint)
    if match is None or not 0 < int(match[1] or 1) < 2**16:
        raise ConfigError(f"{endpoint!r} is not an endpoint: expected one such as tcp://127.0.0.1:5555")
    return endpoint


def check_bind_endpoint(endpoint: str) -> str:
    """``endpoint`` if one can listen at it. Raises :class:`ConfigError`."""
    match = _BIND.fullmatch(endpoint)
    # ZeroMQ would take port 70000 for 4464.
    if match is None or ((match["port"] or "*") != "*" and int(match["port"]) >= 2**16):
        raise ConfigError(
            f"{endpoint!r} is no endpoint to bind to: expected tcp://ADDRESS:PORT (PORT may be *) or ipc://PATH"
        )
    return endpoint


def host_and_port(endpoint: str) -> tuple[str, str] | None:
    """Host and port of a TCP endpoint that one can listen at, ``None`` for another kind."""
    match = _BIND.fullmatch(endpoint)
    return None if match is None or match["host"] is None else (match["host"], match["port"])
