"""What verifying a bundle needs TensorFlow for, as jobs for a :class:`converters.worker.Worker`: to run the tail and
the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_sdk.bundle import Bundle
from edge_sdk.errors import BundleError
from edge_sdk.runtime import SIGNATURE

BATCH = 32

Array = npt.NDArray[Any]


def tail_outputs(folder: Path, runs: Sequence[Sequence[Array]]) -> list[dict[int, Array]]:
    """For each of ``runs``, features parallel to the manifest's crossing tensors and each (N, …), the outputs of the
    tail of the bundle in ``folder``, by their place in the manifest.

    Raises :class:`BundleError` where the tail cannot be loaded, fails, or is not what the manifest says.
    """
    tail = _Tail(Bundle.open(folder))
    return [tail.outputs(features) for features in runs]


def tail_tflite_error(folder: Path) -> str:
    """Why ``tail.tflite`` of the bundle in ``folder`` is not the same as its SavedModel; empty where it is.

    Raises :class:`BundleError` where the SavedModel cannot be loaded or fails.
    """
    from converters.tail_tflite import check_tail_tflite

    bundle = Bundle.open(folder)
    return check_tail_tflite(bundle.tail_tflite_path, _Tail(bundle).run, bundle.manifest.crossing)


def whole_outputs(load: Callable[[], Any], sha256: str, inputs: Sequence[Array]) -> tuple[str, list[Array] | None]:
    """The hash of the model that ``load`` returns and, if that is ``sha256``, all its outputs in float.

    Raises what ``load`` and :func:`converters.flatten.flatten` raise.
    """
    from converters.flatten import flatten
    from converters.keras_backend import load_keras
    from converters.model_hash import model_sha256
    from converters.split import Half

    # Keras numbers unnamed layers per process.
    load_keras().backend.clear_session()
    flat = flatten(load())
    found = model_sha256(flat)
    if found != sha256:
        return found, None
    whole = Half(flat=flat, steps=flat.steps, inputs=flat.graph.inputs, outputs=flat.graph.outputs)
    rows = [[np.asarray(output) for output in whole(batch)] for batch in _batches(inputs)]
    return found, [np.concatenate(parts) for parts in zip(*rows, strict=True)]


class _Tail:
    """A loaded tail."""

    def __init__(self, bundle: Bundle) -> None:
        """Raises :class:`BundleError`."""
        from converters.keras_backend import load_tensorflow

        self._bundle = bundle
        self._tensorflow = load_tensorflow()
        try:
            # A signature does not keep what it came with alive.
            self._loaded = self._tensorflow.saved_model.load(str(bundle.tail_path))
            self._signature = self._loaded.signatures[SIGNATURE]
        except Exception as error:  # TensorFlow raises whatever the files provoke
            raise BundleError(f"{bundle.tail_path}: TensorFlow cannot load the tail: {_first_line(error)}") from error

    def run(self, features: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs of a batch of features, both by name. Raises :class:`BundleError`."""
        try:
            made = self._signature(**{name: self._tensorflow.constant(array) for name, array in features.items()})
        except Exception as error:  # TensorFlow raises whatever the graph provokes
            raise BundleError(f"{self._bundle.tail_path}: the tail failed: {_first_line(error)}") from error
        return {key: np.asarray(value) for key, value in made.items()}

    def outputs(self, features: Sequence[Array]) -> dict[int, Array]:
        """The outputs for ``features``, parallel to the crossing tensors and each (N, …), by place in the manifest.

        Raises :class:`BundleError` where they are not what the manifest says.
        """
        manifest = self._bundle.manifest
        specs = {place: spec for place, spec in enumerate(manifest.outputs) if spec.side == "tail"}
        names = [spec.name for spec in manifest.crossing]
        made: dict[int, list[Array]] = {place: [] for place in specs}
        for batch in _batches(features):
            outputs = self.run(dict(zip(names, batch, strict=True)))
            for place, spec in specs.items():
                output = outputs.get(f"output_{place}")
                expected = (len(batch[0]), *spec.shape)
                if output is None or output.shape != expected:
                    raise BundleError(
                        f"{self._bundle.tail_path}: the manifest promises output_{place} of shape {list(expected)}, "
                        f"the tail gave {'none' if output is None else list(output.shape)}; build the bundle again"
                    )
                made[place].append(output)
        return {place: np.concatenate(parts) for place, parts in made.items()}


def _batches(arrays: Sequence[Array]) -> Iterator[list[Array]]:
    for start in range(0, len(arrays[0]), BATCH):
        yield [array[start : start + BATCH] for array in arrays]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
