"""The commands over a registry in which two runs are told: what goes to stdout, and how they end."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from cloud_server.allocation.means import Means
from cloud_server.allocation.observer import Observer
from cloud_server.allocation.run import allocate, find_devices
from cloud_server.allocation.settings import AllocationSettings, Thresholds
from cloud_server.allocation.task_data import TaskData
from cloud_server.cli import cli
from cloud_server.cli.allocation_progress import AllocationProgress
from cloud_server.home import Home
from cloud_server.registry import Registry
from cloud_server.registry.records import RunState
from edge_sdk.errors import ConfigError, PeerUnreachableError, RegistryUnreachableError
from edge_sdk.protocol import DeviceState

Told = Callable[..., Any]


@pytest.fixture
def told(
    candidates: Any,
    registry: Registry,
    data: TaskData,
    make_fleet: Callable[..., Any],
    make_state: Callable[..., DeviceState],
) -> Told:
    """Make a run over two devices, one of them emulated, each with an accuracy of 0.9 and a latency of 20 ms."""

    def run(observer: Observer | None = None, **thresholds: Any) -> None:
        observer = observer or Observer()
        settings = AllocationSettings(task="t", thresholds=Thresholds(**thresholds), baselines=True)
        fleet = make_fleet(lambda *_: (0.9, 20.0), make_state("board", emulated=True), make_state("camera", budget=999))
        means = Means(
            settings=settings,
            fleet=fleet,
            candidates=candidates,
            registry=registry,
            data=data,
            observer=observer,
            abort=fleet.close,
        )
        allocate(means, find_devices(fleet, settings, observer, wait=False, endpoint="tcp://nowhere:1"))

    return run


@pytest.fixture
def splitfleet(tmp_path: Path) -> Callable[..., Result]:
    def invoke(*arguments: str) -> Result:
        url = f"sqlite:///{tmp_path / 'registry.db'}"
        return CliRunner().invoke(cli, [*arguments, "--home", str(tmp_path / "home"), "--registry", url])

    return invoke


def test_devices_are_listed(told: Told, splitfleet: Callable[..., Result]) -> None:
    told()
    table = splitfleet("devices", "list")
    assert table.exit_code == 0
    assert "board" in table.stdout
    assert "cpu" in table.stdout
    document = json.loads(splitfleet("devices", "list", "--json").stdout)
    assert [(each["device_id"], each["model_ram_bytes"]) for each in document["devices"]] == [
        ("board", 250),
        ("camera", 999),
    ]
    assert len(document["devices"][0]["bundle"]) == 64


def test_runs_are_listed_and_shown(told: Told, splitfleet: Callable[..., Result]) -> None:
    told()
    told(min_accuracy=0.99)
    document = json.loads(splitfleet("allocations", "list", "--json").stdout)
    assert [(each["run"], each["state"]) for each in document["runs"]] == [(2, "infeasible"), (1, "accepted")]
    assert [(each["device_id"], each["run"]) for each in document["active"]] == [("board", 1), ("camera", 1)]
    assert "infeasible: board, camera" in splitfleet("allocations", "list").stdout
    assert json.loads(splitfleet("allocations", "show", "--json").stdout)["run"] == 2
    assert json.loads(splitfleet("allocations", "show", "1", "--json").stdout)["state"] == "accepted"
    newest = splitfleet("allocations", "show").stdout
    assert "nearest miss" in newest
    assert "accuracy 0.9000 < 0.99" in newest


def test_the_table_says_what_is_emulated_and_what_does_not_fit(told: Told, splitfleet: Callable[..., Result]) -> None:
    told()
    table = splitfleet("allocations", "show", "1").stdout
    lines = [" ".join(line.split()) for line in table.splitlines()]
    assert any(line.startswith("board*, 1 trial ") for line in lines)
    assert any(line.startswith("200 B of 250 B, 80% layer_2 1.000") for line in lines)
    assert any(line.startswith("peak 5 kB 2 of 4, ") for line in lines)
    assert "edge-only needs 400 B:" in lines
    assert "edge-only all of it fits:" in lines
    assert "* emulated on this machine: cpu by sleep" in table
    assert "test set, with 95 % intervals: board 0.900 (0.769 to 0.960)" in table


def test_a_run_whose_allocator_was_killed_is_shown_as_interrupted(
    registry: Registry, splitfleet: Callable[..., Result]
) -> None:
    registry.start_run(AllocationSettings(task="t"), lease_s=10, now=datetime.now(UTC) - timedelta(seconds=60))
    document = json.loads(splitfleet("allocations", "list", "--json").stdout)
    assert [each["state"] for each in document["runs"]] == ["interrupted"]


@pytest.mark.parametrize("command", [("allocations", "show"), ("allocations", "show", "7")])
def test_a_run_that_is_not_there_is_told(splitfleet: Callable[..., Result], command: tuple[str, ...]) -> None:
    result = splitfleet(*command)
    assert isinstance(result.exception, ConfigError)
    assert "has no run" in result.exception.message
    assert result.stdout == ""


@pytest.mark.parametrize("run", ["99999999999999999999", "0", "one"])
def test_a_number_that_no_run_can_have_is_a_usage_error(splitfleet: Callable[..., Result], run: str) -> None:
    result = splitfleet("allocations", "show", run)
    assert result.exit_code == 2
    assert "RUN" in result.stderr


def test_a_registry_out_of_reach_ends_with_4(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'missing' / 'registry.db'}"
    result = CliRunner().invoke(cli, ["devices", "list", "--registry", url])
    assert isinstance(result.exception, RegistryUnreachableError)


def test_allocate_without_a_server_ends_with_4(splitfleet: Callable[..., Result]) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{bound.getsockname()[1]}"
        result = splitfleet("allocate", "--task", "fashion-mnist", "--server", endpoint)
    assert isinstance(result.exception, PeerUnreachableError)
    assert result.stdout == ""


def test_allocate_of_an_unknown_task_names_those_that_exist(splitfleet: Callable[..., Result]) -> None:
    result = splitfleet("allocate", "--task", "chess")
    assert isinstance(result.exception, ConfigError)
    assert "fashion-mnist" in result.exception.message


@pytest.mark.parametrize(
    "option",
    [
        ("--min-accuracy", "85"),
        ("--max-latency-ms", "0"),
        ("--redraw", "all"),
        ("--devices", "a,,b"),
        ("--latency-samples", "0"),
    ],
)
def test_a_wrong_option_is_a_usage_error(splitfleet: Callable[..., Result], option: tuple[str, str]) -> None:
    result = splitfleet("allocate", "--task", "fashion-mnist", *option)
    assert result.exit_code == 2
    assert option[0] in result.stderr


def test_sigterm_ends_a_run_as_ctrl_c_does(
    splitfleet: Callable[..., Result],
    candidates: Any,
    registry: Registry,
    data: TaskData,
    make_fleet: Callable[..., Any],
    make_state: Callable[..., DeviceState],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def terminated(device_id: str, model: str) -> tuple[float, float]:
        os.kill(os.getpid(), signal.SIGTERM)
        assert fleet.was_closed.wait(60)
        raise PeerUnreachableError(f"{device_id}, {model}: the channel is closed")

    def run_allocation(settings: AllocationSettings, *, home: Home, observer: Observer, **_: Any) -> Any:
        means = Means(
            settings=settings,
            fleet=fleet,
            candidates=candidates,
            registry=registry,
            data=data,
            observer=observer,
            abort=fleet.close,
        )
        assert home.path.is_dir()
        return allocate(means, find_devices(fleet, settings, observer, wait=False, endpoint="tcp://nowhere:1"))

    fleet = make_fleet(terminated, make_state("x"))
    monkeypatch.setattr("cloud_server.allocation.run_allocation", run_allocation)
    before = signal.getsignal(signal.SIGTERM)
    result = splitfleet("allocate", "--task", "t")
    assert (result.exit_code, result.stdout) == (1, "")
    assert signal.getsignal(signal.SIGTERM) is before
    (ended,) = registry.runs()
    assert (ended.state, ended.reason) == (RunState.INTERRUPTED, "stopped by the user")
    assert fleet.loaded == set()


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_tells_every_round_trial_and_phase(told: Told, terminal: bool) -> None:
    console = Console(record=True, force_terminal=terminal, width=200, file=io.StringIO())
    with AllocationProgress(console) as progress:
        told(progress, min_accuracy=0.99)
    text = console.export_text()
    assert "run 1: t, devices: 2, models: 3, seed: 0; wanted: accuracy of 0.99 or more" in text
    assert "round 3: board, camera" in text
    assert "missed: accuracy 0.900, p50 latency 20.0 ms (accuracy 0.9000 < 0.99)" in text
