"""How to make a short burst of work slower: the quota of a cpu cgroup against a sleep after it.

A head runs for 0.05 to a few ms, then its device waits for the server. The smallest quota of the kernel is 1 ms of CPU
time per period, so a shorter burst runs at full speed. This script shows it: bursts of CPU work with a pause between
them, as one request follows another, by themselves, in a cpu cgroup (v1, needs root; left out where there is none), and
paced by a sleep as the agent does it.

    python benchmarks/emulation.py [--json emulation.json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CPU_MOUNT = Path("/sys/fs/cgroup/cpu")
MIN_QUOTA_US = 1000
BURSTS = 300
PAUSE_S = 0.005


def work(cpu_s: float) -> None:
    """Use so much CPU time."""
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        pass


def measure(burst_s: float, slowdown_by_sleep: float = 1.0) -> list[float]:
    """Wall times of bursts, in seconds, sorted."""
    times = []
    for _ in range(BURSTS):
        began = time.perf_counter()
        cpu_began = time.thread_time()
        work(burst_s)
        if slowdown_by_sleep > 1:
            time.sleep((slowdown_by_sleep - 1) * (time.thread_time() - cpu_began))
        times.append(time.perf_counter() - began)
        time.sleep(PAUSE_S)
    return sorted(times)


@contextlib.contextmanager
def quota(slowdown: float) -> Iterator[None]:
    """This process in a cpu cgroup that grants ``1 / slowdown`` of one core, in the smallest steps there are."""
    home = next(line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":cpu:" in line)
    group = CPU_MOUNT / f"splitfleet-benchmark-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text(str(int(MIN_QUOTA_US * slowdown)))
        (group / "cpu.cfs_quota_us").write_text(str(MIN_QUOTA_US))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (CPU_MOUNT / home.lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def main() -> None:
    """Print the table; write the figures where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    has_group = os.access(CPU_MOUNT / "cpu.cfs_quota_us", os.F_OK) and os.access(CPU_MOUNT, os.W_OK)
    rows: list[dict[str, Any]] = []
    for burst_ms in (0.3, 3.0):
        for slowdown in (1.0, 2.0, 4.8, 7.1):
            measured = {"sleep": measure(burst_ms / 1000, slowdown)}
            if slowdown > 1 and has_group:
                with quota(slowdown):
                    measured["cgroup quota"] = measure(burst_ms / 1000)
            for method, times in measured.items():
                rows.append(
                    {
                        "burst_ms": burst_ms,
                        "slowdown": slowdown,
                        "method": "none" if slowdown == 1 else method,
                        "wanted_ms": burst_ms * slowdown,
                        "p10_ms": times[BURSTS // 10] * 1000,
                        "p50_ms": statistics.median(times) * 1000,
                        "p90_ms": times[BURSTS * 9 // 10] * 1000,
                    }
                )
    columns = ("burst_ms", "slowdown", "method", "wanted_ms", "p10_ms", "p50_ms", "p90_ms")
    print("".join(f"{column:>14}" for column in columns))
    for row in rows:
        print("".join(f"{row[c]:>14}" if isinstance(row[c], str) else f"{row[c]:>14.2f}" for c in columns))
    if options.json is not None:
        document = {"bursts": BURSTS, "pause_ms": PAUSE_S * 1000, "cores": os.cpu_count(), "rows": rows}
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
