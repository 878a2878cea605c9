"""The lab with stand-ins for the agent: started, watched, stopped, and never left behind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cloud_server.lab.fleet_file import Fleet, load_fleet
from cloud_server.lab.lab import Lab
from cloud_server.lab.limits import DataLimits

pytestmark = pytest.mark.usefixtures("no_group_is_left")

Until = Callable[[Callable[[], object]], None]
IsRunning = Callable[[int], bool]
SERVER = "tcp://127.0.0.1:9"

# Says what it was called with, and then lives until it is told to end.
OBEDIENT = """
import json, os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print(json.dumps({"pid": os.getpid(), "arguments": sys.argv[1:]}), flush=True)
signal.pause()
"""
STUBBORN = OBEDIENT.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN").replace("signal.pause()", "signal.sigwait([])")
STUBBORN = STUBBORN.replace("signal.sigwait([])", "\nwhile True: signal.pause()")
DYING = "import sys; print('line one'); print('no head can be loaded'); sys.exit(3)"
HUNGRY = "data = bytearray(300_000_000)"


def fleet(folder: Path, count: int = 2) -> Fleet:
    devices = [
        {"id": f"device-{number}", "profile": "raspberry-pi-zero-2-w", "ram": "128MB", "model_ram_bytes": "150kB"}
        for number in range(count)
    ]
    path = folder / "fleet.yaml"
    path.write_text(json.dumps({"schema_version": 1, "devices": devices}))
    return load_fleet(path)


def lab(folder: Path, code: str, count: int = 2, **options: object) -> Lab:
    agent = (sys.executable, "-c", code)
    return Lab(fleet(folder, count), server=SERVER, folder=folder / "lab", agent=agent, **options)  # type: ignore[arg-type]


def said(device_log: Path) -> dict[str, object]:
    return json.loads(device_log.read_text())  # type: ignore[no-any-return]


def test_each_device_is_a_process_with_its_profile_and_its_labels(
    tmp_path: Path, until: Until, is_running: IsRunning
) -> None:
    with lab(tmp_path, OBEDIENT) as running:
        running.start()
        for device in running.devices:
            until(lambda device=device: device.log_path.read_text().endswith("\n"))
        first, second = (said(device.log_path) for device in running.devices)
        assert running.alive == 2
        arguments = first["arguments"]
        assert isinstance(arguments, list)
        options = dict(zip(arguments[::2], arguments[1::2], strict=True))
        assert options["--device-id"] == "device-0"
        assert options["--profile"] == "raspberry-pi-zero-2-w"
        assert options["--model-ram"] == "150000"
        assert options["--store"] == str(tmp_path / "lab" / "device-0" / "store")
        # The device goes through its own link, not straight to the server.
        assert options["--server"] not in (SERVER, second["arguments"][1])  # type: ignore[index]
        emulation = json.loads(options["--emulation"])
        assert emulation["cpu_slowdown"] == 4.8
        assert emulation["cpu"] == "4.8 × the time of this machine by sleep"
        assert emulation["link"] == "36/36 Mbit/s up/down, RTT 5 ms by a proxy"
        assert emulation["ram"].startswith("128 MB by ")
        pids = [int(str(text["pid"])) for text in (first, second)]
        assert all(is_running(pid) for pid in pids)
    assert not any(is_running(pid) for pid in pids)
    assert running.alive == 0


def test_what_is_emulated_and_what_is_not_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    with lab(tmp_path, OBEDIENT, 1, open_limits=DataLimits) as running:
        assert running.devices[0].describe() == (
            "device-0 (raspberry-pi-zero-2-w), emulated: RAM 128 MB by RLIMIT_DATA, not RSS; "
            "CPU 4.8 × the time of this machine by sleep; link 36/36 Mbit/s up/down, RTT 5 ms by a proxy. "
            "Memory for a model: 150 kB. Not emulated: 3 cores instead of 4; x86_64 instead of aarch64."
        )


def test_more_ram_than_this_machine_has_is_not_called_emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloud_server.lab.devices._ram_bytes", lambda: 100_000_000)
    with lab(tmp_path, OBEDIENT, 1, open_limits=DataLimits) as running:
        assert running.devices[0].labels()["ram"] == ""
        assert "Not emulated: the 128 MB of RAM, here are 100 MB; " in running.devices[0].describe()


def test_a_device_that_does_not_end_is_killed(
    tmp_path: Path, until: Until, monkeypatch: pytest.MonkeyPatch, is_running: IsRunning
) -> None:
    monkeypatch.setattr("cloud_server.lab.lab.GRACE_S", 0.2)
    with lab(tmp_path, STUBBORN) as running:
        running.start()
        until(lambda: all(device.log_path.read_text() for device in running.devices))
        pids = [device.child.pid for device in running.devices if device.child is not None]
    assert not any(is_running(pid) for pid in pids)


def test_a_death_is_told_once_with_the_end_of_the_log(tmp_path: Path, until: Until) -> None:
    with lab(tmp_path, DYING) as running:
        running.start()
        until(lambda: running.alive == 0)
        deaths = running.new_deaths()
        assert len(deaths) == 2
        assert deaths[0].startswith("device device-0 ended with exit code 3; the end of ")
        assert deaths[0].endswith("line one\nno head can be loaded")
        assert running.new_deaths() == []


def test_a_device_that_needs_more_than_its_ram_dies_of_it(tmp_path: Path, until: Until) -> None:
    with lab(tmp_path, HUNGRY, 1) as running:
        running.start()
        until(lambda: running.alive == 0)
        death = running.new_deaths()[0]
        assert "MemoryError" in death or "was killed by SIGKILL: it needed more than its RAM, 128 MB" in death


def test_no_device_outlives_a_lab_that_is_killed(tmp_path: Path, until: Until, is_running: IsRunning) -> None:
    fleet(tmp_path)
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from cloud_server.lab.fleet_file import load_fleet\n"
        "from cloud_server.lab.lab import Lab\n"
        f"folder = Path({str(tmp_path)!r})\n"
        f"lab = Lab(load_fleet(folder / 'fleet.yaml'), server={SERVER!r}, folder=folder / 'lab',\n"
        f"          agent=(sys.executable, '-c', {OBEDIENT!r}))\n"
        "lab.start()\n"
        "import signal; signal.pause()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    logs = [tmp_path / "lab" / f"device-{number}" / "device.log" for number in range(2)]
    try:
        until(lambda: all(log.exists() and log.read_text().endswith("\n") for log in logs))
        pids = [int(str(said(log)["pid"])) for log in logs]
        assert all(is_running(pid) for pid in pids)
    finally:
        process.kill()
        process.wait()
    until(lambda: not any(is_running(pid) for pid in pids))
    # The cgroups of the killed lab go when the next one starts.
    with lab(tmp_path, OBEDIENT, 1):
        pass


def test_a_lab_that_cannot_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloud_server.lab.devices.LinkProxy", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lab(tmp_path, OBEDIENT)


def test_no_server_is_told_before_anything_is_started(tmp_path: Path) -> None:
    fleet(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    command = [sys.executable, "-c", "from cloud_server.cli import main; main()", "lab", "run", "fleet.yaml"]
    command += ["--server", f"tcp://127.0.0.1:{port}", "--home", "home"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=_environment())
    assert result.returncode == 4
    assert result.stdout == ""
    assert result.stderr.startswith("error: no splitfleet peer answers")
    assert not (tmp_path / "home" / "lab").exists()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
