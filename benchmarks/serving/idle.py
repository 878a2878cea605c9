"""What many idle devices cost: the server's memory, and the latency of one that is active, with and without them."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.serving.figures import Figures
from benchmarks.serving.idle_devices import Beats, idle_devices
from benchmarks.serving.layouts import Layout
from benchmarks.serving.load import Load
from benchmarks.serving.measuring import measure
from benchmarks.serving.systems import Running, Setting, splitfleet
from benchmarks.serving.tails import Tail
from edge_sdk.channel import Channel
from edge_sdk.protocol import HEARTBEAT_S, DeviceState, ListDevices

# Heartbeats of a while are in the memory that is measured.
SETTLE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class IdleRound:
    """Of one round. ``grown_mib`` is by how much the server's memory grew from before the devices connected; ``online``
    is how many of them the server took for online at the end. ``late`` heartbeats were answered after more than an
    interval, or not at all.
    """

    without: Figures
    beside: Figures
    grown_mib: float
    online: int
    heartbeats: int
    late: int
    heartbeat_p99_ms: float
    heartbeat_max_ms: float
    server_cores: float


def measure_idle(setting: Setting, layout: Layout, count: int, seconds: float, rounds: int) -> list[IdleRound]:
    """``count`` devices beside one that asks in a closed loop. In each round once without them and once with them."""
    found = []
    with splitfleet(setting) as running:
        for number in range(rounds):
            _say(f"round {number + 1} of {rounds}: without")
            without = _active(running, setting.tail, layout, seconds)
            before = running.processes.memory().rss
            _say(f"round {number + 1} of {rounds}: with {count} devices")
            with idle_devices(running.target.endpoint, count, layout.clients) as devices:
                time.sleep(SETTLE_S)
                grown = running.processes.memory().rss - before
                idle_cores = _cores(running, SETTLE_S)
                devices.begin()
                beside = _active(running, setting.tail, layout, seconds)
                beats = devices.beats()
                online = _online(running)
            found.append(_round(without, beside, grown, online, beats, idle_cores))
    return found


def _round(without: Figures, beside: Figures, grown: int, online: int, beats: Beats, server_cores: float) -> IdleRound:
    answers = np.asarray(beats.answers_s) * 1000
    late = int((answers > 1000 * HEARTBEAT_S).sum()) + beats.missing + beats.refused
    return IdleRound(
        without=without,
        beside=beside,
        grown_mib=grown / 2**20,
        online=online,
        heartbeats=len(answers) + beats.missing + beats.refused,
        late=late,
        heartbeat_p99_ms=float(np.percentile(answers, 99)),
        heartbeat_max_ms=float(answers.max()),
        server_cores=server_cores,
    )


def _active(running: Running, tail: Tail, layout: Layout, seconds: float) -> Figures:
    load = Load(
        target=running.target,
        features=tail.features,
        expected=tail.expected,
        tolerance=tail.tolerance,
        clients=1,
        seconds=seconds,
        cores=layout.clients,
    )
    return measure(running.processes, load)


def _cores(running: Running, seconds: float) -> float:
    """How many cores the server takes while all are idle."""
    cpu_s = running.processes.cpu_s()
    time.sleep(seconds)
    return (running.processes.cpu_s() - cpu_s) / seconds


def _online(running: Running) -> int:
    online, after = 0, None
    with Channel(running.target.endpoint, connect_timeout_s=30.0) as channel:
        while True:
            page = channel.call(ListDevices(after=after), timeout_s=30.0).body
            online += sum(DeviceState.from_body(each).online for each in page["devices"])
            after = page["next"]
            if after is None:
                return online


def show_idle(count: int, rounds: list[IdleRound]) -> None:
    """The medians; of lateness and of devices lost the worst."""

    def middle(of: Callable[[IdleRound], float]) -> float:
        return statistics.median(map(of, rounds))

    p99 = middle(lambda each: each.without.p99_ms or 0.0), middle(lambda each: each.beside.p99_ms or 0.0)
    p50 = middle(lambda each: each.without.p50_ms or 0.0), middle(lambda each: each.beside.p50_ms or 0.0)
    ratio = middle(lambda each: (each.beside.p99_ms or 0.0) / (each.without.p99_ms or 1.0))
    beats, late = sum(each.heartbeats for each in rounds), sum(each.late for each in rounds)
    beat_p99_ms, longest_ms = middle(lambda each: each.heartbeat_p99_ms), max(each.heartbeat_max_ms for each in rounds)
    lines = {
        "the server's memory grew by": f"{max(each.grown_mib for each in rounds):.0f} MiB",
        "its CPU time while all are idle": f"{middle(lambda each: each.server_cores):.0%} of a core",
        "online at the end, at least": str(min(each.online for each in rounds)),
        "heartbeats, late ones": f"{beats}, {late}",
        "answered within, p99 and longest": f"{beat_p99_ms:.1f} ms, {longest_ms:.1f} ms",
        "p50 of an active one, without and with": f"{p50[0]:.2f} ms, {p50[1]:.2f} ms",
        "p99 of an active one, without and with": f"{p99[0]:.2f} ms, {p99[1]:.2f} ms: × {ratio:.2f}",
        "others on the machine meanwhile": f"{middle(lambda each: each.beside.others_busy or 0.0):.0%} of a core",
    }
    print(f"\n{count} idle devices")
    for name, value in lines.items():
        print(f"{name:40}{value}")


def idle_document(count: int, rounds: list[IdleRound]) -> dict[str, Any]:
    """For the JSON file."""
    return {"devices": count, "rounds": [asdict(each) for each in rounds]}


def _say(line: str) -> None:
    print(f"idle devices: {line}", file=sys.stderr, flush=True)
