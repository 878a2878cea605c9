"""One measurement of a server that runs: what its clients saw, and what it cost."""

from __future__ import annotations

import time

from benchmarks.serving.figures import Cost, Figures, figures
from benchmarks.serving.load import Load, clients
from benchmarks.serving.processes import Processes, machine_cpu_s


def measure(processes: Processes, load: Load) -> Figures:
    """Raises ``RuntimeError`` when the server ended, a process of it left its cores, or the clients failed."""
    with clients(load) as process:
        processes.require_alive()
        processes.require_bound()
        began, server_s, machine_s = time.perf_counter(), processes.cpu_s(), machine_cpu_s()
        process.begin()
        outcome = process.outcome()
        cost = Cost(
            seconds=time.perf_counter() - began,
            server_s=processes.cpu_s() - server_s,
            machine_s=machine_cpu_s() - machine_s,
            memory=processes.memory(),
        )
        outcome.errors += process.last_check()
    return figures(outcome, cost)
