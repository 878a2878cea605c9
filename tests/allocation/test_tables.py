"""The tables of devices and allocations: in the width of a terminal, and in that of a file."""

from __future__ import annotations

import io
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.console import Console

from cloud_server.allocation.means import Means
from cloud_server.allocation.observer import Observer
from cloud_server.allocation.result import AllocationResult, read_result
from cloud_server.allocation.run import allocate, find_devices
from cloud_server.allocation.settings import AllocationSettings, Thresholds
from cloud_server.allocation.task_data import TaskData
from cloud_server.cli.allocation_table import allocation_table, runs_table, trials_table
from cloud_server.cli.devices import devices_table
from cloud_server.registry import Registry
from cloud_server.registry.records import DeviceRecord, RunRecord, RunState

NOW = datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC)
WIDTHS = (80, 200)


def shown(table: Any, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(table)
    return console.export_text()


def words(text: str) -> str:
    return " ".join(text.split())


def device(name: str, *, silent_s: float, emulated: bool = False) -> DeviceRecord:
    return DeviceRecord(
        device_id=name,
        profile="raspberry-pi-zero-2-w",
        model_ram_bytes=4_200_000,
        resources={"ram_bytes": 512_000_000, "cores": 4, "runtimes": {"litert": "2.3.0", "tflite-runtime": "2.14.0"}},
        emulation={"cpu": "×9.5 by sleep", "link": "2 Mbit/s by a proxy"} if emulated else {},
        version="0.1.0",
        first_seen=NOW - timedelta(days=1),
        last_seen=NOW - timedelta(seconds=silent_s),
        bundle="0123456789abcdef" * 4,
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_devices(width: int) -> None:
    known = [device("a-name-of-twenty-one", silent_s=3, emulated=True), device("camera", silent_s=60)]
    text = shown(devices_table(known, now=NOW, width=width), width)
    first = next(line for line in text.splitlines() if "a-name" in line)
    assert "a-name-of-twenty-one*" in first
    assert "online" in first
    assert "offline" in next(line for line in text.splitlines() if "camera" in line)
    assert "3 s ago" in text
    assert "1 min ago" in text
    assert "* emulated on this machine: cpu by sleep, link by a proxy" in text
    for part in ("raspberry-pi-zero-2-w", "tflite-runtime", "0123456789ab", "4.2 MB", "512 MB"):
        assert text.count(part) == 2
    assert ("4.2 MB 512 MB 4 litert" in words(text)) == (width == 200)


def test_a_device_is_online_while_a_server_hears_from_it() -> None:
    # Every ten seconds the server records whom it heard from.
    assert [device("d", silent_s=seconds).is_online(NOW) for seconds in (0, 12, 30)] == [True, True, False]


@pytest.mark.parametrize("width", WIDTHS)
def test_runs(width: int) -> None:
    run = RunRecord(
        run_id=12,
        settings=AllocationSettings(task="fashion-mnist"),
        state=RunState.INFEASIBLE,
        reason="infeasible: camera, pi-3b-plus, raspberry-pi-zero-2-w",
        rounds=8,
        started_at=NOW,
        ended_at=NOW + timedelta(seconds=95),
    )
    text = shown(runs_table([run], [], width=width), width)
    for part in ("fashion-mnist", "95 s", "infeasible", "raspberry-pi-zero-2-w"):
        assert part in text
    assert ("fashion-mnist infeasible 8 0" in words(text)) == (width == 200)


@pytest.fixture
def infeasible(
    candidates: Any, registry: Registry, data: TaskData, make_fleet: Callable[..., Any], make_state: Callable[..., Any]
) -> AllocationResult:
    """A run in which a device misses both thresholds, by the least with its second model, and no model fits another."""

    def measured(_: str, model: str) -> tuple[float, float]:
        return {"a": (0.5, 60.0), "b": (0.8, 30.0), "c": (0.4, 90.0)}[model]

    settings = AllocationSettings(task="t", thresholds=Thresholds(min_accuracy=0.9, max_latency_ms=20))
    fleet = make_fleet(measured, make_state("board"), make_state("tiny", budget=50))
    observer = Observer()
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
    return read_result(registry, 1)


def test_of_what_failed_the_nearest_miss_is_shown_with_what_it_missed(infeasible: AllocationResult) -> None:
    text = words(shown(allocation_table(infeasible), 200).split("tiny, 3 trials")[0])
    assert "board, 3 trials b" in text
    for part in ("infeasible, nearest miss:", "accuracy 0.8000 < 0.9", "p50 latency 30.00 ms > 20 ms"):
        assert part in text


def test_where_nothing_was_measured_each_model_tells_why(infeasible: AllocationResult) -> None:
    text = words(shown(allocation_table(infeasible), 200).split("tiny, 3 trials")[1])
    assert text.startswith("c, b, a: its smallest head needs 100 B, the budget is 50 B infeasible")
    assert "nearest miss" not in text


@pytest.mark.parametrize("width", WIDTHS)
def test_trials(infeasible: AllocationResult, width: int) -> None:
    text = shown(trials_table(infeasible, width=width), width)
    assert words(text).count("does not fit") == 3
    assert all(len(line) <= width for line in text.splitlines())
    for part in ("board", "tiny", "2 of 4", "0.800", "30.0"):
        assert part in text
