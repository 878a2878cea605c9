"""``fleet.yaml``: what it may say, and what is refused with file, line and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloud_server.lab.fleet_file import load_fleet
from device_profiles import Link, load
from edge_sdk.errors import ConfigError

GOOD = """\
schema_version: 1
server: tcp://127.0.0.1:5555
devices:
  - id: pi
    profile: raspberry-pi-zero-2-w
    ram: 256MB
    model_ram_bytes: 150kB
    link:
      uplink_mbit_s: 2
  - id: nano
    profile: jetson-nano
"""

OWN_PROFILE = """\
schema_version: 1
name: mine
title: Mine
ram: 64MB
model_ram_share: 0.5
cores: 1
architecture: armv7l
runtime: tflite-runtime
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "fleet.yaml"
    path.write_text(text)
    return path


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_fleet(write(folder, text))
    return caught.value.message


def test_a_device_is_its_profile_with_its_own_facts_put_in(tmp_path: Path) -> None:
    fleet = load_fleet(write(tmp_path, GOOD))
    assert fleet.server == "tcp://127.0.0.1:5555"
    pi, nano = fleet.devices
    assert (pi.device_id, pi.profile.name) == ("pi", "raspberry-pi-zero-2-w")
    assert (pi.profile.ram_bytes, pi.profile.memory_budget_bytes) == (256_000_000, 150_000)
    assert pi.profile.link == Link(uplink_mbit_s=2, downlink_mbit_s=36, rtt_ms=5)
    assert nano.profile == load("jetson-nano")


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "reason"),
    [
        ("id: nano", "id: pi", 10, "devices[1].id", "'pi' is there twice; the first is in line 4"),
        ("id: nano", "id: ../nano", 10, "devices[1].id", "match pattern"),
        ("profile: jetson-nano", "profile: jetson", 11, "devices[1].profile", "there is no profile 'jetson'"),
        ("profile: jetson-nano", "profil: jetson-nano", 11, "devices[1].profil", "did you mean 'profile'?"),
        ("profile: jetson-nano", "profile: ./none.yaml", 11, "devices[1].profile", "cannot be read"),
        ("uplink_mbit_s: 2", "uplink_mbits: 2", 9, "devices[0].link.uplink_mbits", "did you mean 'uplink_mbit_s'?"),
        ("uplink_mbit_s: 2", "uplink_mbit_s: 0", 9, "devices[0].link.uplink_mbit_s", "greater than 0, received 0"),
        ("ram: 256MB", "ram: 256M", 6, "devices[0].ram", "'256M' is not a size"),
        ("150kB", "1GB", 7, "devices[0].model_ram_bytes", "exceed the RAM of the device"),
        ("tcp://127.0.0.1:5555", "127.0.0.1:5555", 2, "server", "match pattern"),
        ("schema_version: 1", "schema_version: 2", 1, "schema_version", "expected 1"),
    ],
)
def test_refusal_names_file_line_and_key(tmp_path: Path, old: str, new: str, line: int, key: str, reason: str) -> None:
    assert old in GOOD
    message = refusal(tmp_path, GOOD.replace(old, new))
    complaint = next(part for part in message.splitlines() if f"key {key!r}" in part)
    assert complaint.startswith(f"{tmp_path / 'fleet.yaml'}, line {line}, key {key!r}: ")
    assert reason in complaint


def test_a_fleet_has_devices(tmp_path: Path) -> None:
    assert "line 2, key 'devices'" in refusal(tmp_path, "schema_version: 1\ndevices: []\n")
    assert "key 'devices': is missing" in refusal(tmp_path, "schema_version: 1\n")


def test_profiles_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.yaml").write_text(OWN_PROFILE)
    text = "schema_version: 1\ndevices:\n- {id: a, profile: own/mine.yaml}\n"
    assert load_fleet(write(tmp_path, text)).devices[0].profile.title == "Mine"
    text = text.replace("own/mine.yaml", "mine")
    assert load_fleet(write(tmp_path, text), [tmp_path / "own"]).devices[0].profile.title == "Mine"
    assert "there is no profile 'mine'" in refusal(tmp_path, text)


def test_a_link_put_on_a_profile_without_one_must_be_whole(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(OWN_PROFILE)
    text = "schema_version: 1\ndevices:\n- id: a\n  profile: mine.yaml\n  link: {uplink_mbit_s: 1, rtt_ms: 3}\n"
    assert "line 5, key 'devices[0].link': the profile has no link, so downlink_mbit_s must be" in refusal(
        tmp_path, text
    )
