"""Calibration data: real samples that tell the converter which range each tensor of the head takes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from converters.flatten import FlatModel
from converters.graph import Graph, TensorInfo
from edge_sdk.errors import InvalidInputError
from edge_sdk.wire import DTYPES

MAX_SAMPLES = 200
# Random samples of an input hold so many values at most, unless that were fewer samples than these.
MAX_RANDOM_VALUES = 2**24
MIN_RANDOM_SAMPLES = 4
# Data that is rescaled to 0…1 and the same to -1…1 have a ratio of 2; other samples of the same data are far below.
MAX_DISAGREEMENT = 1.5

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """``inputs`` are parallel to the model's inputs, each (samples, *shape) in that input's dtype.

    ``sha256`` covers all the data that was given, not only the samples taken from it.
    """

    inputs: tuple[Array, ...]
    sha256: str

    @classmethod
    def of(cls, graph: Graph, samples: Mapping[str, Array]) -> Calibration:
        """At most 200 of ``samples`` (by the name of the input), evenly spaced.

        Those with the smallest and the largest value of an input are always among them: a range that leaves out 255
        where pixels go up to it would clip every bright one. Raises :class:`InvalidInputError` for samples that are
        not those of the model's inputs, or not finite.
        """
        inputs = [graph.tensors[position] for position in graph.inputs]
        names = [tensor.name for tensor in inputs]
        arrays = checked_samples(samples, inputs, f"calibration data of model {graph.name!r}")
        digest = hashlib.sha256()
        for name, array in zip(names, arrays, strict=True):
            digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        taken = _taken(arrays)
        return cls(
            inputs=tuple(
                array[taken].astype(DTYPES[tensor.dtype]) for tensor, array in zip(inputs, arrays, strict=True)
            ),
            sha256=digest.hexdigest(),
        )


def random_calibration(flat: FlatModel, count: int = 100, seed: int = 0) -> dict[str, Array]:
    """Random samples in place of calibration data: the ranges that they give are guesses.

    Where a model begins with a Rescaling, a Normalization, an Embedding or a CategoryEncoding, this tells the range of
    what it takes. Other floating-point inputs are normally distributed, bytes uniformly, other integers are 0 or 1, in
    range as an index. Of large inputs there are fewer.
    """
    rng = np.random.default_rng(seed)
    largest = max(math.prod(flat.graph.tensors[position].shape) for position in flat.graph.inputs)
    count = min(count, max(MIN_RANDOM_SAMPLES, MAX_RANDOM_VALUES // max(largest, 1)))
    made: dict[str, Array] = {}
    for position in flat.graph.inputs:
        tensor = flat.graph.tensors[position]
        takers = [step.layer for step in flat.steps if position in (place for _, place in step.bound)]
        made[tensor.name] = _random(rng, tensor, takers[0] if takers else None, (count, *tensor.shape))
    return made


def _random(rng: np.random.Generator, tensor: TensorInfo, taker: Any, shape: tuple[int, ...]) -> Array:
    kind = type(taker).__name__
    dtype = DTYPES[tensor.dtype]
    if kind in ("Embedding", "CategoryEncoding"):
        values: Array = rng.integers(0, taker.input_dim if kind == "Embedding" else taker.num_tokens, shape)
    elif kind == "Rescaling" and np.all(np.asarray(taker.scale) > 0):
        # From 0 to what becomes 1: 255 for scales of 1/255, and of 1/127.5 with an offset of -1.
        top = np.broadcast_to((1.0 - np.asarray(taker.offset)) / np.asarray(taker.scale), shape[-1:])
        values = rng.uniform(0.0, np.maximum(top, 0.0), shape)
    elif kind == "Normalization" and not taker.invert:
        values = np.asarray(taker.mean) + np.sqrt(np.asarray(taker.variance)) * rng.normal(size=shape)
    elif tensor.is_float:
        values = rng.normal(size=shape)
    else:
        values = rng.integers(0, 256 if tensor.dtype == "uint8" else 2, shape)
    return np.asarray(np.rint(values) if dtype.kind in "iu" else values).astype(dtype)


def check_calibration(
    samples: Mapping[str, Array], inputs: Sequence[TensorInfo], validation: Mapping[str, Array] | None = None
) -> None:
    """Raise :class:`InvalidInputError` unless ``samples`` can calibrate a model that takes ``inputs``.

    They need the inputs' names and shapes, finite numbers, and values like those of ``validation``, if that is given:
    data in 0 to 1 where the device will see 0 to 255 would make an int8 head that saturates.
    """
    arrays = checked_samples(samples, inputs, "calibration data")
    if validation is None:
        return
    others = checked_samples(validation, inputs, "validation data")
    for tensor, array, other in zip(inputs, arrays, others, strict=True):
        if _disagreement(array, other) > MAX_DISAGREEMENT:
            raise InvalidInputError(
                f"calibration data: input {tensor.name!r} has values from {array.min():g} to {array.max():g}, the "
                f"validation data from {other.min():g} to {other.max():g}; preprocess both in the same way"
            )


def checked_samples(samples: Mapping[str, Array], inputs: Sequence[TensorInfo], where: str) -> list[Array]:
    """``samples`` in the order of ``inputs``, each (samples, *shape) and of a dtype whose values the input takes.

    Raises :class:`InvalidInputError`, which begins with ``where``, for data that are not those of the inputs.
    """
    names = [tensor.name for tensor in inputs]
    if set(samples) != set(names):
        raise InvalidInputError(f"{where}: expected the inputs {sorted(names)}, got {sorted(samples)}")
    arrays = [_checked(tensor, samples[tensor.name], where) for tensor in inputs]
    counts = {len(array) for array in arrays}
    if len(counts) != 1 or 0 in counts:
        raise InvalidInputError(
            f"{where}: expected the same number of samples for each input, at least one; "
            f"got {[len(array) for array in arrays]}"
        )
    return arrays


def _checked(tensor: TensorInfo, array: Array, where: str) -> Array:
    array = np.asarray(array)
    where = f"{where}: input {tensor.name!r}"
    if array.shape[1:] != tensor.shape or not array.ndim:
        raise InvalidInputError(f"{where}: expected shape (samples, *{list(tensor.shape)}), got {list(array.shape)}")
    if array.dtype.kind not in "biuf":
        raise InvalidInputError(f"{where}: expected numbers, got dtype {array.dtype}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise InvalidInputError(f"{where}: holds values that are not finite numbers")
    dtype = DTYPES[tensor.dtype]
    if dtype.kind == "f" and array.size and max(-float(array.min()), float(array.max())) > float(np.finfo(dtype).max):
        raise InvalidInputError(
            f"{where}: expected {tensor.dtype}, got {array.dtype} from {array.min():g} to {array.max():g}"
        )
    if dtype.kind in "iu" and array.size:
        bounds = np.iinfo(dtype)
        if array.dtype.kind == "f" or array.min() < bounds.min or array.max() > bounds.max:
            raise InvalidInputError(
                f"{where}: expected {tensor.dtype}, got {array.dtype} from {array.min():g} to {array.max():g}"
            )
    return array


def _disagreement(array: Array, other: Array) -> float:
    """How many times wider the range of both together is than what they share, by the extremes or by the percentiles
    1 and 99, whichever say less: neither an outlier nor a background of zeros decides alone.
    """
    by_extremes = _ratio((array.min(), array.max()), (other.min(), other.max()))
    inner, other_inner = np.percentile(array, [1, 99]), np.percentile(other, [1, 99])
    if inner[0] == inner[1] or other_inner[0] == other_inner[1]:
        return by_extremes
    return min(by_extremes, _ratio(tuple(inner), tuple(other_inner)))


def _ratio(first: tuple[float, ...], second: tuple[float, ...]) -> float:
    shared = min(float(first[1]), float(second[1])) - max(float(first[0]), float(second[0]))
    union = max(float(first[1]), float(second[1])) - min(float(first[0]), float(second[0]))
    if union == 0:
        return 1.0
    return union / shared if shared > 0 else math.inf


def _taken(arrays: list[Array]) -> npt.NDArray[np.int64]:
    count = len(arrays[0])
    extreme = set()
    for array in arrays:
        flat = array.reshape(count, -1)
        if flat.shape[1]:
            extreme |= {int(flat.min(axis=1).argmin()), int(flat.max(axis=1).argmax())}
    spaced = np.rint(np.linspace(0, count - 1, min(count, MAX_SAMPLES - len(extreme)))).astype(np.int64)
    return np.array(sorted(extreme | set(spaced.tolist())), np.int64)
