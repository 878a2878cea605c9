"""What whole models predict in floating point, beside which a split is judged; kept, so that each is asked once."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from cloud_server.allocation.fleet import Array
from converters import Recipe
from converters.versions import versions
from converters.worker import Worker
from edge_sdk.errors import StorageError
from zoo_keras.samples import Samples

BATCH = 128


class Predictions:
    """Predictions by the content of model and samples, in ``folder``. Thread-safe; a process of its own runs Keras."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._worker = Worker(threads=len(os.sched_getaffinity(0)), scratch=folder / "work")
        self._lock = threading.Lock()

    def of(self, recipe: Recipe, samples: Samples) -> Sequence[Array]:
        """The outputs (N, …) of a recipe's model, in its order. Raises :class:`SplitfleetError`."""
        key = json.dumps([versions(), recipe.task, recipe.model_name, recipe.fingerprint, samples.digest])
        path = self._folder / f"{hashlib.sha256(key.encode()).hexdigest()}.npz"
        with self._lock:
            known = _read(path)
            if known is not None:
                return known
            outputs = self._worker.run(_predict, recipe.load, dict(samples.inputs))
            if recipe.fingerprint is not None:
                _write(path, outputs)
            return outputs

    def close(self) -> None:
        """End the process, whatever it is at."""
        self._worker.kill()
        with self._lock:
            self._worker.stop()


def _predict(load: Callable[[], Any], inputs: Mapping[str, Array]) -> list[Array]:
    from converters.keras_backend import load_keras
    from converters.keras_graph import end_names, graph_ends

    tree = load_keras().tree
    model = load()
    ends, _ = graph_ends(model, f"model {model.name!r}")
    structure = getattr(model, "_inputs_struct", ends)
    # As the model wants them, be it a list, a dict or one array, and its outputs as converters have them: flat.
    taken = tree.pack_sequence_as(structure, [inputs[name] for name in end_names(structure, ends)])
    return [np.asarray(output) for output in tree.flatten(model.predict(taken, batch_size=BATCH, verbose=0))]


def _read(path: Path) -> list[Array] | None:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return [archive[f"output_{number}"] for number in range(len(archive.files))]
    except (OSError, ValueError, KeyError):
        return None


def _write(path: Path, outputs: Sequence[Array]) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.part.npz")
    arrays: dict[str, Any] = {f"output_{number}": array for number, array in enumerate(outputs)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(temporary, **arrays)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StorageError(f"{path.parent}: predictions cannot be kept ({error.strerror or error})") from error
