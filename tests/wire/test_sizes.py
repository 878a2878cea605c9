from __future__ import annotations

import pytest

from edge_sdk.errors import ConfigError
from edge_sdk.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8MB", 8_000_000),
        ("1.5 GiB", 1_610_612_736),
        ("4096", 4096),
        ("12 B", 12),
        ("100kB", 100_000),
        (" 1KiB ", 1024),
    ],
)
def test_sizes_are_read(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "MB", "-8MB", "8 megabytes", "8Mb", "8mb", "1e3", "8 MB MB", "nan"])
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="such as '8MB'"):
        parse_size(text)


@pytest.mark.parametrize("text", ["9" * 400, "9" * 400 + "GiB", "9223372036854775807", "8589934592GiB"])
def test_a_size_that_no_machine_has_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="too large for a size"):
        parse_size(text)
    assert parse_size("8589934591GiB") < 2**63


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(0, "0 B"), (999, "999 B"), (12_345, "12.3 kB"), (8_000_000, "8 MB"), (2.5e9, "2.5 GB")]
)
def test_sizes_are_written_for_people(size_bytes: float, text: str) -> None:
    assert format_size(size_bytes) == text
