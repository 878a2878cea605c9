"""The engine for CPUs: ``ai-edge-litert`` runs ``tail.tflite``, the same graph as the SavedModel."""

from __future__ import annotations

from typing import Self

import numpy as np
import numpy.typing as npt

from cloud_server.engines.base import Arrays, TailEngine, engine_threads
from edge_sdk.bundle import Bundle
from edge_sdk.errors import BundleError, RuntimeUnavailableError
from edge_sdk.manifest import TAIL_TFLITE_FILE
from edge_sdk.runtime import Interpreter
from edge_sdk.wire import DTYPES

RUNTIME = "litert"
_WARM_RUNS = 3

Array = npt.NDArray[np.float32]


class LitertEngine(TailEngine):
    """``tail.tflite`` of a bundle in one interpreter, resized for each batch that is not as large as the one before.

    Resizing takes some hundredths of a millisecond once the interpreter has had a batch of the largest size, while
    another interpreter would hold all weights again. So that its memory does not grow for good with a single request
    of many samples, it runs at most ``most`` at a time.
    """

    name = "litert"

    def __init__(self, interpreter: Interpreter, threads: int, most: int | None) -> None:
        self._interpreter = interpreter
        self.threads = threads
        self._batch = 0
        self._most = most

    @classmethod
    def load(cls, bundle: Bundle, threads: int | None = None, most: int | None = None) -> Self:
        """The tail in ``bundle`` on so many ``threads``, by default one for each core; ``most`` is the largest batch as
        a rule, by default any.

        Raises :class:`BundleError`, also where the bundle has no ``tail.tflite``.
        """
        if not bundle.manifest.has_tail_tflite:
            raise BundleError(f"bundle {bundle.digest} has no {TAIL_TFLITE_FILE}{why_not(bundle)}")
        threads = threads or engine_threads()
        try:
            interpreter = Interpreter(bundle.tail_tflite_path, runtime=RUNTIME, num_threads=threads)
        except RuntimeUnavailableError as error:
            raise BundleError(error.message) from error
        takes = {key: (info.shape[1:], info.dtype) for key, info in interpreter.inputs.items()}
        expected = {spec.name: (spec.shape, DTYPES[spec.dtype]) for spec in bundle.manifest.crossing}
        if takes != expected:
            raise BundleError(
                f"{bundle.tail_tflite_path}: it takes {_listed(takes)}, the manifest's features are {_listed(expected)}"
            )
        return cls(interpreter, threads, most)

    def warm(self, features: Arrays) -> None:
        for _ in range(_WARM_RUNS):
            self.run(features)

    def run(self, features: Arrays) -> dict[str, Array]:
        samples = _samples(features)
        most = self._most or samples
        if samples <= most:
            return self._run(features, samples)
        parts = [
            self._run(
                {name: array[start : start + most] for name, array in features.items()}, min(most, samples - start)
            )
            for start in range(0, samples, most)
        ]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _run(self, features: Arrays, samples: int) -> dict[str, Array]:
        if samples != self._batch:
            # Unknown until it has succeeded.
            self._batch = 0
            self._interpreter.resize(samples)
            self._batch = samples
        return self._interpreter.run(features)

    def close(self) -> None:
        del self._interpreter


def why_not(bundle: Bundle) -> str:
    """What the manifest says of why there is no ``tail.tflite``, as the end of a sentence."""
    reason = bundle.manifest.tail_tflite_reason
    return f": {reason}" if reason else ""


def _samples(features: Arrays) -> int:
    return int(next(iter(features.values())).shape[0])


def _listed(tensors: dict[str, tuple[tuple[int, ...], np.dtype[np.generic]]]) -> str:
    return ", ".join(f"{name} {dtype} {list(shape)}" for name, (shape, dtype) in sorted(tensors.items()))
