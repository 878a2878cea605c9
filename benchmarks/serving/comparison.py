"""One comparison: a tail in a layout, all systems side by side, in turns."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.serving.ceiling import Ceiling, ceiling
from benchmarks.serving.figures import Figures, figures
from benchmarks.serving.layouts import Layout
from benchmarks.serving.load import Load
from benchmarks.serving.measuring import measure
from benchmarks.serving.systems import SYSTEMS, Running, Setting
from benchmarks.serving.tails import Tail

CEILING = "ceiling"
BARE = "bare"
ECHO = "echo"
OPEN_CONNECTIONS = 256


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure. ``open_loop`` are fractions of what the bare loop managed with the most clients.

    ``cache`` holds the peers' environments, ``work`` is for what the systems write.
    """

    systems: Sequence[str]
    clients: Sequence[int]
    seconds: float
    rounds: int
    max_batch: int
    delay_ms: float
    open_loop: Sequence[float]
    cache: Path
    work: Path


@dataclass(kw_only=True)
class Results:
    """Rounds of each system: by number of clients, and by fraction of ``capacity_per_s``; and what each runs the tail
    with.
    """

    engines: dict[str, str] = field(default_factory=dict)
    closed: dict[tuple[int, str], list[Figures]] = field(default_factory=dict)
    open: dict[tuple[float, str], list[Figures]] = field(default_factory=dict)
    capacity_per_s: float | None = None


class Comparison:
    """:meth:`run` starts all systems of the plan, and gives each its turn in each round."""

    def __init__(self, tail: Tail, layout: Layout, plan: Plan) -> None:
        self._tail = tail
        self._layout = layout
        self._plan = plan
        self._ceiling: Ceiling | None = None
        self._servers: dict[str, Running] = {}

    def run(self) -> Results:
        """Raises ``RuntimeError`` when a system does not start, answers wrongly while warming up, or leaves its
        cores.
        """
        plan, results = self._plan, Results()
        with ExitStack() as stack:
            for name in plan.systems:
                self._say(f"starting {name}")
                if name == CEILING:
                    cores = self._layout.server
                    self._ceiling = stack.enter_context(ceiling(self._tail, cores, plan.max_batch))
                else:
                    running = stack.enter_context(SYSTEMS[name](self._setting(name)))
                    running.processes.stop()
                    self._servers[name] = running
                    results.engines[name] = running.engine
            for number in range(plan.rounds):
                for count in plan.clients:
                    for name in _turns(plan.systems, number):
                        found = self._closed(name, count)
                        results.closed.setdefault((count, name), []).append(found)
                        self._say(f"round {number + 1} of {plan.rounds}, {name} ×{count}: {_summary(found)}")
            if plan.open_loop:
                reference = BARE if BARE in self._servers else next(iter(self._servers))
                most = results.closed[max(plan.clients), reference]
                results.capacity_per_s = statistics.median(each.requests_per_s for each in most)
                for number in range(plan.rounds):
                    for fraction in plan.open_loop:
                        for name in _turns(list(self._servers), number):
                            found = self._open(name, fraction * results.capacity_per_s, number)
                            results.open.setdefault((fraction, name), []).append(found)
                            turn = f"round {number + 1} of {plan.rounds}, {name} at {fraction:.0%}"
                            self._say(f"{turn}: {_summary(found)}")
        return results

    def _setting(self, name: str) -> Setting:
        work = self._plan.work / f"{self._tail.name}-{self._layout.name}-{name}"
        work.mkdir()
        return Setting(
            tail=self._tail,
            cores=self._layout.server,
            max_batch=self._plan.max_batch,
            delay_ms=self._plan.delay_ms,
            cache=self._plan.cache,
            work=work,
        )

    def _closed(self, name: str, count: int) -> Figures:
        if name == CEILING:
            assert self._ceiling is not None
            return figures(*self._ceiling.measure(count, self._plan.seconds))
        return self._measure(name, self._load(name, count))

    def _open(self, name: str, rate_per_s: float, seed: int) -> Figures:
        return self._measure(name, self._load(name, OPEN_CONNECTIONS, rate_per_s=rate_per_s, seed=seed))

    def _load(self, name: str, count: int, *, rate_per_s: float | None = None, seed: int = 0) -> Load:
        return Load(
            target=self._servers[name].target,
            features=self._tail.features,
            # An echo is zeros.
            expected=self._tail.expected * (name != ECHO),
            tolerance=self._tail.tolerance,
            clients=count,
            seconds=self._plan.seconds,
            cores=self._layout.clients,
            rate_per_s=rate_per_s,
            seed=seed,
        )

    def _measure(self, name: str, load: Load) -> Figures:
        with self._turn_of(name):
            return measure(self._servers[name].processes, load)

    @contextmanager
    def _turn_of(self, name: str) -> Iterator[None]:
        processes = self._servers[name].processes
        processes.go_on()
        try:
            yield
        finally:
            processes.stop()

    def _say(self, line: str) -> None:
        print(f"{self._tail.name}, {self._layout.name}: {line}", file=sys.stderr, flush=True)


def _turns(names: Sequence[str], number: int) -> list[str]:
    """Another one goes first in each round."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def _summary(found: Figures) -> str:
    errors = "".join(f", {count} × {what}" for what, count in found.errors.items())
    return f"{found.requests_per_s:.0f}/s{errors}"
