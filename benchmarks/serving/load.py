"""The clients of one measurement: what they are to do, what came of it, and the process they run in."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.serving.connections import Target

START_S = 120.0
PATIENCE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one process of clients does, on ``cores``.

    With ``rate_per_s`` requests come at random (Poisson), at this rate, over ``clients`` connections, else each client
    asks anew as it gets its answer. Client i asks about ``features[i]`` (*shape) and awaits ``expected[i]`` within
    ``tolerance``, absolute; there may be fewer of them than clients.
    """

    target: Target
    features: npt.NDArray[np.generic]
    expected: npt.NDArray[np.float32]
    tolerance: float
    clients: int
    seconds: float
    cores: frozenset[int]
    rate_per_s: float | None = None
    seed: int = 0


@dataclass(kw_only=True)
class Outcome:
    """Latencies of right answers, what else came and how often, and the CPU time of the clients' process.

    ``late_ms``: by how much an open loop sent what was due and had a free connection too late, 99th percentile.
    """

    latencies_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    sent: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    client_cpu_s: float = 0.0
    late_ms: float | None = None


class LoadProcess:
    """Clients that are connected and warm: :meth:`begin`, then :meth:`outcome`."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def begin(self) -> None:
        self._pipe.send(None)

    def outcome(self) -> Outcome:
        """When the loop is over. Raises ``RuntimeError``."""
        outcome = _receive(self._pipe)
        assert isinstance(outcome, Outcome)
        return outcome

    def last_check(self) -> Counter[str]:
        """What was wrong with whole answers after the loop, and how often; it is asked for after :meth:`outcome`."""
        wrong = _receive(self._pipe)
        assert isinstance(wrong, Counter)
        return wrong


@contextmanager
def clients(load: Load) -> Iterator[LoadProcess]:
    """Start them, and wait until they are warm. Raises ``RuntimeError``."""
    spawn = get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_run, args=(load, there), daemon=True)
    process.start()
    there.close()
    try:
        _receive(here)
        yield LoadProcess(here)
    finally:
        process.terminate()
        process.join()


def _receive(pipe: Pipe) -> Any:
    if not pipe.poll(START_S + PATIENCE_S):
        raise RuntimeError("the clients do not answer")
    try:
        got = pipe.recv()
    except EOFError:
        raise RuntimeError("the clients' process ended") from None
    if isinstance(got, Exception):
        raise got
    return got


def _run(load: Load, pipe: Pipe) -> None:
    # Before anything starts a thread.
    os.sched_setaffinity(0, load.cores)
    from benchmarks.serving.clients import Clients

    try:
        clients = Clients(load)
        clients.warm()
        pipe.send(None)
        pipe.recv()
        pipe.send(clients.measure())
        pipe.send(clients.check_all())
    except Exception as error:
        pipe.send(RuntimeError(f"the clients failed: {type(error).__name__}: {error}"))
