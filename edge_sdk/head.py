"""The head of a bundle on this device: a sample in, features and the head's own outputs out.

It checks and casts the sample, quantizes where the head's file wants integers, runs the interpreter, and quantizes
features that the head emits as floats. A bundle cut at k = 0 has no head: its raw input is quantized and crosses. What
becomes of the features is :mod:`edge_sdk.inference`'s business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_sdk.bundle import Bundle
from edge_sdk.errors import BundleError, InvalidInputError
from edge_sdk.manifest import CrossingSpec, InputSpec, OutputSpec
from edge_sdk.quantization import dequantize, quantize
from edge_sdk.runtime import Interpreter, TensorInfo
from edge_sdk.self_check import compare, self_check_inputs
from edge_sdk.wire import DTYPES, Tensor

Array = npt.NDArray[Any]
Sample = Array | Mapping[str, Array]

# Runtimes round differently, layer after layer: by up to 5 steps between ai-edge-litert and tflite-runtime on fifteen
# heads of the zoo. A wrong kernel is off by far more than this tenth of the range.
MAX_STEPS = 24.0


@dataclass(frozen=True, kw_only=True)
class HeadResult:
    """What a head made of one sample.

    ``features`` have a batch axis of 1, as they cross. ``outputs`` are the model's outputs that the head returns, by
    name, without a batch axis, as real numbers.
    """

    features: tuple[Tensor, ...]
    outputs: dict[str, Array]


class Head:
    """A loaded head. Not thread-safe: one thread at a time."""

    def __init__(
        self,
        bundle: Bundle,
        *,
        runtime: str | None = None,
        num_threads: int = 1,
        delegate: Path | str | None = None,
    ) -> None:
        """Check the bundle's files, load the head with ``runtime``, and prove it by the manifest's self-check.

        Raises :class:`IntegrityError`, :class:`BundleError` when file and manifest contradict each other or the
        self-check fails, :class:`RuntimeUnavailableError`.
        """
        bundle.verify(bundle.manifest.head_files)
        self.bundle = bundle
        manifest = bundle.manifest
        self._inputs = tuple(
            (f"input_{number}", spec, DTYPES[spec.dtype]) for number, spec in enumerate(manifest.inputs)
        )
        self._outputs = tuple(
            (f"output_{number}", spec) for number, spec in enumerate(manifest.outputs) if spec.side == "head"
        )
        self._interpreter: Interpreter | None = None
        if not manifest.has_head:
            self._check_raw()
            return
        self._interpreter = Interpreter(bundle.head_path, runtime=runtime, num_threads=num_threads, delegate=delegate)
        self._check_file(self._interpreter)
        self._check_itself(self._interpreter)

    @property
    def runtime(self) -> str:
        """Name of the runtime that runs it, ``"none"`` where there is no head."""
        return self._interpreter.runtime if self._interpreter else "none"

    @property
    def runtime_version(self) -> str:
        return self._interpreter.runtime_version if self._interpreter else ""

    def run(self, sample: Sample) -> HeadResult:
        """Run one sample: an array for a model of one input, else arrays by input name; batch axis of 1 optional.

        Raises :class:`InvalidInputError` saying what was expected and what came.
        """
        arrays = self._by_name(sample)
        if self._interpreter is None:
            return HeadResult(
                features=tuple(
                    _feature(crossing, prepare_input(arrays[spec.name], spec, dtype))
                    for crossing, (_, spec, dtype) in zip(self.bundle.manifest.crossing, self._inputs, strict=True)
                ),
                outputs={},
            )
        inputs = {
            key: to_head(prepare_input(arrays[spec.name], spec, dtype), spec, self._interpreter.inputs[key])
            for key, spec, dtype in self._inputs
        }
        raw = self._interpreter.run(inputs)
        return HeadResult(
            features=tuple(_feature(spec, raw[spec.name]) for spec in self.bundle.manifest.crossing),
            outputs={spec.name: _real(raw[key][0], spec) for key, spec in self._outputs},
        )

    def _by_name(self, sample: Sample) -> Mapping[str, Array]:
        names = [spec.name for _, spec, _ in self._inputs]
        if not isinstance(sample, Mapping):
            if len(names) > 1:
                raise InvalidInputError(
                    f"the model has {len(names)} inputs: expected arrays by name for {', '.join(map(repr, names))}, "
                    f"got one {type(sample).__name__}"
                )
            return {names[0]: sample}
        if set(sample) != set(names):
            raise InvalidInputError(
                f"expected inputs {', '.join(map(repr, names))}; got {', '.join(map(repr, sample)) or 'none'}"
            )
        return sample

    def _check_raw(self) -> None:
        manifest = self.bundle.manifest
        if self._outputs or len(manifest.crossing) != len(manifest.inputs):
            raise BundleError(f"{self.bundle.path}: a bundle cut at k=0 must send each of its inputs, and nothing else")
        for crossing, spec in zip(manifest.crossing, manifest.inputs, strict=True):
            if crossing.shape != spec.shape:
                raise BundleError(
                    f"{self.bundle.path}: input {spec.name!r} has shape {list(spec.shape)}, "
                    f"{crossing.name} {list(crossing.shape)}; build the bundle again"
                )

    def _check_file(self, interpreter: Interpreter) -> None:
        manifest = self.bundle.manifest
        shapes: list[tuple[str, tuple[int, ...], dict[str, TensorInfo]]] = [
            *((key, spec.shape, interpreter.inputs) for key, spec, _ in self._inputs),
            *((spec.name, spec.shape, interpreter.outputs) for spec in manifest.crossing),
            *((key, spec.shape, interpreter.outputs) for key, spec in self._outputs),
        ]
        for key, shape, tensors in shapes:
            found = tensors.get(key)
            if found is None or found.shape != (1, *shape):
                raise BundleError(
                    f"{self.bundle.head_path}: the manifest promises {key} of shape {[1, *shape]}, the file has "
                    f"{'none' if found is None else list(found.shape)}; build the bundle again"
                )
        if extra := set(interpreter.inputs) - {key for key, _, _ in self._inputs}:
            raise BundleError(f"{self.bundle.head_path}: the head wants {sorted(extra)}, which the manifest lacks")
        for _, spec, _ in self._inputs:
            info = interpreter.inputs[f"input_{manifest.inputs.index(spec)}"]
            if info.scale is not None and spec.scale is None:
                raise BundleError(
                    f"{self.bundle.head_path}: input {spec.name!r} is quantized in the file, not in the manifest"
                )

    def _check_itself(self, interpreter: Interpreter) -> None:
        manifest = self.bundle.manifest
        if manifest.self_check is None:
            return
        made = self_check_inputs(manifest.inputs, manifest.self_check.seed)
        raw = interpreter.run({key: made[key].astype(info.dtype) for key, info in interpreter.inputs.items()})
        deviation = compare(manifest.self_check.expected, raw)
        if deviation > MAX_STEPS:
            raise BundleError(
                f"{self.bundle.head_path}: self check failed: {interpreter.runtime} {interpreter.runtime_version} "
                f"computes outputs that are off by up to {deviation:g}, at most {MAX_STEPS:g} is expected; "
                "use another runtime"
            )


def prepare_input(value: Any, spec: InputSpec, dtype: np.dtype[Any]) -> Array:
    """One input as an array of shape (1, …) of the dtype that the model declares.

    Numbers are cast where that loses nothing but float precision: integers to floats, and integers to others that hold
    them. Raises :class:`InvalidInputError` for another shape, a dtype that does not fit, NaN or infinity.
    """
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise InvalidInputError(
            f"input {spec.name!r}: expected numbers of shape {list(spec.shape)}, got what is no array: {error}"
        ) from None
    if array.shape == spec.shape:
        array = array[np.newaxis]
    elif array.shape != (1, *spec.shape):
        raise InvalidInputError(
            f"input {spec.name!r}: expected shape {list(spec.shape)} (or with a batch axis of 1), "
            f"got {list(array.shape)}"
        )
    if array.dtype == dtype:
        cast = array
    elif array.dtype.kind in "biu" and dtype.kind in "iu" and not np.can_cast(array.dtype, dtype):
        bounds = np.iinfo(dtype)
        low, high = int(array.min()), int(array.max())
        if low < bounds.min or high > bounds.max:
            raise InvalidInputError(
                f"input {spec.name!r}: expected {spec.dtype}, got {array.dtype} with values from {low} to {high}"
            )
        cast = array.astype(dtype)
    elif array.dtype.kind in "biuf" and (dtype.kind == "f" or np.can_cast(array.dtype, dtype)):
        # A float64 beyond float32 becomes infinite, which is told below.
        with np.errstate(over="ignore"):
            cast = array.astype(dtype)
    else:
        raise InvalidInputError(f"input {spec.name!r}: expected {spec.dtype}, got {array.dtype}")
    if cast.dtype.kind == "f" and not np.isfinite(cast).all():
        raise InvalidInputError(
            f"input {spec.name!r}: expected finite numbers, got {'NaN' if np.isnan(cast).any() else 'infinity'}"
        )
    return cast


def to_head(array: Array, spec: InputSpec, info: TensorInfo) -> Array:
    """An input of the model's dtype as the head's file takes it."""
    if info.scale is not None and spec.scale is not None and spec.zero_point is not None:
        return quantize(array, spec.scale, spec.zero_point, info.dtype)
    return array.astype(info.dtype, copy=False)


def _feature(spec: CrossingSpec, array: Array) -> Tensor:
    dtype = DTYPES[spec.dtype]
    if array.dtype != dtype and spec.scale is not None and spec.zero_point is not None:
        array = quantize(array, spec.scale, spec.zero_point, dtype)
    return Tensor(name=spec.name, data=array.astype(dtype, copy=False), scale=spec.scale, zero_point=spec.zero_point)


def _real(array: Array, spec: OutputSpec) -> Array:
    if array.dtype.kind in "iu" and spec.scale is not None and spec.zero_point is not None:
        array = dequantize(array, spec.scale, spec.zero_point)
    return array.astype(DTYPES[spec.dtype], copy=False)
