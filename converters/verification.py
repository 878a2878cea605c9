"""A bundle, proved: its head on every TFLite runtime that is installed, its tail, both together against the whole.

It loads TensorFlow and runtimes that may crash, so it belongs into a worker process
(:class:`converters.worker.Worker`). The hashes of the files are :meth:`edge_sdk.bundle.Bundle.verify`'s matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from converters.comparison import Comparison, compare
from edge_sdk.bundle import Bundle
from edge_sdk.errors import BundleError, InvalidInputError, SplitfleetError
from edge_sdk.head import Head, HeadResult
from edge_sdk.manifest import InputSpec
from edge_sdk.runtime import RUNTIMES, SIGNATURE, usable_runtimes
from edge_sdk.wire import DTYPES

BATCH = 32
MADE_UP_SAMPLES = 16
MADE_UP_SEED = 1
# The standard deviation, where a range has 256 steps: four of them lie on either side.
MADE_UP_STEPS = 32
NO_HEAD = "none"

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class RuntimeCheck:
    """Head and tail with the head on one runtime. ``error`` says what failed; ``comparison`` is ``None`` then, and
    where there was no model to compare with.
    """

    version: str
    error: str
    comparison: Comparison | None


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What was found. ``model_sha256`` is that of the model that was compared with, ``None`` without one.

    ``runtimes`` has the single entry ``none`` for a bundle without a head. ``tail_error`` says why the tail cannot be
    loaded, ``tail_tflite_error`` why its ``tail.tflite`` is not the same. ``model_error`` says why the bundle could not
    be compared with the model.
    """

    samples: int
    model_sha256: str | None
    model_error: str
    runtimes: dict[str, RuntimeCheck]
    tail_error: str
    tail_tflite_error: str


def verify(
    folder: Path, load: Callable[[], Any] | None, samples: Mapping[str, Array] | None, *, classifier: bool
) -> Verification:
    """Run the bundle in ``folder`` on ``samples`` (name of an input -> (N, …)), or on made-up ones, and compare it with
    the whole model that ``load`` returns.

    A model whose outputs are probabilities is a classifier; ``classifier`` says so of others. What is wrong with the
    bundle is in the result. Raises :class:`InvalidInputError` for samples that the model does not take, and what
    ``load`` raises.
    """
    bundle = Bundle.open(folder)
    inputs = _made_up(bundle.manifest.inputs) if samples is None else _checked(bundle.manifest.inputs, samples)
    count = len(inputs[0])
    model_sha256, model_error, whole = None, "", None
    if load is not None:
        model_sha256, whole = _whole(load, bundle, inputs)
        if whole is None:
            model_error = (
                f"the bundle was made of a model with the SHA-256 {bundle.manifest.model.sha256}, "
                f"this one has {model_sha256}"
            )
    tail, tail_error, tail_tflite_error = None, "", ""
    if bundle.manifest.has_tail:
        try:
            tail = _Tail(bundle)
        except SplitfleetError as error:
            tail_error = error.message
    if tail is not None and bundle.manifest.has_tail_tflite:
        tail_tflite_error = _tail_tflite_error(bundle, tail)
    checks = {}
    for name, version in (usable_runtimes() if bundle.manifest.has_head else {NO_HEAD: ""}).items():
        outputs, failure = None, ""
        try:
            if not tail_error:
                outputs = _outputs(bundle, Head(bundle, runtime=name if name in RUNTIMES else None), tail, inputs)
        except SplitfleetError as error:
            failure = error.message
        comparison = None if outputs is None or whole is None else compare(outputs, whole, classifier)
        checks[name] = RuntimeCheck(version=version, error=failure, comparison=comparison)
    return Verification(
        samples=count,
        model_sha256=model_sha256,
        model_error=model_error,
        runtimes=checks,
        tail_error=tail_error,
        tail_tflite_error=tail_tflite_error,
    )


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
    names = sorted(spec.name for spec in specs)
    if sorted(samples) != names:
        raise InvalidInputError(f"the bundle takes the inputs {', '.join(names)}, the data has {', '.join(samples)}")
    for spec in specs:
        if samples[spec.name].shape[1:] != spec.shape:
            raise InvalidInputError(
                f"input {spec.name!r}: expected shape (samples, {', '.join(map(str, spec.shape))}), "
                f"the data has {list(samples[spec.name].shape)}"
            )
    return [samples[spec.name].astype(DTYPES[spec.dtype]) for spec in specs]


