"""What a tail takes and gives, as the manifest says: names, dtypes, shapes, and their bytes one after another.

The server and its workers read the same manifest, so that a batch crosses between them as bare bytes: for each
crossing tensor the features of all samples, and back likewise the outputs, as float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_sdk.errors import FeatureMismatchError, TailFailedError
from edge_sdk.manifest import CrossingSpec, Manifest
from edge_sdk.wire import DTYPES, Tensor

# Of one request.
MAX_BATCH = 256

Features = Sequence[Tensor]
Result = tuple[Tensor, ...]
Array = npt.NDArray[Any]
_FLOAT = np.dtype(np.float32)


class TailSignature:
    """The features and outputs of one bundle's tail."""

    def __init__(self, manifest: Manifest, digest: str) -> None:
        self.digest = digest
        self._crossing = {spec.name: spec for spec in manifest.crossing}
        self._dtypes = {spec.name: DTYPES[spec.dtype] for spec in manifest.crossing}
        self._outputs = {
            f"output_{j}": output.shape for j, output in enumerate(manifest.outputs) if output.side == "tail"
        }
        self._only = next(iter(self._crossing)) if len(self._crossing) == 1 else None
        self.feature_bytes = sum(math.prod(spec.shape) * self._dtypes[spec.name].itemsize for spec in manifest.crossing)
        self.output_bytes = sum(math.prod(shape) for shape in self._outputs.values()) * _FLOAT.itemsize

    def check(self, features: Features) -> None:
        """Raises :class:`FeatureMismatchError` unless ``features`` are this tail's, with one common batch axis."""
        names = {tensor.name for tensor in features}
        if names != self._crossing.keys():
            raise FeatureMismatchError(
                f"bundle {self.digest[:12]} takes the features {sorted(self._crossing)}, got {sorted(names)}"
            )
        for tensor in features:
            self._check_one(self._crossing[tensor.name], tensor.data)
            self._check_quantization(self._crossing[tensor.name], tensor)
        if len(features) > 1:
            batches = {tensor.data.shape[0] for tensor in features}
            if len(batches) != 1:
                raise FeatureMismatchError(f"the features of one request have different batch sizes: {sorted(batches)}")

    def _check_one(self, spec: CrossingSpec, data: Array) -> None:
        shape = data.shape
        if data.dtype != self._dtypes[spec.name] or shape[1:] != spec.shape or len(shape) != len(spec.shape) + 1:
            raise FeatureMismatchError(
                f"bundle {self.digest[:12]}: {spec.name} is {spec.dtype} {['batch', *spec.shape]}, "
                f"got {data.dtype.name} {list(shape)}: is the device's head of another bundle?"
            )
        if not 1 <= shape[0] <= MAX_BATCH:
            raise FeatureMismatchError(f"{spec.name}: a batch has 1 to {MAX_BATCH} samples, got {shape[0]}")

    def _check_quantization(self, spec: CrossingSpec, tensor: Tensor) -> None:
        # Two heads of one shape may differ in nothing else that can be seen. Who states none is taken at his word.
        if tensor.scale is not None and (tensor.scale, tensor.zero_point) != (spec.scale, spec.zero_point):
            raise FeatureMismatchError(
                f"bundle {self.digest[:12]}: {spec.name} has scale {spec.scale} and zero point {spec.zero_point}, "
                f"got {tensor.scale} and {tensor.zero_point}: is the device's head of another bundle?"
            )

    def buffers(self, requests: Sequence[Features]) -> list[Array]:
        """The features of ``requests``, which were checked, in the order in which their bytes cross."""
        if self._only is not None:
            return [features[0].data for features in requests]
        # By name, since each request may have them in an order of its own.
        arrays = [{tensor.name: tensor.data for tensor in features} for features in requests]
        return [each[name] for name in self._crossing for each in arrays]

    def features(self, samples: int, data: memoryview) -> dict[str, Array]:
        """The batch that :meth:`buffers` became, as read-only views of ``data``, by name."""
        found = {}
        offset = 0
        for name, spec in self._crossing.items():
            array = np.frombuffer(data, self._dtypes[name], samples * math.prod(spec.shape), offset)
            offset += array.nbytes
            found[name] = array.reshape(samples, *spec.shape)
            found[name].flags.writeable = False
        return found

    def zeros(self, samples: int) -> dict[str, Array]:
        """A batch of zeros."""
        return {name: np.zeros((samples, *spec.shape), self._dtypes[name]) for name, spec in self._crossing.items()}

    def outputs(self, samples: int, outputs: dict[str, Array]) -> list[Array]:
        """The outputs of an engine in the order in which their bytes cross.

        Raises :class:`TailFailedError` unless they are what the manifest promises.
        """
        shapes = {name: array.shape for name, array in outputs.items()}
        expected = {name: (samples, *shape) for name, shape in self._outputs.items()}
        if shapes != expected:
            raise TailFailedError(f"the tail of bundle {self.digest[:12]} gave {shapes}, its manifest says {expected}")
        return [np.asarray(outputs[name], _FLOAT, order="C") for name in self._outputs]

    def results(self, requests: Sequence[Features], data: memoryview) -> list[Result]:
        """To each of ``requests`` its own rows of the outputs in ``data``, by name in the manifest's order."""
        ends = []
        samples = 0
        for features in requests:
            samples += features[0].data.shape[0]
            ends.append(samples)
        arrays = {}
        offset = 0
        for name, shape in self._outputs.items():
            array = np.frombuffer(data, _FLOAT, samples * math.prod(shape), offset)
            offset += array.nbytes
            arrays[name] = array.reshape(samples, *shape)
        return [
            tuple(Tensor(name=name, data=array[begin:end]) for name, array in arrays.items())
            for begin, end in zip([0, *ends], ends, strict=False)
        ]
