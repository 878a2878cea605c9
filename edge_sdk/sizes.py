"""Sizes of memory as people write them: ``512MB`` is 512 × 10⁶ bytes, ``512MiB`` 512 × 2²⁰."""

from __future__ import annotations

import re

from edge_sdk.errors import ConfigError

UNITS = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}
# A number of bytes travels in 64 bits, and no machine has as many.
MAX_SIZE_BYTES = 2**63 - 1
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """Bytes of a size such as ``8MB``, ``1.5 GiB`` or ``4096``. Raises :class:`ConfigError` for anything else."""
    match = _PATTERN.fullmatch(text)
    unit = UNITS.get(match[2] or "B") if match else None
    if match is None or unit is None:
        raise ConfigError(
            f"{text[:80]!r} is not a size: expected a number and one of {', '.join(UNITS)}, such as '8MB' or '1.5GiB'"
        )
    size_bytes = float(match[1]) * unit
    if not size_bytes < MAX_SIZE_BYTES:
        raise ConfigError(f"{text[:80]!r} is too large for a size: expected less than 2^63 bytes, such as '8MB'")
    return round(size_bytes)


def format_need(size_bytes: int) -> str:
    """As :func:`format_size`, but rounded up: whoever gives that much gives enough."""
    step = 10 ** max(len(str(size_bytes)) - 3, 0)
    return format_size(-(-size_bytes // step) * step)


def format_size(size_bytes: float) -> str:
    """``size_bytes`` for people, in decimal units with three significant digits: ``12.3 kB``."""
    for unit in ("GB", "MB", "kB"):
        if abs(size_bytes) >= UNITS[unit]:
            return f"{size_bytes / UNITS[unit]:.3g} {unit}"
    return f"{size_bytes:.0f} B"
