"""Profiles: the shipped files, what is refused and where, and the user's own directories."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import device_profiles
from cloud_server.cli.profiles import profiles
from device_profiles.document import MAX_DEPTH, MAX_FILE_BYTES, read_document
from device_profiles.loader import SHIPPED
from edge_sdk.commands import detect
from edge_sdk.errors import ConfigError

GOOD = """\
schema_version: 1
name: board
title: A board
ram: 512MB
model_ram_share: 0.25
cores: 4
architecture: aarch64
runtime: litert
cpu_slowdown: 5
reference: some core
link:
  uplink_mbit_s: 10
  downlink_mbit_s: 20.5
  rtt_ms: 5
"""


@pytest.fixture(autouse=True)
def _no_directories_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPLITFLEET_PROFILES", raising=False)


def write(folder: Path, text: str, name: str = "board.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        device_profiles.load(write(folder, text))
    return caught.value.message


@pytest.mark.parametrize("name", device_profiles.names())
def test_shipped_profile(name: str) -> None:
    profile = device_profiles.load(name)
    assert profile.name == name
    assert profile.link is not None
    assert 0 < profile.memory_budget_bytes < profile.ram_bytes


@pytest.mark.parametrize("name", device_profiles.names())
def test_every_fact_has_its_source_above_it(name: str) -> None:
    lines = (SHIPPED / f"{name}.yaml").read_text().splitlines()
    for key in ("ram", "model_ram_share", "cores", "cpu_slowdown", "reference", "architecture", "runtime", "rtt_ms"):
        number = next(number for number, line in enumerate(lines) if line.strip().startswith(f"{key}:"))
        assert lines[number - 1].strip().startswith("# "), key


def test_shipped_profiles_cover_the_boards_and_share_one_reference() -> None:
    names = device_profiles.names()
    assert {
        "camera-256mb",
        "jetson-agx-orin",
        "jetson-nano",
        "jetson-orin-nano",
        "raspberry-pi-3b-plus",
        "raspberry-pi-4-2gb",
        "raspberry-pi-4-4gb",
        "raspberry-pi-4-8gb",
        "raspberry-pi-5-8gb",
        "raspberry-pi-zero-2-w",
    } <= set(names)
    assert len({device_profiles.load(name).reference for name in names}) == 1


def test_fields(tmp_path: Path) -> None:
    profile = device_profiles.load(write(tmp_path, GOOD))
    assert profile.ram_bytes == 512_000_000
    assert profile.memory_budget_bytes == 128_000_000
    assert profile.link == device_profiles.Link(uplink_mbit_s=10, downlink_mbit_s=20.5, rtt_ms=5)


def test_model_ram_bytes_wins_over_the_share(tmp_path: Path) -> None:
    profile = device_profiles.load(write(tmp_path, GOOD + "model_ram_bytes: 64kB\n"))
    assert profile.memory_budget_bytes == 64_000


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "reason"),
    [
        ("ram: 512MB", "ram: -512MB", 4, "ram", "'-512MB' is not a size"),
        ("ram: 512MB", "ram: -5", 4, "ram", "greater than 0, received -5"),
        ("ram: 512MB", "ram: 0MB", 4, "ram", "greater than 0"),
        ("ram: 512MB", "ram: 512Mb", 4, "ram", "'512Mb' is not a size"),
        ("ram: 512MB", "ram: true", 4, "ram", "valid integer, received true"),
        ("ram: 512MB", "ram:", 4, "ram", "received null"),
        ("cores: 4", "corse: 4", 6, "corse", "did you mean 'cores'?"),
        ("cores: 4", "cores: '4'", 6, "cores", 'received "4"'),
        ("cores: 4", "cores: 4.5", 6, "cores", "received 4.5"),
        ("schema_version: 1", "schema_version: 2", 1, "schema_version", "expected 1, received 2"),
        ("name: board", "name: A Board", 2, "name", "match pattern"),
        ("model_ram_share: 0.25", "model_ram_share: 25", 5, "model_ram_share", "less than or equal to 1"),
        ("runtime: litert", "runtime: onnx", 8, "runtime", 'received "onnx"'),
        ("  rtt_ms: 5", "  rtt_ms: .nan", 14, "link.rtt_ms", "received NaN"),
        ("  rtt_ms: 5", "  rtt_ms: -1", 14, "link.rtt_ms", "received -1"),
        ("  rtt_ms: 5", "  rtt: 5", 14, "link.rtt", "did you mean 'rtt_ms'?"),
        ("  rtt_ms: 5\n", "", 11, "link.rtt_ms", "is missing"),
        ("title: A board\n", "", 1, "title", "is missing"),
        ("cores: 4", "ram: 1GB", 6, "ram", "twice; the first is in line 4"),
    ],
)
def test_refusal_names_file_line_and_key(tmp_path: Path, old: str, new: str, line: int, key: str, reason: str) -> None:
    assert old in GOOD
    message = refusal(tmp_path, GOOD.replace(old, new))
    complaint = next(part for part in message.splitlines() if f"key {key!r}" in part)
    assert complaint.startswith(f"{tmp_path / 'board.yaml'}, line {line}, key {key!r}: ")
    assert reason in complaint


def test_several_mistakes_come_at_once_in_the_order_of_lines(tmp_path: Path) -> None:
    message = refusal(tmp_path, GOOD.replace("512MB", "half").replace("cores: 4", "cores: 0"))
    assert [part.split("key ")[1].split(":")[0] for part in message.splitlines()] == ["'ram'", "'cores'"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "received null"),
        ("- a\n- b\n", "an object"),
        ("just text", "an object"),
        ("a: [1, 2\nb: 3\n", "line 2: not valid YAML"),
        ("a: &x [*x]\n", "nested too deeply"),
        ("[" * 100_000, "nested too deeply"),
        ("{a: " * 5_000, "nested too deeply"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("\x00", "not valid YAML"),
        ("? [1, 2]\n: 3\n", "unhashable key"),
        ("2024-01-01: 3\n", "a key of a map must be"),
        ("a: !!python/object/apply:os.system ['true']\n", "line 1: not valid YAML"),
        ("a: " + "[" * (MAX_DEPTH + 5) + "]" * (MAX_DEPTH + 5), "nested too deeply"),
        (
            "a: &a [1,1,1,1,1,1,1,1,1]\n"
            + "".join(
                f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdef", "bcdefg", strict=True)
            ),
            "too large",
        ),
        ("#" * (MAX_FILE_BYTES + 1), "at most"),
    ],
)
def test_what_is_no_profile_at_all(tmp_path: Path, text: str, reason: str) -> None:
    assert reason in refusal(tmp_path, text)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        device_profiles.load(tmp_path / "none.yaml")


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "any.yaml"
    path.write_bytes(data)
    with contextlib.suppress(ConfigError):
        read_document(path)


def test_budget_above_the_ram_is_refused(tmp_path: Path) -> None:
    assert "exceeds ram" in refusal(tmp_path, GOOD + "model_ram_bytes: 1GB\n")


def test_slowdown_without_reference_is_refused(tmp_path: Path) -> None:
    assert "come together" in refusal(tmp_path, GOOD.replace("reference: some core\n", ""))


def test_json_is_read_too(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps(yaml.safe_load(GOOD), indent=2), "board.json")
    assert device_profiles.load(path) == device_profiles.load(write(tmp_path, GOOD))


def test_a_profile_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        device_profiles.load("jetson-nano").cores = 8  # type: ignore[misc]


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"no profile 'pi'.*jetson-nano.*raspberry-pi-zero-2-w"):
        device_profiles.load("pi")


def test_a_users_file_shadows_a_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = GOOD.replace("name: board", "name: jetson-nano").replace("A board", "Mine")
    write(tmp_path, own, "jetson-nano.yaml")
    first = tmp_path / "first"
    first.mkdir()
    write(first, GOOD)
    assert device_profiles.load("jetson-nano").title != "Mine"
    monkeypatch.setenv("SPLITFLEET_PROFILES", f"{first}:{tmp_path}")
    assert device_profiles.load("jetson-nano").title == "Mine"
    assert "board" in device_profiles.names()
    write(first, own.replace("Mine", "Nearer"), "jetson-nano.yml")
    assert device_profiles.load("jetson-nano").title == "Nearer"
    assert device_profiles.load("jetson-nano", [tmp_path]).title == "Mine"


def test_a_directory_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no directory with profiles"):
        device_profiles.names([tmp_path / "none"])


def test_a_name_must_be_that_of_its_file(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "other.yaml")
    with pytest.raises(ConfigError, match=r"line 2, key 'name': must be the file's name, 'other'; received 'board'"):
        device_profiles.load("other", [tmp_path])


def test_commands(tmp_path: Path) -> None:
    runner = CliRunner()
    listed = runner.invoke(profiles, ["list", "--json"])
    assert [entry["name"] for entry in json.loads(listed.stdout)["profiles"]] == device_profiles.names()
    assert "raspberry-pi-5-8gb" in runner.invoke(profiles, ["list"]).stdout
    shown = runner.invoke(profiles, ["show", "jetson-nano"])
    path = write(tmp_path, shown.stdout, "shown.yaml")
    assert device_profiles.load(path) == device_profiles.load("jetson-nano")
    assert json.loads(runner.invoke(profiles, ["show", "jetson-nano", "--json"]).stdout)["ram"] == 4_000_000_000
    checked = runner.invoke(profiles, ["validate", str(path)])
    assert (checked.exit_code, checked.stdout) == (0, f"{path}: ok\n")


def test_what_the_device_detects_of_itself_is_a_profile(tmp_path: Path) -> None:
    detected = CliRunner().invoke(detect, [])
    profile = device_profiles.load(write(tmp_path, detected.stdout, "detected.json"))
    assert profile.ram_bytes > 0
    # How fast it is and how it is connected, it cannot know.
    assert profile.cpu_slowdown is profile.link is None


def test_validate_goes_through_all_files(tmp_path: Path) -> None:
    bad, good = write(tmp_path, GOOD + "colour: red\n", "bad.yaml"), write(tmp_path, GOOD)
    result = CliRunner().invoke(profiles, ["validate", str(bad), str(good)])
    assert isinstance(result.exception, ConfigError)
    assert "line 15, key 'colour'" in result.stderr
    assert f"{good}: ok" in result.stdout
    result = CliRunner().invoke(profiles, ["validate", "--json", str(bad), str(good)])
    assert [entry["ok"] for entry in json.loads(result.stdout)["files"]] == [False, True]
