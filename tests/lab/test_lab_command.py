"""``splitfleet lab run`` with the real server and the real agent, each a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("no_group_is_left")

Until = Callable[[Callable[[], object]], None]
SPLITFLEET = [sys.executable, "-c", "from cloud_server.cli import main; main()"]
FLEET = """\
schema_version: 1
devices:
  - {id: pi, profile: raspberry-pi-zero-2-w, model_ram_bytes: 60kB, link: {uplink_mbit_s: 2}}
  - {id: camera, profile: camera-256mb, model_ram_bytes: 20kB}
"""


@contextmanager
def command(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A ``splitfleet`` command with its stderr in ``<its name>.log``; it has ended when the block ends."""
    with (folder / f"{arguments[0]}.log").open("w") as log:
        process = subprocess.Popen([*SPLITFLEET, *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def server(tmp_path: Path, until: Until) -> Iterator[str]:
    ready = tmp_path / "server.json"
    with command(
        tmp_path, "serve", "--bind", "tcp://127.0.0.1:*", "--home", "home", "--ready-file", str(ready)
    ) as process:
        until(lambda: ready.exists() or process.poll() is not None)
        yield json.loads(ready.read_text())["endpoint"]
        process.send_signal(signal.SIGTERM)
        process.wait(30)


@contextmanager
def lab(folder: Path, server: str, until: Until) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """The lab, ready, and the process ids of its devices."""
    (folder / "fleet.yaml").write_text(FLEET)
    ready = folder / "lab.json"
    with command(
        folder, "lab", "run", "fleet.yaml", "--server", server, "--home", "home", "--ready-file", str(ready)
    ) as process:
        until(lambda: ready.exists() or process.poll() is not None)
        assert process.poll() is None, (folder / "lab.log").read_text()
        assert json.loads(ready.read_text()) == {"server": server, "devices": ["pi", "camera"]}
        yield process, children(process.pid)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_lab_registers_its_devices_and_stops_in_order(
    tmp_path: Path, server: str, until: Until, is_running: Callable[[int], bool]
) -> None:
    with lab(tmp_path, server, until) as (process, devices):
        assert len(devices) == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stdout is not None
        assert process.stdout.read() == ""
    assert not any(is_running(device) for device in devices)
    said = (tmp_path / "lab.log").read_text()
    assert "pi (raspberry-pi-zero-2-w), emulated: RAM 512 MB by " in said
    assert "CPU 4.8 × the time of this machine by sleep; link 2/36 Mbit/s up/down, RTT 5 ms by a proxy" in said
    assert f"ready: 2 emulated devices are registered at {server}" in said
    for device_id in ("pi", "camera"):
        assert "registered" in (tmp_path / "home" / "lab" / device_id / "device.log").read_text()


def test_a_second_lab_does_not_take_the_devices_of_the_first_for_its_own(
    tmp_path: Path, server: str, until: Until
) -> None:
    with lab(tmp_path, server, until) as (process, _):
        process.kill()
        process.wait(30)
    (tmp_path / "lab.json").unlink()
    # The server may well hold the first ones for online still.
    with lab(tmp_path, server, until) as (process, _):
        for device_id in ("pi", "camera"):
            assert "registered" in (tmp_path / "home" / "lab" / device_id / "device.log").read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_a_device_that_dies_is_told_and_the_others_go_on(
    tmp_path: Path, server: str, until: Until, is_running: Callable[[int], bool]
) -> None:
    with lab(tmp_path, server, until) as (process, devices):
        os.kill(devices[0], signal.SIGKILL)
        until(lambda: "error: device pi was killed by SIGKILL" in (tmp_path / "lab.log").read_text())
        assert process.poll() is None
        assert is_running(devices[1])
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 1
    assert not any(is_running(device) for device in devices)
    assert "error: 1 of 2 devices died while the lab ran" in (tmp_path / "lab.log").read_text()


def test_mistakes_in_the_fleet_file_end_in_one_line_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET.replace("2}", "-2}").replace("20kB", "20kb"))
    with command(tmp_path, "lab", "run", "fleet.yaml", "--home", "home") as process:
        assert process.wait(30) == 1
    said = (tmp_path / "lab.log").read_text().splitlines()
    assert said[0].startswith("error: fleet.yaml, line 3, key 'devices[0].link.uplink_mbit_s': expected greater than 0")
    assert said[1].startswith("fleet.yaml, line 4, key 'devices[1].model_ram_bytes': '20kb' is not a size")
    assert len(said) == 2
