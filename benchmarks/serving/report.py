"""The tables, and the JSON document."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

from benchmarks.serving.comparison import BARE, CEILING, ECHO, Results
from benchmarks.serving.figures import Figures, document, median, ratio

PEERS = ("mosec", "litserve", "ray")
# What it computes with is not what the ceiling does.
OTHER_ENGINE = "splitfleet-auto"
# Of one core. Beyond it the clients would be what is measured.
BUSY = 0.85


def show(title: str, results: Results) -> None:
    """Tables of one comparison, and what is to be said of the clients."""
    print(f"\n{title}")
    for count in sorted({count for count, _ in results.closed}):
        rounds = {name: found for (of, name), found in results.closed.items() if of == count}
        _table(f"{count} client{'' if count == 1 else 's'}", rounds)
    if results.capacity_per_s is not None:
        print(f"open loop, capacity is {results.capacity_per_s:.0f}/s")
    for fraction in sorted({fraction for fraction, _ in results.open}):
        rounds = {name: found for (of, name), found in results.open.items() if of == fraction}
        _table(f"{fraction:.0%}: {fraction * (results.capacity_per_s or 0):.0f}/s", rounds)
    if OTHER_ENGINE in results.engines:
        print(f"{OTHER_ENGINE} took {results.engines[OTHER_ENGINE]}")
    for line in _alone(results):
        print(line)


def _table(title: str, rounds: Mapping[str, list[Figures]]) -> None:
    head = (
        "req/s",
        "p50 ms",
        "p99 ms",
        "cpu ms",
        "rss MiB",
        "B up",
        "B down",
        "client",
        "others",
        "errors",
        "× bare",
        "× best",
    )
    print(f"{title:16}" + "".join(f"{each:>9}" for each in head))
    peers = [name for name in PEERS if name in rounds]
    best = max(peers, key=lambda name: median(rounds[name]).requests_per_s, default=None)
    for name, found in rounds.items():
        it = median(found)
        cells = [
            f"{it.requests_per_s:.1f}",
            _number(it.p50_ms, 2),
            _number(it.p99_ms, 2),
            _number(it.cpu_ms, 3),
            _number(it.rss_mib, 0),
            _number(it.sent_bytes, 0),
            _number(it.received_bytes, 0),
            "" if it.client_busy is None else f"{it.client_busy:.0%}",
            "" if it.others_busy is None else f"{it.others_busy:.0%}",
            str(sum(it.errors.values())) if it.errors else "",
            _number(ratio(found, rounds[BARE]), 2) if BARE in rounds else "",
            _number(ratio(found, rounds[best]), 2) if best is not None else "",
        ]
        print(f"{name:16}" + "".join(f"{cell:>9}" for cell in cells))
        if it.errors:
            print(f"{'':16}  errors: " + ", ".join(f"{count} × {what}" for what, count in it.errors.items()))
        if it.client_busy is not None and it.client_busy > BUSY:
            print(f"{'':16}  warning: the clients were busy all the time; so it is not the server that was measured")


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _alone(results: Results) -> list[str]:
    """What a lone request takes beyond an echo of the same bytes and the computation, which the ceiling is."""
    one = {name: median(found) for (count, name), found in results.closed.items() if count == 1}
    if ECHO not in one or CEILING not in one:
        return []
    base = (one[ECHO].p50_ms or 0) + (one[CEILING].p50_ms or 0)
    return [
        f"one request alone, {name}: p50 is {it.p50_ms - base:+.2f} ms beyond echo and computation ({base:.2f} ms)"
        for name, it in one.items()
        if name not in (ECHO, CEILING, OTHER_ENGINE) and it.p50_ms is not None
    ]


def as_document(results: Results) -> dict[str, Any]:
    """Of one comparison."""
    return {
        "engines": results.engines,
        "capacity_per_s": results.capacity_per_s,
        "closed_loop": [
            {"system": name, "clients": count, **_ratios(name, count, results.closed), **document(found)}
            for (count, name), found in results.closed.items()
        ],
        "open_loop": [
            {"system": name, "fraction": fraction, **_ratios(name, fraction, results.open), **document(found)}
            for (fraction, name), found in results.open.items()
        ],
    }


def _ratios(name: str, key: float, rounds: Mapping[Any, list[Figures]]) -> dict[str, Any]:
    others = [other for other in (BARE, *PEERS) if (key, other) in rounds and other != name]
    return {"ratios": {other: ratio(rounds[key, name], rounds[key, other]) for other in others}}


def machine() -> dict[str, Any]:
    """Where this ran."""
    return {
        "cores": sorted(os.sched_getaffinity(0)),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
    }
