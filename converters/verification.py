"""A bundle, proved: its head on every TFLite runtime that is installed, its tail, both together against the whole.

Runtimes, TensorFlow and what a stranger's files make of them may crash, so all of it runs in other processes: the head
in one for each runtime (:mod:`converters.head_runs`), tail and model in a worker (:mod:`converters.verification_jobs`).
The hashes of the files are :meth:`edge_sdk.bundle.Bundle.verify`'s matter.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from converters.calibration import checked_samples
from converters.comparison import Comparison, compare
from converters.graph import TensorInfo
from converters.head_runs import HeadRun, InstalledRuntime, installed_runtimes, run_head
from converters.verification_jobs import tail_outputs, tail_tflite_error, whole_outputs
from converters.worker import Worker
from edge_sdk.bundle import Bundle
from edge_sdk.errors import InvalidInputError, SplitfleetError, StorageError
from edge_sdk.manifest import InputSpec
from edge_sdk.wire import DTYPES

MADE_UP_SAMPLES = 16
MADE_UP_SEED = 1
# The standard deviation, where a range has 256 steps: four of them lie on either side.
MADE_UP_STEPS = 32

Array = npt.NDArray[Any]
Doing = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class RuntimeCheck:
    """The head on one runtime, and the tail with it. ``error`` says how the head failed; ``comparison`` is ``None``
    then, where the tail failed, and where there was no model to compare with.
    """

    runtime: InstalledRuntime
    error: str
    comparison: Comparison | None


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What was found. ``runtimes`` has the single entry ``none`` for a bundle without a head.

    ``tail_error`` says how the tail failed, ``tail_tflite_error`` why ``tail.tflite`` is not the same as that,
    ``model_error`` why the bundle could not be compared with the model.
    """

    samples: int
    model_error: str
    runtimes: dict[str, RuntimeCheck]
    tail_error: str
    tail_tflite_error: str


def verify(
    bundle: Bundle,
    load: Callable[[], Any] | None,
    samples: Mapping[str, Array] | None,
    *,
    classifier: bool,
    pythons: Sequence[Path] = (),
    doing: Doing = lambda _: nullcontext(),
) -> Verification:
    """Run ``bundle`` on ``samples`` (name of an input -> (N, …)), or on made-up ones, and compare it with the whole
    model that ``load`` returns.

    A model whose outputs are probabilities is a classifier; ``classifier`` says so of others. ``pythons`` are other
    interpreters whose runtimes shall run the head, too. ``doing`` is entered for what takes long. What is wrong with
    bundle or model is in the result. Raises :class:`InvalidInputError` for samples that the model does not take,
    :class:`ConfigError` for an interpreter that is none, :class:`StorageError`.
    """
    inputs = _made_up(bundle.manifest.inputs) if samples is None else _checked(bundle.manifest.inputs, samples)
    count = len(inputs[0])
    runs: dict[str, HeadRun] = {}
    errors: dict[str, str] = {}
    runtimes = {runtime.name: runtime for runtime in installed_runtimes(bundle, pythons)}
    for name, runtime in runtimes.items():
        with doing(f"running the head on {name} {runtime.version}: {count} samples"), _noted(errors, name):
            runs[name] = run_head(bundle, runtime, inputs)
    made: dict[str, dict[int, Array]] = {name: run.outputs for name, run in runs.items()}
    whole: list[Array] | None = None
    with _worker() as worker:
        if bundle.manifest.has_tail and runs:
            with doing("running the tail"), _noted(errors, "tail"):
                tails = worker.run(tail_outputs, bundle.path.absolute(), [run.features for run in runs.values()])
                made = {name: made[name] | tail for name, tail in zip(runs, tails, strict=True)}
        if bundle.manifest.has_tail_tflite and "tail" not in errors:
            with doing("comparing tail.tflite with the tail"), _noted(errors, "tail.tflite"):
                if reason := worker.run(tail_tflite_error, bundle.path.absolute()):
                    errors["tail.tflite"] = f"{bundle.tail_tflite_path}: {reason}"
        if load is not None:
            with doing("running the whole model"), _noted(errors, "model"):
                wanted = bundle.manifest.model.sha256
                sha256, whole = worker.run(whole_outputs, load, wanted, inputs)
                if whole is None:
                    errors["model"] = f"the bundle was made of a model with the SHA-256 {wanted}, this one has {sha256}"
    checks = {}
    for name, runtime in runtimes.items():
        outputs = _in_order(made.get(name, {}), len(bundle.manifest.outputs))
        comparison = None if outputs is None or whole is None else compare(outputs, whole, classifier)
        checks[name] = RuntimeCheck(runtime=runtime, error=errors.get(name, ""), comparison=comparison)
    return Verification(
        samples=count,
        model_error=errors.get("model", ""),
        runtimes=checks,
        tail_error=errors.get("tail", ""),
        tail_tflite_error=errors.get("tail.tflite", ""),
    )


@contextmanager
def _worker() -> Iterator[Worker]:
    worker = Worker(threads=len(os.sched_getaffinity(0)))
    try:
        yield worker
    except BaseException:
        # Ctrl-C does not wait for a job to end.
        worker.kill()
        raise
    finally:
        worker.stop()


@contextmanager
def _noted(errors: dict[str, str], what: str) -> Iterator[None]:
    """Note an error of ``what`` and go on: what is wrong with a bundle is what is asked for.

    Neither bundle nor model are to blame for samples that the model does not take, nor for a full disk.
    """
    try:
        yield
    except (InvalidInputError, StorageError):
        raise
    except SplitfleetError as error:
        errors[what] = error.message


def _in_order(outputs: Mapping[int, Array], count: int) -> list[Array] | None:
    """All outputs in the model's order, or ``None`` where one is missing."""
    return [outputs[place] for place in range(count)] if len(outputs) == count else None


def _made_up(specs: Sequence[InputSpec]) -> list[Array]:
    """Samples amid the range that the head takes; of an input without a scale from 0 to 1, or 0 and 1.

    Evenly spread over the whole range they would be stronger than any real ones, and clipped all along.
    """
    rng = np.random.default_rng(MADE_UP_SEED)
    made = []
    for spec in specs:
        shape = (MADE_UP_SAMPLES, *spec.shape)
        if spec.scale is not None and spec.zero_point is not None:
            steps = np.clip(rng.normal(0.0, MADE_UP_STEPS, shape), -128, 127)
            values = spec.scale * (steps - spec.zero_point)
            if DTYPES[spec.dtype].kind in "iu":
                bounds = np.iinfo(DTYPES[spec.dtype])
                values = np.clip(np.rint(values), bounds.min, bounds.max)
        elif spec.dtype.startswith("float"):
            values = rng.uniform(0, 1, shape)
        else:
            values = rng.integers(0, 2, shape).astype(np.float64)
        made.append(values.astype(DTYPES[spec.dtype]))
    return made


def _checked(specs: Sequence[InputSpec], samples: Mapping[str, Array]) -> list[Array]:
    # Keras makes up names for unnamed inputs: with one input there is nothing to mix up.
    if len(specs) == len(samples) == 1:
        samples = {specs[0].name: next(iter(samples.values()))}
    tensors = [TensorInfo(name=spec.name, source=spec.name, shape=spec.shape, dtype=spec.dtype) for spec in specs]
    arrays = checked_samples(samples, tensors, "samples for the bundle")
    return [array.astype(DTYPES[spec.dtype]) for spec, array in zip(specs, arrays, strict=True)]
