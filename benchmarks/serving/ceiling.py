"""The ceiling: a process that runs the SavedModel on batches of its own, without any network."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe

from benchmarks.peers.saved_model import Array, SavedModel
from benchmarks.serving.figures import Cost
from benchmarks.serving.load import Outcome
from benchmarks.serving.processes import machine_cpu_s
from benchmarks.serving.tails import Tail

_START_S = 180.0
_WARM_S = 0.5


class Ceiling:
    """It waits when it is not asked."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def measure(self, clients: int, seconds: float) -> tuple[Outcome, Cost]:
        """Batches of as many requests as there are clients; a request takes as long as its batch."""
        self._pipe.send((clients, seconds))
        if not self._pipe.poll(_START_S + seconds):
            raise RuntimeError("the ceiling does not answer")
        found = self._pipe.recv()
        if isinstance(found, Exception):
            raise found
        outcome, cost = found
        return outcome, cost


@contextmanager
def ceiling(tail: Tail, cores: frozenset[int], max_batch: int) -> Iterator[Ceiling]:
    """On these cores."""
    spawn = get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_work, args=(there, tail, cores, max_batch), daemon=True)
    process.start()
    there.close()
    try:
        yield Ceiling(here)
    finally:
        process.terminate()
        process.join()


def _work(pipe: Pipe, tail: Tail, cores: frozenset[int], max_batch: int) -> None:
    # Before anything starts a thread.
    os.sched_setaffinity(0, cores)
    # TensorFlow's libraries write there when they are loaded.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        model = SavedModel(tail.bundle.tail_path, max_batch=max_batch)
        while True:
            clients, seconds = pipe.recv()
            asked = tail.features[:clients]
            batches = [list(asked[at : at + max_batch]) for at in range(0, len(asked), max_batch)]
            _loop(model, batches, _WARM_S)
            server_s, machine_s = time.process_time(), machine_cpu_s()
            outcome = _loop(model, batches, seconds)
            cost = Cost(
                seconds=outcome.seconds,
                server_s=time.process_time() - server_s,
                machine_s=machine_cpu_s() - machine_s,
            )
            pipe.send((outcome, cost))
    except EOFError:
        return
    except Exception as error:
        pipe.send(RuntimeError(f"the ceiling failed: {type(error).__name__}: {error}"))


def _loop(model: SavedModel, batches: list[list[Array]], seconds: float) -> Outcome:
    outcome = Outcome()
    start = now = time.perf_counter()
    while now < start + seconds:
        for batch in batches:
            began = now
            model.run(batch)
            now = time.perf_counter()
            outcome.latencies_s += [now - began] * len(batch)
            outcome.sent += len(batch)
    outcome.seconds = now - start
    return outcome
