"""The home folder: where it is, and that it has one server and one demo at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cloud_server.home import Home
from edge_sdk.errors import ConfigError


def test_the_home_is_where_one_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITFLEET_HOME", str(tmp_path / "named"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert Home.at(tmp_path / "given").path == tmp_path / "given"
    assert Home.at().path == tmp_path / "named"
    monkeypatch.delenv("SPLITFLEET_HOME")
    assert Home.at().path == tmp_path / "data" / "splitfleet"


def test_a_home_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="name another with --home"):
        Home.at(tmp_path / "file" / "home")


def test_a_home_has_one_server_at_a_time(tmp_path: Path) -> None:
    home = Home.at(tmp_path)
    with home.claim("server"), home.claim("demo"), pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        home.claim("server").__enter__()
    with home.claim("server"):
        pass


@pytest.mark.parametrize("command", [["devices", "list"], ["allocations", "list"], ["allocations", "show"]])
def test_who_only_reads_makes_no_registry_where_there_is_none(tmp_path: Path, command: list[str]) -> None:
    """A home that is mistyped would look like one where nothing has happened."""
    mistyped = tmp_path / "hom"
    done = subprocess.run(
        [sys.executable, "-c", "from cloud_server.cli import main; main()", *command, "--home", str(mistyped)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: --home {mistyped} has no registry: ")
    assert not mistyped.exists()
