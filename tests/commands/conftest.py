"""The files that users bring, made once a session, and the command line to bring them with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cloud_server.cli import cli
from edge_sdk.errors import SplitfleetError

# For the tests and, since a spawned process inherits the path, for the workers.
sys.path.append(str(Path(__file__).parent / "library"))
sys.path.append(str(Path(__file__).parents[1] / "edge" / "library"))

Splitfleet = Callable[..., Result]


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and labelled sets, see `tiny_models`."""
    from tiny_models import make_files

    folder = tmp_path_factory.mktemp("files")
    make_files(folder)
    return folder


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home that the tests of a session share: what one test converted, another finds in the cache."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def bundle(files: Path, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The narrow model cut after its pooling, by a real process."""
    folder = tmp_path_factory.mktemp("bundles") / "deep" / "bundle"
    program = "from cloud_server.cli import main; main()"
    command = ["split", files / "narrow.keras", "--cut", "pool", "--calibration", files / "calibration.npz"]
    result = subprocess.run(
        [sys.executable, "-c", program, *map(str, command), "--out", folder, "--home", home, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["bundle"] == str(folder)
    assert "building the bundle" in result.stderr
    return folder


@pytest.fixture
def splitfleet(home: Path, tmp_path: Path) -> Splitfleet:
    """The command line, with the shared cache and a registry of the test's own."""

    def invoke(*arguments: object, registry: Path = tmp_path / "registry.db") -> Result:
        options = ["--home", str(home), "--registry", f"sqlite:///{registry}"]
        return CliRunner().invoke(cli, [*map(str, arguments), *options])

    return invoke


@pytest.fixture
def document(splitfleet: Splitfleet) -> Callable[..., Any]:
    """What a command prints with ``--json``, which must be all that is on stdout."""

    def invoke(*arguments: object, exit_code: int = 0) -> Any:
        result = splitfleet(*arguments, "--json")
        assert result.exit_code == exit_code, result.output
        return json.loads(result.stdout)

    return invoke


@pytest.fixture
def error(splitfleet: Splitfleet) -> Callable[..., str]:
    """What a command that fails says, with nothing on stdout."""

    def invoke(*arguments: object) -> str:
        result = splitfleet(*arguments)
        assert result.stdout == ""
        if isinstance(result.exception, SplitfleetError):
            return result.exception.message
        assert result.exit_code == 2, (result.output, result.exception)
        return result.stderr

    return invoke
