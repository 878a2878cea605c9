"""The demo: its fleet, how it starts and stops its commands, and (exhaustive) the whole of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cloud_server.lab import demo
from cloud_server.lab.fleet_file import load_fleet
from edge_sdk.errors import LabError

pytestmark = pytest.mark.usefixtures("no_group_is_left")

Until = Callable[[Callable[[], object]], None]
IsRunning = Callable[[int], bool]


def test_the_fleet_is_five_boards_with_budgets_of_their_own() -> None:
    fleet = load_fleet(demo.FLEET_FILE)
    profiles = [device.profile for device in fleet.devices]
    assert len({profile.name for profile in profiles}) == len(profiles) == 5
    assert sum(profile.name.startswith("raspberry-pi-") for profile in profiles) == 3
    assert sum(profile.name.startswith("jetson-") for profile in profiles) == 1
    assert [profile.ram_bytes for profile in profiles if profile.name.startswith("camera-")] == [256_000_000]
    assert len({profile.memory_budget_bytes for profile in profiles}) == 5


def server(folder: Path, bind: str = "tcp://127.0.0.1:*") -> tuple[list[str], dict[str, Path]]:
    arguments = ["serve", "--bind", bind, "--home", str(folder / "home")]
    return arguments, {"ready_file": folder / "ready.json", "log_path": folder / "serve.log"}


def test_a_command_runs_until_its_block_ends(tmp_path: Path, is_running: IsRunning) -> None:
    arguments, files = server(tmp_path)
    # What an earlier run has left must not pass for this one's.
    files["ready_file"].write_text('{"endpoint": "stale", "pid": 1}')
    with demo.running(arguments, **files) as ready:
        assert ready["endpoint"].startswith("tcp://127.0.0.1:")
        assert is_running(ready["pid"])
    assert not is_running(ready["pid"])

    def fail() -> None:
        with demo.running(arguments, **files) as again:
            ready.update(again)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not is_running(ready["pid"])


def test_a_command_that_does_not_start_is_told_with_its_log(tmp_path: Path) -> None:
    arguments, files = server(tmp_path, bind="nonsense")
    with (
        pytest.raises(LabError, match=r"splitfleet serve ended with exit code 2; the end of (?s:.*)nonsense"),
        demo.running(arguments, **files),
    ):
        pass


def test_an_interrupted_demo_leaves_nothing_running(tmp_path: Path, until: Until, is_running: IsRunning) -> None:
    command = [*demo.SPLITFLEET, "demo", "--home", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    ready = tmp_path / "lab.json"
    try:
        until(lambda: ready.exists() or process.poll() is not None)
        pids = descendants(process.pid)
        # The server, the lab and its five devices, at least.
        assert len(pids) >= 7
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60)[0] == ""
        assert process.returncode == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.communicate()
    until(lambda: not any(is_running(pid) for pid in pids))


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_the_whole_demo(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from cloud_server.cli import main; main()", "demo", "--json", "--home", "home"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=800)
    assert done.returncode == 0, done.stderr
    assert "would hold these small models whole" in done.stderr
    document = json.loads(done.stdout)
    allocation = document["allocation"]
    assert allocation["state"] == "accepted"
    devices = allocation["devices"]
    assert len(devices) == 5
    assert all(set(device["emulation"]) >= {"ram", "cpu", "link"} for device in devices)
    cuts = {(device["allocation"]["model"], device["allocation"]["cut"]["k"]) for device in devices}
    assert len(cuts) >= 3
    missed = [tuple(trial["missed"]) for device in devices for trial in device["trials"] if trial["state"] == "missed"]
    assert ("accuracy",) in missed
    assert ("latency",) in missed
    for device in devices:
        assert "cloud-only" in device["baselines"]
        cut = device["allocation"]["cut"]
        assert ("edge-only" in device["baselines"]) == (cut["k"] == cut["n"])
        assert device["allocation"]["float_accuracy"] > 0.89
    assert document["inferred_on"] in {device["device_id"] for device in devices}
    assert len(document["inferences"]) == 10
    for inference in document["inferences"]:
        assert inference["total_ms"] == pytest.approx(
            inference["edge_ms"] + inference["transfer_ms"] + inference["cloud_ms"]
        )
