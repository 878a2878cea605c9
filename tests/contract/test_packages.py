"""What the packages promise to each other and to a device that installs them."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"edge_sdk", "device_profiles", "converters", "zoo_keras", "cloud_server"}
WHEEL_LIMIT_BYTES = 15_000_000


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_imports_run_one_way() -> None:
    result = run(str(Path(sys.executable).with_name("lint-imports")))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    result = run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    assert result.returncode == 0, result.stderr
    (path,) = folder.glob("splitfleet-*.whl")
    return path


def test_the_wheel_holds_just_the_five_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == PACKAGES
    for package in PACKAGES:
        assert f"{package}/py.typed" in names
    assert wheel.stat().st_size < WHEEL_LIMIT_BYTES


def test_the_wheel_holds_the_data_that_the_code_reads(wheel: Path) -> None:
    """Every file under the packages that git tracks is in the wheel."""
    tracked = set(run("git", "ls-files", "--", *sorted(PACKAGES)).stdout.split())
    with zipfile.ZipFile(wheel) as archive:
        missing = tracked - set(archive.namelist())
    assert not missing


def test_without_extras_no_tensorflow_is_required(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    plain = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    required = {line.split()[1].rstrip(";").split(">")[0].split("=")[0].split("<")[0].lower() for line in plain}
    assert required == {"click", "msgpack", "numpy", "pyzmq", "ai-edge-litert", "tflite-runtime"}
