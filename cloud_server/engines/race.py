"""A race: the engines that a bundle offers run the same random batches, and are compared in outputs and time.

It loads TensorFlow, which takes seconds and half a gigabyte, and files that may crash a library. So it is run in a
process of its own (:mod:`cloud_server.engines.choice`), and what is served needs none of it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import Literal

from cloud_server.engines.base import Arrays, TailEngine
from converters.tail_tflite import TOLERANCE, disagreement, random_features
from edge_sdk.bundle import Bundle
from edge_sdk.errors import SplitfleetError

EngineName = Literal["tensorflow", "litert"]
# Other tails are served meanwhile.
_NICE = 5
# At each batch size, for each entrant: as many runs as fit into this time, within the limits.
_SECONDS = 0.05
_FEWEST_RUNS = 3
_MOST_RUNS = 60
# One after another, before it is the next one's turn, and a pause in which the threads that one left waiting for work
# fall asleep: until then they keep a core busy.
_RUNS_A_TURN = 3
_PAUSE_S = 0.002
# A run that takes longer than its CPU time by this factor was held up by whatever else this machine does.
_HELD_UP = 1.25
# Less CPU time than this is not worth sharing between threads.
_WORTH_SHARING_S = 0.001
# What twice as many threads must at least gain to be worth it: they are taken from other tails.
_WORTH_THREADS = 1.25


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """An engine with so many threads."""

    engine: EngineName
    threads: int

    def load(self, bundle: Bundle, most: int) -> TailEngine:
        """The engine for the tail in ``bundle``; a batch has up to ``most`` samples as a rule.

        Raises :class:`BundleError`.
        """
        if self.engine == "tensorflow":
            from cloud_server.engines.tensorflow_engine import TensorFlowEngine

            return TensorFlowEngine.load(bundle)
        from cloud_server.engines.litert_engine import LitertEngine

        return LitertEngine.load(bundle, self.threads, most)

    def __str__(self) -> str:
        return f"{self.engine} on {self.threads} thread{'s' if self.threads > 1 else ''}"


@dataclass(frozen=True, kw_only=True)
class Finish:
    """How an entrant did: seconds for a batch, by its size.

    ``reckoned``: this machine was busy otherwise, and the seconds are what CPU time tells. ``error`` says why it is
    out of the race; there are no ``seconds`` then.
    """

    entrant: Entrant
    seconds: Mapping[int, float] = field(default_factory=dict)
    reckoned: bool = False
    error: str = ""


def race(folder: Path, entrants: Sequence[Entrant], batches: Sequence[int]) -> list[Finish]:
    """Have ``entrants`` run the tail in ``folder``. The first one is the reference that the others must agree with.

    Raises what the reference raises; what befalls another is in its :class:`Finish`.
    """
    os.nice(max(0, _NICE - os.nice(0)))
    bundle = Bundle.open(folder)
    features = {batch: random_features(bundle.manifest.crossing, batch) for batch in batches}
    running: dict[Entrant, TailEngine] = {}
    finishes: dict[Entrant, Finish] = {}
    expected: Mapping[int, Arrays] | None = None
    try:
        for entrant in entrants:
            try:
                engine = entrant.load(bundle, max(batches))
                outputs = _outputs(engine, features)
            except Exception as error:
                if entrant == entrants[0]:
                    raise
                finishes[entrant] = Finish(entrant=entrant, error=_reason(error))
                continue
            running[entrant] = engine
            expected = expected or outputs
            far = max(disagreement(expected[batch], outputs[batch]) for batch in batches)
            if not far <= TOLERANCE:
                running.pop(entrant).close()
                error_text = f"its outputs differ by {far:.2g} of their largest value"
                finishes[entrant] = Finish(entrant=entrant, error=error_text)
        timings = {batch: _timed(running, features[batch]) for batch in batches}
    finally:
        for engine in running.values():
            engine.close()
    reckoned = any(timing.held_up for times in timings.values() for timing in times.values())
    for entrant in running:
        seconds = {batch: times[entrant].seconds(entrant, reckoned) for batch, times in timings.items()}
        finishes[entrant] = Finish(entrant=entrant, seconds=seconds, reckoned=reckoned)
    return [finishes[entrant] for entrant in entrants]


def _outputs(engine: TailEngine, features: Mapping[int, Arrays]) -> dict[int, Arrays]:
    """Warm an engine for each batch size, then run it; close it where that fails."""
    try:
        for batch in features.values():
            engine.warm(batch)
        return {batch: engine.run(arrays) for batch, arrays in features.items()}
    except BaseException:
        engine.close()
        raise


def winner(finishes: Sequence[Finish]) -> Finish:
    """The fastest over all batch sizes; the first one, the reference, unless another is faster.

    With more threads of the same engine only where that gains enough.
    """
    reference, *others = finishes
    best, gained = reference, 1.0
    for finish in others:
        if finish.error:
            continue
        gain = speedup(reference, finish)
        same = best.entrant.engine == finish.entrant.engine and best.entrant.threads < finish.entrant.threads
        if gain > gained * (_WORTH_THREADS if same else 1.0):
            best, gained = finish, gain
    return best


def speedup(reference: Finish, finish: Finish) -> float:
    """How many times as fast as ``reference``: the geometric mean over the batch sizes."""
    logs = [math.log(reference.seconds[batch] / finish.seconds[batch]) for batch in reference.seconds]
    return math.exp(sum(logs) / len(logs))


@dataclass(kw_only=True)
class _Timing:
    """The best of some runs, which is the least disturbed: what it took, and its CPU time."""

    took_s: float = math.inf
    cpu_s: float = math.inf

    def add_run(self, engine: TailEngine, features: Arrays) -> None:
        began, cpu = perf_counter(), process_time()
        engine.run(features)
        self.took_s = min(self.took_s, perf_counter() - began)
        self.cpu_s = min(self.cpu_s, process_time() - cpu)

    @property
    def held_up(self) -> bool:
        """Whether this machine is busy otherwise, so that what a run takes says little."""
        return self.took_s > _HELD_UP * self.cpu_s

    def seconds(self, entrant: Entrant, reckoned: bool) -> float:
        """What a run takes; ``reckoned`` from its CPU time, as if threads shared that evenly."""
        if not reckoned:
            return self.took_s
        return self.cpu_s / entrant.threads if self.cpu_s >= _WORTH_SHARING_S else self.cpu_s


def _timed(engines: Mapping[Entrant, TailEngine], features: Arrays) -> dict[Entrant, _Timing]:
    """Run all of them, in turns."""
    timings = {entrant: _Timing() for entrant in engines}
    runs = 0
    began = perf_counter()
    while runs < _FEWEST_RUNS or (runs < _MOST_RUNS and perf_counter() - began < _SECONDS * len(engines)):
        for entrant, engine in engines.items():
            sleep(_PAUSE_S)
            for _ in range(_RUNS_A_TURN):
                timings[entrant].add_run(engine, features)
        runs += _RUNS_A_TURN
    return timings


def _reason(error: Exception) -> str:
    if isinstance(error, SplitfleetError):
        return error.message
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