def _whole(load: Callable[[], Any], bundle: Bundle, inputs: Sequence[Array]) -> tuple[str, list[Array] | None]:
    """The model's hash and, if the bundle was made of it, all its outputs in float."""
    from converters.flatten import flatten
    from converters.keras_backend import load_keras
    from converters.model_hash import model_sha256
    from converters.split import Half

    load_keras().backend.clear_session()
    flat = flatten(load())
    sha256 = model_sha256(flat)
    if sha256 != bundle.manifest.model.sha256:
        return sha256, None
    whole = Half(flat=flat, steps=flat.steps, inputs=flat.graph.inputs, outputs=flat.graph.outputs)
    rows = [[np.asarray(output) for output in whole(batch)] for batch in _batches(inputs)]
    return sha256, [np.concatenate(parts) for parts in zip(*rows, strict=True)]


class _Tail:
    """A loaded tail."""

    def __init__(self, bundle: Bundle) -> None:
        """Raises :class:`BundleError`."""
        from converters.keras_backend import load_tensorflow

        self._path = bundle.tail_path
        self._tensorflow = load_tensorflow()
        try:
            # A signature does not keep what it came with alive.
            self._loaded = self._tensorflow.saved_model.load(str(self._path))
            self._signature = self._loaded.signatures[SIGNATURE]
        except Exception as error:  # TensorFlow raises whatever the files provoke
            raise BundleError(f"{self._path}: TensorFlow cannot load the tail: {_first_line(error)}") from error

    def run(self, features: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs of a batch. Raises :class:`BundleError`."""
        try:
            made = self._signature(**{name: self._tensorflow.constant(array) for name, array in features.items()})
        except Exception as error:  # TensorFlow raises whatever the graph provokes
            raise BundleError(f"{self._path}: the tail failed: {_first_line(error)}") from error
        return {key: np.asarray(value) for key, value in made.items()}


def _tail_tflite_error(bundle: Bundle, tail: _Tail) -> str:
    from converters.tail_tflite import check_tail_tflite

    try:
        reason = check_tail_tflite(bundle.tail_tflite_path, tail.run, bundle.manifest.crossing)
    except SplitfleetError as error:
        reason = error.message
    return f"{bundle.tail_tflite_path}: {reason}" if reason else ""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _outputs(bundle: Bundle, head: Head, tail: _Tail | None, inputs: Sequence[Array]) -> list[Array]:
    """All outputs of head and tail in the model's order, each (N, …). Raises :class:`SplitfleetError`."""
    names = [spec.name for spec in bundle.manifest.inputs]
    results = [
        head.run({name: array[number] for name, array in zip(names, inputs, strict=True)})
        for number in range(len(inputs[0]))
    ]
    ends: dict[str, list[Array]] = {}
    if tail is not None:
        for start in range(0, len(results), BATCH):
            for key, value in tail.run(_features(results[start : start + BATCH])).items():
                ends.setdefault(key, []).append(value)
    return [
        np.stack([result.outputs[spec.name] for result in results])
        if spec.side == "head"
        else np.concatenate(ends[f"output_{place}"])
        for place, spec in enumerate(bundle.manifest.outputs)
    ]


def _features(results: Sequence[HeadResult]) -> dict[str, Array]:
    """The features of some samples as one batch."""
    return {
        tensors[0].name: np.concatenate([tensor.data for tensor in tensors])
        for tensors in zip(*(result.features for result in results), strict=True)
    }


def _batches(inputs: Sequence[Array]) -> Iterator[list[Array]]:
    for start in range(0, len(inputs[0]), BATCH):
        yield [array[start : start + BATCH] for array in inputs]
