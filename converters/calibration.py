"""Calibration data: real samples that tell the converter which range each tensor of the head takes."""

from __future__ import annotations

import hashlib
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
        names = [graph.tensors[position].name for position in graph.inputs]
        if set(samples) != set(names):
            raise InvalidInputError(
                f"calibration data of model {graph.name!r}: expected the inputs {sorted(names)}, got {sorted(samples)}"
            )
        arrays = [_checked(graph, position, samples[graph.tensors[position].name]) for position in graph.inputs]
        counts = {len(array) for array in arrays}
        if len(counts) != 1 or 0 in counts:
            raise InvalidInputError(
                f"calibration data of model {graph.name!r}: expected the same number of samples for each input, at "
                f"least one; got {[len(array) for array in arrays]}"
            )
        digest = hashlib.sha256()
        for name, array in zip(names, arrays, strict=True):
            digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        taken = _taken(arrays)
        return cls(
            inputs=tuple(
                array[taken].astype(DTYPES[graph.tensors[position].dtype])
                for position, array in zip(graph.inputs, arrays, strict=True)
            ),
            sha256=digest.hexdigest(),
        )


def _checked(graph: Graph, position: int, array: Array) -> Array:
    tensor = graph.tensors[position]
    array = np.asarray(array)
    where = f"calibration data of model {graph.name!r}: input {tensor.name!r}"
    if array.shape[1:] != tensor.shape or not array.ndim:
        raise InvalidInputError(f"{where}: expected shape (samples, *{list(tensor.shape)}), got {list(array.shape)}")
    if array.dtype.kind not in "biuf":
        raise InvalidInputError(f"{where}: expected numbers, got dtype {array.dtype}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise InvalidInputError(f"{where}: holds values that are not finite numbers")
    return array


def _taken(arrays: list[Array]) -> npt.NDArray[np.int64]:
    count = len(arrays[0])
    extreme = set()
    for array in arrays:
        flat = array.reshape(count, -1)
        if flat.shape[1]:
            extreme |= {int(flat.min(axis=1).argmin()), int(flat.max(axis=1).argmax())}
    spaced = np.rint(np.linspace(0, count - 1, min(count, MAX_SAMPLES - len(extreme)))).astype(np.int64)
    return np.array(sorted(extreme | set(spaced.tolist())), np.int64)


def random_calibration(flat: FlatModel, count: int = 100, seed: int = 0) -> dict[str, Array]:
    """Random samples in place of calibration data: the ranges that they give are guesses.

    Floating-point inputs are normally distributed, bytes uniformly; other integers are 0 or 1, which any index allows.
    """
    rng = np.random.default_rng(seed)
    made: dict[str, Array] = {}
    for position in flat.graph.inputs:
        tensor = flat.graph.tensors[position]
        shape = (count, *tensor.shape)
        dtype = DTYPES[tensor.dtype]
        if tensor.is_float:
            made[tensor.name] = rng.normal(size=shape).astype(dtype)
        elif tensor.dtype == "uint8":
            made[tensor.name] = rng.integers(0, 256, shape).astype(dtype)
        else:
            made[tensor.name] = rng.integers(0, 2, shape).astype(dtype)
    return made


def check_calibration(
    arrays: Mapping[str, Array], inputs: Sequence[TensorInfo], validation: Mapping[str, Array] | None = None
) -> None:
    """Raise :class:`InvalidInputError` unless ``arrays`` are usable calibration data for a model with ``inputs``."""
    raise NotImplementedError
