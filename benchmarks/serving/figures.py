"""What is reported of a system: one round's figures, and their medians over rounds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from benchmarks.serving.load import Outcome
from benchmarks.serving.processes import Memory


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one round. ``cpu_ms`` is the server's CPU time per request; ``client_busy`` is how much of one core the
    clients took, ``others_busy`` how many cores everybody else; ``late_ms`` is by how much an open loop lagged behind
    its own times (99th percentile).
    """

    requests_per_s: float
    p50_ms: float | None
    p99_ms: float | None
    cpu_ms: float | None = None
    rss_mib: float | None = None
    pss_mib: float | None = None
    sent_bytes: float | None = None
    received_bytes: float | None = None
    client_busy: float | None = None
    others_busy: float | None = None
    late_ms: float | None = None
    requests: int = 0
    errors: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a measurement cost within ``seconds``: CPU time of the server, and of all of the machine."""

    seconds: float
    server_s: float
    machine_s: float
    memory: Memory | None = None


def figures(outcome: Outcome, cost: Cost) -> Figures:
    """Of what the clients saw, and what it cost."""
    latencies = 1000 * np.asarray(outcome.latencies_s)
    done = len(latencies)
    memory = cost.memory
    others_s = cost.machine_s - cost.server_s - outcome.client_cpu_s
    return Figures(
        requests_per_s=done / outcome.seconds,
        p50_ms=float(np.percentile(latencies, 50)) if done else None,
        p99_ms=float(np.percentile(latencies, 99)) if done else None,
        cpu_ms=1000 * cost.server_s / done if done else None,
        rss_mib=None if memory is None else memory.rss / 2**20,
        pss_mib=None if memory is None else memory.pss / 2**20,
        sent_bytes=outcome.sent_bytes / outcome.sent if outcome.sent_bytes else None,
        received_bytes=outcome.received_bytes / outcome.sent if outcome.received_bytes else None,
        client_busy=outcome.client_cpu_s / outcome.seconds if outcome.client_cpu_s else None,
        others_busy=max(others_s, 0.0) / cost.seconds,
        late_ms=outcome.late_ms,
        requests=done,
        errors=dict(outcome.errors),
    )


def median(rounds: Sequence[Figures]) -> Figures:
    """Medians; requests and errors are sums."""
    values: dict[str, Any] = {}
    for name in (each.name for each in fields(Figures)):
        found = [value for each in rounds if (value := getattr(each, name)) is not None]
        if name == "requests":
            values[name] = sum(found)
        elif name == "errors":
            values[name] = {key: sum(each.get(key, 0) for each in found) for key in sorted(set().union(*found))}
        else:
            values[name] = statistics.median(found) if found else None
    return Figures(**values)


def ratio(of: Sequence[Figures], to: Sequence[Figures]) -> float | None:
    """Of requests per second: the median of the rounds' ratios."""
    pairs = [(each.requests_per_s, other.requests_per_s) for each, other in zip(of, to, strict=True)]
    found = [each / other for each, other in pairs if other]
    return statistics.median(found) if found else None


def document(rounds: Sequence[Figures]) -> dict[str, Any]:
    """For the JSON file."""
    return {**asdict(median(rounds)), "rounds": [asdict(each) for each in rounds]}
